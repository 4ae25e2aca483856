"""Weights that are not there yet: predicted from the newest ones and the optimizer's own state.

    linear     W - (lr₁ + … + lrₛ) · d, with the direction d of the optimizer's rule (`rules.py`)
    decayed    where the optimizer itself goes in s steps with a gradient of zero: its momentum shrinks, its own
               decay applies; run on a copy of weights and state, so it works for every optimizer

Both go by the rates of the updates that they predict: where there is a learning-rate scheduler, a second one of its
kind runs ahead of it. Before the first update there is no state, and the weights are the newest ones.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.errors import WeftError
from weft.runtime.update.rules import Given, Ratio, Rule, coast_of, rule_of

SchedulerMaker: TypeAlias = Callable[[Optimizer], LRScheduler]
Groups: TypeAlias = "list[dict[str, Any]]"  # the options of every parameter group, in one update
SCHEDULED = ("lr", "momentum", "betas")  # what schedulers change


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How weights are predicted."""

    bias: str = "adam"  # or "printed"
    extrapolation: str = "linear"  # or "decayed"


def check_rule(optimizer: Optimizer | None, choice: Choice) -> None:
    """Refuse an optimizer without the rule that is asked for."""
    if optimizer is not None and choice.extrapolation == "linear":
        rule_of(optimizer)


