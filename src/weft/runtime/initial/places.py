"""Where the tensors of a model are: one may have several places, in the user's modules and in layers cut from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.partition import Place, named_tensors


def places_of(modules: Iterable[nn.Module]) -> dict[int, list[Place]]:
    """All places of each tensor, by the id of the tensor."""
    places: dict[int, dict[tuple[int, str], Place]] = {}
    for module in modules:
        for owner, attribute, tensor in named_tensors(module):
            places.setdefault(id(tensor), {})[id(owner), attribute] = owner, attribute
    return {number: list(found.values()) for number, found in places.items()}


def without_values(tensor: Tensor, device: str) -> Tensor:
    """A new parameter or buffer of the same form on a device, without values."""
    new = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, Parameter):
        new = Parameter(new, requires_grad=tensor.requires_grad)
        vars(new).update({name: value for name, value in vars(tensor).items() if name != "_is_hf_initialized"})
    return new


def replace_by_empty(tensor: Tensor, device: str, places: Iterable[Place]) -> Tensor:
    """Put a new tensor without values into all places of a tensor."""
    new = without_values(tensor, device)
    for owner, attribute in places:
        setattr(owner, attribute, new)
    return new


def drop_values(layers: Iterable[nn.Module], kept: Iterable[Tensor], places: Mapping[int, list[Place]]) -> None:
    """Move tensors that only other ranks need to the meta device, in all their places: nothing holds their memory."""
    keep = {id(tensor) for tensor in kept}
    dropped: dict[int, Tensor] = {}
    for layer in layers:
        for _, _, tensor in named_tensors(layer):
            if id(tensor) not in keep and not tensor.is_meta and id(tensor) not in dropped:
                dropped[id(tensor)] = tensor  # keeps its id from being used again
                replace_by_empty(tensor, "meta", places[id(tensor)])


def check_attributes(modules: Iterable[nn.Module]) -> None:
    """Refuse tensors on the meta device that are neither parameters nor buffers: nobody can give them values."""
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise WeftError(
                    f"{type(module).__name__}.{name} is a tensor on the meta device, and neither a parameter nor a "
                    "buffer, so its values are lost; register it as a buffer, or build the model in `with "
                    "weft.on_meta():`, which keeps computed values"
                )
