"""One cell: a model, a method, a grid, a batch, recompute or not -> samples a second, idle, bytes of the fullest rank.

A grid is depth x width: pipelines of `depth` ranks, `width` replicas of them. The batch is what one update is computed
from, over the whole grid; a replica has its share, in `m = depth` micro-batches unless assumed otherwise. A batch of
fewer samples than that is cut into fewer micro-batches, where the method allows it; else there is no such cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import weft
from weft.bench.paper_scale.devices import GB, Device, ring_seconds, step_seconds
from weft.bench.paper_scale.shapes import DEVICES, Chunks, Layer, cut, layers_of
from weft.bench.schedules import fits
from weft.schedule import Schedule
from weft.simulate import CATEGORIES, ChunkCost, Cost, Link, simulate

METHODS = {  # on so many devices
    8: ("gpipe", "1f1b", "pipedream", "2bw", "wpipe", "xpipe"),
    64: ("gpipe", "2bw", "wpipe", "xpipe"),
}
GRIDS = {8: ((8, 1), (4, 2), (2, 4)), 64: ((64, 1), (32, 2), (16, 4), (8, 8))}
BATCHES = tuple(2**power for power in range(10))


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """What the papers leave open; the defaults are weft's own model."""

    device: Device = field(default_factory=Device)
    rounds: int = 1  # micro-batches of a mini-batch, in units of the depth
    warmup: int = 1  # of 2bw and wpipe: 2 sends twice the forwards ahead
    choices: tuple[bool, ...] = (False, True)  # of recompute
    recompute: Literal["chunk", "layer"] = "chunk"  # what runs again at once, and is held at once
    value_bytes: float = 4.0  # of weights, gradients, activations
    optimizer_bytes: float = 8.0  # a parameter: two states of Adam
    gradients: bool = True  # counted
    persistent: bool = False  # gradients are never freed
    hidden: bool = False  # the all-reduce hides behind other work
    near: Literal["replicas", "stages"] = "replicas"  # which ranks share a machine
    batches: tuple[int, ...] = BATCHES


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is simulated."""

    model: str
    method: str
    depth: int
    width: int
    batch: int
    recompute: bool


def grid_of(model: str, assumed: Assumed, methods: tuple[str, ...]) -> Iterator[Cell]:
    """All cells of a model that exist; on many devices, those with a sample or more for each of them."""
    devices = DEVICES[model]
    for depth, width in GRIDS[devices]:
        for method in methods:
            for batch in assumed.batches if devices == 8 else [one for one in assumed.batches if one >= devices]:
                for recompute in assumed.choices:
                    cell = Cell(model=model, method=method, depth=depth, width=width, batch=batch, recompute=recompute)
                    if microbatches_of(cell, assumed):
                        yield cell


def microbatches_of(cell: Cell, assumed: Assumed) -> int:
    """How many micro-batches a replica's share is cut into; 0: there is no such cell."""
    share, wanted = cell.batch // cell.width, assumed.rounds * cell.depth
    if share >= wanted:
        return wanted
    return share if _fewer(cell.method, cell.depth) else 0


@cache
def _fewer(method: str, depth: int) -> bool:
    """Whether the method can do with fewer micro-batches than ranks."""
    return fits(method, depth, 1)


