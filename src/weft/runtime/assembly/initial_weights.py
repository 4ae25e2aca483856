"""The weights that a pipeline starts with: every tensor has one process that decides its values.

That is the process of the first chunk that holds it, in the first replica: it initializes or reads the tensor, or built
it with the model. All others that hold it receive it: replicas, and chunks that share it. So ranks may build different
weights, or none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from weft.runtime.assembly.layout import Layout
from weft.runtime.assembly.settings import Settings
from weft.runtime.comm import Collectives
from weft.runtime.initial import OpenWeights, drop_values, make_tensors, places_of, without_values
from weft.runtime.partition import named_tensors

START = "share the initial weights"  # purpose of collective calls


class _Shared(NamedTuple):
    """A tensor of the model, and the ranks that hold it; the first one decides its values."""

    tensor: Tensor
    ranks: list[int]


def start_weights(layout: Layout, collectives: Collectives, settings: Settings, open_weights: OpenWeights) -> Layout:
    """Give the tensors that this process holds their initial values, in the model's own modules.

    Tensors that only other processes hold are moved to the meta device, also in the user's model. Of the layout's state
    only dtypes and shapes stay, except tensors that no layer uses.
    """
    model, rank = layout.model, collectives.rank
    held = [entry for entry in _shared_tensors(layout, settings.replicas, collectives.world) if rank in entry.ranks]
    now = collectives.together(
        lambda: make_tensors(
            model,
            [entry.tensor for entry in held],
            own=[entry.tensor for entry in held if entry.ranks[0] == rank],
            weights=settings.weights,
            open_weights=open_weights,
            seed=settings.seed,
        ),
        purpose="make the initial weights",
    )
    for entry in held:
        first, *others = entry.ranks
        if others:
            collectives.hand_out(now[id(entry.tensor)], first, others, purpose=START)
    drop_values(model.layers, now.values(), places_of([model.root, *model.layers]))
    state = {
        name: without_values(tensor, "meta") if name in layout.homes else now[id(tensor)]
        for name, tensor in model.state.items()
    }
    return replace(layout, model=replace(model, state=state))


def _shared_tensors(layout: Layout, replicas: int, world: int) -> list[_Shared]:
    """All tensors of the model, in one order on every rank; those that no layer uses belong to every rank."""
    schedule = layout.programs[()].schedule
    tensors: dict[int, Tensor] = {}
    holders: dict[int, list[int]] = {}  # ranks of a replica
    for chunk, layers in enumerate(layout.ranges):
        for layer in layers:
            for _, _, tensor in named_tensors(layout.model.layers[layer]):
                tensors[id(tensor)] = tensor
                holders.setdefault(id(tensor), []).append(schedule.placement[chunk])
    for tensor in layout.model.state.values():
        if id(tensor) not in tensors:
            tensors[id(tensor)] = tensor
            holders[id(tensor)] = list(range(schedule.stages))
    if world == 1:  # virtual ranks
        return [_Shared(tensor, [0]) for tensor in tensors.values()]
    firsts = range(0, replicas * schedule.stages, schedule.stages)
    return [
        _Shared(tensor, list(dict.fromkeys(first + rank for first in firsts for rank in holders[number])))
        for number, tensor in tensors.items()
    ]
