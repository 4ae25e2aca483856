"""One assumption changed at a time: what it does to WPipe beside PipeDream-2BW.

Four ways to compare the two, as a paper's sentence does not say which it means:

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

from weft.bench.paper_scale.cells import BATCHES, Assumed, grid_of, run
from weft.bench.paper_scale.devices import Device

PAIR = ("wpipe", "2bw")
V100 = Device()
OURS = "weft's model"

CHANGED = {  # on one machine
    OURS: Assumed(),
    "activations always kept": Assumed(choices=(False,)),
    "activations always recomputed": Assumed(choices=(True,)),
    "recompute layer by layer": Assumed(recompute="layer"),
    "optimizer state not counted": Assumed(optimizer_bytes=0.0),
    "gradients not counted": Assumed(gradients=False),
    "gradients never freed": Assumed(persistent=True),
    "neither optimizer nor gradients": Assumed(optimizer_bytes=0.0, gradients=False),
    "fp16 values, fp32 master and states": Assumed(value_bytes=2.0, optimizer_bytes=12.0),
    "fp16 values, no optimizer state": Assumed(value_bytes=2.0, optimizer_bytes=0.0),
    "m = 4 p": Assumed(rounds=4),
    "batch up to 512 a device": Assumed(batches=(*BATCHES, 1024, 2048, 4096)),
    "all-reduce hidden": Assumed(hidden=True),
    "a tenth of the link": Assumed(device=replace(V100, inside=V100.inside / 10)),
    "small micro-batches as efficient": Assumed(device=replace(V100, half_at=0.0)),
    "half efficiency at 8 samples": Assumed(device=replace(V100, half_at=8.0)),
}
CHANGED_BETWEEN = {  # on eight machines
    OURS: Assumed(),
    "stages share a machine": Assumed(near="stages"),
    "batch up to 2048": Assumed(batches=(*BATCHES, 1024, 2048)),
    "m = 2 p": Assumed(rounds=2),
    "m = 2 p, twice the forwards ahead": Assumed(rounds=2, warmup=2),
    "network of 100 Gbit/s": Assumed(device=replace(V100, between=4 * V100.between)),
}


def pair(model: str, assumed: Assumed) -> list[dict[str, Any]]:
    """All cells of the two methods."""
    return [vars(cell) | run(cell, assumed) for cell in grid_of(model, assumed, PAIR)]


def compare(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """WPipe over 2BW, in all four ways; a value of several cells as the least and the most with its place."""
    cells = [cell for cell in cells if cell["method"] in PAIR]
    by = {_key(cell, "method", "depth", "width", "batch", "recompute"): cell for cell in cells}
    same = [
        (one, by["2bw", *key[1:]])
        for key, one in by.items()
        if key[0] == "wpipe" and one["fits"]  # no claim about what nobody could run
    ]
    return {
        "cell": _ends([(one["throughput"] / two["throughput"], one) for one, two in same if two["fits"]]),
        "memory": _ends([(one["total_gb"] / two["total_gb"], one) for one, two in same]),
        "batch": _ends(_gains(cells, "depth", "width", "batch")),
        "grid": _ends(_gains(cells, "depth", "width")),
        "best": _ends(_gains(cells)),
    }


def fastest(cells: Iterable[Mapping[str, Any]], *names: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Of the cells that fit, the fastest for each value of the fields named."""
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
        (two["wpipe"]["throughput"] / two["2bw"]["throughput"], two["wpipe"])
        for two in methods.values()
        if len(two) > 1
    ]


def _ends(found: list[tuple[float, Mapping[str, Any]]]) -> dict[str, Any] | None:
    if not found:
        return None
    low, high = (chosen(found, key=lambda one: one[0]) for chosen in (min, max))
    return {"least": low[0], "least_at": place(low[1]), "most": high[0], "most_at": place(high[1])}


def place(cell: Mapping[str, Any]) -> str:
    """Where a cell is, in words."""
    again = ", recompute" if cell["recompute"] else ""
    return f"({cell['depth']},{cell['width']}) batch {cell['batch']}{again}"


def _key(cell: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(cell[name] for name in names)
