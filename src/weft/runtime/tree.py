"""Trees of tensors: the inputs and outputs of layers, and the contents of messages.

A tree is a tensor, a plain value (None, number, string), or a tuple, list or dict of trees. Flattened, it is a list of
tensors and a *skeleton*: nested tuples that can be compared, hashed and written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.errors import WeftError

Skeleton: TypeAlias = "tuple[Any, ...]"

TENSOR: Skeleton = ("tensor",)
PLAIN_TYPES = (type(None), bool, int, float, str)
_PARSERS: dict[str, Callable[[str], Any]] = {
    "NoneType": lambda text: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "str": str,
}


def flatten(value: Any) -> tuple[list[Tensor], Skeleton]:
    """The tensors of a tree, in order, and its skeleton."""
    if isinstance(value, Tensor):
        return [value], TENSOR
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors)


def _flatten(value: Any, tensors: list[Tensor]) -> Skeleton:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if type(value) in (tuple, list):
        return (type(value).__name__, *(_flatten(item, tensors) for item in value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ("dict", tuple(value), *(_flatten(item, tensors) for item in value.values()))
    if type(value) in PLAIN_TYPES:  # as text, since 1 == 1.0 == True, and nan != nan
        return (type(value).__name__, value if isinstance(value, str) else repr(value))
    raise WeftError(
        "chunks pass on tensors, numbers, strings and None, in tuples, lists and dicts with keys of str or int "
        f"(got {type(value).__module__}.{type(value).__qualname__}); let the layer before the cut return such values"
    )


def unflatten(skeleton: Skeleton, tensors: Sequence[Any]) -> Any:
    """The tree of a skeleton and its tensors."""
    return tensors[0] if skeleton == TENSOR else _unflatten(skeleton, iter(tensors))


def _unflatten(skeleton: Skeleton, tensors: Any) -> Any:
    kind, *parts = skeleton
    if kind == "tensor":
        return next(tensors)
    if kind in _PARSERS:
        return _PARSERS[kind](parts[0])
    if kind == "dict":
        keys, *values = parts
        return {key: _unflatten(value, tensors) for key, value in zip(keys, values, strict=True)}
    items = [_unflatten(part, tensors) for part in parts]
    return items if kind == "list" else tuple(items)


def from_json(data: Any) -> Any:
    """A skeleton read from JSON, with the lists made tuples again."""
    return tuple(from_json(item) for item in data) if isinstance(data, list) else data


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same tree with a function applied to every tensor."""
    tensors, skeleton = flatten(value)
    return unflatten(skeleton, [function(tensor) for tensor in tensors])


def batch_size(value: Any, *, what: str) -> int:
    """The number of samples in a tree: the first dimension of its tensors, which must be the same for all."""
    sizes = {tensor.shape[0] for tensor in flatten(value)[0] if tensor.dim()}
    if len(sizes) != 1:
        found = f"sizes: {', '.join(map(str, sorted(sizes)))}" if sizes else "no tensor has a dimension"
        raise WeftError(f"the tensors of {what} must have the same first dimension, the samples ({found})")
    return int(sizes.pop())


def pieces(value: Any, parts: int) -> list[Any]:
    """Split a tree along the samples; if they don't divide evenly, the first pieces have one sample more.

    Tensors without a dimension and plain values go into every piece.
    """
    tensors, skeleton = flatten(value)
    splits = [torch.tensor_split(tensor, parts) if tensor.dim() else [tensor] * parts for tensor in tensors]
    return [unflatten(skeleton, [split[part] for split in splits]) for part in range(parts)]
