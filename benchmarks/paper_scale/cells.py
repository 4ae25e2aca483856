"""One cell: a model, a method, a grid, a batch, recompute or not -> samples a second, idle, bytes of the fullest rank.

A grid is depth x width: pipelines of `depth` ranks, `width` replicas of them. The batch is what one update is computed
from, over the whole grid; a replica has its share, in `m = depth` micro-batches unless assumed otherwise. A batch of
fewer samples is cut into fewer micro-batches if the method allows it; else there is no such cell. `weave` with slack
needs more micro-batches, and fresh reads change nothing with so few, so these have `m = 2 depth`. A method whose
backwards read other weights than their forwards can't recompute, and has no such cells either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from benchmarks.harness import fits, schedule_named
from benchmarks.paper_scale.devices import GB, Device, ring_seconds, step_seconds
from benchmarks.paper_scale.shapes import DEVICES, Chunks, Layer, cut, layers_of
from weft.schedule import Schedule
from weft.simulate import CATEGORIES, ChunkCost, Cost, Link, Simulation, simulate

METHODS = {  # by the number of devices
    8: ("gpipe", "1f1b", "pipedream", "2bw", "paci", "wpipe", "wpipe fresh True", "weave", "weave slack 0", "xpipe"),
    64: ("gpipe", "2bw", "paci", "wpipe", "wpipe fresh True", "weave", "weave slack 0", "xpipe"),
}
GRIDS = {8: ((8, 1), (4, 2), (2, 4)), 64: ((64, 1), (32, 2), (16, 4), (8, 8))}
BATCHES = tuple(2**power for power in range(10))


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the papers leave open; the defaults are weft's model."""

    device: Device = field(default_factory=Device)
    rounds: int = 1  # micro-batches of a mini-batch, in units of the depth
    warmup: int = 1  # of 2bw and wpipe: 2 sends twice the forwards ahead
    choices: tuple[bool, ...] = (False, True)  # of recompute
    recompute: Literal["chunk", "layer"] = "chunk"  # what runs again, and is held, at once
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


def cells_of(model: str, assumptions: Assumptions, methods: tuple[str, ...]) -> Iterator[Cell]:
    """All cells of a model that exist; on many devices, those with at least a sample for each device."""
    devices = DEVICES[model]
    batches = [batch for batch in assumptions.batches if devices == 8 or batch >= devices]
    for depth, width in GRIDS[devices]:
        for method in methods:
            choices = [choice for choice in assumptions.choices if not choice or _can_recompute(method, depth)]
            for batch in batches:
                for recompute in choices:
                    cell = Cell(model=model, method=method, depth=depth, width=width, batch=batch, recompute=recompute)
                    if microbatches_of(cell, assumptions):
                        yield cell


def microbatches_of(cell: Cell, assumptions: Assumptions) -> int:
    """Number of micro-batches of a replica's share; 0: there is no such cell."""
    share, wanted = cell.batch // cell.width, _most(cell.method, cell.depth, assumptions.rounds)
    if share >= wanted:
        return wanted
    return share if _supports_fewer(cell.method, cell.depth) else 0


@cache
def _most(method: str, depth: int, rounds: int) -> int:
    """Number of micro-batches where there are samples enough."""
    few = "fresh" not in method and fits(method, depth, rounds * depth)
    return rounds * depth if few else 2 * rounds * depth


@cache
def _supports_fewer(method: str, depth: int) -> bool:
    """Whether the method can have fewer micro-batches than ranks."""
    return fits(method, depth, 1)


@cache
def _can_recompute(method: str, depth: int) -> bool:
    """Whether a backward reads the weights of its forward."""
    return schedule_named(method, depth, 2 * depth).weights.backward == "forward"


