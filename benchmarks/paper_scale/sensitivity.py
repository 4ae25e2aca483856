"""One assumption changed at a time: what it does to WPipe beside PipeDream-2BW.

Four ways to compare the two, as the paper does not say which it means:

    cell   same grid, batch and recompute, where both fit
    batch  same grid and batch; each recomputes only if it must, to fit
    grid   same grid; each at its own best batch and with its own choice of recompute, of those that fit
    best   each at its own best grid too
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.paper_scale.cells import BATCHES, Assumptions, cells_of, simulate_cell
from benchmarks.paper_scale.devices import Device

PAIR = ("wpipe", "2bw")
V100 = Device()
DEFAULT = "weft's model"

ONE_MACHINE = {
    DEFAULT: Assumptions(),
    "activations always kept": Assumptions(choices=(False,)),
    "activations always recomputed": Assumptions(choices=(True,)),
    "recompute layer by layer": Assumptions(recompute="layer"),
    "optimizer state not counted": Assumptions(optimizer_bytes=0.0),
    "gradients not counted": Assumptions(gradients=False),
    "gradients never freed": Assumptions(persistent=True),
    "neither optimizer nor gradients": Assumptions(optimizer_bytes=0.0, gradients=False),
    "fp16 values, fp32 master and states": Assumptions(value_bytes=2.0, optimizer_bytes=12.0),
    "fp16 values, no optimizer state": Assumptions(value_bytes=2.0, optimizer_bytes=0.0),
    "m = 4 p": Assumptions(rounds=4),
    "batch up to 512 a device": Assumptions(batches=(*BATCHES, 1024, 2048, 4096)),
    "all-reduce hidden": Assumptions(hidden=True),
    "a tenth of the link": Assumptions(device=replace(V100, inside=V100.inside / 10)),
    "small micro-batches as efficient": Assumptions(device=replace(V100, half_at=0.0)),
    "half efficiency at 8 samples": Assumptions(device=replace(V100, half_at=8.0)),
}
EIGHT_MACHINES = {
    DEFAULT: Assumptions(),
    "stages share a machine": Assumptions(near="stages"),
    "batch up to 2048": Assumptions(batches=(*BATCHES, 1024, 2048)),
    "m = 2 p": Assumptions(rounds=2),
    "m = 2 p, twice the forwards ahead": Assumptions(rounds=2, warmup=2),
    "network of 100 Gbit/s": Assumptions(device=replace(V100, between=4 * V100.between)),
}


def simulate_pair(model: str, assumptions: Assumptions) -> list[dict[str, Any]]:
    """All cells of the two methods."""
    return [vars(cell) | simulate_cell(cell, assumptions) for cell in cells_of(model, assumptions, PAIR)]


def compare(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """WPipe over 2BW, in all four ways; of several cells, the least and the most, and where."""
    cells = [cell for cell in cells if cell["method"] in PAIR]
    by = {_key(cell, "method", "depth", "width", "batch", "recompute"): cell for cell in cells}
    same = [
        (wpipe, by["2bw", *key[1:]])
        for key, wpipe in by.items()
        if key[0] == "wpipe" and wpipe["fits"]  # no claim about what does not run
    ]
    return {
        "cell": _ends([(wpipe["throughput"] / two["throughput"], wpipe) for wpipe, two in same if two["fits"]]),
        "memory": _ends([(wpipe["total_gb"] / two["total_gb"], wpipe) for wpipe, two in same]),
        "batch": _ends(_gains(cells, "depth", "width", "batch")),
        "grid": _ends(_gains(cells, "depth", "width")),
        "best": _ends(_gains(cells)),
    }


def fastest(cells: Iterable[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Of the cells that fit, the fastest for each value of the named fields."""
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for cell in cells:
        key = _key(cell, *names)
        if cell["fits"] and (key not in best or cell["throughput"] > best[key]["throughput"]):
            best[key] = cell
    return best


def _gains(cells: list[Mapping[str, Any]], *names: str) -> list[tuple[float, Mapping[str, Any]]]:
    methods: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for (method, *key), cell in fastest(cells, "method", *names).items():
        methods[tuple(key)][method] = cell
    return [
        (both["wpipe"]["throughput"] / both["2bw"]["throughput"], both["wpipe"])
        for both in methods.values()
        if len(both) > 1
    ]


def _ends(found: list[tuple[float, Mapping[str, Any]]]) -> dict[str, Any] | None:
    if not found:
        return None
    low, high = (chosen(found, key=lambda pair: pair[0]) for chosen in (min, max))
    return {"least": low[0], "least_at": place(low[1]), "most": high[0], "most_at": place(high[1])}


def place(cell: Mapping[str, Any]) -> str:
    """Grid, batch and recompute of a cell."""
    recompute = ", recompute" if cell["recompute"] else ""
    return f"({cell['depth']},{cell['width']}) batch {cell['batch']}{recompute}"


def _key(cell: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(cell[name] for name in names)
