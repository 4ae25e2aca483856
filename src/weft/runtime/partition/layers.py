"""A model as a list of layers, with the parameter names of the user's model.

Layers are called one after the other, as in `nn.Sequential`, each with the output of the previous one. A tuple is
unpacked for a layer whose forward needs several arguments, a dict for a layer whose arguments have its keys.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.partition.cut import cut_layers
from weft.runtime.partition.cut_layer import CutLayer
from weft.runtime.partition.export import has_checkpointing, is_exported
from weft.runtime.partition.members import AS_THEY_ARE, ComputeDtypes, cast_inputs, state_tensors
from weft.runtime.tree import map_tensors


@dataclass(frozen=True, kw_only=True)
class LayeredModel:
    """The whole model, as every rank gets it; a rank then keeps the layers of its own chunks."""

    layers: list[nn.Module]
    root: nn.Module  # whose modules hold the same tensors, under the model's names
    state: dict[str, Tensor]  # name -> parameter or persistent buffer, as in its state_dict
    checkpointing: bool = False  # a model that was cut had gradient checkpointing, which its layers have not
    dtypes: ComputeDtypes = AS_THEY_ARE

    def names(self) -> defaultdict[int, list[str]]:
        """The names of each tensor, by id; a tied tensor has several."""
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, tensor in self.state.items():
            names[id(tensor)].append(name)
        return names


def layered_model(
    model: Any, *, cut: Sequence[str] | None, example: Any, dtype: torch.dtype | None = None
) -> LayeredModel:
    """A model in any supported form, as layers; `dtype` is a lower precision in which passes read its parameters."""
    if isinstance(model, list | tuple | nn.ModuleList) and not isinstance(model, nn.Sequential):
        if others := [layer for layer in model if not isinstance(layer, nn.Module)]:
            raise WeftError(f"a list of layers must hold nn.Modules (got {type(others[0]).__name__})")
        model = model if isinstance(model, nn.ModuleList) else nn.Sequential(*model)
    dtypes = ComputeDtypes.of_model(model, dtype) if isinstance(model, nn.Module) else ComputeDtypes(low=dtype)
    if isinstance(model, nn.Sequential | nn.ModuleList) and cut is None:
        layers = list(model)
    else:
        copied = None if example is None else map_tensors(Tensor.clone, example)  # a view would be exported as a view
        layers = cut_layers(model, at=cut, example=copied, dtypes=dtypes)
    if not layers:
        raise WeftError("a model needs at least one layer (got none)")
    named = nn.ModuleList(layers) if is_exported(model) else model
    tops = layers if is_exported(model) else [model]  # an exported layer has the names of the model
    state = {name: tensor for top in tops for name, tensor in state_tensors(top).items()}
    if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        count = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
        raise WeftError(
            f"there is nothing to train: no parameter needs a gradient (parameters: {count}, layers: {len(layers)}); "
            "set requires_grad on those to train"
        )
    return LayeredModel(
        layers=layers,
        root=named,
        state=state,
        checkpointing=has_checkpointing(model) and isinstance(layers[0], CutLayer),
        dtypes=dtypes,
    )


def layer_input(layer: nn.Module, value: Any, dtype: torch.dtype | None) -> Any:
    """What a layer is given: floating-point tensors in a dtype, except between the cuts of one graph, which casts."""
    return value if isinstance(layer, CutLayer) and not layer.takes_inputs else cast_inputs(value, dtype)


def call_layer(layer: nn.Module, value: Any) -> Any:
    """Call a layer with the output of the previous one."""
    if isinstance(value, Tensor):
        return layer(value)
    if type(value) is tuple and _takes_several(layer):
        return layer(*value)
    if type(value) is dict and value.keys() <= _arguments(layer).keys():
        return layer(**value)
    return layer(value)


_cached_arguments: WeakKeyDictionary[nn.Module, dict[str, inspect.Parameter]] = WeakKeyDictionary()


def _arguments(layer: nn.Module) -> dict[str, inspect.Parameter]:
    if layer not in _cached_arguments:
        forward = inspect.signature(layer.forward)
        _cached_arguments[layer] = {
            name: argument for name, argument in forward.parameters.items() if argument.kind is not argument.VAR_KEYWORD
        }
    return _cached_arguments[layer]


def _takes_several(layer: nn.Module) -> bool:
    arguments = _arguments(layer).values()
    required = [
        argument
        for argument in arguments
        if argument.default is argument.empty and argument.kind is not argument.KEYWORD_ONLY
    ]
    return len(required) > 1 or any(argument.kind is argument.VAR_POSITIONAL for argument in arguments)
