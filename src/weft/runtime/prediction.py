"""Weights that are not there yet: predicted from the newest ones and the optimizer's own state.

    linear     W - (lr₁ + … + lrₛ) · d, with the direction d of the optimizer's rule (`rules.py`)
    decayed    where the optimizer itself goes in s steps with a gradient of zero: its momentum shrinks, its own
               decay applies; run on a copy of weights and state, so it works for every optimizer

Both go by the rates of the updates that they predict: where there is a learning-rate scheduler, a second one of its
kind runs ahead of it. Before the first update there is no state, and the weights are the newest ones.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import WeftError
from weft.runtime.rules import Given, Rule, rule_of

SchedulerMaker: TypeAlias = Callable[[Optimizer], LRScheduler]
Rates: TypeAlias = "list[list[float]]"  # of the next updates, one a parameter group


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How weights are predicted."""

    bias: str = "adam"  # or "printed"
    extrapolation: str = "linear"  # or "decayed"


class Predictor:
    """Predicts the parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer, *, choice: Choice, lr_scheduler: SchedulerMaker | None = None) -> None:
        self.optimizer, self.choice = optimizer, choice
        self._rule = rule_of(optimizer) if choice.extrapolation == "linear" else None
        self._rates = None if lr_scheduler is None else _RatesAhead(optimizer, lr_scheduler)
        self._members = _members(optimizer)
        self._moved: set[int] = set()  # parameters that have had an update
        self._gradients: dict[int, Tensor] = {}  # of the last update, where the rule needs them

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that it keeps."""
        return sum(gradient.nbytes for gradient in self._gradients.values())

    def updated(self) -> None:
        """The optimizer has just made a step, with the gradients that its parameters still hold."""
        for group in self.optimizer.param_groups:
            given = {id(one): one.grad.detach() for one in group["params"] if one.grad is not None}
            self._moved |= given.keys()
            if self._rule is not None and self._rule.gradient(group):
                self._gradients |= given
        if self._rates is not None:
            self._rates.updated()

    @torch.no_grad()
    def predict(self, live: Sequence[Parameter], into: Sequence[Parameter], ahead: int) -> None:
        """Write the weights that the live parameters will have after `ahead` more updates into others."""
        if _members(self.optimizer) != self._members:
            raise WeftError(
                "the optimizer holds other parameters than at the start, so its updates can't be predicted; "
                "build a new pipeline with the optimizer that you want"
            )
        homes = {id(one): home.data for one, home in zip(live, into, strict=True)}
        rates = [_rates(self.optimizer)] * ahead if self._rates is None else self._rates.of_next(ahead)
        if self._rule is None:
            self._decayed(live, homes, rates)
        else:
            self._linear(self._rule, homes, rates)

    def _linear(self, rule: Rule, homes: dict[int, Tensor], rates: Rates) -> None:
        for group, *each in zip(self.optimizer.param_groups, *rates, strict=True):
            for one in group["params"]:
                if id(one) in self._moved:
                    direction = rule.direction(self._given(one, group))
                    torch.add(one, direction, alpha=-sum(each), out=homes[id(one)])
                else:
                    homes[id(one)].copy_(one)

    def _given(self, parameter: Parameter, group: Mapping[str, Any]) -> Given:
        state, gradient = self.optimizer.state[parameter], self._gradients.get(id(parameter))
        if gradient is not None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradient = -gradient if group.get("maximize") else gradient
        step = 1 if self.choice.bias == "printed" else int(state.get("step", 1))
        return Given(parameter.detach(), state, group, gradient, step)

    def _decayed(self, live: Sequence[Parameter], homes: dict[int, Tensor], rates: Rates) -> None:
        copies = {}
        for one in live:
            homes[id(one)].copy_(one)
            copies[one] = Parameter(homes[id(one)])  # over the same storage, with a gradient of its own
            if id(one) in self._moved:
                copies[one].grad = torch.zeros_like(one)
        if self._moved:
            ghost = _ghost(self.optimizer, copies)
            for each in rates:
                _set_rates(ghost, each)
                ghost.step()


class _RatesAhead:
    """The learning rates of updates to come, from a scheduler of the same kind that is ahead of the real one."""

    def __init__(self, optimizer: Optimizer, lr_scheduler: SchedulerMaker) -> None:
        self._scout = _ghost(optimizer, {})
        for group in self._scout.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])  # as the real one found it
        self._scout._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns that no update was made
        self._scheduler = lr_scheduler(self._scout)
        self._next = deque([_rates(self._scout)])

    def of_next(self, updates: int) -> Rates:
        while len(self._next) < updates:
            self._scheduler.step()
            self._next.append(_rates(self._scout))
        return list(self._next)[:updates]

    def updated(self) -> None:
        self.of_next(2)
        self._next.popleft()


def _ghost(optimizer: Optimizer, copies: Mapping[Parameter, Parameter]) -> Optimizer:
    """An optimizer like this one, for copies of some parameters, with a copy of their state."""
    ghost: Optimizer = object.__new__(type(optimizer))
    known = {id(one): copies.get(one, one) for group in optimizer.param_groups for one in group["params"]}
    own = {"state", "param_groups", "step"}  # a scheduler puts its own `step` there
    ghost.__dict__ |= {
        name: OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, dict(known))
        for name, value in vars(optimizer).items()
        if name not in own
    }
    ghost.state = defaultdict(dict)
    for one, copied in copies.items():
        if one in optimizer.state:
            ghost.state[copied] = copy.deepcopy(optimizer.state[one], dict(known))
    ghost.param_groups = [
        group | {"params": [known[id(one)] for one in group["params"]]} for group in optimizer.param_groups
    ]
    return ghost


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def _set_rates(optimizer: Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate


def _members(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
