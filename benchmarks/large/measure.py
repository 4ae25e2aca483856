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
from benchmarks.large.headline import CONTESTANTS, largest
from benchmarks.large.models import GPT, HEADLINE, LINEAR, MIB, TINY, Size
from benchmarks.large.pages import label_of
from benchmarks.large.ranks import measure_rank
from weft.errors import WeftError

METHODS = ("1f1b", "2bw", "wpipe")
OPTIONS: tuple[dict[str, str], ...] = ({}, {"precision": "bf16"}, {"recompute": "layer"})
BOTH = {"precision": "bf16", "recompute": "layer"}
OTHERS = ("torch 1F1B", "FSDP2")
UPDATES = 4
LIMIT = 2048 * MIB
HEADLINE_RANKS = 8


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Resident sets of all contestants, and the largest GPT of each."""
    if sys.platform != "linux":
        raise WeftError(f"this benchmark reads the resident sets of Linux (here: {sys.platform})")
    if quick:
        cells = [_cell(name, TINY, 2, {}, ResumeCache()) for name in ("1f1b", "wpipe", "torch 1F1B")]
        return {"models": [{"name": "tiny", "size": asdict(TINY), "ranks": 2, "cells": cells}], "headline": None}
    models = [
        _model("linear", LINEAR, 4, [(name, {}) for name in (*METHODS, *OTHERS)], cache),
        _model("gpt", GPT, 4, [*product(METHODS, (*OPTIONS, BOTH)), *((name, {}) for name in OTHERS)], cache),
        _model("gpt", GPT, 8, [*product(METHODS, ({}, BOTH)), *((name, {}) for name in OTHERS)], cache),
    ]
    found = {name: largest(name, HEADLINE, ranks=HEADLINE_RANKS, limit=LIMIT, cache=cache) for name in CONTESTANTS}
    headline = {"limit": LIMIT, "ranks": HEADLINE_RANKS, "size": asdict(HEADLINE), "contestants": found}
    headline["alone"] = largest("1f1b", HEADLINE, ranks=1, limit=LIMIT, cache=cache)
    return {"models": models, "headline": headline}


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
        return weft.launch(measure_rank, *arguments, ranks=ranks, timeout=START_TIMEOUT)
