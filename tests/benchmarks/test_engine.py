"""Engine: timers by part, its tables and targets, and the quick form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.engine import measure as measuring
from benchmarks.engine import parts
from benchmarks.engine.measure import SCHEDULES, measure
from benchmarks.engine.pages import alone_ratios, busy_ratios, microseconds, missed, tables
from benchmarks.harness import ResumeCache
from weft.errors import WeftError


class Clock:
    """Moves by what a test adds, and by `tick` with every look."""

    def __init__(self, tick: int = 0) -> None:
        self.now, self.tick = 0, tick

    def __call__(self) -> int:
        self.now += self.tick
        return self.now

    def spend(self, nanoseconds: int) -> None:
        self.now += nanoseconds


def test_a_part_has_its_own_time_only() -> None:
    """Without that of parts inside it, generators included."""
    clock = Clock()
    timers = parts.Timers(clock)
    inner = timers._timed("inner", lambda: clock.spend(20))

    def make() -> Iterator[int]:
        for number in range(3):
            clock.spend(10)
            yield number

    def outer() -> None:
        inner()
        clock.spend(300)
        for _ in timers._timed_generator("items", make)():
            clock.spend(1000)

    timers._timed("outer", outer)()
    assert timers.read() == {"inner": 20, "items": 30, "outer": 3300}
    timers.clear()
    assert timers.read() == {}


def test_timers_do_not_count_themselves() -> None:
    """Each looks at the clock twice: one tick is inside its part, one is in the part around it."""
    clock = Clock(tick=1)
    timers = parts.Timers(clock)
    nothing = timers._timed("nothing", lambda: None)
    timers._timed("loop", lambda: [nothing() for _ in range(1000)])()
    assert timers.read() == {"nothing": 0.0, "loop": pytest.approx(0, abs=1)}


def test_every_function_exists_in_this_version_or_is_of_an_earlier_one() -> None:
    timers = parts.Timers()
    replaced: list[str] = []

    def note(owner: Any, name: str, value: Any) -> None:
        replaced.append(name)

    with mock.patch.object(parts, "setattr", note, create=True):
        timers.install()
    expected = [name.rsplit(":", 1)[1].split(".")[-1] for names in parts.FUNCTIONS.values() for name in names]
    assert sorted(replaced) == sorted(name for name in expected if name != "tasks")  # of an earlier version


def window(busy: float, cpu: float, **more: float) -> dict[str, float]:
    return {
        "wall": busy + 0.5,
        "busy": busy,
        "cpu": cpu,
        "main": 0.9 * cpu,
        "alone": 1.0,
        "actions": 10.0,
        "waiting": 0.1,
    } | more


def results(wpipe: float = 2.04, cpu: float = 1.02) -> dict[str, Any]:
    figures = {"2bw": [window(2.0, cpu)] * 3, "wpipe": [window(wpipe, cpu)] * 3}
    profiled = {"2bw": [window(2.0, 1.0, send=2e-5)] * 3}
    now = {"models": {"main": figures}, "parts": profiled}
    return {"environment": "2 cores", "versions": {"now": now, "before": now}}


def test_tables_show_both_versions() -> None:
    found = tables(results())
    row = "| `wpipe` | 1.020 (1.020 to 1.020) | 1.020 (1.020 to 1.020) | 1.03 |"
    assert row in found["busy"]
    assert "schedule | main job, before | main job, now |" in found["busy"]
    assert "| `wpipe` | 1.02 (1.02 to 1.02), 3.9 % |" in found["pace"]  # 2.54 of 2.5, of which it waits 0.1
    assert "| `2bw` | 1.020 (1.020 to 1.020) |" in found["alone"]
    assert "| send | 2.0 | 2.0 |" in found["parts"]


def test_a_version_may_lack_a_schedule() -> None:
    shown = results()
    figures = shown["versions"]["before"]["models"]["main"]
    shown["versions"]["before"] = {"models": {"main": {"2bw": figures["2bw"]}}, "parts": {"2bw": [window(1, 1)]}}
    assert "| `wpipe` | – | 1.020" in tables(shown)["busy"]
    del shown["versions"]["before"]
    assert "before" not in tables(shown)["parts"]


def test_ratios_are_of_the_same_window() -> None:
    figures = {"2bw": [window(2.0, 1.0), window(4.0, 1.0)], "wpipe": [window(3.0, 2.0), window(4.0, 1.5)]}
    assert busy_ratios(figures, "wpipe") == [1.5, 1.0]
    assert alone_ratios(figures["wpipe"]) == [2.0, 1.5]
    assert microseconds([window(1, 1.0, send=1e-3)])["send"] == pytest.approx(100)
    assert microseconds([window(1, 1.0)])["other threads"] == pytest.approx(0.1 / 10 * 1e6)


def test_targets() -> None:
    assert missed(results()) == []
    (line,) = missed(results(wpipe=2.2))
    assert line == "main job, wpipe: busy time over 2bw's is 1.100 (1.100 to 1.100), at the most 1.03: missed"
    assert [line.split(":")[0] for line in missed(results(cpu=1.1))] == ["main job, 2bw", "main job, wpipe"]


def test_a_folder_without_weft_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measuring.VARIABLE, str(tmp_path))
    with pytest.raises(WeftError, match="WEFT_BEFORE names a checkout of weft"):
        measure(quick=True, cache=ResumeCache())


@pytest.mark.slow
def test_quick_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """This version in the place of an earlier one, too."""
    monkeypatch.setenv(measuring.VARIABLE, str(Path(measuring.__file__).parents[2]))
    found = measure(quick=True, cache=ResumeCache())
    for version in ("now", "before"):
        for figures in found["versions"][version]["models"].values():
            assert figures.keys() == set(SCHEDULES)
            assert all(row["busy"] > 0 and row["alone"] > 0 for rows in figures.values() for row in rows)
        costs = microseconds(found["versions"][version]["parts"]["wpipe"])
        assert min(costs[part] for part in ("send", "receive", "steps", "forwards", "autograd")) > 0
    assert tables(found | {"environment": "2 cores"})
