"""Memory: the quick form on real ranks, the search of the largest batch, tables and targets of synthetic results."""

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
from benchmarks.harness import ResumeCache
from benchmarks.memory import models, pages, trial
from benchmarks.memory.measure import _run, measure
from benchmarks.memory.search import Search, largest_of
from weft.errors import PeerError, RunError, WeftError

MIB = 2**20


def cell(method: str, *, form: str = "", extra: int = 0, tried: Any = ((4, True), (8, False))) -> dict[str, Any]:
    """Two ranks, the first of which is fuller."""
    nbytes = {"weights": 10 * MIB, "extra_versions": extra * MIB, "masters": 0}
    nbytes |= {"gradients": 10 * MIB, "optimizer": 20 * MIB}
    simulated = [nbytes | {"activations": size * MIB, "buffers": 0} for size in (60, 30)]
    ranks = [{"counted": rank | {"buffers": MIB}, "resident": 120 * MIB, "seconds": 1.0} for rank in simulated]
    return {
        "method": method,
        "form": form,
        "ranks": ranks,
        "tried": [list(pair) for pair in tried],
        "simulated": simulated,
        "simulated_largest": [6, 10],
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Of two models, without and with recompute; batches of the base model are tried without it only."""
    models = {}
    for name, limit in (("small", 100), ("base", 200)):
        cells = [
            cell(method, form=form, extra=extra, tried=() if name == "base" and form else ((4, True),))
            for method, extra in (("2bw", 10), ("wpipe", 5))
            for form in ("", "recompute")
        ]
        models[name] = {
            "size": {"batch": 8, "limit": limit * MIB, "limits": [limit * MIB, 2 * limit * MIB]},
            "cells": cells,
        }
    return {"stages": 2, "microbatches": 2, "models": models, "environment": "two cores"}


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="resident sets are read on Linux with glibc"
)
def test_quick_form() -> None:
    """Every rank of every method holds the simulated bytes, from chunks that ran alone; wpipe holds fewer versions than
    2bw, and more than 1f1b, which has none."""
    measured = measure(quick=True, cache=ResumeCache())
    assert pages.missed(measured) == []
    cells = {cell["method"]: cell for cell in measured["models"]["tiny"]["cells"]}
    extra = {method: sum(rank["counted"]["extra_versions"] for rank in cell["ranks"]) for method, cell in cells.items()}
    assert 0 == extra["1f1b"] < extra["wpipe"] < extra["2bw"]
    for cell in cells.values():
        assert all(rank["counted"]["activations"] > 0 for rank in cell["ranks"])
    assert set(pages.plots(measured)) == {"tiny.svg"}
    assert pages.tables(measured)["tiny"].count("\n") == 1 + len(cells)


def test_tables_show_the_fullest_rank(results: dict[str, Any]) -> None:
    tables = pages.tables(results)
    assert set(tables) == {"small", "base", "batch"}
    rows = [re.split(r"\s*\|\s*", line)[1:-1] for line in tables["small"].splitlines()[2:]]
    assert rows[0] == [
        "2bw",
        *["20.0", "10.0", "0.0", "10.0", "20.0", "60.0", "110.0", "1.0", "120.0"],
        "1.000 to 1.000",
    ]
    assert [row[0] for row in rows] == ["2bw", "2bw, recompute", "wpipe", "wpipe, recompute"]
    assert tables["batch"].startswith(
        "| method | small, tried at 100 MiB | simulated at 100 | simulated at 200 | base, "
    )
    assert "| 2bw | 4 | 6 | 10 | 4 | 6 | 10 |" in tables["batch"]
    assert "| 2bw, recompute | 4 | 6 | 10 | – | 6 | 10 |" in tables["batch"]
    assert "2 ranks, two cores." in tables["batch"]


def test_plots_show_parts_and_batches(results: dict[str, Any]) -> None:
    plots = pages.plots(results)
    assert set(plots) == {"small.svg", "base.svg", "batch.svg"}
    assert "extra versions" in plots["small.svg"]
    assert "base, recompute" not in plots["batch.svg"]  # not tried


def test_good_results_miss_nothing(results: dict[str, Any]) -> None:
    assert pages.missed(results) == []


@pytest.mark.parametrize("factor", [0.94, 1.06])
def test_rank_with_other_bytes_is_reported(results: dict[str, Any], factor: float) -> None:
    worse = copy.deepcopy(results)
    other = worse["models"]["base"]["cells"][3]["ranks"][1]["counted"]
    other |= {name: factor * other[name] for name in other}
    (line,) = pages.missed(worse)
    assert line.startswith(f"base, wpipe, recompute: rank 1 holds {factor:.3f}")


def test_wpipe_that_saves_no_versions_is_reported(results: dict[str, Any]) -> None:
    worse = copy.deepcopy(results)
    wpipe = worse["models"]["small"]["cells"][2]
    for nbytes in (*(rank["counted"] for rank in wpipe["ranks"]), *wpipe["simulated"]):
        nbytes["extra_versions"] = 10 * MIB
    (line,) = pages.missed(worse)
    assert line.startswith("small, wpipe: 40.0 MiB of weights and versions")


@pytest.mark.parametrize(
    ("step", "limit", "largest"), [(4, 3, 0), (4, 4, 4), (4, 11, 8), (4, 47, 44), (4, 200, 192), (4, 250, 240)]
)
def test_the_search_doubles_and_then_halves_the_gap(step: int, limit: int, largest: int) -> None:
    """Down to the step, or to an eighth of the last power that fits."""
    assert largest_of(lambda samples: samples <= limit, step=step) == largest


def test_search_continues_from_what_is_known() -> None:
    search = Search(step=4, known={4: True, 8: True, 16: False})
    assert search.next() == 12
    search.known[12] = False
    assert (search.next(), search.largest) == (None, 8)


def test_search_ends_if_nothing_fits() -> None:
    assert Search(step=4, known={4: False}).next() is None


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to …"


def raised(*chain: Exception) -> Exception:
    """The last of these errors, each caused by the one before."""
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
def test_failed_allocation_means_that_a_batch_does_not_fit(problem: Exception, tmp_path: Path) -> None:
    trial.begin_trial(tmp_path, {"trying": 8})
    with pytest.raises(type(problem)), trial.marks_failed_allocation(tmp_path, 1):
        raise problem
    assert trial.failed_trial(tmp_path) == {"trying": 8}


@pytest.mark.parametrize("problem", BROKEN, ids=repr)
def test_other_failures_do_not(problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a peer's failed allocation: the peer leaves the mark."""
    monkeypatch.setattr(trial, "GRACE", 0.1)
    trial.begin_trial(tmp_path, {"trying": 8})
    with pytest.raises(type(problem)), trial.marks_failed_allocation(tmp_path, 1):
        raise problem
    assert trial.failed_trial(tmp_path) is None


@pytest.mark.parametrize(
    ("stderr", "full"), [("terminate called: std::bad_alloc", True), ("Segmentation fault", False)]
)
def test_last_output_of_a_process_counts(stderr: str, full: bool, tmp_path: Path) -> None:
    trial.begin_trial(tmp_path, {"trying": 8})
    with trial.marks_failed_allocation(tmp_path, 0):
        os.write(2, stderr.encode())
    assert (trial.failed_trial(tmp_path) is not None) == full


def test_failure_before_a_trial_says_nothing_about_a_batch(tmp_path: Path) -> None:
    with pytest.raises(MemoryError), trial.marks_failed_allocation(tmp_path, 0):
        raise MemoryError
    assert trial.failed_trial(tmp_path) is None


def test_search_continues_after_a_batch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In new ranks, which get what is known; any other failure ends the measurement."""
    size = dataclasses.replace(models.TINY, tried=True)

    def launch(job: Any, size: Any, method: str, form: str, stages: int, known: Any, folder: str, **_: Any) -> Any:
        if known:
            return [(None, known | {6: True})] * 2
        trial.begin_trial(Path(folder), {"held": ["a", "b"], "known": [[2, True], [4, True]], "trying": 8})
        if full:
            (Path(folder) / "full1").touch()
        raise RunError("rank 1 failed")

    monkeypatch.setattr(weft, "launch", launch)
    full = True
    cell = _run(size, "2bw", "", 2)
    assert (cell["ranks"], cell["tried"]) == (["a", "b"], [[2, True], [4, True], [6, True], [8, False]])
    full = False
    with pytest.raises(RunError, match="rank 1 failed"):
        _run(size, "2bw", "", 2)


@pytest.mark.parametrize("size", [models.SMALL, models.BASE, models.TINY])
def test_chunks_have_equal_parts_of_the_blocks(size: models.Size) -> None:
    for chunks in (2, 4, 8):
        counts = models.balance(size, chunks)
        assert sum(counts) == 2 * size.layers + 2
        assert len({count - (place in (0, chunks - 1)) for place, count in enumerate(counts)}) == 1
