"""The whole model's state, by the plain model's names, gathered from the ranks that hold it and given back to them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.assembly import Assembly


def state_dict(assembly: Assembly) -> dict[str, Tensor]:
    """The state of a drained pipeline, on every rank."""
    homes = assembly.layout.homes
    return {
        name: _gathered(assembly, name) if name in homes else tensor.detach().clone()  # no layer uses the others
        for name, tensor in assembly.layout.model.state.items()
    }


def _gathered(assembly: Assembly, name: str) -> Tensor:
    """A copy of one tensor of the model's state, from the first replica, on every rank."""
    home = assembly.layout.homes[name]
    local = assembly.chunks.get((0, home))
    empty = assembly.layout.model.state[name]
    tensor = torch.empty_like(empty, device="cpu") if local is None else local.tensor(name).detach().cpu().clone()
    rank = assembly.schedule.placement[home]
    assembly.collectives.broadcast(tensor, rank, purpose=f"gather {name} of the model's state")
    return tensor


@torch.no_grad()
def share_buffers(assembly: Assembly) -> None:
    """Give all replicas the first one's running statistics, which are the model's."""
    if assembly.settings.replicas == 1:
        return
    homes = assembly.layout.homes
    for name, tensor in assembly.layout.model.state.items():
        if name in homes and not isinstance(tensor, Parameter):
            shared = _gathered(assembly, name)
            for (_, chunk), built in assembly.chunks.items():
                if chunk == homes[name]:
                    built.tensor(name).copy_(shared)


@torch.no_grad()
def load_state_dict(assembly: Assembly, state: Mapping[str, Tensor]) -> None:
    """Set all weights and buffers of a drained pipeline; nothing is changed if a name or shape does not fit."""
    known = assembly.layout.model.state
    if missing := [name for name in known if name not in state]:
        raise WeftError(f"the state has no {missing[0]} (missing: {len(missing)}); give the whole model's state_dict")
    if unknown := [name for name in state if name not in known]:
        raise WeftError(f"the model has no {unknown[0]} (unknown: {len(unknown)}); give this model's state_dict")
    for name, tensor in known.items():
        if tensor.shape != state[name].shape:
            raise WeftError(
                f"{name} has another shape (model: {tuple(tensor.shape)}, state: {tuple(state[name].shape)}); "
                "give this model's state_dict"
            )
    for name, tensor in known.items():
        if name not in assembly.layout.homes:  # no layer uses it
            tensor.detach().copy_(state[name])
    for built in assembly.chunks.values():
        for name in built.state:
            if name in known:
                built.tensor(name).copy_(state[name])
        built.refresh()
