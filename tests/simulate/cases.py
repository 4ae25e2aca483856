"""Schedules and costs for several tests.

Times and sizes are multiples of an eighth and bandwidths are powers of two, so that floats are exact and can be
compared with ==.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from weft.errors import WeftError
from weft.schedule import Schedule, Weights, schedule, splits_backwards
from weft.simulate import ChunkCost, Cost, Link

SYNCHRONOUS = ("gpipe", "1f1b", "interleaved", "zb-h1")
ASYNCHRONOUS = ("pipedream", "2bw", "wpipe", "paci", "weave", "xpipe", "spectrain", "pipeoptim")

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", {"chunks": 1}),
    ("interleaved", {"chunks": 2}),
    ("interleaved", {"chunks": 3}),
    ("zb-h1", {}),
    ("pipedream", {}),
    ("pipedream", {"vertical_sync": True}),
    ("2bw", {}),
    ("2bw", {"warmup": 2}),
    ("wpipe", {}),
    ("wpipe", {"warmup": 2}),
    ("wpipe", {"fresh": True}),
    ("wpipe", {"warmup": 2, "fresh": True}),
    ("paci", {}),
    ("weave", {}),
    ("weave", {"slack": 0}),
    ("weave", {"slack": 0, "split": False}),
    ("weave", {"split": False}),
    ("xpipe", {}),
    ("xpipe", {"versions": "exact"}),
    ("spectrain", {}),
    ("pipeoptim", {}),
)

# three chunks on two ranks; the first without updates, the second with updates later than necessary
CUSTOM = (
    Schedule(
        name="own",
        stages=2,
        microbatches=2,
        placement=(0, 1, 0),
        streams=("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"),
    ),
    Schedule(
        name="own-late",
        stages=2,
        microbatches=2,
        placement=(0, 0, 1),
        streams=("0F0 1F0 1B-1 0F1 0B-1 1F1 0U-1 1U-1 1B0 0B0", "2F0 2I0 2F1 2W0 2I1 2W1"),
        weights=Weights(delay=(1, 1, 0)),
    ),
)


def build(name: str, options: dict[str, Any], stages: int, microbatches: int) -> Schedule:
    """The variant with this number of micro-batches, or the next number that it allows."""
    while True:
        try:
            return schedule(name, stages=stages, microbatches=microbatches, **options)
        except WeftError:
            microbatches = microbatches + 1 if not options.get("vertical_sync") else 1


@st.composite
def schedules(draw: st.DrawFn, stages: int = 6, microbatches: int = 12) -> Schedule:
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(CUSTOM))
    name, options = draw(st.sampled_from(VARIANTS))
    return build(name, options, draw(st.integers(1, stages)), draw(st.integers(1, microbatches)))


eighths = st.integers(0, 24).map(lambda number: number / 8)
sizes = st.integers(0, 8).map(float)
links = st.builds(
    Link, bandwidth=st.sampled_from([0.5, 1.0, 4.0, math.inf]), latency=eighths | st.just(0.0), overlap=st.booleans()
)


@st.composite
def chunk_costs(draw: st.DrawFn, schedule: Schedule) -> ChunkCost:
    choices: list[Any] = [False, True] + ["layer"] * (not splits_backwards(schedule))
    recompute = draw(st.sampled_from(choices if schedule.weights.backward == "forward" else [False]))
    layers = draw(st.sampled_from([1, 2, 4]))
    whole, inputs = sorted((draw(sizes), draw(sizes)), reverse=True)
    whole *= layers
    return ChunkCost(
        forward=draw(eighths),
        backward_input=draw(eighths),
        backward_weight=draw(eighths),
        update=draw(eighths),
        activation_bytes=whole,
        input_bytes=inputs,
        weight_bytes=draw(sizes),
        gradient_bytes=draw(sizes),
        optimizer_bytes=draw(sizes),
        master_bytes=draw(sizes),
        recompute=recompute,
        layers=layers,
    )


@st.composite
def costs(draw: st.DrawFn, schedule: Schedule) -> Cost:
    """Uneven costs, with different links between several ranks."""
    ranks = st.integers(0, schedule.stages - 1)
    return Cost(
        chunks=tuple(draw(chunk_costs(schedule)) for _ in range(schedule.chunks)),
        link=draw(links),
        links=draw(st.dictionaries(st.tuples(ranks, ranks), links, max_size=4)),
    )
