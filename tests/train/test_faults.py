"""Trials: a fault at a named phase of a real run, and what the run makes of it.

Ranks are forked (see `tests/helpers/starter.py`). A trial whose fault has not fired is no trial: `Trial.check` fails.
The page docs/guarantees.md says which promise each of these tests shows.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.faults import Trial
from tests.helpers.rank_functions import eventually
from tests.helpers.scripts import Commands, Done, Script
from tests.train.jobs import free_port, lines, same, summary, tiny, train, weights

from weft.faults import PHASES
from weft.train.run import Folder, locked

# six updates with a clipped norm (an all-reduce), an evaluation and a checkpoint every two
JOB = {"train__updates": 6, "checkpoint__every": 2, "evaluate__every": 2, "log__every": 1, "train__clip_norm": 1.0}
ENDLESS = {"train__updates": 100_000}


def attempt(commands: Commands, trial: Trial, *arguments: str, **changes: Any) -> Done:
    """A run of the small job with the faults of a trial."""
    commands.environment |= trial.environment
    done = commands.run("train", *tiny(**JOB | changes), *arguments)
    trial.check()
    return done


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on virtual ranks, which compute the same bits."""
    home = tmp_path_factory.mktemp("uninterrupted")
    assert train(log__folder=str(home), **JOB) == 0
    return home / "tiny"


def test_every_phase_has_its_place_in_the_code() -> None:
    import weft

    text = "".join(path.read_text() for path in Path(weft.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'faults\.(?:hit|site)\("([\w-]+)"\)', text)) == set(PHASES)


# A killed rank

KILLS = {
    "import": ["import:1:1:kill"],
    "rendezvous": ["rendezvous:1:0:kill"],
    "data": ["data:1:1:kill"],
    "agreement": ["agreement:1:1:kill"],
    "folder": ["folder:1:0:kill", "folder:2:0:kill", "folder:3:0:kill"],  # around the file of the invocation
    "send": ["send:9:1:segv"],
    "receive": ["receive:9:0:kill"],
    "all-reduce": ["all-reduce:3:1:kill"],
    "flush": ["flush:2:0:kill"],
    "evaluate": ["evaluate:9:1:kill"],
    "chunk-write": ["chunk-write:60:1:kill"],  # in the second checkpoint
    "before-rename": ["before-rename:2:0:kill"],
    "before-latest": ["before-latest:2:0:kill"],
    "rotation": ["rotation:1:0:kill"],
    "load-verify": ["flush:2:0:kill", "load-verify:2:1:kill"],
    "load-install": ["flush:2:0:kill", "load-install:3:1:kill"],
    "end": ["end:1:0:kill"],
}
ALWAYS = (
    "import",
    "data",
    "folder",
    "send",
    "all-reduce",
    "chunk-write",
    "before-latest",
    "rotation",
    "load-install",
    "end",
)


def test_every_phase_is_tried() -> None:
    assert KILLS.keys() == PHASES.keys()


@pytest.mark.parametrize(
    "phase", [phase if phase in ALWAYS else pytest.param(phase, marks=pytest.mark.slow) for phase in KILLS]
)
def test_a_rank_killed_in_any_phase_costs_a_restart_and_no_bit(
    phase: str, uninterrupted: Path, tmp_path: Path, commands: Commands
) -> None:
    trial = Trial(tmp_path, *KILLS[phase])
    done = attempt(commands, trial, "--max-restarts", str(len(trial.faults)))
    run = tmp_path / "runs" / "tiny"
    assert done.code == 0, done.err
    assert "was killed by SIG" in done.err or phase == "end"
    assert summary(run)["restarts"] == (0 if phase == "end" else len(trial.faults))  # at the end there are results
    assert same(weights(run), weights(uninterrupted))
    assert [(line["update"], line["loss"]) for line in lines(run, "train")] == [
        (line["update"], line["loss"]) for line in lines(uninterrupted, "train")
    ]


# Results


