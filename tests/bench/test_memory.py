"""What ranks hold: the quick form on real ranks, and the pages made of results that are made up."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.bench import memory
from weft.bench.kept import Keep
from weft.bench.memory import bert, trial
from weft.bench.memory.search import Search, largest_of
from weft.bench.writing import mark
from weft.errors import PeerError, RunError, WeftError

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
        "simulated_largest": [6, 10],
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
        models[name] = {
            "size": {"batch": 8, "limit": limit * MIB, "limits": [limit * MIB, 2 * limit * MIB]},
            "cells": cells,
        }
    return {"stages": 2, "microbatches": 2, "models": models, "environment": "two cores"}


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="resident sets are read on Linux with glibc"
)
def test_quick_form() -> None:
    """Every rank of every method holds what the simulator says of chunks that were run alone; wpipe holds fewer
    versions than 2bw, and more than 1f1b, which has none."""
    measured = memory.measure(quick=True, keep=Keep())
    assert memory.missed(measured) == []
    cells = {one["method"]: one for one in measured["models"]["tiny"]["cells"]}
    extra = {method: sum(rank["counted"]["extra_versions"] for rank in one["ranks"]) for method, one in cells.items()}
    assert 0 == extra["1f1b"] < extra["wpipe"] < extra["2bw"]
    for one in cells.values():
        assert all(rank["counted"]["activations"] > 0 for rank in one["ranks"])
    assert set(memory.plots(measured)) == {"tiny.svg"}
    assert memory.tables(measured)["tiny"].count("\n") == 1 + len(cells)


def test_tables_show_the_fullest_rank(results: dict[str, Any]) -> None:
    made = memory.tables(results)
    assert set(made) == {"small", "base", "batch"}
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in made["small"].splitlines()[2:]]
    assert rows[0] == ["2bw", *["20.0", "10.0", "10.0", "20.0", "60.0", "110.0", "1.0", "120.0"], "1.000 to 1.000"]
    assert [row[0] for row in rows] == ["2bw", "2bw, recompute", "wpipe", "wpipe, recompute"]
    assert made["batch"].startswith("| method | small, tried at 100 MiB | simulated at 100 | simulated at 200 | base, ")
    assert "| 2bw | 4 | 6 | 10 | 4 | 6 | 10 |" in made["batch"]
    assert "| 2bw, recompute | 4 | 6 | 10 | – | 6 | 10 |" in made["batch"]
    assert "2 ranks, two cores." in made["batch"]


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


def test_a_search_ends_where_nothing_fits() -> None:
    assert Search(step=4, known={4: False}).next() is None


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to …"


def raised(*chain: Exception) -> Exception:
    """The last of these errors, each of which the one before it has caused."""
    for cause, problem in itertools.pairwise(chain):
        problem.__cause__ = cause
    return chain[-1]


FULL = (
    MemoryError(),
    RuntimeError(NO_MEMORY),
    raised(RuntimeError(NO_MEMORY), RunError(f"rank 1, chunk 1: RuntimeError: {NO_MEMORY}")),
    raised(MemoryError(), RunError("rank 0, chunk 0: MemoryError: ")),
)
BROKEN = (
    RunError("rank 1 waited 600 s for an activation from rank 0"),
    PeerError(f"rank 1, chunk 1: RuntimeError: {NO_MEMORY}"),
    raised(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RunError("rank 0, chunk 0")),
    WeftError("a mini-batch is cut into equal micro-batches"),
    ValueError("a mistake"),
)


@pytest.mark.parametrize("problem", FULL, ids=repr)
def test_a_failed_allocation_says_that_a_batch_does_not_fit(problem: Exception, tmp_path: Path) -> None:
    trial.begin(tmp_path, {"trying": 8})
    with pytest.raises(type(problem)), trial.told(tmp_path, 1):
        raise problem
    assert trial.too_large(tmp_path) == {"trying": 8}


@pytest.mark.parametrize("problem", BROKEN, ids=repr)
def test_nothing_else_says_so(problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what a rank hears from one that is full: that one tells it by itself."""
    monkeypatch.setattr(trial, "GRACE", 0.1)
    trial.begin(tmp_path, {"trying": 8})
    with pytest.raises(type(problem)), trial.told(tmp_path, 1):
        raise problem
    assert trial.too_large(tmp_path) is None


@pytest.mark.parametrize(("said", "full"), [("terminate called: std::bad_alloc", True), ("Segmentation fault", False)])
def test_what_a_process_wrote_before_it_ended_counts(said: str, full: bool, tmp_path: Path) -> None:
    trial.begin(tmp_path, {"trying": 8})
    with trial.told(tmp_path, 0):
        os.write(2, said.encode())
    assert (trial.too_large(tmp_path) is not None) == full


def test_ranks_that_never_began_a_trial_say_nothing_of_a_batch(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), trial.told(tmp_path, 0):
        raise MemoryError
    assert trial.too_large(tmp_path) is None


def test_the_search_goes_on_after_a_batch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In new ranks, which are told what is known; any other failure ends the measurement."""
    size = dataclasses.replace(bert.TINY, tried=(("2bw", False),))

    def launch(
        job: Any, size: Any, method: str, recompute: bool, stages: int, known: Any, folder: str, **_: Any
    ) -> Any:
        if known:
            return [(None, known | {6: True})] * 2
        trial.begin(Path(folder), {"held": ["a", "b"], "known": [[2, True], [4, True]], "trying": 8})
        if full:
            (Path(folder) / "full1").touch()
        raise RunError("rank 1 failed")

    monkeypatch.setattr(weft, "launch", launch)
    full = True
    ran = memory._ran(size, "2bw", False, 2)
    assert (ran["ranks"], ran["tried"]) == (["a", "b"], [[2, True], [4, True], [6, True], [8, False]])
    full = False
    with pytest.raises(RunError, match="rank 1 failed"):
        memory._ran(size, "2bw", False, 2)


@pytest.mark.parametrize("size", [bert.SMALL, bert.BASE, bert.TINY])
def test_chunks_have_equal_parts_of_the_blocks(size: bert.Size) -> None:
    for chunks in (2, 4, 8):
        counts = bert.balance(size, chunks)
        assert sum(counts) == 2 * size.layers + 2
        assert len({count - (place in (0, chunks - 1)) for place, count in enumerate(counts)}) == 1


def test_the_page_has_a_place_for_every_table() -> None:
    page = (Path(__file__).parents[2] / "benchmarks/memory/README.md").read_text(encoding="utf-8")
    assert all(mark(name) in page for name in (*memory.MEASURED, "batch"))
