"""Simulate all models, methods and batches, and the effect of each assumption."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.harness import ResumeCache
from benchmarks.paper_scale.cells import METHODS, Assumptions, cells_of, simulate_cell
from benchmarks.paper_scale.sensitivity import DEFAULT, EIGHT_MACHINES, ONE_MACHINE, compare, simulate_pair
from benchmarks.paper_scale.shapes import DEVICES

STUDIED = {"bert-192": ONE_MACHINE, "bert-384": EIGHT_MACHINES}


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """All cells of all models, and wpipe beside 2bw under each changed assumption; quick: one model, one batch."""
    if quick:
        cells = {"bert-96": _cells("bert-96", replace(Assumptions(), batches=(64,)))}
        return {"cells": cells, "assumptions": {"bert-96": {DEFAULT: compare(cells["bert-96"])}}}
    cells = {model: cache(model, partial(_cells, model, Assumptions())) for model in DEVICES}
    assumptions = {
        model: {name: compare(cells[model]) if name == DEFAULT else _changed(cache, model, name) for name in changed}
        for model, changed in STUDIED.items()
    }
    return {"cells": cells, "assumptions": assumptions}


def _changed(cache: ResumeCache, model: str, name: str) -> Any:
    return cache(f"{model}: {name}", lambda: compare(simulate_pair(model, STUDIED[model][name])))


def _cells(model: str, assumptions: Assumptions) -> list[dict[str, Any]]:
    cells = cells_of(model, assumptions, METHODS[DEVICES[model]])
    return [vars(cell) | simulate_cell(cell, assumptions) for cell in cells]
