"""The state of parameter sets in a checkpoint, by parameter name.

It is all that updates depend on besides the weights: the state of every part of an update (optimizer, learning-rate
scheduler, predictor, cure) and the options of parameter groups. Values become JSON, in which a tensor is a name.
Another schedule or number of ranks divides the parameters into other sets, so each set looks up what it needs by name.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.update import PartState, options_of
from weft.runtime.weights import ParameterSet

Fetch: TypeAlias = Callable[[str], Any]  # a tensor of a checkpoint, in new memory, or what stands for it
SHARED = ("optimizer", "scheduler")  # parts with state that belongs to no single parameter
PARTS = ("optimizer", "prediction", "cure")  # every parameter has these keys; a part that is not there has None


class IncompatibleCheckpoint(ValueError):
    """A checkpoint that does not fit this pipeline; its message says why."""


class SavedTensors(Protocol):
    """The tensors of a checkpoint."""

    def tensor(self, key: str) -> Tensor:
        """Read a tensor into new memory."""
        ...

    def read_into(self, key: str, tensor: Tensor) -> None:
        """Read a tensor into one of the same shape."""
        ...

    def stand_in(self, key: str) -> Tensor:
        """A tensor of the same dtype and shape that takes no memory; refuses one that can't be read."""
        ...


# Any value as JSON


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON that `decode` reads back with the same types; adds its tensors to `tensors`, under `key`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"@float": repr(float(value))}
    if isinstance(value, Tensor):
        assert key not in tensors, key
        tensors[key] = value
        return {"@tensor": key}
    if type(value) in (list, tuple):
        items = [encode(item, f"{key}/{index}", tensors) for index, item in enumerate(value)]
        return items if type(value) is list else {"@tuple": items}
    if type(value) in (dict, Counter):
        plain = all(type(name) is str and not name.startswith("@") for name in value)
        pairs = [
            [encode(name, f"{key}/key", tensors), encode(item, f"{key}/{name}", tensors)]
            for name, item in value.items()
        ]
        if type(value) is dict and plain:
            return dict(pairs)
        return {"@dict" if type(value) is dict else "@counter": pairs}
    raise WeftError(
        f"a checkpoint holds numbers, text, tensors, lists, tuples and dicts, and {key} is a {type(value).__name__}; "
        "leave it out, or keep it in one of those"
    )


def decode(value: Any, fetch: Fetch) -> Any:
    """The value that was encoded."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("@float", text)]:
            return float(text)
        case [("@tensor", key)]:
            return fetch(key)
        case [("@tuple", items)]:
            return tuple(decode(item, fetch) for item in items)
        case [("@dict" | "@counter" as kind, pairs)]:
            items = {decode(name, fetch): decode(item, fetch) for name, item in pairs}
            return items if kind == "@dict" else Counter(items)
        case _:
            return {name: decode(item, fetch) for name, item in value.items()}


# Saving


def state_of(parameter_set: ParameterSet, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of a set that has parameters, as JSON; adds its tensors to `tensors`."""
    optimizer, scheduler = parameter_set.optimizer, parameter_set.updater.lr_scheduler
    assert optimizer is not None
    states = {part.key: part.state() for part in parameter_set.updater.parts}
    for key, state in states.items():
        if state.shared is not None and key not in SHARED:
            raise WeftError(
                f"a checkpoint holds the state of a {key} by parameter, because another run may divide the parameters "
                f"into other sets (shared state: {type(state.shared).__name__}); keep it in PartState.parameters"
            )
    first = parameter_set.names[0]
    groups = [
        {"names": names, "options": _encode_all(options, f"{first}/{place}", tensors)}
        for place, (names, options) in enumerate(
            zip(_names_by_group(parameter_set, optimizer), states["optimizer"].shared, strict=True)
        )
    ]
    parameters = {}
    for index, name in enumerate(parameter_set.names):
        by_part = {key: state.parameters[index] for key, state in states.items() if state.parameters is not None}
        parameters[name] = _encode_all(dict.fromkeys(PARTS) | by_part, name, tensors)
    scheduled = None
    if scheduler is not None:
        scheduled = {"kind": type(scheduler).__name__, "state": states["scheduler"].shared}
    return {
        "optimizer": type(optimizer).__name__,
        "cure": _cure_of(parameter_set),
        "updates": parameter_set.updater.updates,
        "groups": groups,
        "scheduler": encode(scheduled, f"scheduler/{first}", tensors),
        "parameters": parameters,
    }


