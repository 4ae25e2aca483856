"""Simulator: the quick form, and its targets."""

from typing import Any

import pytest

from benchmarks.harness import ResumeCache
from benchmarks.simulator.measure import METHODS, QUICK_SIZES, measure
from benchmarks.simulator.pages import missed, tables


@pytest.mark.slow
def test_quick_form() -> None:
    """The steady bubble of 1f1b is (p - 1) / (m + p - 1); asynchronous schedules have none."""
    cases = measure(quick=True, cache=ResumeCache())["cases"]
    assert len(cases) == len(METHODS) * (len(QUICK_SIZES) + 1)
    for case in (case for case in cases if case["costs"] == "default"):
        p, m = case["stages"], case["microbatches"]
        assert case["steady"]
        assert case["bubble"] == pytest.approx((p - 1) / (m + p - 1) if case["method"] == "1f1b" else 0.0)
        assert 0 < case["gib"][0] < 2


def case(**changes: Any) -> dict[str, Any]:
    known = {"method": "2bw", "stages": 1024, "microbatches": 4096, "costs": "full"}
    return known | {"seconds": [9.0, 11.0, 10.0], "gib": [0.5, 0.8], "steady": True, "bubble": 0.125} | changes


def test_tables_and_targets() -> None:
    cases = [case(), case(seconds=[20.5]), case(gib=[0.1, 2.5]), case(steady=False)]
    results = {"environment": "2 cores", "repeats": 3, "cases": cases}
    shown = tables(results)["seconds"]
    assert "| `2bw` | 1024 | 4096 | full | 10.0 (9.0 to 11.0) | 0.80 | 12.5000% |" in shown
    assert "| not steady |" in shown
    name = "2bw, 1024 x 4096, full costs"
    assert missed(results) == [f"{name}: 20.5 s, above 20", f"{name}: 2.50 GiB, above 2", f"{name}: no steady state"]
