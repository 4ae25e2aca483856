"""Runs in real processes: stopped, killed, restarted, under torchrun. No update is lost, and no process is left.

Ranks are forked (see `tests/helpers/starter.py`), except under torchrun and in the tests with `weft` as a subprocess.
`WEFT_KILLS=20` kills as often as a release should be tested with.
"""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.faults import Trial
from tests.helpers.rank_functions import DEADLINE, eventually
from tests.helpers.scripts import TORCHRUN, Commands, Script
from tests.train.jobs import free_port, lines, same, summary, tiny, train, weights

KILLS = int(os.environ.get("WEFT_KILLS", "1"))
ENDLESS = {"train__updates": 100000}


def ranks_of(parent: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def wait_for(condition: Callable[[], bool], process: Script) -> None:
    """Wait for a condition; the process must not end before."""

    def met() -> bool:
        met = condition()
        assert met or process.poll() is None, process.out + process.err
        return met

    eventually(met)


def has_lines(run: Path, count: int) -> bool:
    return len(lines(run, "train")) > count


def has_checkpoint(run: Path) -> bool:
    return (run / "checkpoints" / "latest").exists()


def train_uninterrupted(home: Path, **changes: object) -> Path:
    """The same job without an interruption, on virtual ranks, which compute the same bits."""
    assert train(**{"name": "uninterrupted", "log__folder": str(home / "runs")} | changes) == 0
    return home / "runs" / "uninterrupted"


@pytest.mark.parametrize("to_all", [False, True])
def test_a_run_stops_on_request_and_resumes(to_all: bool, tmp_path: Path, commands: Commands) -> None:
    """After SIGTERM or Ctrl-C the mini-batch is finished and all is saved, exit 0; resumed, the run goes to its end."""
    run = tmp_path / "runs" / "tiny"
    process = commands.start("train", *tiny(**ENDLESS, checkpoint__every=0, evaluate__every=0))
    wait_for(lambda: has_lines(run, 3), process)
    pids = ranks_of(process.pid)
    assert len(pids) == 2
    if to_all:
        os.killpg(process.pid, signal.SIGTERM)  # as batch systems do
    else:
        process.send_signal(signal.SIGINT)
    done = commands.finish(process)
    assert done.code == 0, done.err
    assert "resume with: weft train --resume runs/tiny" in done.out
    assert alive(pids) == []
    result = summary(run)
    assert result["how"] == "stopped"
    assert (run / "checkpoints" / "latest").read_text().strip() == f"update-{result['update']:08}"
    if to_all:
        return
    more = result["update"] + 4
    done = commands.run("train", "--resume", "tiny", "--set", f"train.updates={more}")
    assert done.code == 0, done.err
    assert summary(run)["update"] == more


def test_the_second_request_ends_it_at_once(tmp_path: Path, commands: Commands) -> None:
    run = tmp_path / "runs" / "tiny"
    settings = {"checkpoint__every": 0, "evaluate__every": 0, "checkpoint__grace": 600.0}
    trial = Trial(tmp_path, "flush:1:*:hang")  # so that they can't follow the first request
    commands.environment |= trial.environment
    process = commands.start("train", *tiny(**ENDLESS, **settings))
    wait_for(lambda: has_lines(run, 1), process)
    pids = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "once more to quit at once" in process.err, process)
    eventually(lambda: trial.fired("flush:1:*:hang"))
    process.send_signal(signal.SIGTERM)
    done = commands.finish(process)
    assert done.code == 130, done.err
    assert alive(pids) == []


