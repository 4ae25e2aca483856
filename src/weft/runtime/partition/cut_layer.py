"""A layer of a model that was cut: what it holds, and what it does when it is called.

It has a graph for each mode. Parameters and buffers hang in the layer under the model's own names and are handed to
the graph in every call, so they can be replaced and moved as those of any module.
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
    """The arguments that inputs stand for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


class CutLayer(nn.Module):
    """A layer of a model that was cut. Under the model's names it holds the tensors that its graphs use."""

    def __init__(self, starts: str) -> None:
        super().__init__()
        self.weft_parts: dict[bool, Part] = {}  # by mode
        self.weft_starts = starts

    def forward(self, carry: Any) -> Any:
        part = self.weft_parts.get(self.training)
        if part is None:
            own, asked = ("evaluation", "training") if self.training else ("training", "evaluation")
            raise WeftError(
                f"a model that was exported for {own} has no graph for {asked}; "
                "give weft the model that it was made from"
            )
        values = part.reads.read(carry) if part.reads else carry
        if len(values) != part.carried:
            raise WeftError(
                f"a layer takes what the layer before it returns in the same mode (values: {len(values)}, wanted: "
                f"{part.carried}); call train() or eval() on all layers"
            )
        part.follow(values)
        results = part.code(*values, *(getattr(*place) for place in part.places), *part.constants)
        return part.writes.unflatten(results) if part.writes else results

    def extra_repr(self) -> str:
        return f"from {self.weft_starts}" if self.weft_starts else ""


def hold(layer: CutLayer, tensor: Tensor, name: str, persistent: bool) -> tuple[nn.Module, str]:
    """Hang a parameter or buffer into a layer under its own name. Returns its owner and its name there."""
    *path, leaf = name.split(".")
    owner: nn.Module = layer
    for step in path:
        if step not in dict(owner.named_children()):
            setattr(owner, step, nn.Module())
        owner = owner.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        setattr(owner, leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor, persistent=persistent)
    return owner, leaf


@dataclass(kw_only=True)
class Part:
    """What a layer does in one mode."""

    code: fx.GraphModule  # of the carry, the tensors at `places` and the constants
    carried: int
    places: list[tuple[nn.Module, str]]
    constants: list[Tensor]
    device: torch.device | None
    reads: Form | None  # of the first layer
    writes: Form | None  # of the last layer

    def follow(self, values: Iterable[Any]) -> None:
        """Go where the inputs are: the graph names the device that the example was on."""
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
        self.constants = [one.to(device) if one.device == old else one for one in self.constants]


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of a model's inputs and outputs."""

    inputs: list[Input]
    guards: list[nn.Module]  # what torch.export assumes of sizes
    flatten: Callable[[Call], list[Any]]
    unflatten: Callable[[Any], Any]

    def __deepcopy__(self, _: Any) -> Form:
        return self  # never changes, and torch.export's own forms warn when they are copied

    def read(self, inputs: Any) -> list[Any]:
        """The inputs as the graph takes them."""
        try:
            leaves = self.flatten(as_call(inputs))
            given = list(zip(self.inputs, leaves, strict=True))
        except (KeyError, ValueError) as error:
            raise WeftError(f"inputs must have the form of the example ({error}); give another example") from error
        for one, leaf in given:
            if not one.accepts(leaf):
                raise WeftError(
                    f"torch.export fixed {one.name} to {one} (got {_show(leaf)}); "
                    "give an example that is like the micro-batches"
                )
        for guard in self.guards:
            try:
                guard(*leaves)
            except AssertionError as error:
                raise WeftError(
                    f"torch.export fixed the inputs to {str(error).removeprefix('Guard failed: ')} (got "
                    f"{'; '.join(f'{one.name}: {_show(leaf)}' for one, leaf in given)}); "
                    "give an example that is like the micro-batches"
                ) from None
        return leaves


@dataclass(frozen=True)
class Input:
    """An input as it was exported: a tensor of a shape whose free sizes are None, or a constant."""

    name: str
    shape: tuple[int | None, ...] | None
    constant: Any

    @classmethod
    def of(cls, name: str, value: Any) -> Input:
        if not isinstance(value, Tensor):
            return cls(name, None, value)
        sizes = map(str, value.shape)  # a size that was fixed later on still is a symbol, but reads as a number
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
