"""Checks on ranks: outcomes of all of them, errors, deaths and hangs that cost one check, and the budget of time."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.helpers import doctor_checks as fake

from weft.doctor import ranks, training
from weft.doctor.checks import Check, Found, Outcome
from weft.doctor.ranks import Crew, Place, run_on_ranks

REAL = Crew(kind="cpu", ranks=2)
VIRTUAL = Crew(kind="cpu", ranks=4, virtual=True, limit=2.0)
LONG = 300.0  # seconds: a budget that nothing here exceeds


def check(run: Callable[[Place], Found], name: str = "") -> Check:
    judge = training.judge_death if run in (fake.surviving, fake.exiting) else None
    return Check(name=name or getattr(run, "__name__", ""), run=run, remedy="mend it", judge=judge)


def run(crew: Crew, *functions: Callable[[Place], Found], seconds: float = LONG) -> dict[str, Outcome]:
    before = children()
    outcomes = run_on_ranks([check(function) for function in functions], crew, end=time.monotonic() + seconds)
    assert children() == before
    return {outcome.check: outcome for outcome in outcomes}


def children() -> set[int]:
    """The processes that this one has started."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            pid, rest = status.read_text().split(" ", 1)
            found |= {int(pid)} if int(rest.rpartition(") ")[2].split()[1]) == os.getpid() else set()
    return found


def test_two_ranks() -> None:
    """One start for all checks up to the error, and another one for the death."""
    outcomes = run(
        REAL,
        fake.good,
        fake.broken_on_last,
        fake.not_here,
        fake.lossy,
        fake.without_memfd,
        fake.strange_memory,
        fake.switched_off,
        fake.surviving,
        fake.raising_on_last,
        fake.exiting,
    )
    found = {name: (outcome.verdict, outcome.found) for name, outcome in outcomes.items()}
    assert outcomes["good"] == Outcome(check="good", verdict="passed", found="2 stages", figures={"processes": 2})
    assert found["broken_on_last"] == ("failed", "rank 1: it is broken")
    assert found["not_here"] == ("unchecked", "it is elsewhere")
    assert found["lossy"] == ("failed", "a message of 8 B arrived with other contents")
    assert found["without_memfd"] == (
        "unchecked",
        "ranks can't share it (memfd is refused); messages use gloo, which is slower",
    )
    assert found["strange_memory"] == ("failed", "memory of another rank has other contents here")
    assert found["switched_off"] == ("unchecked", "switched off by WEFT_SHARED_MEMORY=0; messages use gloo")
    assert found["surviving"] == ("failed", "rank 1 was killed, and training went on")
    assert found["raising_on_last"] == ("failed", "rank 1 failed: ValueError: no such value")
    assert found["exiting"][0] == "failed"
    assert "rank 1 was killed, but the error is: rank 1 ended with exit code 3" in found["exiting"][1]
    assert {outcome.remedy for outcome in outcomes.values() if outcome.verdict == "failed"} == {"mend it"}


def test_a_hang_costs_one_check() -> None:
    wrong = partial(training.law, "wpipe", ("fp32",), reads=fake.on_time)
    outcomes = run_on_ranks(
        [check(fake.hanging), check(wrong, "wrong law"), check(fake.good)], VIRTUAL, end=time.monotonic() + LONG
    )
    assert [outcome.verdict for outcome in outcomes] == ["failed", "failed", "passed"]
    assert outcomes[0].found == "it did not end within 2 s"
    assert outcomes[1].found.startswith("wrong weights")
    assert outcomes[2].figures == {"processes": 1}


def test_what_the_budget_has_no_time_for_is_unchecked() -> None:
    outcomes = run(REAL, fake.good, fake.hanging, seconds=0.1)
    assert {outcome.verdict for outcome in outcomes.values()} == {"unchecked"}
    assert all("no time was left" in outcome.found for outcome in outcomes.values())


ALARM = "rank 0 was killed by SIGALRM"
KILLED = "rank 1 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("limit", "problem", "verdict", "found"),
    [
        (ranks.CHECK_LIMIT, ALARM, "failed", "did not end within 12 s"),
        (3.0, ALARM, "unchecked", "no time was left"),
        (3.0, "rank 1 failed: X", "failed", "rank 1 failed: X"),
        (3.0, KILLED, "failed", KILLED),  # by somebody else
    ],
)
def test_why_ranks_ended(tmp_path: Path, limit: float, problem: str, verdict: str, found: str) -> None:
    (tmp_path / "journal").write_text(json.dumps({"begun": "x", "limit": limit}) + "\n")
    outcome = ranks._after_error(check(fake.good), REAL, problem, str(tmp_path))
    assert outcome.verdict == verdict
    assert found in outcome.found
    assert bool(outcome.remedy) == (verdict == "failed")


def not_starting(monkeypatch: pytest.MonkeyPatch, problem: str, *, left: float, taken: float) -> list[Outcome]:
    """The outcomes of two checks, if ranks that have `left` seconds fail to start after `taken` seconds."""
    now = [0.0]

    def run_once(*args: object, **options: object) -> str:
        now[0] += taken
        return problem

    monkeypatch.setattr(ranks, "_run_once", run_once)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return run_on_ranks([check(fake.good), check(fake.hanging)], REAL, end=left)


@pytest.mark.parametrize(("left", "taken"), [(25.0, 25.0), (5.0, 0.1)])
def test_ranks_that_do_not_start_are_one_failure(monkeypatch: pytest.MonkeyPatch, left: float, taken: float) -> None:
    start, *rest = not_starting(monkeypatch, "rank 0 did not join", left=left, taken=taken)
    assert (start.check, start.verdict, start.found) == ("ranks start", "failed", "rank 0 did not join")
    assert "--seconds" in start.remedy
    assert [(outcome.check, outcome.found) for outcome in rest] == [
        ("good", "the ranks had ended before"),
        ("hanging", "the ranks had ended before"),
    ]


def test_a_start_with_little_time_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = not_starting(monkeypatch, "rank 0 did not join", left=5.0, taken=5.0)
    assert [(outcome.check, outcome.found) for outcome in outcomes] == [
        ("good", ranks.OUT_OF_TIME),
        ("hanging", ranks.OUT_OF_TIME),
    ]


def test_a_mistake_has_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    start, *_ = not_starting(monkeypatch, "WeftError: x must be 1 (got 2); use 1; or 0", left=25.0, taken=1.0)
    assert (start.found, start.remedy) == ("WeftError: x must be 1 (got 2)", "use 1; or 0")


def test_a_death_is_judged_by_its_moment(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text('{"begun": "x", "limit": 12.0}\n')
    for seconds, verdict in ((0.0, "passed"), (60.0, "failed")):
        ranks.moment_file(str(tmp_path)).write_text(str(time.monotonic() - seconds))
        outcome = ranks._after_error(check(fake.exiting), REAL, KILLED, str(tmp_path))
        assert outcome.verdict == verdict
