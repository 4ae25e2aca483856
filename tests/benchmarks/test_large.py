"""Large models: the search of the largest one, what counts as too large, tables and targets of synthetic results."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import ResumeCache
from benchmarks.large import headline, pages
from benchmarks.large.headline import Search, judged, malloc_of
from benchmarks.large.measure import measure
from benchmarks.large.models import GPT, LINEAR, TINY, balance, build, write_folder
from weft.errors import RunError

MIB = 2**20


def search_until_done(limit: int, first: int, each: int) -> Search:
    """Models of `first` bytes and `each` for a layer; what is above the limit fails without a peak."""
    search = Search(step=4, limit=limit)
    while (layers := search.next()) is not None:
        assert layers not in search.trials
        peak = first + each * layers
        search.trials[layers] = {"fits": peak <= limit, "peak": peak if peak <= limit else 0}
    return search


@pytest.mark.parametrize(("first", "each"), [(300, 25), (300, 200), (10, 3), (990, 1)])
def test_the_search_finds_the_largest_model(first: int, each: int) -> None:
    search = search_until_done(1000, first, each)
    assert search.largest == (1000 - first) // each // 4 * 4
    assert len(search.trials) <= 6  # two small ones show where to look


def test_a_model_that_never_fits_ends_the_search() -> None:
    assert search_until_done(100, 200, 1).largest == 0


def rank(peak: int, *, counted: int = 0) -> dict[str, Any]:
    nbytes = {"weights": counted * MIB} if counted else {}
    peaks = {"start": peak * MIB // 2, "training": peak * MIB}
    return {"empty": 300 * MIB, "peaks": peaks, "seconds": {"training": 4.0}, "counted": nbytes}


def test_a_run_fits_if_every_resident_set_is_within_the_limit() -> None:
    assert judged(500 * MIB, lambda: [rank(100), rank(200)])["fits"]
    assert not judged(499 * MIB, lambda: [rank(100), rank(200)])["fits"]


def test_only_a_failed_allocation_means_that_a_model_is_too_large() -> None:
    def fail(cause: str) -> Any:
        raise RunError(cause)

    assert not judged(1, lambda: fail("DefaultCPUAllocator: can't allocate memory: you tried"))["fits"]
    with pytest.raises(RunError, match="deadline"):
        judged(1, lambda: fail("rank 0 waited for the deadline"))


def test_pytorchs_contestants_have_no_settings_of_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for name in headline.CONTESTANTS:
        with malloc_of(name):
            assert ("GLIBC_TUNABLES" in os.environ) == (name in ("torch 1F1B", "FSDP2"))
    assert "GLIBC_TUNABLES" not in os.environ


@pytest.mark.parametrize("size", [LINEAR, GPT, TINY])
def test_chunks_have_all_layers(size: Any) -> None:
    for chunks in (1, 4, 8, 16):
        assert sum(balance(size, chunks)) == len(build(size))
    assert all(parameter.is_meta for parameter in build(size).parameters())
    if size is GPT:
        assert size.parameters > 12 * size.layers * size.width**2
    if size is LINEAR:
        assert 1024 * MIB <= 4 * size.parameters < 1025 * MIB


def test_a_folder_holds_the_whole_model(tmp_path: Path) -> None:
    write_folder(TINY, tmp_path / "weights")
    (index,) = (tmp_path / "weights").glob("*.index.json")
    assert json.loads(index.read_text())["weight_map"].keys() == build(TINY).state_dict().keys()


def results(**peaks: int) -> dict[str, Any]:
    cells = [
        {"contestant": name, "options": {}, "ranks": [rank(peak, counted=0 if name == pages.TORCH else 100)]}
        for name, peak in peaks.items()
    ]
    return {"models": [{"name": "gpt", "ranks": 4, "cells": cells}], "headline": None, "environment": "two cores"}


def test_targets() -> None:
    assert pages.missed(results(**{"1f1b": 110, pages.TORCH: 120})) == []
    assert len(pages.missed(results(**{"1f1b": 116, pages.TORCH: 120}))) == 1
    assert len(pages.missed(results(**{"1f1b": 110, pages.TORCH: 100}))) == 1


def test_the_table_shows_the_fullest_rank() -> None:
    made = results(wpipe=110)
    made["models"][0]["cells"][0]["ranks"].append(rank(150, counted=140))
    (row,) = pages.tables(made)["gpt-4"].splitlines()[2:]
    assert row.split(" | ")[1:4] == ["75", "150", "–"]
    assert row.split(" | ")[-3:-1] == ["140", "1.10"]  # the ratio of the rank where it is largest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident sets are read on Linux")
def test_quick_form() -> None:
    measured = measure(quick=True, cache=ResumeCache())
    for cell in measured["models"][0]["cells"]:
        assert all(rank["peaks"].keys() == set(pages.MOMENTS) for rank in cell["ranks"])
    assert set(pages.plots(measured)) == {"tiny-2.svg"}