def test_a_run_that_does_not_stop_in_its_grace_is_killed(tmp_path: Path, commands: Commands) -> None:
    run = tmp_path / "runs" / "tiny"
    trial = Trial(tmp_path, "flush:2:*:hang")
    commands.environment |= trial.environment
    process = commands.start("train", *tiny(**ENDLESS, checkpoint__grace=1.0, checkpoint__every=400, evaluate__every=0))
    wait_for(lambda: has_checkpoint(run), process)
    pids = ranks_of(process.pid)
    process.send_signal(signal.SIGINT)
    done = commands.finish(process)
    trial.check()
    assert done.code == 1
    assert "checkpoint.grace (1 s)" in done.err
    assert alive(pids) == []


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])  # 2 covers all but the number
def test_a_killed_run_is_identical_to_an_uninterrupted_one(ranks: int, tmp_path: Path, commands: Commands) -> None:
    """SIGKILL of any rank, while it trains, evaluates or saves: the run restarts from its last checkpoint."""
    sizes = {"schedule__ranks": ranks, "checkpoint__every": 3, "evaluate__every": 6}
    sizes |= {"train__updates": 6 + 6 * KILLS, "model__width": 64}
    uninterrupted = train_uninterrupted(tmp_path, **sizes)
    in_a_save = "chunk-write:60:0:slow=60"  # of the second checkpoint; so that the first kill meets it
    trial = Trial(tmp_path, in_a_save)
    commands.environment |= trial.environment
    chance = random.Random(ranks)
    run = tmp_path / "runs" / "killed"
    process = commands.start("train", *tiny(name="killed", **sizes), "--max-restarts", "1000")
    killed, before = 0, ""

    def progressed() -> bool:
        latest = run / "checkpoints" / "latest"
        now = latest.read_text() if latest.exists() else ""
        return process.poll() is not None or (now != before and len(ranks_of(process.pid)) == ranks)

    for number in range(KILLS):
        if number:
            wait_for(progressed, process)
            threading.Event().wait(chance.uniform(0, 0.3))  # a random moment is the point of this test
        else:
            wait_for(lambda: trial.fired(in_a_save), process)
        pids = ranks_of(process.pid)
        if len(pids) == ranks and process.poll() is None:
            before = (run / "checkpoints" / "latest").read_text()
            victim = chance.choice(pids)
            os.kill(victim, signal.SIGKILL)
            killed += 1
            wait_for(lambda gone=victim: gone not in ranks_of(process.pid) or process.poll() is not None, process)  # type: ignore[misc]
    done = commands.finish(process)
    assert done.code == 0, done.err
    assert killed > 0
    assert "was killed by SIGKILL" in done.err
    assert summary(run)["restarts"] >= 1
    assert same(weights(run), weights(uninterrupted))
    for kind in ("train", "evaluation"):
        losses = [[(line["update"], line["loss"]) for line in lines(folder, kind)] for folder in (uninterrupted, run)]
        assert losses[0] == losses[1]


def test_without_restarts_a_killed_rank_ends_the_run(tmp_path: Path, commands: Commands) -> None:
    run = tmp_path / "runs" / "tiny"
    process = commands.start("train", *tiny(**ENDLESS))
    wait_for(lambda: has_checkpoint(run), process)
    pids = ranks_of(process.pid)
    os.kill(pids[1], signal.SIGKILL)
    done = commands.finish(process)
    assert done.code == 1
    assert "rank 1 was killed by SIGKILL" in done.err
    assert alive(pids) == []


@pytest.mark.slow  # test_a_run_does_without_stderr starts them in the same way
def test_ranks_are_new_interpreters(tmp_path: Path) -> None:
    """As a shell starts `weft`; nothing is forked."""
    command = [sys.executable, "-m", "weft", "train", *tiny(train__updates=4)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "runs" / "tiny")["update"] == 4


def test_a_mistake_that_only_ranks_notice_is_one_line(commands: Commands) -> None:
    done = commands.run("train", *tiny(schedule__name="1f1b", schedule__cure="gapaware"), "--max-restarts", "3")
    assert done.code == 2
    assert done.err.startswith("weft: GapAware is for chunks")
    assert len(done.err.splitlines()) == 1


# torchrun


def test_a_run_under_torchrun_is_the_same(tmp_path: Path, commands: Commands) -> None:
    job = tiny(name="torchrun", schedule__ranks=0)
    done = commands.finish(commands.start_torchrun(*TORCHRUN[1:], "-m", "weft", "train", *job))
    assert done.code == 0, done.err
    assert done.out.count("report.html") == 1
    assert same(weights(tmp_path / "runs" / "torchrun"), weights(train_uninterrupted(tmp_path)))


@pytest.mark.slow  # test_faults.py shows the same without torchrun
def test_torchrun_restarts_a_run(tmp_path: Path, commands: Commands) -> None:
    """A killed rank ends the others; torchrun restarts all of them, with the same store and the same command."""
    job = {"name": "again", "train__updates": 8, "checkpoint__every": 2, "evaluate__every": 0}
    uninterrupted = train_uninterrupted(tmp_path, **job | {"name": "uninterrupted"})
    assert train(**job, train__seed=7, log__folder=str(tmp_path / "runs")) == 0  # which is replaced, once
    trial = Trial(tmp_path, "flush:2:1:kill")
    commands.environment |= trial.environment
    torchrun = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
    torchrun += ["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = ["-m", "weft", "train", *tiny(**job, schedule__ranks=0), "--overwrite"]
    done = commands.finish(commands.start_torchrun(*torchrun, *command))
    trial.check()
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "again"
    assert (summary(run)["update"], summary(run)["restarts"]) == (8, 1)
    assert same(weights(run), weights(uninterrupted))


@pytest.mark.slow  # test_faults.py shows the same without torchrun
def test_ranks_end_with_torchrun(tmp_path: Path, commands: Commands) -> None:
    job = tiny(**ENDLESS, schedule__ranks=0, checkpoint__every=0, evaluate__every=0)
    process = commands.start_torchrun(*TORCHRUN[1:], "-m", "weft", "train", *job)
    wait_for(lambda: has_lines(tmp_path / "runs" / "tiny", 1), process)
    process.send_signal(signal.SIGKILL)
    eventually(lambda: not commands.alive())
