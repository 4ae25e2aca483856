"""The optimizer and its learning-rate scheduler, as parts of an update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import WeftError
from weft.runtime.update.part import PartState, UpdatePart
from weft.runtime.update.shadow import shadow_optimizer


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class OptimizerPart(UpdatePart):
    """The innermost part. Its shared state is a list: the options of each parameter group."""

    key = "optimizer"

    def __init__(self, optimizer: Optimizer, live: Sequence[Parameter]) -> None:
        self._optimizer, self._live = optimizer, live

    @property
    def nbytes(self) -> int:
        return _nbytes(list(self._optimizer.state.values()))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self._optimizer.step()
        yield

    def state(self) -> PartState:
        saved = self._optimizer.state_dict()
        numbers = self._numbers()
        other = [name for name in saved if name not in ("state", "param_groups")]
        other += [number for number in saved["state"] if number not in range(len(numbers))]
        if other:
            kind = type(self._optimizer).__name__
            raise WeftError(
                f"a checkpoint holds the state of parameters, and {kind} has other state, too ({other[0]}); "
                "keep it in optimizer.state, by parameter"
            )
        return PartState(
            parameters=[saved["state"].get(number) for number in numbers],
            shared=[options_of(group) for group in saved["param_groups"]],
        )

    def check(self, state: PartState) -> None:
        try:
            shadow = shadow_optimizer(self._optimizer)
            for group in shadow.param_groups:
                group["params"] = [_on_host(parameter) for parameter in group["params"]]
            shadow.load_state_dict(self._state_dict(state))
        except Exception as problem:
            raise ValueError(f"{type(self._optimizer).__name__} does not take the state: {problem}") from problem

    def load(self, state: PartState, *, updates: int) -> None:
        """Groups stay the same objects, which others hold; tensors keep the dtype that they were saved with."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.state.clear()  # before the new state is read, so that they are not held together
        state = replace(state, parameters=list(state.parameters or ()))
        optimizer.load_state_dict(self._state_dict(state))
        for group, loaded in zip(groups, [dict(group) for group in optimizer.param_groups], strict=True):
            group.clear()
            group |= loaded
        optimizer.param_groups = groups
        for parameter, saved in zip(self._live, state.parameters or (), strict=True):
            held = optimizer.state[parameter] if saved else {}
            for name, value in (saved or {}).items():
                if isinstance(value, Tensor) and isinstance(held.get(name), Tensor):
                    # NAdam has both on the host, and would wait for the device in every step if only one were there
                    device = held["step" if name == "mu_product" else name].device
                    if (held[name].dtype, held[name].device) != (value.dtype, device):
                        held[name] = value.to(device)

    def _numbers(self) -> list[int]:
        """The number of each parameter of the set in the optimizer's state_dict."""
        members = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        numbers = {id(parameter): number for number, parameter in enumerate(members)}
        return [numbers[id(parameter)] for parameter in self._live]

    def _state_dict(self, state: PartState) -> dict[str, Any]:
        assert state.parameters is not None
        by_number = dict(zip(self._numbers(), state.parameters, strict=True))
        groups, start = [], 0
        for group, options in zip(self._optimizer.param_groups, state.shared, strict=True):
            groups.append(options | {"params": list(range(start, start := start + len(group["params"])))})
        return {
            "state": {number: by_number[number] for number in sorted(by_number) if by_number[number] is not None},
            "param_groups": groups,
        }


class SchedulerPart(UpdatePart):
    """Steps after the optimizer; all its state is shared."""

    key = "scheduler"

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        yield
        self._scheduler.step()

    def state(self) -> PartState:
        return PartState(shared=self._scheduler.state_dict())

    def load(self, state: PartState, *, updates: int) -> None:
        self._scheduler.load_state_dict(state.shared)


def _on_host(parameter: Parameter) -> Parameter:
    """A stand-in for a parameter of a device, which takes no memory; to it, no state is copied to the device."""
    if parameter.is_cpu:
        return parameter
    return Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), requires_grad=False)


def tensor_bytes(tensor: Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def _nbytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return tensor_bytes(state)
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_nbytes(value) for value in values)
