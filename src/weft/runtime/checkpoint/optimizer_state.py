"""The state of parameter sets, by parameter name: what is saved of them, and how it comes back into other sets.

All that an update depends on beside the weights: the optimizer's state and options, the learning-rate scheduler, what
prediction and cures remember. Values become JSON, in which a tensor is a name; other chunks, ranks and schedules cut
the parameters into other sets, so each one takes what it needs by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.update import ghost_of
from weft.runtime.weights import ParameterSet

Fetch: TypeAlias = Callable[[str], Tensor]  # a tensor of a checkpoint, always a new one
OWN = ("params", "param_names")  # of a group, beside its options


class IncompatibleCheckpoint(ValueError):
    """A checkpoint that does not fit this pipeline; tells why."""


# Any value as JSON


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON that `decode` reads back with the same types; its tensors are put aside, under `key`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"@float": repr(float(value))}
    if isinstance(value, Tensor):
        assert key not in tensors, key
        tensors[key] = value
        return {"@tensor": key}
    if type(value) in (list, tuple):
        items = [encode(one, f"{key}/{place}", tensors) for place, one in enumerate(value)]
        return items if type(value) is list else {"@tuple": items}
    if type(value) in (dict, Counter):
        plain = all(type(name) is str and not name.startswith("@") for name in value)
        pairs = [
            [encode(name, f"{key}/key", tensors), encode(one, f"{key}/{name}", tensors)] for name, one in value.items()
        ]
        if type(value) is dict and plain:
            return dict(pairs)
        return {"@dict" if type(value) is dict else "@counter": pairs}
    raise WeftError(
        f"a checkpoint holds numbers, text, tensors, lists, tuples and dicts, and {key} is a {type(value).__name__}; "
        "leave it out, or keep it in one of those"
    )


def decode(value: Any, fetch: Fetch) -> Any:
    """What was encoded."""
    if isinstance(value, list):
        return [decode(one, fetch) for one in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("@float", text)]:
            return float(text)
        case [("@tensor", key)]:
            return fetch(key)
        case [("@tuple", items)]:
            return tuple(decode(one, fetch) for one in items)
        case [("@dict" | "@counter" as kind, pairs)]:
            made = {decode(name, fetch): decode(one, fetch) for name, one in pairs}
            return made if kind == "@dict" else Counter(made)
        case _:
            return {name: decode(one, fetch) for name, one in value.items()}


# Out of a parameter set


def state_of(one: ParameterSet, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a set that has parameters, as JSON; its tensors are put aside."""
    optimizer, scheduler = one.optimizer, one.lr_scheduler
    assert optimizer is not None
    found = optimizer.state_dict()
    members, first = _members(one, optimizer), one.names[0]
    own = [name for name in found if name not in ("state", "param_groups")]
    own += [key for key in found["state"] if key not in range(len(members))]
    if own:
        kind = type(optimizer).__name__
        raise WeftError(f"a checkpoint holds state by parameter, and {kind} has one of its own ({own[0]})")
    groups = [
        {
            "names": [members[number] for number in group["params"]],
            "options": _encoded({key: group[key] for key in group if key not in OWN}, f"{first}/{place}", tensors),
        }
        for place, group in enumerate(found["param_groups"])
    ]
    scheduled = None if scheduler is None else {"kind": type(scheduler).__name__, "state": scheduler.state_dict()}
    numbers = {name: number for number, name in enumerate(members)}
    parameters = {
        name: _encoded(
            {
                "optimizer": found["state"].get(numbers[name]),
                "prediction": None if one.predictor is None else one.predictor.state(live),
                "cure": one.treatment.state(place),
            },
            name,
            tensors,
        )
        for place, (name, live) in enumerate(zip(one.names, one.versions.live, strict=True))
    }
    return {
        "optimizer": type(optimizer).__name__,
        "groups": groups,
        "scheduler": encode(scheduled, f"scheduler/{first}", tensors),
        "parameters": parameters,
    }


