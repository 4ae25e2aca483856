"""A model as a list of layers, with the names that its user knows.

Layers are called one after the other, as `nn.Sequential` does it: each takes what the one before it gave. A tuple is
unpacked for a layer whose forward needs several arguments, a dict for one whose arguments bear its keys.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.partition.cut import cut_layers
from weft.runtime.tree import map_tensors


@dataclass(frozen=True, kw_only=True)
class Model:
    """The whole model, as every rank is given it: each keeps the layers of its own chunks."""

    layers: list[nn.Module]
    state: dict[str, Tensor]  # name -> parameter or persistent buffer, as in its state_dict

    def names(self) -> dict[int, list[str]]:
        """The names of a tensor: several, if it is tied."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self.state.items():
            names[id(tensor)].append(name)
        return names


def model_of(model: Any, *, cut: Sequence[str] | None, example: Any) -> Model:
    """Take a model in any form that it may be given in."""
    if isinstance(model, list | tuple | nn.ModuleList) and not isinstance(model, nn.Sequential):
        if strange := [one for one in model if not isinstance(one, nn.Module)]:
            raise WeftError(f"a list of layers holds nn.Modules (got {type(strange[0]).__name__})")
        model = model if isinstance(model, nn.ModuleList) else nn.Sequential(*model)
    if isinstance(model, nn.Sequential | nn.ModuleList) and cut is None:
        layers = list(model)
    else:
        whole = None if example is None else map_tensors(Tensor.clone, example)  # a view would be exported as one
        layers = cut_layers(model, at=cut, example=whole)
    if not layers:
        raise WeftError("a model needs at least one layer (got an empty one)")
    named = model if isinstance(model, nn.Module) else nn.ModuleList(layers)
    state = {name: tensor for name, tensor in named.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        held = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
        raise WeftError(
            f"there is nothing to train: no parameter needs a gradient (parameters: {held}, layers: {len(layers)}); "
            "set requires_grad on those that are to be trained"
        )
    return Model(layers=layers, state=state)


def call(layer: nn.Module, value: Any) -> Any:
    """Call a layer with what the one before it gave."""
    if isinstance(value, Tensor):
        return layer(value)
    if type(value) is tuple and _takes_several(layer):
        return layer(*value)
    if type(value) is dict and value.keys() <= _arguments(layer).keys():
        return layer(**value)
    return layer(value)


_known: WeakKeyDictionary[nn.Module, dict[str, inspect.Parameter]] = WeakKeyDictionary()


def _arguments(layer: nn.Module) -> dict[str, inspect.Parameter]:
    if layer not in _known:
        forward = inspect.signature(layer.forward)
        _known[layer] = {name: one for name, one in forward.parameters.items() if one.kind is not one.VAR_KEYWORD}
    return _known[layer]


def _takes_several(layer: nn.Module) -> bool:
    arguments = _arguments(layer).values()
    needed = [one for one in arguments if one.default is one.empty and one.kind is not one.KEYWORD_ONLY]
    return len(needed) > 1 or any(one.kind is one.VAR_POSITIONAL for one in arguments)


def tensors_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every parameter and buffer with the module that holds it and its name there, tied ones at each place."""
    for owner in module.modules():
        for members in (owner.named_parameters, owner.named_buffers):
            for name, tensor in members(recurse=False, remove_duplicate=False):
                yield owner, name, tensor
