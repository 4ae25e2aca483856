"""The papers' models on the papers' devices, simulated: where weft's model agrees with what they report, and where not.

WPipe reports 1.4 x the throughput of PipeDream-2BW and 36 % less memory, XPipe that its pipeline hardly idles. Nothing
is timed here: every figure follows from `shapes.py` (what the models are), `devices.py` (what a device does), the
schedules, and the assumptions of `cells.py`, which `sensitivity.py` changes one at a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from weft.bench.kept import Keep
from weft.bench.paper_scale.cells import METHODS, Assumed, grid_of, run
from weft.bench.paper_scale.pages import missed, plots, tables
from weft.bench.paper_scale.sensitivity import CHANGED, CHANGED_BETWEEN, OURS, compare, pair
from weft.bench.paper_scale.shapes import DEVICES

__all__ = ["measure", "missed", "plots", "tables"]

STUDIED = {"bert-192": CHANGED, "bert-384": CHANGED_BETWEEN}


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """All cells of all models, and the two methods once for every assumption; quick: one model at one batch."""
    if quick:
        cells = {"bert-96": _cells("bert-96", replace(Assumed(), batches=(64,)))}
        return {"cells": cells, "assumptions": {"bert-96": {OURS: compare(cells["bert-96"])}}}
    cells = {model: keep(model, partial(_cells, model, Assumed())) for model in DEVICES}
    assumptions = {
        model: {name: compare(cells[model]) if name == OURS else _changed(keep, model, name) for name in changed}
        for model, changed in STUDIED.items()
    }
    return {"cells": cells, "assumptions": assumptions}


def _changed(keep: Keep, model: str, name: str) -> Any:
    return keep(f"{model}: {name}", lambda: compare(pair(model, STUDIED[model][name])))


def _cells(model: str, assumed: Assumed) -> list[dict[str, Any]]:
    return [vars(cell) | run(cell, assumed) for cell in grid_of(model, assumed, METHODS[DEVICES[model]])]