def _cure_of(parameter_set: ParameterSet) -> str | None:
    cure = parameter_set.updater.cure
    return None if cure is None else type(cure).__name__


def _encode_all(values: Mapping[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Values of one parameter or group; the name of a tensor starts with its key."""
    return {key: encode(value, f"{key}/{name}", tensors) for key, value in values.items()}


def _names_by_group(parameter_set: ParameterSet, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each parameter group."""
    live = zip(parameter_set.versions.live, parameter_set.names, strict=True)
    names = {id(parameter): name for parameter, name in live}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


# Loading


class _SavedParameter(NamedTuple):
    """Where the state of a parameter is: in a group of a saved set."""

    saved_set: dict[str, Any]
    group: int

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.saved_set["groups"][self.group]["options"])


class SavedSets:
    """The state of all parameter sets of a checkpoint; `updates` is for old ones, without a count for each set."""

    def __init__(self, sets: Sequence[dict[str, Any]], tensors: SavedTensors, *, updates: int) -> None:
        self.parameters = {
            name: _SavedParameter(saved_set, place)
            for saved_set in sets
            for place, group in enumerate(saved_set["groups"])
            for name in group["names"]
        }
        self._tensors, self._updates = tensors, updates

    def prepare(self, parameter_set: ParameterSet) -> Callable[[], None]:
        """Check what a set needs, and return a function that reads and loads it."""
        if parameter_set.optimizer is None:
            return lambda: None
        groups = _names_by_group(parameter_set, parameter_set.optimizer)
        self._check_kinds(parameter_set, groups)
        shared: dict[str, Any] = {"optimizer": self._options(parameter_set.optimizer, groups)}
        if parameter_set.updater.lr_scheduler is not None:
            shared["scheduler"] = self._scheduler_state(type(parameter_set.updater.lr_scheduler).__name__, groups)
        saved = [self.parameters[name].saved_set["parameters"][name] for name in parameter_set.names]
        live = parameter_set.versions.live
        loads = []
        for part in parameter_set.updater.parts:
            states = [by_part.get(part.key) for by_part in saved]
            if part.key == "cure":
                states = self._of_same_cure(parameter_set, states)
            stand_ins = [decode(state, self._stand_in) for state in states]
            try:
                part.check(PartState(parameters=stand_ins, shared=shared.get(part.key)))
            except ValueError as problem:
                raise IncompatibleCheckpoint(str(problem)) from problem
            loads.append((part, states, shared.get(part.key)))

        saved_sets = [self.parameters[name].saved_set for name in parameter_set.names]
        updates = max(int(saved_set.get("updates", self._updates)) for saved_set in saved_sets)

        def load() -> None:
            parameter_set.updater.updates = updates
            for part, states, shared_state in loads:
                memory = _Memory(parameter_set.optimizer if part.key == "optimizer" else None)
                unread = _Unread(states, live, self._tensors, memory)
                part.load(PartState(parameters=unread, shared=shared_state), updates=updates)

        return load

    def _stand_in(self, key: str) -> Tensor:
        """A number as it is, which a check may look at; only the form of anything larger."""
        stand_in = self._tensors.stand_in(key)
        return self._tensors.tensor(key) if stand_in.numel() == 1 else stand_in

    def _check_kinds(self, parameter_set: ParameterSet, groups: Sequence[Sequence[str]]) -> None:
        """Optimizer and scheduler must have the same class as in the run that was saved."""
        optimizer, lr_scheduler = parameter_set.optimizer, parameter_set.updater.lr_scheduler
        scheduler = None if lr_scheduler is None else type(lr_scheduler).__name__
        for name in (name for group in groups for name in group):
            saved = self.parameters[name].saved_set
            if saved["optimizer"] != type(optimizer).__name__:
                raise IncompatibleCheckpoint(
                    f"{name} was trained by {saved['optimizer']}, and is by {type(optimizer).__name__} here"
                )
            before = None if saved["scheduler"] is None else saved["scheduler"]["kind"]
            if before != scheduler:
                raise IncompatibleCheckpoint(
                    f"{name} was trained with {before or 'no'} lr_scheduler, and is with {scheduler or 'none'} here"
                )

    def _of_same_cure(self, parameter_set: ParameterSet, states: Sequence[Any]) -> list[Any]:
        """The states that this set's cure has saved, None for those of another one.

        Old checkpoints do not say whose a state is: `GapAware` alone had any then.
        """
        cure = _cure_of(parameter_set)
        kinds = [self.parameters[name].saved_set.get("cure", "GapAware") for name in parameter_set.names]
        return [state if kind == cure else None for state, kind in zip(states, kinds, strict=True)]

    def _options(self, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """The options of each group: those that its parameters had.

        An empty group takes those of the saved group at its place, if there were as many groups, or keeps its own.
        """
        first = next(name for names in groups for name in names)
        saved_groups = self.parameters[first].saved_set["groups"]
        options_by_group = []
        for place, (names, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            saved = [self.parameters[name].options for name in names]
            for name, options in zip(names, saved, strict=True):
                if self._differ(options, saved[0]):
                    raise IncompatibleCheckpoint(f"{names[0]} and {name} share a group here, and had different options")
            if saved or len(saved_groups) == len(groups):
                options = decode(saved[0] if saved else saved_groups[place]["options"], self._tensors.tensor)
            else:
                options = options_of(group)
            options_by_group.append(options)
        return options_by_group

    def _scheduler_state(self, kind: str, groups: Sequence[Sequence[str]]) -> Any:
        """The state of a scheduler, which has lists by group: so the saved sets must have had the same groups."""
        states = []
        for place, names in enumerate(groups):
            for name in names:
                saved_set, group = self.parameters[name]
                if (group, len(saved_set["groups"])) != (place, len(groups)):
                    raise IncompatibleCheckpoint(
                        f"{name} is in group {place} of {len(groups)} here, and was in group {group} of "
                        f"{len(saved_set['groups'])}; let the optimizer make the same groups of all parameters, "
                        "empty ones too"
                    )
                states.append(saved_set["scheduler"]["state"])
        if any(self._differ(state, states[0]) for state in states):
            raise IncompatibleCheckpoint(f"{kind} was at different steps for parameters that share a scheduler here")
        return decode(states[0], self._tensors.tensor)

    def _differ(self, left: Any, right: Any) -> bool:
        """Whether encoded values differ. Tensors of two sets have two names, so their values are compared."""
        if left == right:
            return False
        one, other = (repr(decode(value, lambda key: self._tensors.tensor(key).tolist())) for value in (left, right))
        return one != other  # as text, in which nan equals nan


class _Memory:
    """Memory for the tensors that are read: that of an optimizer's old state, which it drops, as far as it fits."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        states = [] if optimizer is None else [state for state in optimizer.state.values() if isinstance(state, dict)]
        tensors = [value.detach() for state in states for value in state.values() if isinstance(value, Tensor)]
        self._old: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for tensor in {_address(tensor): tensor for tensor in tensors if _owns_memory(tensor)}.values():
            self._old[tensor.dtype, tensor.shape, tensor.device].append(tensor)

    def like(self, stand_in: Tensor, device: torch.device) -> Tensor:
        """A tensor of this form on a device; the optimizer decides where numbers are."""
        device = device if stand_in.numel() > 1 else torch.device("cpu")
        fitting = self._old[stand_in.dtype, stand_in.shape, device]
        if fitting:
            return fitting.pop()
        return torch.empty(stand_in.shape, dtype=stand_in.dtype, device=device)


def _owns_memory(tensor: Tensor) -> bool:
    """Whether a tensor is all that its memory holds."""
    dense = tensor.layout == torch.strided and tensor.is_contiguous()
    return dense and tensor.untyped_storage().nbytes() == tensor.nbytes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Unread(Sequence[Any]):
    """The states of some parameters, of which each is read when it is taken: so no more are held than are needed."""

    def __init__(self, states: Sequence[Any], live: Sequence[Tensor], tensors: SavedTensors, memory: _Memory) -> None:
        self._states, self._live, self._tensors, self._memory = states, live, tensors, memory

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: Any) -> Any:
        device = self._live[index].device

        def fetch(key: str) -> Tensor:
            tensor = self._memory.like(self._tensors.stand_in(key), device)
            self._tensors.read_into(key, tensor)
            return tensor

        return decode(self._states[index], fetch)