def test_results_are_those_of_this_command(tmp_path: Path, commands: Commands) -> None:
    """A finished run gets more updates, and a rank dies before it has begun: the old results are not the new ones."""
    run = tmp_path / "runs" / "tiny"
    assert commands.run("train", *tiny(**JOB)).code == 0
    old = summary(run)
    trial = Trial(tmp_path, "import:1:1:kill")
    commands.environment |= trial.environment
    more = ("--resume", "tiny", "--set", "train.updates=8")
    done = commands.run("train", *more)
    trial.check()
    assert done.code == 1
    assert "rank 1 was killed by SIGKILL" in done.err
    assert "outcome" not in done.out
    assert summary(run) == old
    trial.log.unlink()
    done = commands.run("train", *more, "--max-restarts", "1")
    trial.check()
    assert done.code == 0, done.err
    assert (summary(run)["update"], summary(run)["restarts"]) == (8, 1)


def test_a_restart_keeps_the_chosen_checkpoint(tmp_path: Path, commands: Commands) -> None:
    """Also if the ranks die in the middle of its choice: before and after newer ones are set aside."""
    assert commands.run("train", *tiny(**JOB), "--set", "checkpoint.keep=9").code == 0
    trial = Trial(tmp_path, "agreement:1:1:kill", "folder:1:0:kill", "folder:2:0:kill", "folder:3:0:kill")
    commands.environment |= trial.environment
    done = commands.run("train", "--resume", "tiny", "--checkpoint", "previous", "--max-restarts", "4")
    trial.check()
    assert done.code == 0, done.err
    assert re.findall(r"restart \d of 4, from (.*)", done.err) == ["update-00000004"] * 4
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / "aside-update-00000006").exists()


def test_one_of_two_commands_gets_the_run(tmp_path: Path, commands: Commands) -> None:
    """The other one learns who has it, and changes nothing."""
    run = tmp_path / "runs" / "tiny"
    first = commands.start("train", *tiny(**ENDLESS, checkpoint__every=10, evaluate__every=0))
    eventually(lambda: (run / "checkpoints" / "latest").exists() or first.poll() is not None)
    holder = f"belongs to another run at the moment (pid {first.pid} on {socket.gethostname()}, since "
    for command in (tiny(), [*tiny(), "--overwrite"], [*tiny(), "--continue"], ["--resume", "tiny"]):
        done = commands.run("train", *command)
        assert done.code == 2
        assert holder in done.err
    first.send_signal(signal.SIGTERM)
    assert commands.finish(first).code == 0
    assert not list((run / "checkpoints").glob("aside-*"))


# Storage


@pytest.mark.parametrize(
    "fault",
    [
        "chunk-write:3:1:enospc",
        pytest.param("before-rename:1:0:estale", marks=pytest.mark.slow),
        "before-latest:1:0:eio",
    ],
)
def test_a_failed_save_keeps_a_run_alive(fault: str, uninterrupted: Path, tmp_path: Path, commands: Commands) -> None:
    """On all ranks; the next save makes up for it."""
    run = tmp_path / "runs" / "tiny"
    done = attempt(commands, Trial(tmp_path, fault), evaluate__every=0)
    assert done.code == 0, done.err
    assert "update 2: no checkpoint was saved: " in done.err
    (failed,) = lines(run, "save failed")
    assert failed["update"] == 2
    assert failed["problem"] in done.err
    assert (run / "checkpoints" / "latest").read_text() == "update-00000006\n"
    assert same(weights(run), weights(uninterrupted))
    assert not list((run / "checkpoints").glob(".*"))


def test_a_run_whose_last_save_failed_has_failed(tmp_path: Path, commands: Commands) -> None:
    """The restarts apply to it, as to any error that may go away."""
    run = tmp_path / "runs" / "tiny"
    fault = "chunk-write:every:1:enospc"
    done = attempt(commands, Trial(tmp_path, fault), "--max-restarts", "1", checkpoint__every=3, evaluate__every=0)
    assert done.code == 1
    assert done.err.count("update 6: no checkpoint was saved") == 2
    assert "restart 1 of 1, from the beginning" in done.err
    assert "the run ends without its last checkpoint: can't write " in done.err
    assert "No space left on device; free some space" in done.err
    assert not (run / "summary.json").exists()


