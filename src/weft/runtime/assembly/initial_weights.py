"""The weights that a pipeline starts with: every tensor has one process that decides its values.

That is the process of the first chunk that holds it, in the first replica: it initializes or reads the tensor, or built
it with the model. All others that hold it receive it: replicas, and chunks that share it. So ranks may build different
weights, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from weft.runtime.assembly.layout import Layout
from weft.runtime.assembly.settings import Settings
from weft.runtime.comm import Collectives
from weft.runtime.initial import OpenWeights, drop_values, make_tensors, places_of
from weft.runtime.partition import named_tensors
from weft.schedule import Schedule

START = "share the initial weights"  # purpose of collective calls


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """A tensor of the model, and the ranks that hold it; the first one decides its values."""

    tensor: Tensor
    ranks: tuple[int, ...]


def start_weights(
    layout: Layout, schedule: Schedule, collectives: Collectives, settings: Settings, open_weights: OpenWeights
) -> Layout:
    """Give the tensors that this process holds their initial values, in the model's own modules.

    Tensors that only other processes hold are moved to the meta device, also in the user's model.
    """
    model = layout.model
    shared = _shared_tensors(layout, schedule, settings.replicas if collectives.world > 1 else 1)
    held = [entry for entry in shared if collectives.rank in entry.ranks or collectives.world == 1]
    own = [entry.tensor for entry in held if entry.ranks[0] == collectives.rank or collectives.world == 1]
    now = collectives.together(
        lambda: make_tensors(
            model,
            [entry.tensor for entry in held],
            own=own,
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
    state = {name: now.get(id(tensor), tensor) for name, tensor in model.state.items()}
    return replace(layout, model=replace(model, state=state)).with_meta_state()


def _shared_tensors(layout: Layout, schedule: Schedule, replicas: int) -> list[_Shared]:
    """All tensors of the model, in one order on every rank; those that no layer uses belong to every rank."""
    tensors: dict[int, Tensor] = {}
    holders: dict[int, list[int]] = {}
    for chunk, layers in enumerate(layout.ranges):
        for layer in layers:
            for _, _, tensor in named_tensors(layout.model.layers[layer]):
                tensors[id(tensor)] = tensor
                holders.setdefault(id(tensor), []).append(schedule.placement[chunk])
    for tensor in layout.model.state.values():
        if id(tensor) not in tensors:
            tensors[id(tensor)] = tensor
            holders[id(tensor)] = list(range(schedule.stages))
    return [
        _Shared(
            tensor=tensor,
            ranks=tuple(
                dict.fromkeys(
                    replica * schedule.stages + rank for replica in range(replicas) for rank in holders[number]
                )
            ),
        )
        for number, tensor in tensors.items()
    ]
