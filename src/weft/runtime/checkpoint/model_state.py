"""The whole model's state, by the plain model's names, gathered from the ranks that hold it and given back to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.assembly import Assembly


def iter_state_dict(
    assembly: Assembly, moment: Callable[[], object], *, rank0_only: bool
) -> Iterator[tuple[str, Tensor]]:
    """The state of a drained pipeline, a tensor at a time, on every rank, or on rank 0 alone.

    `moment` returns another value after a step.
    """
    return _tensors(assembly, moment(), moment, rank0_only=rank0_only)


def _tensors(
    assembly: Assembly, begin: object, moment: Callable[[], object], *, rank0_only: bool
) -> Iterator[tuple[str, Tensor]]:
    state, homes = assembly.layout.model.state, assembly.layout.homes
    for name, tensor in state.items():
        if moment() != begin:
            raise WeftError("the state of a pipeline is of one moment; take all its tensors before the next step")
        # no layer uses the others
        copy = _gathered(assembly, name, rank0_only=rank0_only) if name in homes else tensor.detach().clone()
        if assembly.collectives.first or not rank0_only:
            yield name, copy


def _gathered(assembly: Assembly, name: str, *, rank0_only: bool = False) -> Tensor:
    """A copy of one tensor of the model's state, from the first replica: on every rank, or on rank 0 alone."""
    collectives, home = assembly.collectives, assembly.layout.homes[name]
    holder, local = assembly.schedule.placement[home], assembly.chunks.get((0, home))
    purpose = f"gather {name} of the model's state, which every rank iterates to the end"
    wanted = collectives.first or not rank0_only
    if local is None:
        like, device = assembly.layout.model.state[name], "cpu" if wanted else "meta"
        tensor = torch.empty_like(like, device=device, requires_grad=False)
    else:
        tensor = local.tensor(name).detach().to("cpu", copy=wanted)
    if not rank0_only:
        collectives.broadcast(tensor, holder, purpose=purpose)
    elif holder != 0:
        collectives.hand_out(tensor, holder, [0], purpose=purpose)
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
