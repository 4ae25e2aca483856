"""A rank reports where it is and whether it moves; one that does not move differs from one that is stopped."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.rank_functions import eventually
from tests.helpers.scripts import Scripts

from weft.errors import RunError
from weft.runtime.process import Status, liveness, status_file
from weft.runtime.process.liveness import PAUSED, Report
from weft.runtime.process.parent import LONG_SILENCE, STUCK_MARGIN, Limits, _Watch

SILENCE = 8.0  # seconds


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 100.0
        fake = SimpleNamespace(monotonic=lambda: self.now, time=time.time, sleep=time.sleep)
        for module in modules:
            monkeypatch.setattr(f"weft.runtime.process.{module}.time", fake)


def test_a_status_knows_how_long_it_is_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counted = Clock(monkeypatch, "liveness"), [0]
    status = Status()
    status.counter = lambda: counted[0]
    assert status.report() == Report(phase="start", minibatch=None, bytes=0, unmoved=0.0, limit=None)
    with status.during("save", limit=9.0):
        clock.now += 1
        assert status.report() == Report(phase="save", minibatch=None, bytes=0, unmoved=0.0, limit=9.0)
        clock.now += 2
        assert status.report().unmoved == 2.0
        status.nbytes += 5
        assert (status.report().unmoved, status.report().bytes) == (0.0, 5)
    assert (status.report().phase, status.report().limit) == ("start", None)
    for change in ("minibatch", "moves"):
        clock.now += 3
        assert status.report().unmoved == 3.0
        setattr(status, change, 7)
        assert status.report().unmoved == 0.0
    clock.now += 3
    counted[0] += 1
    assert status.report().unmoved == 0.0
    assert str(status.report()) == "start, mini-batch 7"


def test_a_process_that_was_stopped_itself_has_missed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, status = Clock(monkeypatch, "liveness"), Status()
    status.report()
    clock.now += PAUSED - 1
    assert status.report().unmoved == PAUSED - 1
    clock.now += PAUSED + 1  # Ctrl-Z, and fg
    assert status.report().unmoved == 0.0


def test_the_status_is_in_a_file_while_a_run_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that docs/guarantees.md describes."""
    status = Status()
    monkeypatch.setattr(liveness, "status", status)
    monkeypatch.setattr(liveness, "PERIOD", 0.01)
    path = tmp_path / "status" / "rank-3.json"

    def read() -> Any:
        return json.loads(path.read_text()) if path.exists() else {}

    page = (Path(__file__).parents[3] / "docs" / "guarantees.md").read_text()
    documented = json.loads(page.partition("```json\n")[2].partition("```")[0])
    with status_file(path, rank=3), status.during("train", limit=60.0):
        status.minibatch = 5
        eventually(lambda: read().get("minibatch") == 5)
        written = read()
        assert written.keys() == documented.keys()
        assert {name: type(value) for name, value in written.items()} == {
            name: type(value) for name, value in documented.items()
        }
        assert (written["rank"], written["phase"], written["limit"]) == (3, "train", 60.0)
        assert written["moved"] <= written["time"] <= time.time()
    assert read()["phase"] == "ended"
    with pytest.raises(RunError), status_file(path, rank=3):
        raise RunError("lost")
    assert read()["phase"] == "failed"


def test_a_folder_that_can_not_be_written_costs_only_the_status(tmp_path: Path) -> None:
    (tmp_path / "status").touch()
    with status_file(tmp_path / "status" / "rank-0.json", rank=0):
        pass
    assert (tmp_path / "status").read_text() == ""


class Rank:
    """A rank as its parent sees it, without a process."""

    def __init__(self, clock: Clock, status: Report | None) -> None:
        self.rank, self.heard, self.status = 0, clock.now, status
        self.failure: Any = None
        self.popen = SimpleNamespace(pid=-1)

    def fail(self, cause: str) -> None:
        self.failure = cause


def report(**changes: Any) -> Report:
    moving: dict[str, Any] = {"phase": "train", "minibatch": 4, "bytes": 0, "unmoved": 0.0, "limit": 60.0}
    return Report(**moving | changes)


def watch(clock: Clock, rank: Rank) -> _Watch:
    ranks: Any = [rank]
    return _Watch(ranks, Limits(start=300.0, silence=SILENCE), threading.Event())


@pytest.mark.parametrize(
    ("stopped", "limit", "seconds", "how"),
    [
        (True, None, SILENCE, "it is stopped (SIGSTOP)"),
        (False, 60.0, 60.0 + STUCK_MARGIN, "it runs, but its threads do not"),
        (False, 1.0, LONG_SILENCE + STUCK_MARGIN, "it runs, but its threads do not"),
        (False, None, None, ""),  # a user's function may call C for as long as it likes
    ],
)
def test_a_rank_without_a_heartbeat_fails(
    stopped: bool, limit: float | None, seconds: float | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, "parent")
    monkeypatch.setattr("weft.runtime.process.hang_dump.is_stopped", lambda pid: stopped)
    monkeypatch.setattr("weft.runtime.process.hang_dump.request_stacks", lambda rank, pid: None)
    rank: Any = Rank(clock, report(limit=limit))
    watched = watch(clock, rank)
    clock.now += 1e6 if seconds is None else seconds
    watched._check_alive(rank)
    assert rank.failure is None
    if seconds is not None:
        clock.now += 1
        watched._check_alive(rank)
        words = f"gave no sign of life for {seconds + 1:.0f} s and was killed: {how}; it was in: train, mini-batch 4"
        assert rank.failure == words


@pytest.mark.parametrize(
    ("status", "fails"),
    [
        (report(unmoved=60.0 + STUCK_MARGIN), False),
        (report(unmoved=61.0 + STUCK_MARGIN), True),
        (report(unmoved=1e6, limit=None), False),
    ],
)
def test_a_rank_that_does_not_move_fails_after_the_limit_of_its_phase(
    status: Report, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, "parent")
    monkeypatch.setattr("weft.runtime.process.hang_dump.request_stacks", lambda rank, pid: None)
    rank: Any = Rank(clock, status)
    watch(clock, rank)._check_alive(rank)
    assert (rank.failure is not None) == fails


def test_a_parent_that_was_stopped_itself_forgives(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "parent")
    rank: Any = Rank(clock, report())
    watched = watch(clock, rank)
    clock.now += 1000  # Ctrl-Z stops the parent with its ranks
    watched._forgive_pause()
    watched._check_alive(rank)
    assert rank.failure is None


AT_THE_END = """
import atexit, os, signal, sys
from rank_functions import report

def work():
    if os.environ["RANK"] == "1":
        atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
    return "done"

if __name__ == "__main__":
    sys.modules["weft.runtime.process.parent"].EXIT_SILENCE = 1.0
    report(work, ranks=2)
"""


def test_a_rank_that_stops_at_the_very_end_is_ended(new_interpreters: Scripts) -> None:
    """Its result counts."""
    done = new_interpreters.run(AT_THE_END)
    (said,) = done.said
    assert said["results"] == ["done", "done"]
    assert "rank 1 had not exited 1 s after fn had returned, and was killed (it is stopped)" in done.err
