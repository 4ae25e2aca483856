"""Throughput on two ranks: its quick form in real processes, and what its pages say of results."""

import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.bench import throughput
from weft.bench.benchmark import module_of
from weft.bench.contender import Contender, Update, check_first_update, first_update, pipeline, turns
from weft.bench.kept import Keep
from weft.bench.layers import SMALL, TASKS, Task
from weft.bench.schedules import fits, schedule_named
from weft.bench.throughput import pages, ranks
from weft.bench.throughput.ranks import Job, race, together
from weft.bench.writing import environment, middle_half, verdict
from weft.errors import RunError, WeftError

ENDLESS = ["pipedream", "2bw", "2bw warmup 2", "wpipe", "wpipe warmup 2", "xpipe", "spectrain", "pipeoptim"]
WEFT = ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "xpipe", "spectrain", "pipeoptim"]
TORCH = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
ENVIRONMENT = {"environment": "2 cores, torch 0"}


def made(**seconds: float) -> dict[str, Any]:
    """Results in which torch's schedules reach half of the limit and weft's all of it, unless told otherwise."""
    names = {f"weft {name}": 1.0 for name in WEFT} | {f"torch {name}": 2.0 for name in TORCH} | {"DDP": 1.5}
    given = names | {name.replace("_", " "): value for name, value in seconds.items()}
    one = {
        "steps": 2,
        "limit": {name: [1.0] * 3 for name in given},
        "mean": {name: [0.8] * 3 for name in given},
        "seconds": {name: [value] * 3 for name, value in given.items()},
    }
    models = {model: {str(m): one for m in (2, 4, 8)} for model in ("transformer", "resnext")}
    return ENVIRONMENT | {"form": "whole", "models": models, "engine": {"wpipe": [100.0, 120.0, 110.0]}}


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return throughput.measure(quick=True, keep=Keep())


def test_every_contender_runs_and_computes_what_plain_training_does(quick: dict[str, Any]) -> None:
    """A mismatch of the first update would have been an error."""
    for model, m in (("transformer", "4"), ("resnext", "2")):
        one = quick["models"][model][m]
        assert {f"weft {name}" for name in WEFT} | {f"torch {name}" for name in TORCH} <= one["seconds"].keys()
        assert {"DDP", "FSDP2"} <= one["seconds"].keys()
        assert ("torch DualPipeV" in one["seconds"]) == (m == "4")
        assert one["seconds"].keys() == one["limit"].keys() == one["mean"].keys()
        for key in ("seconds", "limit", "mean"):
            assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in one[key].values())
        assert one["steps"] >= 2


def test_ratios_are_within_reason(quick: dict[str, Any]) -> None:
    one = quick["models"]["transformer"]["4"]
    of_limit = pages.ratios(one)
    assert max(of_limit["weft wpipe"]) > 0.1  # another process may have a core in all windows of one contender
    assert statistics.median(max(some) for some in of_limit.values()) < 3.0
    assert min(pages.both_cores(one)) >= 1.0
    assert all(min(costs) < 5000 for costs in quick["engine"].values())


def test_asynchronous_pipelines_are_not_far_behind_1f1b_in_the_same_rounds(quick: dict[str, Any]) -> None:
    """The best round is asked, for another process may have a core in most windows of one contender."""
    of_limit = pages.ratios(quick["models"]["transformer"]["4"])
    for name in ENDLESS:
        assert max(of_limit[f"weft {name}"]) >= 0.5 * statistics.median(of_limit["weft 1f1b"]), (name, of_limit)


def test_the_pages_of_what_was_measured(quick: dict[str, Any]) -> None:
    results = ENVIRONMENT | quick | {"form": "quick"}
    tables = throughput.tables(results)
    assert tables.keys() == {"transformer", "resnext", "engine"}  # small layers are asked for nothing
    assert "| weft wpipe |" in tables["transformer"]
    assert ENVIRONMENT["environment"] in tables["transformer"]
    assert throughput.plots(results).keys() == {"transformer.svg", "resnext.svg"}


def test_a_ratio_is_over_the_limit_beside_it() -> None:
    one = {
        "limit": {"weft wpipe": [2.0, 4.0], "DDP": [2.0, 5.0]},
        "mean": {"weft wpipe": [1.0, 4.0], "DDP": [1.5, 5.0]},
        "seconds": {"weft wpipe": [4.0, 5.0], "DDP": [2.0, 5.0]},
    }
    assert pages.ratios(one) == {"weft wpipe": [0.5, 0.8], "DDP": [1.0, 1.0]}
    assert pages.both_cores(one) == [1.6, 1.0]