def _encoded(values: Mapping[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Some values of one name; tensors are called after what they are, then the name."""
    return {what: encode(value, f"{what}/{name}", tensors) for what, value in values.items()}


def _members(one: ParameterSet, optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, as its state_dict counts them."""
    names = {id(live): name for live, name in zip(one.versions.live, one.names, strict=True)}
    return [names[id(live)] for group in optimizer.param_groups for live in group["params"]]


# Into another one


class _Source(NamedTuple):
    """Where the state of a parameter is: in a group of a set that was saved."""

    set: dict[str, Any]
    place: int

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.set["groups"][self.place]["options"])


class Saved:
    """The state of all parameter sets of a checkpoint."""

    def __init__(self, sets: Sequence[dict[str, Any]], fetch: Fetch, *, updates: int) -> None:
        self.sources = {
            name: _Source(one, place)
            for one in sets
            for place, group in enumerate(one["groups"])
            for name in group["names"]
        }
        self.fetch, self.updates = fetch, updates

    def prepare(self, one: ParameterSet) -> Callable[[], None]:
        """Read and check what a set needs; a function that then puts it there."""
        optimizer, scheduler = one.optimizer, one.lr_scheduler
        if optimizer is None:
            return lambda: None
        names = _members(one, optimizer)
        self._check_kinds(one, names)
        of = {name: self.sources[name].set["parameters"][name] for name in names}
        states = {number: decode(of[name]["optimizer"], self.fetch) for number, name in enumerate(names)}
        whole = {
            "state": {number: state for number, state in states.items() if state is not None},
            "param_groups": self._groups(optimizer, names),
        }
        try:
            ghost_of(optimizer).load_state_dict(whole)
        except Exception as problem:
            raise IncompatibleCheckpoint(f"{type(optimizer).__name__} does not take the state: {problem}") from problem
        scheduled = None if scheduler is None else self._scheduled(type(scheduler).__name__, optimizer, names)
        predictions = [decode(of[name]["prediction"], self.fetch) for name in one.names]
        cures = [decode(of[name]["cure"], self.fetch) for name in one.names]

        def install() -> None:
            _load(optimizer, whole)
            if scheduler is not None:
                scheduler.load_state_dict(scheduled or {})
            if one.predictor is not None:
                one.predictor.resume(list(zip(one.versions.live, predictions, strict=True)), scheduler)
            one.treatment.resume(cures, updates=self.updates)

        return install

    def _check_kinds(self, one: ParameterSet, names: Sequence[str]) -> None:
        scheduler = None if one.lr_scheduler is None else type(one.lr_scheduler).__name__
        for name in names:
            saved = self.sources[name].set
            if saved["optimizer"] != type(one.optimizer).__name__:
                raise IncompatibleCheckpoint(
                    f"{name} was trained by {saved['optimizer']}, and is by {type(one.optimizer).__name__} here"
                )
            before = None if saved["scheduler"] is None else saved["scheduler"]["kind"]
            if before != scheduler:
                raise IncompatibleCheckpoint(
                    f"{name} was trained with {before or 'no'} lr_scheduler, and is with {scheduler or 'none'} here"
                )

    def _groups(self, optimizer: Optimizer, names: Sequence[str]) -> list[dict[str, Any]]:
        """Every group's options: those that its parameters had; of an empty one, those that it had beside them."""
        beside = self.sources[names[0]].set["groups"]
        groups, first = [], 0
        for place, group in enumerate(optimizer.param_groups):
            numbers = list(range(first, first := first + len(group["params"])))
            members = [names[number] for number in numbers]
            saved = [self.sources[name].options for name in members]
            for name, options in zip(members, saved, strict=True):
                if options != saved[0]:
                    raise IncompatibleCheckpoint(
                        f"{members[0]} and {name} share a group here, and had other options each"
                    )
            if saved or len(beside) == len(optimizer.param_groups):
                options = decode(saved[0] if saved else beside[place]["options"], self.fetch)
            else:
                options = {name: value for name, value in group.items() if name not in OWN}
            groups.append(options | {"params": numbers})
        return groups

    def _scheduled(self, kind: str, optimizer: Optimizer, names: Sequence[str]) -> Any:
        """The state of a scheduler, which has lists by group: of sets that have the same groups, at the same place."""
        members, found = iter(names), []
        for place, group in enumerate(optimizer.param_groups):
            for name in (next(members) for _ in group["params"]):
                source = self.sources[name]
                if (source.place, len(source.set["groups"])) != (place, len(optimizer.param_groups)):
                    raise IncompatibleCheckpoint(
                        f"{name} is in group {place} of {len(optimizer.param_groups)} here, and was in group "
                        f"{source.place} of {len(source.set['groups'])}; let the optimizer make the same groups of all "
                        "parameters, empty ones too"
                    )
                found.append(source.set["scheduler"]["state"])
        if any(one != found[0] for one in found):
            raise IncompatibleCheckpoint(f"{kind} was not at the same place for all parameters that share one here")
        return decode(found[0], self.fetch)


def _load(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state; groups stay the objects that others hold, and tensors keep the dtype they had."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(dict(state))
    for group, loaded in zip(groups, [dict(one) for one in optimizer.param_groups], strict=True):
        group.clear()
        group |= loaded
    optimizer.param_groups = groups
    members = [live for group in groups for live in group["params"]]
    for number, saved in state["state"].items():
        held = optimizer.state[members[number]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and isinstance(held.get(name), Tensor) and held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)