def simulate_cell(cell: Cell, assumptions: Assumptions) -> dict[str, Any]:
    """Throughput, idle share and the bytes of the fullest rank."""
    m = microbatches_of(cell, assumptions)
    schedule = _schedule(cell.method, cell.depth, m, assumptions.warmup)
    samples = cell.batch / cell.width / m
    parts = _parts(cell.model, schedule.stages, schedule.chunks // schedule.stages)
    chunks = tuple(_chunk(part, cell, assumptions, samples) for part in parts)
    figures = simulate(schedule, Cost(chunks=chunks, links=_links(schedule, cell, assumptions)))
    ranks = []
    for rank, memory in enumerate(figures.memory):
        nbytes = dict(memory.bytes)
        own = schedule.chunks_of(rank)
        if assumptions.persistent:
            nbytes["gradients"] = sum(chunks[chunk].gradient_bytes for chunk in own)
        ranks.append(nbytes)
    fullest = max(ranks, key=lambda nbytes: sum(nbytes.values()))
    total = sum(fullest.values())
    updates = max(sum(chunks[chunk].update for chunk in schedule.chunks_of(rank)) for rank in range(cell.depth))
    return {
        "microbatches": m,
        "samples": samples,
        "throughput": cell.batch / figures.period,
        "idle": figures.bubble,
        "mean_delay": figures.mean_delay,
        "slack": _slack(figures) if cell.batch == max(assumptions.batches) and not cell.recompute else None,
        "update": updates / figures.period,
        "gb": {name: round(fullest[name] / GB, 4) for name in CATEGORIES},
        "total_gb": total / GB,
        "fits": total <= assumptions.device.usable,
        "steady": figures.steady,
    }


def _slack(figures: Simulation) -> float | None:
    """How much longer a hop may take at no cost, in forwards of a stage."""
    if figures.slack is None:
        return None
    return figures.slack.messages / (sum(chunk.forward for chunk in figures.cost.chunks) / figures.schedule.stages)


@cache
def _schedule(method: str, depth: int, microbatches: int, warmup: int) -> Schedule:
    return schedule_named(f"{method} warmup {warmup}" if warmup != 1 else method, depth, microbatches)


@cache
def _parts(model: str, stages: int, groups: int) -> Chunks:
    return cut(layers_of(model), stages, groups)


def _chunk(part: Sequence[Layer], cell: Cell, assumptions: Assumptions, samples: float) -> ChunkCost:
    device, size = assumptions.device, assumptions.value_bytes
    parameters = sum(layer.parameters for layer in part)
    updated = sum(layer.parameters for layer in part if layer.flops)  # few rows of a table have a gradient
    # time is flops / (rate x efficiency), and the efficiency n / (n + half_at)
    forward = sum(layer.flops for layer in part) * (samples + device.half_at) / device.rate(cell.model)
    by_layer = cell.recompute and assumptions.recompute == "layer"
    return ChunkCost(
        forward=forward,
        backward_input=forward,
        backward_weight=forward,
        update=step_seconds(updated, device) + _all_reduce(updated * size, cell, assumptions),
        activation_bytes=sum(layer.kept for layer in part) * samples * size,
        input_bytes=part[0].input * samples * size,
        weight_bytes=parameters * size,
        gradient_bytes=parameters * size if assumptions.gradients else 0.0,
        optimizer_bytes=parameters * assumptions.optimizer_bytes,
        recompute="layer" if by_layer else cell.recompute,
        kept_bytes=sum(layer.input for layer in part) * samples * size if by_layer else None,
        rebuilt_bytes=max(layer.kept - layer.input for layer in part) * samples * size if by_layer else None,
    )


def _all_reduce(size: float, cell: Cell, assumptions: Assumptions) -> float:
    """Seconds of the all-reduce of a chunk's gradients over the replicas: inside a machine if they share it.

    If the stages share it, every device of a machine is in another ring, and all rings share the network card.
    """
    device = assumptions.device
    if cell.width == 1 or assumptions.hidden:
        return 0.0
    if assumptions.near == "replicas" or cell.depth * cell.width <= device.machine:
        return ring_seconds(size, cell.width, bandwidth=device.inside, latency=device.inside_latency)
    share = device.between / device.machine
    return ring_seconds(size, cell.width, bandwidth=share, latency=device.between_latency)


def _links(schedule: Schedule, cell: Cell, assumptions: Assumptions) -> dict[tuple[int, int], Link]:
    """Between neighbours, and from the last rank to the first for two chunks a rank.

    If the replicas of a stage share a machine, all of them send to the next machine through one card at once.
    """
    device, depth = assumptions.device, cell.depth
    by_stage = 1 if assumptions.near == "stages" else cell.width  # devices of a machine that a stage takes
    inside = Link(bandwidth=device.inside, latency=device.inside_latency)
    between = Link(bandwidth=device.between / by_stage, latency=device.between_latency)
    links = {}
    for rank in range(depth):
        following = (rank + 1) % depth
        same = rank * by_stage // device.machine == following * by_stage // device.machine
        links[rank, following] = links[following, rank] = inside if same else between
    return {edge: link for edge, link in links.items() if edge[0] != edge[1]}
