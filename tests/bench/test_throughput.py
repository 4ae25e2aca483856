"""Throughput on two ranks: its quick form in real processes, and what its pages say of results."""

import re
import statistics
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.bench import throughput
from weft.bench.benchmark import module_of
from weft.bench.contender import Contender, Update, check_first_update, first_update
from weft.bench.kept import Keep
from weft.bench.layers import SMALL, TASKS, Task
from weft.bench.schedules import fits, schedule_named
from weft.bench.throughput import pages
from weft.bench.throughput.ranks import Job
from weft.errors import RunError, WeftError

WEFT = ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "xpipe", "spectrain", "pipeoptim"]
TORCH = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
ENVIRONMENT = {"environment": "2 cores, torch 0"}


def made(**seconds: float) -> dict[str, Any]:
    """Results in which torch's schedules reach half of the limit and weft's all of it, unless told otherwise."""
    names = {f"weft {name}": 1.0 for name in WEFT} | {f"torch {name}": 2.0 for name in TORCH} | {"DDP": 1.5}
    given = names | {name.replace("_", " "): value for name, value in seconds.items()}
    one = {"steps": 1, "limit": [[1.0] * 4] * 3, "seconds": {name: [value] * 3 for name, value in given.items()}}
    models = {model: {str(m): one for m in (2, 4, 8)} for model in ("transformer", "resnext")}
    return ENVIRONMENT | {"models": models, "engine": {"wpipe": [100.0, 120.0, 110.0]}}


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
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in one["seconds"].values())
        assert [len(windows) for windows in one["limit"]] == [4, 4]


def test_ratios_are_within_reason(quick: dict[str, Any]) -> None:
    of_limit = {name: max(some) for name, some in pages.ratios(quick["models"]["transformer"]["4"]).items()}
    assert of_limit["weft wpipe"] > 0.1  # another process may have a core in all windows of one contender
    for name in ("wpipe", "2bw", "xpipe", "pipedream"):
        assert of_limit[f"weft {name}"] > 0.2 * of_limit["weft gpipe"], name
    assert statistics.median(of_limit.values()) < 3.0
    assert all(min(costs) < 5000 for costs in quick["engine"].values())


def test_the_pages_of_what_was_measured(quick: dict[str, Any]) -> None:
    results = ENVIRONMENT | quick | {"form": "quick"}
    tables = throughput.tables(results)
    assert tables.keys() == {"transformer", "resnext", "targets", "engine"}
    assert "| weft wpipe |" in tables["transformer"]
    assert ENVIRONMENT["environment"] in tables["transformer"]
    assert throughput.plots(results).keys() == {"transformer.svg", "resnext.svg"}
    assert throughput.missed(results) == []  # small layers are asked for nothing


def test_a_ratio_is_over_the_median_limit_of_its_round() -> None:
    one = {"limit": [[1.0, 2.0, 9.0], [4.0, 4.0, 4.0]], "seconds": {"weft wpipe": [4.0, 5.0]}}
    assert pages.ratios(one) == {"weft wpipe": [0.5, 0.8]}


def test_targets_that_are_met() -> None:
    assert throughput.missed(made()) == []
    assert "missed" not in throughput.tables(made())["targets"]


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


def test_an_engine_that_costs_too_much_is_named() -> None:
    assert throughput.missed(made() | {"engine": {"2bw": [140.0, 180.0, 190.0]}}) == [
        "engine: 2bw takes 180 (140 to 190) microseconds an action, at the most 150"
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


def test_deadlines_are_several_times_what_a_job_takes_and_below_those_of_gloo() -> None:
    for rounds in throughput.MODELS.values():
        took = rounds * throughput.WINDOW * 24 * 1.3
        assert 4 * took < Job("transformer", 2, rounds=rounds, window=throughput.WINDOW).deadline < 1800
    assert Job("transformer", 4, rounds=2, window=0.1).deadline < 450


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
