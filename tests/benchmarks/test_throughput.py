"""Throughput on two ranks: its quick form in real processes, its windows and limits, its tables and targets."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.contenders import Contender, shuffled
from benchmarks.harness import ResumeCache
from benchmarks.throughput import pages, ranks
from benchmarks.throughput.measure import ROUNDS, WINDOW, measure
from benchmarks.throughput.ranks import Race, join_ranks, measure_windows

ASYNCHRONOUS = ["pipedream", "2bw", "2bw warmup 2", "wpipe", "wpipe warmup 2", "xpipe", "spectrain", "pipeoptim"]
WEFT = ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "xpipe", "spectrain", "pipeoptim"]
TORCH = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
ENVIRONMENT = {"environment": "2 cores, torch 0"}


def results_with(**seconds: float) -> dict[str, Any]:
    """Results in which torch's schedules reach half of the limit and weft's all of it, but for these."""
    names = {f"weft {name}": 1.0 for name in WEFT} | {f"torch {name}": 2.0 for name in TORCH} | {"DDP": 1.5}
    given = names | {name.replace("_", " "): value for name, value in seconds.items()}
    case = {
        "steps": 2,
        "limit": {name: [1.0] * 3 for name in given},
        "mean": {name: [0.8] * 3 for name in given},
        "seconds": {name: [value] * 3 for name, value in given.items()},
    }
    models = {model: {str(m): case for m in (2, 4, 8)} for model in ("transformer", "resnext")}
    return ENVIRONMENT | {"form": "whole", "models": models, "engine": {"wpipe": [100.0, 120.0, 110.0]}}


@pytest.mark.slow
def test_quick_form() -> None:
    """Every contender runs, and computes what plain training does: another first update would have been an error.

    Asynchronous pipelines are not far behind 1f1b, by their best round, as another process may have a core in most
    windows of a contender.
    """
    results = ENVIRONMENT | measure(quick=True, cache=ResumeCache()) | {"form": "quick"}
    for model, m in (("transformer", "4"), ("resnext", "2")):
        case = results["models"][model][m]
        assert {f"weft {name}" for name in WEFT} | {f"torch {name}" for name in TORCH} <= case["seconds"].keys()
        assert {"DDP", "FSDP2"} <= case["seconds"].keys()
        assert ("torch DualPipeV" in case["seconds"]) == (m == "4")
        assert case["seconds"].keys() == case["limit"].keys() == case["mean"].keys()
        for key in ("seconds", "limit", "mean"):
            assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in case[key].values())
        assert case["steps"] >= 2
    case = results["models"]["transformer"]["4"]
    of_limit = pages.ratios(case)
    for name in ASYNCHRONOUS:
        assert max(of_limit[f"weft {name}"]) >= 0.5 * statistics.median(of_limit["weft 1f1b"]), (name, of_limit)
    assert max(of_limit["weft wpipe"]) > 0.1
    assert statistics.median(max(values) for values in of_limit.values()) < 3.0
    assert min(pages.both_cores(case)) >= 1.0
    assert all(min(costs) < 5000 for costs in results["engine"].values())
    tables = pages.tables(results)
    assert tables.keys() == {"transformer", "resnext", "engine"}  # small layers have no targets
    assert "| weft wpipe |" in tables["transformer"]
    assert ENVIRONMENT["environment"] in tables["transformer"]
    assert pages.plots(results).keys() == {"transformer.svg", "resnext.svg"}


def test_ratio_is_over_the_limit_beside_it() -> None:
    case = {
        "limit": {"weft wpipe": [2.0, 4.0], "DDP": [2.0, 5.0]},
        "mean": {"weft wpipe": [1.0, 4.0], "DDP": [1.5, 5.0]},
        "seconds": {"weft wpipe": [4.0, 5.0], "DDP": [2.0, 5.0]},
    }
    assert pages.ratios(case) == {"weft wpipe": [0.5, 0.8], "DDP": [1.0, 1.0]}
    assert pages.both_cores(case) == [1.6, 1.0]


def test_limit_is_the_slower_rank_s_before_and_after_a_group() -> None:
    names = ["a", "b", "c", "d"]
    first = {"steps": 2, "limit": [[1.0, 2.0, 3.0]], "seconds": {name: [5.0] for name in names}}
    second = {"steps": 2, "limit": [[3.0, 1.0, 7.0]], "seconds": {name: [4.0] for name in names}}
    (found,) = join_ranks([[first], [second]])
    *group, last = shuffled(names, 0)
    assert [found["limit"][name] for name in (*group, last)] == [[2.5]] * 3 + [[4.5]]  # of 3, 2 and 7
    assert [found["mean"][name] for name in (*group, last)] == [[1.75]] * 3 + [[3.25]]  # of 2, 1.5 and 5
    assert found["seconds"] == first["seconds"]


def test_targets_that_are_met() -> None:
    assert pages.missed(results_with()) == []
    tables = pages.tables(results_with())
    assert "missed" not in tables["targets"]
    assert "| both cores, mean | 1.25 (1.25 to 1.25) |" in tables["resnext"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"weft_wpipe": 1.1}, "`wpipe` of the limit is 0.91"),
        ({"torch_ZBVZeroBubble": 1.05}, "`xpipe` over torch's best is 1.05"),
        ({"weft_gpipe": 2.1}, "`gpipe` over torch's GPipe is 0.95"),
        ({"weft_interleaved": 2.1}, "`interleaved` over torch's LoopedBFS is 0.95"),
    ],
)
def test_missed_target_is_named(seconds: dict[str, float], words: str) -> None:
    results = results_with(**seconds)
    lines = pages.missed(results)
    assert any(words in line and line.endswith("missed") for line in lines), lines
    assert "missed" in pages.tables(results)["targets"]


def test_target_beside_torch_depends_on_the_micro_batches() -> None:
    """At 1.2 times torch's best, only the target of m = 2 is missed."""
    lines = [line for line in pages.missed(results_with(torch_GPipe=1.2)) if "torch's best" in line]
    assert {line.partition(":")[0] for line in lines} == {"transformer, m = 2", "resnext, m = 2"}