def run(cell: Cell, assumed: Assumed) -> dict[str, Any]:
    """Simulate a cell."""
    m = microbatches_of(cell, assumed)
    schedule = _schedule(cell.method, cell.depth, m, assumed.warmup)
    samples = cell.batch / cell.width / m
    parts = _parts(cell.model, schedule.stages, schedule.chunks // schedule.stages)
    chunks = tuple(_chunk(part, cell, assumed, samples) for part in parts)
    figures = simulate(schedule, Cost(chunks=chunks, links=_links(schedule, cell, assumed)))
    ranks = []
    for rank, memory in enumerate(figures.memory):
        held = dict(memory.bytes)
        own = schedule.chunks_of(rank)
        if assumed.persistent:
            held["gradients"] = sum(chunks[one].gradient_bytes for one in own)
        if cell.recompute and assumed.recompute == "layer":  # one layer at a time runs again, in any backward
            held["activations"] += max(
                (layer.kept - layer.input) * samples * assumed.value_bytes for one in own for layer in parts[one]
            )
        ranks.append(held)
    fullest = max(ranks, key=lambda held: sum(held.values()))
    total = sum(fullest.values())
    updates = max(sum(chunks[one].update for one in schedule.chunks_of(rank)) for rank in range(cell.depth))
    return {
        "microbatches": m,
        "samples": samples,
        "throughput": cell.batch / figures.period,
        "idle": figures.bubble,
        "update": updates / figures.period,
        "gb": {name: round(fullest[name] / GB, 4) for name in CATEGORIES},
        "total_gb": total / GB,
        "fits": total <= assumed.device.usable,
        "steady": figures.steady,
    }


@cache
def _schedule(method: str, depth: int, microbatches: int, warmup: int) -> Schedule:
    options = {"warmup": warmup} if warmup != 1 else {}
    return weft.schedule(method, stages=depth, microbatches=microbatches, **options)


@cache
def _parts(model: str, stages: int, groups: int) -> Chunks:
    return cut(layers_of(model), stages, groups)


def _chunk(part: Sequence[Layer], cell: Cell, assumed: Assumed, samples: float) -> ChunkCost:
    device, size = assumed.device, assumed.value_bytes
    parameters = sum(layer.parameters for layer in part)
    updated = sum(layer.parameters for layer in part if layer.flops)  # few rows of a table have a gradient
    # time is flops / (rate x efficiency), and the efficiency n / (n + half_at)
    forward = sum(layer.flops for layer in part) * (samples + device.half_at) / device.rate(cell.model)
    kept = sum(layer.kept for layer in part)
    by_layer = cell.recompute and assumed.recompute == "layer"
    if by_layer:
        kept = sum(layer.input for layer in part)
    return ChunkCost(
        forward=forward,
        backward_input=2 * forward if by_layer else forward,
        backward_weight=forward,
        update=step_seconds(updated, device) + _all_reduce(updated * size, cell, assumed),
        activation_bytes=kept * samples * size,
        input_bytes=part[0].input * samples * size,
        weight_bytes=parameters * size,
        gradient_bytes=parameters * size if assumed.gradients else 0.0,
        optimizer_bytes=parameters * assumed.optimizer_bytes,
        recompute=cell.recompute and not by_layer,
    )


def _all_reduce(size: float, cell: Cell, assumed: Assumed) -> float:
    """Of a chunk's gradients, over the replicas: inside a machine where they share it.

    Where the stages share it, every device of a machine is in another ring, and all rings share the network card.
    """
    device = assumed.device
    if cell.width == 1 or assumed.hidden:
        return 0.0
    if assumed.near == "replicas" or cell.depth * cell.width <= device.machine:
        return ring_seconds(size, cell.width, bandwidth=device.inside, latency=device.inside_latency)
    share = device.between / device.machine
    return ring_seconds(size, cell.width, bandwidth=share, latency=device.between_latency)


def _links(schedule: Schedule, cell: Cell, assumed: Assumed) -> dict[tuple[int, int], Link]:
    """Between neighbours, and from the last rank to the first for two chunks a rank.

    Where the replicas of a stage share a machine, all of them send to the next machine through one card at once.
    """
    device, depth = assumed.device, cell.depth
    by_stage = 1 if assumed.near == "stages" else cell.width  # devices of a machine that a stage takes
    inside = Link(bandwidth=device.inside, latency=device.inside_latency)
    between = Link(bandwidth=device.between / by_stage, latency=device.between_latency)
    links = {}
    for one in range(depth):
        other = (one + 1) % depth
        same = one * by_stage // device.machine == other * by_stage // device.machine
        links[one, other] = links[other, one] = inside if same else between
    return {edge: link for edge, link in links.items() if edge[0] != edge[1]}
