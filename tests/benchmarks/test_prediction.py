"""Prediction: the quick form, its tables and targets."""

from typing import Any

import pytest

from benchmarks.harness import ResumeCache
from benchmarks.prediction.learning import Setting
from benchmarks.prediction.measure import measure
from benchmarks.prediction.pages import METHODS, SYNCHRONOUS, missed, tables


@pytest.mark.slow
def test_quick_form() -> None:
    """Every method trains; buffers do not grow, and take one chunk's weights with exact counts."""
    results = measure(quick=True, cache=ResumeCache()) | {"environment": "2 cores"}
    (setting,) = results["learning"]["settings"]
    assert setting["methods"].keys() == METHODS.keys()
    assert all(2 < losses["losses"][0] < 6 for losses in setting["methods"].values())
    assert setting["methods"][SYNCHRONOUS]["differences"] == [0.0]
    for pair in results["cost"]["pairs"]:
        assert pair["buffers"] == [1.0 if pair["with"].endswith("exact") else 2.0] * 3
        assert min(pair["ratios"]) > 0
    assert tables(results).keys() == {"learning", "cost"}


def test_few_micro_batches_leave_out_2bw_and_wpipe() -> None:
    few, enough = (Setting(microbatches=microbatches, rate=0.1, updates=1) for microbatches in (2, 8))
    assert [method for method in METHODS if not few.supports(method)] == [
        "`2bw`",
        "`wpipe`",
        "`wpipe`, published",
        "`wpipe`, exact",
    ]
    assert all(enough.supports(method) for method in METHODS)


def results_with(**changes: Any) -> dict[str, Any]:
    methods = {
        SYNCHRONOUS: {"losses": [2.0, 2.2, 2.1], "differences": [0.0] * 3},
        "stale": {"losses": [2.1, 2.1, 2.3], "differences": [0.1, -0.1, 0.2]},
        "`2bw`": {"losses": [2.1, None, 2.3], "differences": [0.1, None, 0.2]},
    }
    pair = {"optimizer": "AdamW", "with": "`2bw`, exact", "without": "`2bw`", "ratios": [0.98, 1.0, 0.99]}
    cost = {
        "rounds": 3,
        "load": 0.25,
        "buffers_after": [10, 50, 100],
        "pairs": [pair | {"buffers": [1.0, 1.0, 1.0]} | changes],
        "telemetry": {"AdamW": [0.1, 0.3, 0.2]},
    }
    setting = {"microbatches": 2, "rate": 0.004, "methods": methods}
    learning = {"text": "a text", "seeds": 3, "updates": 150, "settings": [setting]}
    return {"environment": "2 cores", "learning": learning, "cost": cost}


def test_tables() -> None:
    found = tables(results_with())
    assert "| method | m = 2, rate 0.004 | to synchronous |" in found["learning"]
    assert f"| {SYNCHRONOUS} | 2.100 (2.000 to 2.200) |  |" in found["learning"]
    assert "| stale | 2.100 (2.100 to 2.300) | +0.100 (-0.100 to +0.200) |" in found["learning"]
    assert "| `2bw` | diverged |  |" in found["learning"]
    assert "| `wpipe` | – | – |" in found["learning"]
    assert "| AdamW | `2bw`, exact | `2bw` | 0.99 (0.98 to 1.00) | 1, 1, 1 |" in found["cost"]
    assert "AdamW: `telemetry=50` takes 0.20 (0.10 to 0.30) % of a step's time." in found["cost"]


def test_targets() -> None:
    assert missed(results_with()) == []
    name = "`2bw`, exact, AdamW"
    assert missed(results_with(ratios=[0.9, 0.96, 1.0])) == [
        f"{name}: throughput is 0.960 of that without prediction, below 0.97"
    ]
    for buffers in ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]):
        assert missed(results_with(buffers=buffers)) == [
            f"{name}: buffers are {buffers}, in units of a chunk's weights"
        ]
    assert missed(results_with(**{"with": "`xpipe`, published", "buffers": [2.0] * 3})) == []
    slow = results_with()
    slow["cost"]["telemetry"] = {"AdamW": [1.5]}
    assert missed(slow) == ["telemetry, AdamW: 1.50 % of a step's time, above 1 %"]