def test_the_limit_is_the_slower_rank_s_before_and_after_a_group() -> None:
    names = ["a", "b", "c", "d"]
    first = {"steps": 2, "limit": [[1.0, 2.0, 3.0]], "seconds": {name: [5.0] for name in names}}
    other = {"steps": 2, "limit": [[3.0, 1.0, 7.0]], "seconds": {name: [4.0] for name in names}}
    (found,) = together([[first], [other]])
    *group, last = turns(names, 0)
    assert [found["limit"][name] for name in (*group, last)] == [[2.5]] * 3 + [[4.5]]  # of 3, 2 and 7
    assert [found["mean"][name] for name in (*group, last)] == [[1.75]] * 3 + [[3.25]]  # of 2, 1.5 and 5
    assert found["seconds"] == first["seconds"]


def test_turns_are_shuffled_alike_on_all_ranks() -> None:
    names = [f"weft {name}" for name in WEFT]
    assert all(sorted(turns(names, number)) == sorted(names) for number in range(7))
    assert turns(names, 3) == turns(iter(names), 3)
    assert len({tuple(turns(names, number)) for number in range(7)}) == 7


def test_targets_that_are_met() -> None:
    assert throughput.missed(made()) == []
    tables = throughput.tables(made())
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
def test_a_target_that_is_missed_is_named(seconds: dict[str, float], words: str) -> None:
    results = made(**seconds)
    lines = throughput.missed(results)
    assert any(words in line and line.endswith("missed") for line in lines), lines
    assert "missed" in throughput.tables(results)["targets"]


def test_what_is_asked_beside_torch_depends_on_the_micro_batches() -> None:
    """At 1.2 times torch's best, only m = 2 asks for more."""
    lines = [line for line in throughput.missed(made(torch_GPipe=1.2)) if "torch's best" in line]
    assert {line.partition(":")[0] for line in lines} == {"transformer, m = 2", "resnext, m = 2"}


def test_warm_up_does_not_stand_in_for_the_plain_schedule() -> None:
    results = made(weft_wpipe=1.3, weft_wpipe_warmup_2=1.0)
    assert any("`wpipe` of the limit is 0.77" in line for line in throughput.missed(results))


def test_a_spread_that_is_too_wide_is_named() -> None:
    results = made()
    results["models"]["transformer"]["8"]["seconds"]["weft 2bw"] = [0.6, 1.0, 1.4]
    assert any("unsteady" in line for line in throughput.missed(results))


def test_a_target_within_the_quartiles_is_neither_met_nor_missed() -> None:
    results = made()
    results["models"]["transformer"]["8"]["seconds"]["weft 2bw"] = [1 / 0.92, 1 / 0.96, 1 / 0.98]
    lines = [line for line in throughput.missed(results) if "transformer, m = 8" in line]
    assert lines == ["transformer, m = 8: `2bw` of the limit is 0.96 (0.94 to 0.97), asked 0.95: can't tell"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 1.01, 1.02], "met"),
        ([0.5, 1.0, 1.0, 1.0, 1.0], "met"),
        ([0.96, 0.99, 1.02, 1.03], "can't tell"),
        ([0.97, 0.98, 0.99], "missed"),
        ([0.8, 1.0, 1.2], "unsteady"),
        ([1.2, 1.5, 1.8], "unsteady"),  # whatever is asked
    ],
)
def test_verdicts_are_by_quartiles(values: list[float], said: str) -> None:
    assert verdict(values, 1.0) == said
    assert verdict([1 / value for value in values], 1.0, at_most=True) == said


def test_medians_are_told_without_a_minus_before_a_zero() -> None:
    assert middle_half([-0.004, 0.1, 0.3]) == "0.10 (0.05 to 0.20)"
    assert middle_half([-0.001]) == "0.00 (0.00 to 0.00)"
    assert middle_half([1.2345], 3) == "1.234 (1.234 to 1.234)"


def test_the_environment_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Abacus 9: wooden\n"
    monkeypatch.setattr("weft.bench.writing.Path", lambda path: SimpleNamespace(read_text=lambda encoding: text))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert environment("torch").startswith("3 cores (Abacus 9: wooden), ")
    text = "Hardware : a board\n"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert environment("torch").startswith("3 cores (riscv64), ")


def test_an_engine_that_costs_too_much_is_named() -> None:
    assert throughput.missed(made() | {"engine": {"2bw": [170.0, 180.0, 190.0], "1f1b": [140.0, 148.0, 160.0]}}) == [
        "engine: 2bw takes 180 (175 to 185) microseconds an action, at the most 150: missed",
        "engine: 1f1b takes 148 (144 to 154) microseconds an action, at the most 150: can't tell",
    ]


def test_names_with_options() -> None:
    assert schedule_named("wpipe warmup 2", 2, 4).options == {"warmup": 2}
    assert schedule_named("xpipe versions exact", 2, 4).options == {"versions": "exact"}
    assert (fits("wpipe", 2, 4), fits("wpipe", 2, 3)) == (True, False)
    with pytest.raises(WeftError, match="pairs of a name and a value"):
        schedule_named("wpipe warmup", 2, 4)
    with pytest.raises(WeftError, match="no schedule"):
        fits("wpip", 2, 4)


