"""Tensors on the meta device become real: read from a source by name, or initialized as the model does it.

Only those that a process holds, and with values only those that it decides: replicas and holders of tied weights
receive them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.initial.initialize import Initializer, initialize
from weft.runtime.initial.on_meta import last_write
from weft.runtime.initial.places import check_attributes, places_of, replace_by_empty
from weft.runtime.partition import LayeredModel, Place
from weft.runtime.storage import Form, TensorMapping, TensorSource
from weft.text import closest

Weights: TypeAlias = "str | os.PathLike[str] | Mapping[str, Tensor] | TensorSource | Initializer | None"
OpenWeights: TypeAlias = "Callable[[str | os.PathLike[str]], TensorSource]"
SOURCE_METHODS = ("names", "form", "read_into")


class _Member(NamedTuple):
    """A tensor that this process holds."""

    name: str
    before: Tensor
    now: Tensor
    own: bool  # whether this process decides its values


def make_tensors(
    model: LayeredModel,
    needed: Iterable[Tensor],
    *,
    own: Iterable[Tensor],
    weights: Weights,
    open_weights: OpenWeights,
    seed: int,
) -> dict[int, Tensor]:
    """Make the needed tensors real, with values for `own` ones; returns what each is now, by the id of what it was."""
    source, function = _parse(weights, open_weights)
    places = places_of([model.root, *model.layers])
    names, owned = _all_names(model), {id(tensor) for tensor in own}
    distinct = {id(tensor): tensor for tensor in needed}
    modules = [module for top in (model.root, *model.layers) for module in top.modules()]
    if any(tensor.is_meta for tensor in distinct.values()):
        check_attributes(modules)
    elif function is not None:
        raise WeftError(
            "a function in weights= initializes a model on the meta device, and this one is real; leave weights out, "
            "or build the model in `with weft.on_meta():`"
        )
    decided = [tensor for key, tensor in distinct.items() if key in owned]
    found = {} if source is None else _find(source, decided, names, model)
    members = [
        _Member(
            name=names[key][0],
            before=tensor,
            now=replace_by_empty(tensor, "cpu", places[key]) if tensor.is_meta else tensor,
            own=key in owned,
        )
        for key, tensor in distinct.items()
    ]
    new = [member for member in members if member.own and member.before.is_meta and id(member.before) not in found]
    try:
        others = {names[key][0]: getattr(*found[0]) for key, found in places.items()}
        tied = {member.name: _keeper(member, places) for member in new if len(names[id(member.before)]) > 1}
        _initialize(model.root, new, others, places, tied, seed=seed, function=function)
        for member in members:
            if source is not None and id(member.before) in found:
                with torch.no_grad():
                    source.read_into(found[id(member.before)], member.now.detach())
    except BaseException:
        for member in members:  # a model without values must not look like a real one
            for owner, attribute in places[id(member.before)]:
                setattr(owner, attribute, member.before)
        raise
    return {id(member.before): member.now for member in members}


def _parse(weights: Weights, open_weights: OpenWeights) -> tuple[TensorSource | None, Initializer | None]:
    if weights is None:
        return None, None
    if isinstance(weights, str | os.PathLike):
        return open_weights(weights), None
    if isinstance(weights, Mapping):
        return TensorMapping(weights), None
    if all(hasattr(weights, method) for method in SOURCE_METHODS):
        return cast(TensorSource, weights), None
    if callable(weights) and not isinstance(weights, nn.Module):
        return None, weights
    raise WeftError(
        "weights is a file or folder of safetensors, a checkpoint, a dict of tensors such as model.state_dict(), an "
        f"object with the methods {', '.join(SOURCE_METHODS)}, or a function that initializes a module (got an object "
        f"of type {type(weights).__name__}); give one of these"
    )


def _all_names(model: LayeredModel) -> dict[int, list[str]]:
    """The names of every tensor, by id: those of the state_dict first, then where it is in the modules."""
    names = model.names()
    for top in (model.root, *model.layers):
        for members in (top.named_parameters, top.named_buffers):
            for name, tensor in members(remove_duplicate=False):
                if not names[id(tensor)]:
                    names[id(tensor)].append(name)
    return names


def _find(
    source: TensorSource, tensors: Iterable[Tensor], names: dict[int, list[str]], model: LayeredModel
) -> dict[int, str]:
    """The name in the source of each tensor that a state_dict has, by id; refuses what does not fit."""
    there = set(source.names())
    prefix = f"{getattr(model.root, 'base_model_prefix', '')}."  # which files of transformers lack without a head
    optional = set(getattr(source, "optional", ()))
    found: dict[int, str] = {}
    missing: list[str] = []
    for tensor in tensors:
        possible = [other for name in names[id(tensor)] for other in (name, name.removeprefix(prefix), prefix + name)]
        known = [name for name in possible if name in there]
        if known:
            dtype, shape = _form(source, known[0])
            if shape != tuple(tensor.shape):
                raise WeftError(
                    f"{known[0]} has another shape in {source} (model: {tuple(tensor.shape)}, there: {shape}); "
                    "give weights= those of this model"
                )
            if _is_float(dtype) != _is_float(tensor.dtype):
                raise WeftError(
                    f"{known[0]} is {tensor.dtype} in the model and {dtype} in {source}; give weights= those of this "
                    "model, not quantized ones"
                )
            found[id(tensor)] = known[0]
        elif names[id(tensor)][0] in model.state and not optional.intersection(names[id(tensor)]):
            missing.append(names[id(tensor)][0])
    if missing:
        raise WeftError(_missing(source, missing, there.difference(*names.values())))
    return found


def _form(source: TensorSource, name: str) -> Form:
    """The dtype and shape that a source, which may be the user's, gives for a tensor."""
    match source.form(name):
        case (torch.dtype() as dtype, tuple() | list() as shape) if all(isinstance(size, int) for size in shape):
            return dtype, tuple(shape)
        case other:
            parts = other if isinstance(other, tuple) else [other]
            raise WeftError(
                f"form of {type(source).__name__} must return a dtype and a shape (for {name}, got "
                f"{', '.join(type(part).__name__ for part in parts)}); return (tensor.dtype, tuple(tensor.shape))"
            )


