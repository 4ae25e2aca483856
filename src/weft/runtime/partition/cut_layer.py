"""A layer of a model that was cut.

It has a graph for each mode. Parameters and buffers are attached to the layer under the model's names and passed to the
graph in every call, so they can be replaced and moved as those of any module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from weft.errors import WeftError

Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


def as_call(inputs: Any) -> Call:
    """Inputs as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


class CutLayer(nn.Module):
    """A layer of a model that was cut, with the tensors that its graphs use, under the model's names."""

    def __init__(self, first_submodule: str) -> None:
        super().__init__()
        self.weft_graphs: dict[bool, LayerGraph] = {}  # by mode: training or not
        self.weft_first_submodule = first_submodule

    @property
    def takes_inputs(self) -> bool:
        """Whether it takes the model's inputs: the first layer."""
        return any(graph.input_signature is not None for graph in self.weft_graphs.values())

    def forward(self, carry: Any) -> Any:
        graph = self.weft_graphs.get(self.training)
        if graph is None:
            exported, wanted = ("evaluation", "training") if self.training else ("training", "evaluation")
            raise WeftError(
                f"a model that was exported for {exported} has no graph for {wanted}; "
                "pass the model that it was exported from"
            )
        values = graph.input_signature.flatten_inputs(carry) if graph.input_signature else carry
        if len(values) != graph.carried:
            raise WeftError(
                f"a layer takes what the previous layer returns in the same mode (values: {len(values)}, expected: "
                f"{graph.carried}); call train() or eval() on all layers"
            )
        graph.move_to_device_of(values)
        results = graph.code(*values, *(getattr(*place) for place in graph.places), *graph.constants)
        return graph.output_signature.unflatten(results) if graph.output_signature else results

    def extra_repr(self) -> str:
        return f"from {self.weft_first_submodule}" if self.weft_first_submodule else ""


def attach_tensor(layer: CutLayer, tensor: Tensor, name: str, persistent: bool) -> tuple[nn.Module, str]:
    """Attach a parameter or buffer to a layer under its name in the model. Returns its owner and its name there."""
    *path, leaf = name.split(".")
    owner: nn.Module = layer
    for child in path:
        if child not in dict(owner.named_children()):
            setattr(owner, child, nn.Module())
        owner = owner.get_submodule(child)
    if isinstance(tensor, nn.Parameter):
        setattr(owner, leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor, persistent=persistent)
    return owner, leaf


@dataclass(kw_only=True)
class LayerGraph:
    """What a layer computes in one mode."""

    code: fx.GraphModule  # takes the carry, the tensors at `places` and the constants
    carried: int  # number of values in the carry
    places: list[tuple[nn.Module, str]]  # of parameters and buffers: owner, attribute
    constants: list[Tensor]
    device: torch.device | None
    input_signature: Signature | None  # only for the first layer
    output_signature: Signature | None  # only for the last layer

    def move_to_device_of(self, values: Iterable[Any]) -> None:
        """The graph names the device of the example; replace it by that of the inputs."""
        device = next((value.device for value in values if isinstance(value, Tensor)), self.device)
        if device == self.device:
            return
        old, self.device = self.device, device

        def moved(value: Any) -> Any:
            return device if isinstance(value, torch.device) and value == old else value

        for module in self.code.modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.nodes:
                    node.args = tuple(map(moved, node.args))
                    node.kwargs = {key: moved(value) for key, value in node.kwargs.items()}
                module.recompile()
        self.constants = [tensor.to(device) if tensor.device == old else tensor for tensor in self.constants]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The structure of a model's inputs and outputs."""

    inputs: list[ExportedInput]
    guards: list[nn.Module]  # raise if sizes are not as torch.export assumes
    flatten: Callable[[Call], list[Any]]
    unflatten: Callable[[Any], Any]

    def __deepcopy__(self, _: Any) -> Signature:
        return self  # it never changes, and the specs of torch.export warn when they are copied

    def flatten_inputs(self, inputs: Any) -> list[Any]:
        """The inputs as a flat list, checked against what was exported."""
        try:
            leaves = self.flatten(as_call(inputs))
            given = list(zip(self.inputs, leaves, strict=True))
        except (KeyError, ValueError) as error:
            raise WeftError(f"inputs must have the structure of the example ({error}); pass another example") from error
        for exported, leaf in given:
            if not exported.accepts(leaf):
                raise WeftError(
                    f"torch.export fixed {exported.name} to {exported} (got {_show(leaf)}); "
                    "pass an example that is like the micro-batches"
                )
        for guard in self.guards:
            try:
                guard(*leaves)
            except AssertionError as error:
                raise WeftError(
                    f"torch.export fixed the inputs to {str(error).removeprefix('Guard failed: ')} (got "
                    f"{'; '.join(f'{exported.name}: {_show(leaf)}' for exported, leaf in given)}); "
                    "pass an example that is like the micro-batches"
                ) from None
        return leaves


@dataclass(frozen=True)
class ExportedInput:
    """An input as it was exported: a tensor of a shape in which None is any size, or a constant."""

    name: str
    shape: tuple[int | None, ...] | None
    constant: Any

    @classmethod
    def of(cls, name: str, value: Any) -> ExportedInput:
        if not isinstance(value, Tensor):
            return cls(name, None, value)
        sizes = map(str, value.shape)  # a size that was fixed later is still a symbol, but prints as a number
        return cls(name, tuple(int(size) if size.isdigit() else None for size in sizes), None)

    def accepts(self, value: Any) -> bool:
        if self.shape is None:
            return type(value) is type(self.constant) and bool(value == self.constant)
        if not isinstance(value, Tensor) or value.dim() != len(self.shape):
            return False
        return all(size in (None, given) for size, given in zip(self.shape, value.shape, strict=True))

    def __str__(self) -> str:
        if self.shape is None:
            return repr(self.constant)
        return f"a tensor of [{', '.join('any' if size is None else str(size) for size in self.shape)}]"


def _show(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
