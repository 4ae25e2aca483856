"""Run every contestant on real ranks, with the settings that users have."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import weft
from benchmarks.harness import START_TIMEOUT, ResumeCache
from benchmarks.large.headline import CONTESTANTS, largest, malloc_of
from benchmarks.large.models import GPT, HEADLINE, LINEAR, MIB, TINY, Size
from benchmarks.large.pages import TORCH, label_of
from benchmarks.large.ranks import measure_rank
from weft.errors import WeftError

METHODS = ("1f1b", "2bw", "wpipe")
OPTIONS: tuple[dict[str, str], ...] = (
    {},
    {"precision": "bf16"},
    {"recompute": "layer"},
    {"precision": "bf16", "recompute": "layer"},
)
OTHERS = (TORCH, "FSDP2")
UPDATES = 4
LIMIT = 2048 * MIB
HEADLINE_RANKS = 8


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Resident sets of all contestants, and the largest GPT of each."""
    if sys.platform != "linux":
        raise WeftError(f"this benchmark reads the resident sets of Linux (here: {sys.platform})")
    if quick:
        cells = [_cell(name, TINY, 2, {}, ResumeCache()) for name in ("1f1b", "wpipe", TORCH)]
        return {"models": [{"name": "tiny", "size": asdict(TINY), "ranks": 2, "cells": cells}], "headline": None}
    return {"models": measure_models(cache), "headline": measure_headline(cache)}


def measure_models(cache: ResumeCache) -> list[dict[str, Any]]:
    """Every moment of runs of two models."""
    others: list[tuple[str, dict[str, str]]] = [(name, {}) for name in OTHERS]
    return [
        _model("linear", LINEAR, 4, [*((name, {}) for name in METHODS), *others], cache),
        _model("gpt", GPT, 4, [*product(METHODS, OPTIONS), *others], cache),
        _model("gpt", GPT, 8, [*product(METHODS, OPTIONS[::3]), *others], cache),
    ]


def measure_headline(cache: ResumeCache) -> dict[str, Any]:
    """The largest GPT of each contestant on ranks of 2 GiB."""
    find = partial(largest, size=HEADLINE, limit=LIMIT, cache=cache)
    found = {name: find(name, ranks=HEADLINE_RANKS) for name in CONTESTANTS}
    about = {"limit": LIMIT, "ranks": HEADLINE_RANKS, "size": asdict(HEADLINE)}
    return about | {"contestants": found, "alone": find("1f1b", ranks=1)}


def _model(
    name: str, size: Size, ranks: int, cells: list[tuple[str, dict[str, str]]], cache: ResumeCache
) -> dict[str, Any]:
    made = [_cell(method, size, ranks, options, cache) for method, options in cells]
    return {"name": name, "size": asdict(size), "ranks": ranks, "cells": made}


def _cell(name: str, size: Size, ranks: int, options: dict[str, str], cache: ResumeCache) -> dict[str, Any]:
    part = f"{size.kind}, {ranks} ranks: {label_of(name, options)}"
    measured = cache(part, partial(run, name, size, ranks, options))
    return {"contestant": name, "options": options, "ranks": measured}


def run(name: str, size: Size, ranks: int, options: dict[str, str]) -> list[dict[str, Any]]:
    """A run from start to export, on new ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, size, options, ranks, UPDATES, str(Path(folder)))
        with malloc_of(name):
            return weft.launch(measure_rank, *arguments, ranks=ranks, timeout=START_TIMEOUT)
