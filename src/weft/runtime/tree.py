"""Nests of tensors: what layers take and give, and what a message carries.

A nest is a tensor, or a tuple, list or dict of nests, with plain values (None, numbers, texts) among them. Taken
apart, it is a list of tensors and a *skeleton*: nested tuples that can be compared, hashed and written as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.errors import WeftError

Skeleton: TypeAlias = "tuple[Any, ...]"

TENSOR: Skeleton = ("tensor",)
PLAIN = (type(None), bool, int, float, str)
_PLAIN: dict[str, Callable[[str], Any]] = {
    "NoneType": lambda text: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "str": str,
}


def flatten(value: Any) -> tuple[list[Tensor], Skeleton]:
    """The tensors of a nest, in order, and its skeleton."""
    if isinstance(value, Tensor):
        return [value], TENSOR
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors)


def _flatten(value: Any, tensors: list[Tensor]) -> Skeleton:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if type(value) in (tuple, list):
        return (type(value).__name__, *(_flatten(one, tensors) for one in value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ("dict", tuple(value), *(_flatten(one, tensors) for one in value.values()))
    if type(value) in PLAIN:  # as text, for 1, 1.0 and True are equal, and nan is not even equal to itself
        return (type(value).__name__, value if isinstance(value, str) else repr(value))
    raise WeftError(
        "chunks hand over tensors, numbers, texts and None, in tuples, lists and dicts with keys of text "
        f"(got {type(value).__module__}.{type(value).__qualname__}); let the layer before the cut return such values"
    )


def unflatten(skeleton: Skeleton, tensors: Sequence[Any]) -> Any:
    """The nest that a skeleton and its tensors make."""
    return tensors[0] if skeleton == TENSOR else _unflatten(skeleton, iter(tensors))


def _unflatten(skeleton: Skeleton, tensors: Any) -> Any:
    kind, *parts = skeleton
    if kind == "tensor":
        return next(tensors)
    if kind in _PLAIN:
        return _PLAIN[kind](parts[0])
    if kind == "dict":
        keys, *values = parts
        return {key: _unflatten(value, tensors) for key, value in zip(keys, values, strict=True)}
    items = [_unflatten(part, tensors) for part in parts]
    return items if kind == "list" else tuple(items)


def from_json(data: Any) -> Any:
    """A skeleton as it was before JSON made lists of its tuples."""
    return tuple(from_json(one) for one in data) if isinstance(data, list) else data


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest with a function applied to every tensor."""
    tensors, skeleton = flatten(value)
    return unflatten(skeleton, [function(tensor) for tensor in tensors])


def batch_size(value: Any, *, what: str) -> int:
    """How many samples a nest holds: the first dimension of its tensors, which all of them share."""
    sizes = {tensor.shape[0] for tensor in flatten(value)[0] if tensor.dim()}
    if len(sizes) != 1:
        found = f"sizes: {', '.join(map(str, sorted(sizes)))}" if sizes else "no tensor has a dimension"
        raise WeftError(f"the tensors of {what} need one first dimension, the samples ({found})")
    return int(sizes.pop())


def pieces(value: Any, parts: int) -> list[Any]:
    """A nest cut along the samples, the first ones larger by a sample where it doesn't come out even.

    Tensors without a dimension and plain values go into every piece.
    """
    tensors, skeleton = flatten(value)
    cut = [torch.tensor_split(tensor, parts) if tensor.dim() else [tensor] * parts for tensor in tensors]
    return [unflatten(skeleton, [one[part] for one in cut]) for part in range(parts)]
