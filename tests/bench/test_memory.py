"""What ranks hold: the quick form on real ranks, and the pages made of results that are made up."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from weft.bench import memory
from weft.bench.kept import Keep
from weft.bench.memory import bert
from weft.bench.memory.search import Search, largest_of
from weft.bench.writing import mark

MIB = 2**20


def cell(
    method: str, *, recompute: bool = False, extra: int = 0, tried: Any = ((4, True), (8, False))
) -> dict[str, Any]:
    """Two ranks, of which the first is the fuller one."""
    held = {"weights": 10 * MIB, "extra_versions": extra * MIB, "gradients": 10 * MIB, "optimizer": 20 * MIB}
    simulated = [held | {"activations": much * MIB, "buffers": 0} for much in (60, 30)]
    ranks = [{"counted": one | {"buffers": MIB}, "resident": 120 * MIB, "seconds": 1.0} for one in simulated]
    return {
        "method": method,
        "recompute": recompute,
        "ranks": ranks,
        "tried": [list(one) for one in tried],
        "simulated": simulated,
        "simulated_largest": 6,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Of two models, without and with recompute; the base model's batches are tried without it alone."""
    models = {}
    for name, limit in (("small", 100), ("base", 200)):
        cells = [
            cell(method, recompute=recompute, extra=extra, tried=() if name == "base" and recompute else ((4, True),))
            for method, extra in (("2bw", 10), ("wpipe", 5))
            for recompute in (False, True)
        ]
        models[name] = {"size": {"batch": 8, "limit": limit * MIB}, "cells": cells}
    return {"stages": 2, "microbatches": 2, "models": models, "environment": "two cores"}


def test_quick_form() -> None:
    """Every rank of every method holds what the simulator says of chunks that were run alone; wpipe holds fewer
    versions than 2bw, and more than 1f1b, which has none."""
    measured = memory.measure(quick=True, keep=Keep())
    assert memory.missed(measured) == []
    cells = {one["method"]: one for one in measured["models"]["tiny"]["cells"]}
    extra = {method: sum(rank["counted"]["extra_versions"] for rank in one["ranks"]) for method, one in cells.items()}
    assert 0 == extra["1f1b"] < extra["wpipe"] < extra["2bw"]
    for one in cells.values():
        assert all(rank["resident"] > 0 and rank["counted"]["activations"] > 0 for rank in one["ranks"])
    assert set(memory.plots(measured)) == {"tiny.svg"}
    assert memory.tables(measured)["tiny"].count("\n") == 1 + len(cells)


def test_tables_show_the_fullest_rank(results: dict[str, Any]) -> None:
    made = memory.tables(results)
    assert set(made) == {"small", "base", "batch"}
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in made["small"].splitlines()[2:]]
    assert rows[0] == ["2bw", *["20.0", "10.0", "10.0", "20.0", "60.0", "110.0", "1.0", "120.0"], "1.000 to 1.000"]
    assert [row[0] for row in rows] == ["2bw", "2bw, recompute", "wpipe", "wpipe, recompute"]
    assert "| 2bw | 4 | 6 | 4 | 6 |" in made["batch"]
    assert "| 2bw, recompute | 4 | 6 | – | 6 |" in made["batch"]
    assert "small 100 MiB, base 200 MiB. 2 ranks, two cores." in made["batch"]


def test_plots_are_those_of_the_page(results: dict[str, Any]) -> None:
    pictures = memory.plots(results)
    assert set(pictures) == {"small.svg", "base.svg", "batch.svg"}
    assert all(text.lstrip().startswith("<svg") for text in pictures.values())
    assert "extra versions" in pictures["small.svg"]
    assert "base, recompute" not in pictures["batch.svg"]  # not tried


def test_nothing_is_missed_by_good_results(results: dict[str, Any]) -> None:
    assert memory.missed(results) == []


@pytest.mark.parametrize("factor", [0.94, 1.06])
def test_a_rank_that_holds_other_bytes_is_missed(results: dict[str, Any], factor: float) -> None:
    worse = copy.deepcopy(results)
    other = worse["models"]["base"]["cells"][3]["ranks"][1]["counted"]
    other |= {name: factor * other[name] for name in other}
    (line,) = memory.missed(worse)
    assert line.startswith(f"base, wpipe, recompute: rank 1 holds {factor:.3f}")


def test_a_wpipe_that_saves_no_versions_is_missed(results: dict[str, Any]) -> None:
    worse = copy.deepcopy(results)
    for one in (*worse["models"]["small"]["cells"][2]["ranks"], *worse["models"]["small"]["cells"][2]["simulated"]):
        one.get("counted", one)["extra_versions"] = 10 * MIB
    (line,) = memory.missed(worse)
    assert line.startswith("small, wpipe: 40.0 MiB of weights and versions")


@pytest.mark.parametrize(
    ("step", "limit", "largest"), [(4, 3, 0), (4, 4, 4), (4, 11, 8), (4, 47, 44), (4, 200, 192), (4, 250, 240)]
)
def test_the_search_doubles_and_then_halves_the_gap(step: int, limit: int, largest: int) -> None:
    """Down to the step, or to an eighth of the last power that fits."""
    assert largest_of(lambda samples: samples <= limit, step=step) == largest


def test_a_search_goes_on_from_what_is_known() -> None:
    search = Search(step=4, known={4: True, 8: True, 16: False})
    assert search.next() == 12
    search.known[12] = False
    assert (search.next(), search.largest) == (None, 8)


@pytest.mark.parametrize("size", [bert.SMALL, bert.BASE, bert.TINY])
def test_chunks_have_equal_parts_of_the_blocks(size: bert.Size) -> None:
    for chunks in (2, 4, 8):
        counts = bert.balance(size, chunks)
        assert sum(counts) == 2 * size.layers + 2
        assert len({count - (place in (0, chunks - 1)) for place, count in enumerate(counts)}) == 1


def test_the_page_has_a_place_for_every_table() -> None:
    page = (Path(__file__).parents[2] / "benchmarks/memory/README.md").read_text(encoding="utf-8")
    assert all(mark(name) in page for name in ("small", "base", "batch"))
