"""Runs in real processes: stopped, interrupted, killed, under torchrun; nothing is lost and nobody is left behind.

`WEFT_KILLS=20` kills as often as a release should be tried.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.train.jobs import finish, lines, start, weights, words

from weft.cli import main

KILLS = int(os.environ.get("WEFT_KILLS", "1"))
DEADLINE = 300.0  # seconds; for what hangs, not for what is slow


def ranks_of(parent: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def wait_for(condition: object, process: subprocess.Popen[str]) -> None:
    """Until something is so, looking often; the process must not end before."""
    assert callable(condition)
    pause = threading.Event()
    for _ in range(int(DEADLINE / 0.02)):
        if condition():
            return
        assert process.poll() is None, finish(process)
        pause.wait(0.02)
    process.kill()
    raise AssertionError(f"it did not come to that within {DEADLINE} s: {finish(process)}")


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def whole_run(home: Path, **changes: object) -> None:
    """The same job without an interruption, on virtual ranks, which compute the same bits."""
    folder = str(home / "runs")
    assert main(["train", *words(name="whole", schedule__virtual=True, log__folder=folder, **changes)]) == 0


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("everybody", [False, True])
def test_a_wish_to_stop_is_followed_and_the_run_goes_on(everybody: bool, tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C: the mini-batch is finished, all is saved, exit 0; resumed, it makes its other updates."""
    run = tmp_path / "runs" / "tiny"
    job = words(train__updates=100000, checkpoint__every=0, evaluate__every=0)
    process = start("train", *job, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(lines(run, "train")) > 3, process)
    pids = ranks_of(process.pid)
    assert len(pids) == 2
    if everybody:
        os.killpg(process.pid, signal.SIGTERM)  # as batch systems do it, to all processes of a job
    else:
        process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 0, err
    assert "go on with: weft train --resume runs/tiny" in out
    assert alive(pids) == []
    summary = json.loads((run / "summary.json").read_text())
    assert summary["how"] == "stopped"
    assert (run / "checkpoints" / "latest").read_text().strip() == f"update-{summary['update']:08}"
    if everybody:
        return
    more = summary["update"] + 4
    code, _, err = finish(start("train", "--resume", "tiny", "--set", f"train.updates={more}", cwd=tmp_path))
    assert code == 0, err
    assert json.loads((run / "summary.json").read_text())["update"] == more


def test_the_second_wish_ends_it_at_once(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    more = {"train__updates": 100000, "checkpoint__every": 0, "evaluate__every": 0, "checkpoint__grace": 600.0}
    process = start("train", *words(**more), cwd=tmp_path)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(lines(run, "train")) > 1, process)
    pids = ranks_of(process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that they can't follow the first one
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "once more to leave at once" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 130, err
    assert alive(pids) == []


def test_a_run_that_does_not_stop_in_its_grace_is_ended(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    process = start("train", *words(train__updates=100000, checkpoint__grace=1.0), cwd=tmp_path)
    wait_for(lambda: (run / "checkpoints" / "latest").exists(), process)
    pids = ranks_of(process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 1
    assert "checkpoint.grace (1 s)" in err
    assert alive(pids) == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_killed_at_any_moment_it_ends_with_the_same_bits(ranks: int, tmp_path: Path) -> None:
    """SIGKILL of any rank, while it trains, evaluates or saves: the job goes on from its last checkpoint."""
    sizes = {"schedule__ranks": ranks, "checkpoint__every": 3, "evaluate__every": 6}
    sizes |= {"train__updates": 6 + 6 * KILLS, "model__width": 64}
    whole_run(tmp_path, **sizes)
    chance = random.Random(ranks)
    run = tmp_path / "runs" / "killed"
    process = start("train", *words(name="killed", **sizes), "--max-restarts", "1000", cwd=tmp_path)
    told: list[int] = []
    killed, saving, before = 0, 0, ""

    def half_saved() -> bool:
        return process.poll() is not None or bool(list(run.glob("checkpoints/.update-*.part/*")))

    def progress() -> bool:
        latest = run / "checkpoints" / "latest"
        now = latest.read_text() if latest.exists() else ""
        return process.poll() is not None or (now != before and len(ranks_of(process.pid)) == ranks)

    for number in range(KILLS):
        wait_for(progress, process)
        if number % 2:
            threading.Event().wait(chance.uniform(0, 0.3))  # a random moment is what is tested
        else:
            wait_for(half_saved, process)
            saving += 1
        pids = ranks_of(process.pid)
        if len(pids) == ranks and process.poll() is None:
            before = (run / "checkpoints" / "latest").read_text()
            told.append(chance.choice(pids))
            os.kill(told[-1], signal.SIGKILL)
            killed += 1
            wait_for(lambda: told[-1] not in ranks_of(process.pid) or process.poll() is not None, process)
    code, _, err = finish(process)
    assert code == 0, err
    assert killed > 0
    assert saving > 0
    assert "was killed by SIGKILL" in err
    assert json.loads((run / "summary.json").read_text())["restarts"] >= 1
    whole, resumed = weights(tmp_path / "runs" / "whole"), weights(run)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for kind in ("train", "evaluation"):
        found = [lines(tmp_path / "runs" / one, kind) for one in ("whole", "killed")]
        losses = [[(line["update"], line["loss"]) for line in some] for some in found]
        assert losses[0] == losses[1]


def test_without_restarts_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    process = start("train", *words(train__updates=100000), cwd=tmp_path)
    wait_for(lambda: (run / "checkpoints" / "latest").exists(), process)
    pids = ranks_of(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert alive(pids) == []


def test_under_torchrun_it_is_the_same_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "weft", "train", *words(name="there", schedule__ranks=0)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 1
    whole_run(tmp_path)
    there, here = (weights(tmp_path / "runs" / name) for name in ("there", "whole"))
    assert all(torch.equal(there[name], here[name]) for name in here)


def test_torchrun_starts_it_again(tmp_path: Path) -> None:
    """A rank that is killed ends the others; torchrun starts all again, with the store that it had."""
    run = tmp_path / "runs" / "again"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
    ]
    command += ["static", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--max-restarts", "1"]
    job = words(name="again", schedule__ranks=0, train__updates=40, checkpoint__every=2, evaluate__every=0)
    process = subprocess.Popen(
        [*command, "-m", "weft", "train", *job, "--continue"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (run / "checkpoints" / "latest").exists(), process)
    ranks = [one for pid in ranks_of(process.pid) for one in [pid, *ranks_of(pid)] if "weft" in command_of(one)]
    os.kill(ranks[-1], signal.SIGKILL)
    code, out, err = finish(process)
    assert code == 0, err
    assert "update 40/40" in out
    assert json.loads((run / "summary.json").read_text())["update"] == 40


def test_a_mistake_that_only_ranks_see_is_told_in_one_line(tmp_path: Path) -> None:
    process = start("train", *words(schedule__name="xpipe", train__clip_norm=1.0), "--max-restarts", "3", cwd=tmp_path)
    code, _, err = finish(process)
    assert code == 2
    assert err.startswith("weft: clip_norm needs one norm over all chunks")
    assert len(err.splitlines()) == 1