@pytest.mark.slow  # half a minute of waiting; test_collectives.py shows the same of a call
def test_a_slow_file_system_is_waited_for(uninterrupted: Path, tmp_path: Path, commands: Commands) -> None:
    """Longer than ranks wait for each other otherwise: before the first mini-batch, in a save and in a load."""
    faults = "folder:1:0:slow=10", "chunk-write:3:1:slow=10", "flush:2:0:kill", "load-verify:2:1:slow=10"
    done = attempt(commands, Trial(tmp_path, *faults), "--max-restarts", "1", schedule__deadline=5.0)
    assert done.code == 0, done.err
    assert same(weights(tmp_path / "runs" / "tiny"), weights(uninterrupted))


def test_a_slow_save_is_no_stuck_rank(tmp_path: Path, commands: Commands) -> None:
    """A rank that has written its part waits for another one that moves, for longer than it may stay unmoved."""
    trial = Trial(tmp_path, "chunk-write:every:0:slow=0.15")  # of more than thirty
    done = attempt(commands, trial, train__updates=2, evaluate__every=0, checkpoint__deadline=1.5)
    assert done.code == 0, done.err


def test_a_stuck_save_ends_at_its_own_deadline(tmp_path: Path, commands: Commands) -> None:
    """No byte moves: the message speaks of the checkpoint, and restarts apply."""
    trial = Trial(tmp_path, "chunk-write:3:1:hang")
    done = attempt(commands, trial, "--max-restarts", "1", checkpoint__deadline=2.0, evaluate__every=0)
    assert done.code == 0, done.err
    assert "waited 2 s for rank 1 to save the checkpoint, and no byte was moved" in done.err
    assert summary(tmp_path / "runs" / "tiny")["restarts"] == 1


def test_an_error_of_storage_before_the_ranks_start_costs_a_restart(tmp_path: Path, commands: Commands) -> None:
    trial = Trial(tmp_path, "flush:2:0:kill", "load-verify:1:parent:eio")
    done = attempt(commands, trial, "--max-restarts", "2")
    assert done.code == 0, done.err
    assert summary(tmp_path / "runs" / "tiny")["restarts"] == 2