def _missing(source: TensorSource, missing: Sequence[str], others: Collection[str]) -> str:
    """What to say of missing names; `others` are those that only the source has."""
    remedy = "give weights= those of this model"
    has = closest(missing[0], others)
    if has is not None:
        remedy += f", or rename them (it has {has})"
    elif others:
        remedy += f" (it has {min(others)}, which the model does not)"
    return f"{source} has no {missing[0]} (missing: {len(missing)}); {remedy}"


def _is_float(dtype: torch.dtype) -> bool:
    """Floating-point numbers are converted to one another; integers in their place would be quantized ones."""
    return dtype.is_floating_point or dtype.is_complex


@torch.no_grad()
def _initialize(
    root: nn.Module,
    members: Sequence[_Member],
    others: dict[str, Tensor],
    places: dict[int, list[Place]],
    tied: dict[str, nn.Module],
    *,
    seed: int,
    function: Initializer | None,
) -> None:
    """Initialize new tensors, among others of the model; refuse those that nothing has initialized."""
    if not members:
        return
    for member in members:
        if function is None and (lost := last_write(member.before).lost):
            raise WeftError(
                f"{lost} writes to {member.name}, which is lost on the meta device; do that in reset_parameters of its "
                "module, or give weights= a function that initializes a module"
            )
        if member.now.is_floating_point() or member.now.is_complex():
            member.now.fill_(float("nan"))
    tensors = {member.name: member.now for member in members}
    written = initialize(root, list(tensors), others | tensors, seed=seed, tied=tied, function=function)
    for member in members:
        name, now = member.name, member.now
        for owner, attribute in places[id(member.before)]:
            if (other := getattr(owner, attribute)) is not now:  # a rule may set a new tensor
                now.copy_(other)
                written.add(name)
                setattr(owner, attribute, now)
        if now.numel() and (name not in written or now.isnan().any()):
            raise WeftError(_uninitialized(member, places[id(member.before)][0]))


def _keeper(member: _Member, places: dict[int, list[Place]]) -> nn.Module:
    """The module that a tied tensor was made for."""
    module = last_write(member.before).module
    return (module and module()) or places[id(member.before)][0][0]


def _uninitialized(member: _Member, place: Place) -> str:
    owner, kind = type(place[0]).__name__, "parameter" if isinstance(member.now, nn.Parameter) else "buffer"
    return (
        f"nothing initializes the {kind} {member.name}, which was built on the meta device ({owner} has no "
        "reset_parameters that does); write one, build the model in `with weft.on_meta():`, which keeps what "
        "constructors compute, or give weights= a file or folder that has it, or a function that initializes a module"
    )