def test_another_first_update_is_an_error() -> None:
    task = SMALL["resnext"]
    expected = first_update(task, 2)
    check_first_update("the same", _with({name: one.after for name, one in expected.items()}), expected)
    with pytest.raises(RunError, match="knows no weights"):
        check_first_update("none", _with({}), expected)
    with pytest.raises(RunError, match="a weight x that the model does not have"):
        check_first_update("more", _with({"x": torch.zeros(1)}), expected)


@pytest.mark.parametrize("task", [*SMALL.values(), TASKS["transformer"]], ids=["transformer", "resnext", "large"])
def test_no_weight_passes_untouched_or_updated_twice_as_far(task: Task) -> None:
    """Each by itself: an update may be a millionth of its weight."""
    expected = first_update(task, 2)
    for name, (before, after) in expected.items():
        almost = after + 1e-4 * (after - before)
        check_first_update("almost the same", _with({name: almost}), expected)
        for other in (before, 2 * after - before):
            with pytest.raises(RunError, match=re.escape(f"other: after the first update {name} is")):
                check_first_update("other", _with({name: other}), expected)


def test_a_weight_without_a_gradient_must_stay() -> None:
    still = {"x": Update(torch.ones(3), torch.ones(3))}
    check_first_update("still", _with({"x": torch.ones(3)}), still)
    with pytest.raises(RunError, match="whose update is 0"):
        check_first_update("moved", _with({"x": torch.ones(3) + 1e-6}), still)


def _with(weights: dict[str, Tensor]) -> Contender:
    return Contender(step=lambda: None, weights=lambda: weights)


def test_a_rank_that_is_stuck_ends_and_shows_where() -> None:
    code = "import time\nfrom weft.bench.deadline import ends_within\n"
    code += "with ends_within({}):\n    time.sleep({})\nprint('out')"
    stuck, through = (
        subprocess.run([sys.executable, "-c", code.format(*times)], capture_output=True, text=True, timeout=120)
        for times in ((0.2, 100), (100, 0))
    )
    assert (stuck.returncode, stuck.stdout) == (1, "")
    assert 'File "<string>", line 4 in <module>' in stuck.stderr
    assert (through.returncode, through.stdout) == (0, "out\n")


class Clock:
    """Time that passes in steps only, beside the deadlines that were set."""

    def __init__(self) -> None:
        self.now, self.deadlines, self.closed = 0.0, list[float](), 0

    def perf_counter(self) -> float:
        return self.now

    @contextmanager
    def ends_within(self, seconds: float) -> Iterator[None]:
        self.deadlines.append(self.now + seconds)
        yield

    def contender(self, seconds: float) -> Contender:
        def step() -> None:
            self.now += seconds

        def close() -> None:
            self.closed += 1

        return Contender(step=step, weights=dict, close=close)


@pytest.mark.parametrize(("microbatches", "took"), [(8, 0.001), (8, 1.6), (8, 20.0), (2, 0.4)])
def test_a_race_whose_contenders_are_slow_ends_long_before_its_deadline(
    microbatches: int, took: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-two of them, each three times slower than the limit; closed at the end."""
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    monkeypatch.setattr(ranks, "ends_within", clock.ends_within)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    contenders = {str(number): clock.contender(3 * took) for number in range(22)}
    job = Job("transformer", microbatches, rounds=throughput.ROUNDS, window=throughput.WINDOW)
    found = race(job, contenders, clock.contender(took), took)
    (deadline,) = clock.deadlines
    assert 2 * clock.now < deadline < 20 * clock.now + 300
    assert clock.closed == len(contenders)
    assert found["steps"] == max(2, round(throughput.WINDOW / took))
    assert [len(windows) for windows in found["limit"]] == [9] * throughput.ROUNDS
    assert all(
        some == [pytest.approx(3 * took / microbatches)] * throughput.ROUNDS for some in found["seconds"].values()
    )


def test_a_pipeline_is_closed() -> None:
    one = pipeline("1f1b", SMALL["transformer"], 2, stages=2)
    one.step()
    one.close()
    with pytest.raises(RunError, match="closed"):
        one.step()


def test_models_hand_over_a_mebibyte_at_the_most() -> None:
    for task in TASKS.values():
        value, _ = task.batch(1)
        with torch.no_grad():
            for layer in task.model():
                value = layer(value)
                assert value.nbytes <= 2**20


def test_pages_need_no_torch() -> None:
    code = "import sys, weft.bench.throughput.pages, weft.bench.benchmark; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_catalog_knows_it() -> None:
    assert module_of("throughput") is throughput