def test_warm_up_does_not_stand_in_for_the_plain_schedule() -> None:
    results = results_with(weft_wpipe=1.3, weft_wpipe_warmup_2=1.0)
    assert any("`wpipe` of the limit is 0.77" in line for line in pages.missed(results))


def test_spread_that_is_too_wide_is_named() -> None:
    results = results_with()
    results["models"]["transformer"]["8"]["seconds"]["weft 2bw"] = [0.6, 1.0, 1.4]
    assert any("unsteady" in line for line in pages.missed(results))


def test_target_within_the_quartiles_is_neither_met_nor_missed() -> None:
    results = results_with()
    results["models"]["transformer"]["8"]["seconds"]["weft 2bw"] = [1 / 0.92, 1 / 0.96, 1 / 0.98]
    lines = [line for line in pages.missed(results) if "transformer, m = 8" in line]
    assert lines == ["transformer, m = 8: `2bw` of the limit is 0.96 (0.94 to 0.97), target 0.95: can't tell"]


def test_engine_that_costs_too_much_is_named() -> None:
    engine = {"2bw": [170.0, 180.0, 190.0], "1f1b": [140.0, 148.0, 160.0]}
    assert pages.missed(results_with() | {"engine": engine}) == [
        "engine: 2bw takes 180 (175 to 185) microseconds an action, at the most 150: missed",
        "engine: 1f1b takes 148 (144 to 154) microseconds an action, at the most 150: can't tell",
    ]


class Clock:
    """Time that passes in steps only, and the deadlines that were set."""

    def __init__(self) -> None:
        self.now, self.deadlines, self.closed = 0.0, list[float](), 0

    def perf_counter(self) -> float:
        return self.now

    @contextmanager
    def exit_after(self, seconds: float) -> Iterator[None]:
        self.deadlines.append(self.now + seconds)
        yield

    def contender(self, seconds: float) -> Contender:
        def step() -> None:
            self.now += seconds

        def close() -> None:
            self.closed += 1

        return Contender(step=step, weights=dict, close=close)


@pytest.mark.parametrize(("microbatches", "seconds"), [(8, 0.001), (8, 1.6), (8, 20.0), (2, 0.4)])
def test_race_of_slow_contenders_ends_long_before_its_deadline(
    microbatches: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-two of them, each three times slower than the limit; closed at the end."""
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    monkeypatch.setattr(ranks, "exit_after", clock.exit_after)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    contenders = {str(number): clock.contender(3 * seconds) for number in range(22)}
    race = Race("transformer", microbatches, rounds=ROUNDS, window=WINDOW)
    found = measure_windows(race, contenders, clock.contender(seconds), seconds)
    (deadline,) = clock.deadlines
    assert 2 * clock.now < deadline < 20 * clock.now + 300
    assert clock.closed == len(contenders)
    assert found["steps"] == max(2, round(WINDOW / seconds))
    assert [len(windows) for windows in found["limit"]] == [9] * ROUNDS
    expected = [pytest.approx(3 * seconds / microbatches)] * ROUNDS
    assert all(times == expected for times in found["seconds"].values())
