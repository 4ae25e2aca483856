"""Startup: the quick form, and its targets."""

import pytest

from benchmarks.harness import ResumeCache
from benchmarks.startup.measure import COMMANDS, measure
from benchmarks.startup.pages import missed, tables


@pytest.mark.slow
def test_quick_form() -> None:
    results = measure(quick=True, cache=ResumeCache())
    assert results["seconds"].keys() == COMMANDS.keys()
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in results["seconds"].values())


def test_tables_and_targets() -> None:
    results = {"environment": "2 cores", "repeats": 3, "seconds": {"weft": [0.5, 0.3, 0.4], "python": [0.01] * 3}}
    assert "| `weft` | 0.40 (0.30 to 0.50) |" in tables(results)["seconds"]
    assert tables(results)["seconds"].endswith("\n\n3 interleaved repeats, 2 cores.")
    assert missed(results) == ["weft takes 0.40 s, above 0.3"]