@pytest.mark.parametrize("size", ["16k", "20k", "208k", "240k", "264k"])
def test_a_disk_that_is_really_full(size: str, tmp_path: Path, commands: Commands) -> None:
    """From the folder's first file to the report: never a mistake of the user, and never a wrong result."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("needs permission to mount")
    try:
        done = commands.run("train", *tiny(log__folder=str(disk), schedule__virtual=True))
        trained = (disk / "tiny" / "summary.json").exists()
        assert done.code == (0 if trained else 1), done.err
        assert "No space left on device" in done.err
        assert "Traceback" not in done.err
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_is_moved_ends_its_run(tmp_path: Path, commands: Commands) -> None:
    """Another run may have its place; what was saved is where it was moved to."""
    run, moved = tmp_path / "runs" / "tiny", tmp_path / "runs" / "moved"
    job = tiny(**ENDLESS, checkpoint__every=40, evaluate__every=0)
    process = commands.start("train", *job, "--overwrite", "--max-restarts", "1")
    eventually(lambda: (run / "checkpoints" / "latest").exists() or process.poll() is not None)
    run.rename(moved)
    other = Folder(run)
    other.create()
    other.begin("", invocation="other")
    with locked(run):
        done = commands.finish(process)
    assert done.code == 1
    assert "was moved or deleted while its run was going on" in done.err
    assert other.begun_by() == "other"
    assert other.names() == []
    assert (moved / "checkpoints" / "latest").exists()


# Ranks that are alive, or not


def test_a_stopped_rank_that_nobody_waits_for_is_named_and_ended(tmp_path: Path, commands: Commands) -> None:
    trial = Trial(tmp_path, "flush:1:0:stop")
    done = attempt(commands, trial, schedule__ranks=1, schedule__deadline=2.0)
    assert done.code == 1
    assert re.search(r"rank 0 gave no sign of life for \d+ s and was killed: it is stopped", done.err)
    assert "it was in: train" in done.err
    assert commands.alive() == []


@pytest.mark.slow  # the margin of five seconds, and as above
def test_a_rank_that_does_not_move_is_named_with_its_phase(tmp_path: Path, commands: Commands) -> None:
    trial = Trial(tmp_path, "evaluate:1:0:hang")
    done = attempt(commands, trial, schedule__ranks=1, schedule__deadline=1.0)
    assert done.code == 1
    assert re.search(
        r"rank 0 is alive, has not moved for \d+ s and was killed \(limit: 1 s; it was in: evaluate", done.err
    )
    assert " in _hang\n" in done.err


def test_a_stopped_rank_follows_a_request_to_stop(tmp_path: Path, commands: Commands) -> None:
    """It is continued, saves with the others, and ends."""
    run = tmp_path / "runs" / "tiny"
    process = commands.start("train", *tiny(**ENDLESS, schedule__ranks=1, checkpoint__every=0, evaluate__every=0))
    eventually(lambda: len(lines(run, "train")) > 1 if (run / "metrics.jsonl").exists() else process.poll() is not None)
    (rank,) = (int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    os.kill(rank, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    done = commands.finish(process)
    assert done.code == 0, done.err
    assert summary(run)["how"] == "stopped"


# Under torchrun, whose variables and parent these processes have


def start_joined(commands: Commands, *arguments: str, port: int, restarts: int = 0, **by_rank: str) -> list[Script]:
    """Two ranks as torchrun starts them; `by_rank` is a key of the job that is different on rank 1."""
    processes = []
    for rank in range(2):
        commands.environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        commands.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        commands.environment |= {"TORCHELASTIC_RUN_ID": "trial", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        other = [word for key, value in by_rank.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        processes.append(commands.start("train", *arguments, *(other if rank else ())))
    return processes


def test_a_restart_of_torchrun_resumes_whatever_the_command_says(
    uninterrupted: Path, tmp_path: Path, commands: Commands
) -> None:
    """`--overwrite` replaces the run that was there, once; not the one that the job itself has begun."""
    run = tmp_path / "runs" / "tiny"
    assert commands.run("train", *tiny(**JOB | {"train__updates": 2, "train__seed": 7})).code == 0
    trial = Trial(tmp_path, "flush:2:1:kill")
    commands.environment |= trial.environment
    job = [*tiny(**JOB, schedule__ranks=0), "--overwrite"]
    first, second = start_joined(commands, *job, port=free_port())
    assert commands.finish(second).code == -signal.SIGKILL
    assert commands.finish(first).code == 1
    trial.check()
    assert (run / "checkpoints" / "latest").read_text() == "update-00000002\n"
    begun = run / "invocation"  # rank 0 moves to another host; torchrun itself is in test_processes.py
    begun.write_text(begun.read_text().replace(socket.gethostname(), "elsewhere"))
    restarted = [commands.finish(script) for script in start_joined(commands, *job, port=free_port(), restarts=1)]
    assert [done.code for done in restarted] == [0, 0], restarted[0].err
    assert summary(run)["restarts"] == 1
    assert "update 2:" not in restarted[0].out  # its first evaluation after the restart is a later one
    assert "update 4:" in restarted[0].out
    assert same(weights(run), weights(uninterrupted))


def test_ranks_with_different_jobs_are_refused(tmp_path: Path, commands: Commands) -> None:
    """Before anything is opened or written."""
    job = tiny(**JOB, schedule__ranks=0)
    for process in start_joined(commands, *job, port=free_port(), train__lr="0.5"):
        done = commands.finish(process)
        assert done.code == 2, done.err
        assert "all ranks need the same train.lr (rank 0: 0.01, rank 1: 0.5)" in done.err
    assert not (tmp_path / "runs").exists()


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path, commands: Commands) -> None:
    run = tmp_path / "runs" / "tiny"
    job = tiny(**ENDLESS, schedule__ranks=0, checkpoint__every=0, evaluate__every=0)
    processes = start_joined(commands, *job, port=free_port())
    eventually(lambda: len(lines(run, "train")) > 1 if (run / "metrics.jsonl").exists() else False)
    for process in processes:
        parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{process.pid}").exists() for process in processes))
    assert any("is gone; rank" in process.err for process in processes)  # the other may lose its peer first
    assert commands.alive() == []
