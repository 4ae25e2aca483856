"""Many stages: the quick form in real processes, simulated times, tables and targets."""

from functools import partial
from typing import Any

import pytest

from benchmarks.contenders import Contender
from benchmarks.harness import ResumeCache
from benchmarks.many_stages import pages, ranks
from benchmarks.many_stages.measure import BACKWARD, FORWARD, TORCH, measure, paces_of, simulated, weft_schedules
from weft.schedule import METHODS

NAMES = [f"weft {name}" for name in weft_schedules(4)] + [f"torch {name}" for name in TORCH]
ASYNCHRONOUS = [name for name in NAMES if (method := METHODS.get(name.split()[1])) and method.asynchronous]
ORDERS = {  # of two ranks with two chunks each and two micro-batches, in the form of torch's own
    "torch InterleavedZeroBubble": """
0F0,0F1,2F0,2F1,,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1
,1F0,1F1,3F0,3I0,3W0,3F1,3I1,3W1,1I0,1W0,1I1,1W1
""",
    "torch ZBVZeroBubble": """
0F0,0F1,,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1
,1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,1I1,2W1,1W1
""",
}
ENVIRONMENT = {"environment": "2 cores, torch 0"}


def results_with(**seconds: list[float]) -> dict[str, Any]:
    """Results that are as simulated, but for these."""
    given = {name: [1.0, 1.0, 1.0] for name in NAMES}
    given |= {key.replace("_", " "): rounds for key, rounds in seconds.items()}
    case = {"simulated": dict.fromkeys(given, 1.0), "seconds": given}
    return ENVIRONMENT | {"stages": {"4": {"even": case, "uneven": case}, "8": {"even": case}}}


@pytest.mark.slow
def test_quick_form() -> None:
    """Sleeps never end early, so at most the simulated throughput, and a tenth more for what the windows cut off.

    Sleeps need no core, so that even on a busy machine asynchronous pipelines differ from ranks that take turns: 0.25.
    """
    results = ENVIRONMENT | measure(quick=True, cache=ResumeCache()) | {"form": "quick"}
    found = pages.ratios(results["stages"]["4"]["even"])
    assert list(found) == NAMES
    for name, values in found.items():
        assert (0.4 if name in ASYNCHRONOUS else 0.15) < max(values) < 1.1, (name, values)
        assert len(values) == 3
    tables = pages.tables(results)
    assert tables.keys() == {"torch", "ratios", "milliseconds"}
    assert "p = 4, even" in tables["ratios"]
    assert ENVIRONMENT["environment"] in tables["ratios"]
    assert "| weft wpipe warmup 2, m = 2p |" in tables["milliseconds"]
    assert pages.plots(results).keys() == {"ratios.svg"}


def test_throughput_over_torch_counts_micro_batches() -> None:
    """The schedules with more warm-up have twice as many in a mini-batch."""
    shown = results_with(torch_1F1B=[1.5] * 3, weft_2bw=[0.5] * 3, weft_2bw_warmup_2=[1.0] * 3)
    case = shown["stages"]["8"]["even"]
    assert pages.over_torch(case, "weft 2bw", "torch 1F1B") == [3.0] * 3
    assert pages.over_torch(case, "weft 2bw warmup 2", "torch 1F1B", "torch GPipe") == [2.0] * 3
    row = next(line for line in pages.tables(shown)["torch"].splitlines() if line.startswith("| weft 2bw |"))
    assert row.endswith("| 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) |")


def test_asynchronous_contenders() -> None:
    assert [name.removeprefix("weft ") for name in ASYNCHRONOUS] == [
        "pipedream",
        "2bw",
        "wpipe",
        "xpipe",
        "2bw warmup 2",
        "wpipe warmup 2",
    ]


def test_simulated_times() -> None:
    """In units of a layer's forward; a stage is two layers, and B costs 2 F."""
    even = simulated([(1.0, 2.0)] * 8, 4, ORDERS)
    assert even["weft wpipe"] == even["weft 2bw"] == even["weft xpipe"] == pytest.approx(4 * 6.0)
    assert even["weft 1f1b"] == even["torch GPipe"] == pytest.approx((4 + 3) * 6.0)
    assert even["weft interleaved"] == even["torch Interleaved1F1B"] == pytest.approx(4 * 6.0 + 3 * 3.0)
    assert 4 * 6.0 < even["weft zb-h1"] < even["weft 1f1b"]
    assert even["weft 2bw warmup 2"] == even["weft wpipe warmup 2"] == pytest.approx(2 * 4 * 6.0)
    two = simulated([(1.0, 2.0)] * 4, 2, ORDERS)
    for name in ORDERS:
        assert 2 * 6.0 < two[name] < two["torch 1F1B"] == pytest.approx((2 + 1) * 6.0)
    slow = simulated(paces_of(4, 1.5, 1.0), 4, ORDERS)
    stage = 2 * (FORWARD + BACKWARD)
    assert slow["weft 2bw"] == pytest.approx(4 * 1.5 * stage)
    assert 4 * 1.25 * stage <= slow["weft wpipe"] < 4 * 1.5 * stage  # the slow layers are on two ranks


def test_targets() -> None:
    assert pages.missed(results_with()) == []
    lines = pages.missed(results_with(weft_wpipe=[1.1, 1.1, 1.1], torch_GPipe=[2.0, 2.0, 2.0]))
    assert [line.partition(":")[0] for line in lines] == ["p = 4, even", "p = 4, uneven", "p = 8, even"]
    assert all("weft wpipe is 0.909" in line and line.endswith("missed") for line in lines)
    assert pages.missed(results_with(torch_1F1B=[1.1, 1.1, 1.1])) == []
    for name in ("torch_1F1B", "weft_1f1b"):
        lines = pages.missed(results_with(**{name: [0.5, 0.7, 1.0]}))
        assert len(lines) == 3
        assert all(line.endswith("unsteady") for line in lines)
    lines = pages.missed(results_with(weft_wpipe=[1 / 0.93, 1 / 0.95, 1 / 0.97]))
    assert len(lines) == 3
    assert all(
        line.endswith("0.950 (0.940 to 0.960) of the simulated throughput, target 0.95: can't tell") for line in lines
    )


def test_windows_take_turns_and_contenders_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    names = ["a", "b", "c", "d"]
    contenders = {
        name: Contender(step=partial(noted.append, name), weights=dict, close=partial(noted.append, "closed"))
        for name in names
    }
    seconds = ranks.measure_windows(contenders, ["b"], 3)
    assert all(len(rounds) == 3 for rounds in seconds.values())
    assert noted[: ranks.FILL] == ["b"] * ranks.FILL
    assert noted[-4:] == ["closed"] * 4
    turns = [name for name in noted[ranks.FILL : -4] if name != "b"]
    assert sorted(turns) == sorted("acd" * 3)
    assert turns != list("acd" * 3)
    assert noted.count("b") == ranks.FILL + 3 * (1 + ranks.STEPS)