class Predictor:
    """Predicts the parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer, *, choice: Choice, lr_scheduler: SchedulerMaker | None = None) -> None:
        self.optimizer, self.choice = optimizer, choice
        self._rule = rule_of(optimizer) if choice.extrapolation == "linear" else None
        self._ahead = None if lr_scheduler is None else _Ahead(optimizer, lr_scheduler)
        self._members = _members(optimizer)
        self._moved: dict[int, Tensor | None] = {}  # parameters that have had an update; a zero for sparse gradients
        self._gradients = _Gradients(self._rule)
        self._listens = False
        self._listen()

    def _listen(self) -> None:
        """Hear of gradients, where the rule needs them."""
        if not self._listens and any(map(self._gradients.needed, self.optimizer.param_groups)):
            self.optimizer.register_step_pre_hook(self._gradients)
            self._listens = True

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that it keeps."""
        return sum(gradient.nbytes for gradient in self._gradients.last.values())

    def updated(self) -> None:
        """The optimizer has just made a step, with the gradients that its parameters still hold."""
        for group in self.optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self._moved[id(one)] = torch.zeros_like(one.grad) if one.grad.is_sparse else None
        if self._ahead is not None:
            self._ahead.updated()

    def state(self, parameter: Parameter) -> dict[str, Any] | None:
        """What it knows of a parameter, if that has had an update."""
        if id(parameter) not in self._moved:
            return None
        zero, gradient = self._moved[id(parameter)], self._gradients.last.get(id(parameter))
        return {"sparse": None if zero is None else zero.sparse_dim(), "gradient": gradient}

    @torch.no_grad()
    def resume(self, states: Sequence[tuple[Parameter, dict[str, Any] | None]], scheduler: LRScheduler | None) -> None:
        """Go on from the states of all parameters, after the optimizer and its scheduler do.

        A parameter whose last gradient is needed and not known counts as one that has had no update.
        """
        self._listen()
        self._moved.clear()
        self._gradients.last.clear()
        needed = {
            id(one) for group in self.optimizer.param_groups for one in group["params"] if self._gradients.needed(group)
        }
        for one, state in states:
            if state is None or (id(one) in needed and state["gradient"] is None):
                continue
            self._moved[id(one)] = None if state["sparse"] is None else _sparse_zero(one, state["sparse"])
            if id(one) in needed:
                self._gradients.last[id(one)] = state["gradient"].to(one.device)
        if self._ahead is not None and scheduler is not None:
            self._ahead.resume(self.optimizer, scheduler)

    @torch.no_grad()
    def predict(self, live: Sequence[Parameter], into: Sequence[Parameter], ahead: int) -> None:
        """Write the weights that the live parameters will have after `ahead` more updates into others."""
        if _members(self.optimizer) != self._members:
            raise WeftError(
                "the optimizer holds other parameters than at the start, so its updates can't be predicted; "
                "build a new pipeline with the optimizer that you want"
            )
        homes = {id(one): home.data for one, home in zip(live, into, strict=True)}
        for one in live:
            if id(one) not in self._moved:
                homes[id(one)].copy_(one)
        updates = self._updates(ahead)
        if self._rule is None:
            self._decayed(homes, updates)
        else:
            self._linear(self._rule, homes, updates)

    def basis(self, ahead: int) -> object:
        """What a prediction goes by beside weights and state, which change with an update only."""
        rates = None if self._ahead is None else _plain(self._ahead.options_of_next(ahead))
        return ahead, _plain(self.optimizer.param_groups), rates

    def _updates(self, ahead: int) -> list[Groups]:
        groups = self.optimizer.param_groups
        return [groups] * ahead if self._ahead is None else self._ahead.of_next(ahead, groups)

    def _linear(self, rule: Rule, homes: dict[int, Tensor], updates: list[Groups]) -> None:
        for group, *options in zip(self.optimizer.param_groups, *updates, strict=True):
            way = sum(float(one.get("lr", 1.0)) for one in options)
            for one in self._moving(group):
                given, home = self._given(one, group), _real(homes[id(one)])
                direction = rule.direction(given)
                if isinstance(direction, Ratio):
                    top, bottom, factor = direction
                    torch.addcdiv(given.weight, top, bottom, value=-way * factor, out=home)
                else:
                    torch.add(given.weight, direction, alpha=-way, out=home)

    def _decayed(self, homes: dict[int, Tensor], updates: list[Groups]) -> None:
        running = []
        for group, *options in zip(self.optimizer.param_groups, *updates, strict=True):
            coast = coast_of(self.optimizer, options)
            for one in self._moving(group):
                if coast is not None and self._moved[id(one)] is None:
                    coast(self._given(one, group), options, _real(homes[id(one)]))
                else:
                    homes[id(one)].copy_(one)
                    running.append(id(one))
        if running:
            self._run(running, homes, updates)

    def _run(self, running: Sequence[int], homes: dict[int, Tensor], updates: list[Groups]) -> None:
        """Let an optimizer like the real one update some copies without gradients; it knows none of the originals."""
        copies = {number: Parameter(home) for number, home in homes.items()}  # over the same storage
        ghost = ghost_of(self.optimizer, copies)
        devices = {home.device.index for home in homes.values() if home.is_cuda}
        with torch.random.fork_rng(devices=devices):
            for groups in updates:
                for group, options in zip(ghost.param_groups, groups, strict=True):
                    group |= {name: copy.deepcopy(options[name]) for name in SCHEDULED if name in options}
                for number in running:  # anew every time: a step may change its gradient
                    zero = self._moved[number]
                    copies[number].grad = torch.zeros_like(copies[number]) if zero is None else zero.clone()
                _step_alone(ghost)
        for number, copied in copies.items():
            if copied.data_ptr() != homes[number].data_ptr():  # some optimizers put another tensor in its place
                homes[number].copy_(copied)

    def _moving(self, group: Mapping[str, Any]) -> list[Parameter]:
        return [one for one in group["params"] if id(one) in self._moved]

    def _given(self, parameter: Parameter, group: Mapping[str, Any]) -> Given:
        state = self.optimizer.state.get(parameter, {})
        step = int(state.get("step", 1))
        if parameter.is_complex():  # optimizers take the two parts of a number for two numbers
            state = {name: _real(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        gradient = self._gradients.last.get(id(parameter))
        return Given(_real(parameter.detach()), state, group, gradient, step, self.choice.bias == "printed")


@dataclass(kw_only=True, eq=False)
class _Buffer:
    """Predicted weights, and what they were predicted by; None: they are outdated."""

    leaves: list[Parameter]
    basis: object = None
    written: list[int] = field(default_factory=list)  # how often each had been changed then
    readers: int = 0


class Predictions:
    """The predicted weights of some parameters, each under the keys of those who read it.

    A buffer that nobody reads any more is used again, and as it is while the same weights are asked for: those of the
    next micro-batch, if no update came between.
    """

    def __init__(self, live: Sequence[Parameter], predictor: Predictor | None) -> None:
        self._live, self._predictor = live, predictor
        self._buffers: list[_Buffer] = []
        self._read: dict[Hashable, _Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return len(self._buffers) * sum(one.nbytes for one in self._live)

    def make(self, key: Hashable, ahead: int) -> None:
        basis = None if self._predictor is None else self._predictor.basis(ahead)
        buffer = next((one for one in self._buffers if _fits(one, basis)), None) or self._fill(ahead, basis)
        buffer.readers += 1
        self._read[key] = buffer

    def _fill(self, ahead: int, basis: object) -> _Buffer:
        spare = [one for one in self._buffers if not one.readers]
        if not spare:
            spare = [_Buffer(leaves=[Parameter(torch.empty_like(one)) for one in self._live])]
            self._buffers += spare
        buffer = next((one for one in spare if one.basis is None), spare[0])
        if self._predictor is not None:
            self._predictor.predict(self._live, buffer.leaves, ahead)
        buffer.basis, buffer.written = basis, [one._version for one in buffer.leaves]
        return buffer

    def read(self, key: Hashable) -> list[Parameter]:
        return self._read[key].leaves

    def forget(self, key: Hashable) -> None:
        """One reader less."""
        self._read.pop(key).readers -= 1

    def outdate(self) -> None:
        """There are other weights to predict from."""
        for one in self._buffers:
            one.basis = None


def _fits(buffer: _Buffer, basis: object) -> bool:
    """Whether a buffer holds the weights of a basis: not if a layer has written into them, as some do."""
    known = basis is not None and buffer.basis == basis
    return known and buffer.written == [one._version for one in buffer.leaves]


class _Gradients:
    """The gradients of the last update where a rule needs them, dense and as the optimizer minimizes.

    Taken down before the step, for some steps write over them.
    """

    def __init__(self, rule: Rule | None) -> None:
        self._rule = rule
        self.last: dict[int, Tensor] = {}

    def needed(self, group: Mapping[str, Any]) -> bool:
        return self._rule is not None and self._rule.gradient(group)

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if self.needed(group):
                for one in (one for one in group["params"] if one.grad is not None):
                    gradient = _real(one.grad.to_dense() if one.grad.is_sparse else one.grad)
                    if id(one) not in self.last:
                        self.last[id(one)] = torch.empty_like(gradient)
                    self.last[id(one)].copy_(gradient.neg() if group.get("maximize") else gradient)


class _Ahead:
    """The options of updates to come, from a scheduler of the same kind that is ahead of the real one."""

    def __init__(self, optimizer: Optimizer, lr_scheduler: SchedulerMaker) -> None:
        self._scout = ghost_of(optimizer)
        for group in self._scout.param_groups:
            group["lr"] = copy.deepcopy(group.get("initial_lr", group["lr"]))  # as the real one found it
        self._scout._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns that no update was made
        self._scheduler = lr_scheduler(self._scout)
        for group, real in zip(self._scout.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = copy.deepcopy(real["lr"])  # a scheduler that is built for a later epoch goes on from here
        self._next = deque([self._options()])

    def of_next(self, updates: int, groups: Groups) -> list[Groups]:
        return [[a | b for a, b in zip(groups, one, strict=True)] for one in self.options_of_next(updates)]

    def options_of_next(self, updates: int) -> list[Groups]:
        self._reach(updates)
        return [self._next[one] for one in range(updates)]

    def updated(self) -> None:
        self._reach(2)
        self._next.popleft()

    def resume(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Go back to where the real one is."""
        for group, real in zip(self._scout.param_groups, optimizer.param_groups, strict=True):
            group |= {name: copy.deepcopy(value) for name, value in real.items() if name != "params"}
        self._scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        self._next = deque([self._options()])

    def _reach(self, updates: int) -> None:
        while len(self._next) < updates:
            with contextlib.suppress(ValueError):  # one that has an end is not asked beyond it: the last rates stay
                self._scheduler.step()
            self._next.append(self._options())

    def _options(self) -> Groups:
        groups = self._scout.param_groups
        return [{name: copy.deepcopy(one[name]) for name in SCHEDULED if name in one} for one in groups]


def _plain(value: Any) -> object:
    """A value of an option that compares, and does not change any more; what might is equal to nothing."""
    if isinstance(value, Parameter):
        return id(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | complex | None) else object()


def ghost_of(optimizer: Optimizer, copies: Mapping[int, Parameter] | None = None) -> Optimizer:
    """An optimizer like this one for copies of some parameters, with all its state copied; or without any state.

    It has no hooks. What can't be copied (a lock, a process group) is shared.
    """
    ghost: Optimizer = object.__new__(type(optimizer))
    members = {id(one): one for group in optimizer.param_groups for one in group["params"]}
    memo: dict[int, Any] = members | dict(copies or {}) | {id(optimizer): ghost}
    ghost.__dict__ |= {"state": defaultdict(dict)}
    for name, value in vars(optimizer).items():
        if name == "step" or (name == "state" and copies is None):  # a scheduler puts its own `step` there
            continue
        try:
            ghost.__dict__[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
        except TypeError:
            ghost.__dict__[name] = value
    return ghost


def _step_alone(optimizer: Optimizer) -> None:
    """A step without the hooks that are set for all optimizers."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def _sparse_zero(parameter: Parameter, sparse_dim: int) -> Tensor:
    """A sparse gradient of zero, as `zeros_like` makes it."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dim:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True).coalesce()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _members(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
