"""Predicts weights some updates ahead, from the newest weights and the optimizer's state.

    linear     W - (lr₁ + … + lrₛ) · d, with the direction d of the optimizer's rule (`rules.py`)
    decayed    the result of s steps of the optimizer with zero gradients (`decayed.py`)

Both use the learning rates of the predicted updates (`rates_ahead.py`). Before its first update, a parameter has no
optimizer state, and its prediction is the newest weight.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.tensors import as_real, by_kind, copy_tensors, in_batches
from weft.runtime.update.decayed import closed_form, run_shadow
from weft.runtime.update.host_numbers import HostNumbers, on_device
from weft.runtime.update.moves import move_weights
from weft.runtime.update.part import PartState, UpdatePart
from weft.runtime.update.rates_ahead import Groups, RatesAhead
from weft.runtime.update.rules import Rule, UpdatedParameter, rule_of


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """How weights are predicted."""

    bias: str = "adam"  # or "printed"
    extrapolation: str = "linear"  # or "decayed"


def check_rule(optimizer: Optimizer | None, options: PredictionOptions) -> None:
    """Refuse an optimizer that has no rule for these options."""
    if optimizer is not None and options.extrapolation == "linear":
        rule_of(optimizer)


class Predictor(UpdatePart):
    """Predicts the parameters of one optimizer; observes its updates."""

    key = "prediction"

    def __init__(
        self,
        optimizer: Optimizer,
        live: Sequence[Parameter],
        *,
        options: PredictionOptions,
        rates: RatesAhead | None = None,
    ) -> None:
        self.options = options
        self._optimizer, self._live, self._rates = optimizer, live, rates
        self._rule = rule_of(optimizer) if options.extrapolation == "linear" else None
        self._members = _member_ids(optimizer)
        self._on_device = any(map(on_device, live))
        self._numbers: defaultdict[int, HostNumbers] = defaultdict(HostNumbers)  # by the number of a group
        # By id, the parameters that have had an update; a zero gradient of those that have sparse ones.
        self._updated: dict[int, Tensor | None] = {}
        self._steps: Counter[int] = Counter()  # by id, the updates so far, for states that count them on a device
        self._gradients = _LastGradients(self._rule)
        self._gradients.observe(optimizer)

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self._gradients.last.values())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        yield
        for parameter in self._live:
            if parameter.grad is not None:
                sparse = parameter.grad.is_sparse
                self._updated[id(parameter)] = torch.zeros_like(parameter.grad) if sparse else None
                self._steps[id(parameter)] += 1
        if self._rates is not None:
            self._rates.advance()

    def state(self) -> PartState:
        return PartState(parameters=[self._parameter_state(parameter) for parameter in self._live])

    def _parameter_state(self, parameter: Parameter) -> dict[str, Any] | None:
        if id(parameter) not in self._updated:
            return None
        zero, gradient = self._updated[id(parameter)], self._gradients.last.get(id(parameter))
        return {"sparse": None if zero is None else zero.sparse_dim(), "gradient": gradient}

    @torch.no_grad()
    def load(self, state: PartState, *, updates: int) -> None:
        """A parameter without the last gradient that its rule needs counts as one that has had no update.

        If the saved run did not predict a parameter, a linear rule starts from the optimizer's state of it.
        """
        self._gradients.observe(self._optimizer)
        self._updated.clear()
        self._gradients.last.clear()
        steps = {id(parameter): self._optimizer.state.get(parameter, {}).get("step") for parameter in self._live}
        self._steps = Counter({parameter: int(step) for parameter, step in steps.items() if on_device(step)})
        needed = {
            id(parameter)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if self._gradients.needed(group)
        }
        for parameter, saved in zip(self._live, state.parameters or (), strict=True):
            if saved is None and self._rule is not None and self._optimizer.state.get(parameter):
                saved = {"sparse": None, "gradient": None}
            if saved is None or (id(parameter) in needed and saved["gradient"] is None):
                continue
            sparse = saved["sparse"]
            self._updated[id(parameter)] = None if sparse is None else _sparse_zero(parameter, sparse)
            if id(parameter) in needed:
                self._gradients.last[id(parameter)] = saved["gradient"].to(parameter.device)
        if self._rates is not None:
            self._rates.load()

    @torch.no_grad()
    def predict(self, into: Sequence[Parameter], ahead: int) -> None:
        """Write the weights that the parameters will have after `ahead` more updates into others."""
        if _member_ids(self._optimizer) != self._members:
            raise WeftError(
                "the optimizer holds other parameters than at the start, so its updates can't be predicted; "
                "build a new pipeline with the optimizer that you want"
            )
        targets = {id(parameter): target.data for parameter, target in zip(self._live, into, strict=True)}
        without_update = [parameter for parameter in self._live if id(parameter) not in self._updated]
        copy_tensors([targets[id(parameter)] for parameter in without_update], without_update)
        groups = self._optimizer.param_groups
        updates = [groups] * ahead if self._rates is None else self._rates.options(ahead)
        if self._rule is None:
            self._predict_decayed(targets, updates)
        else:
            self._predict_linear(self._rule, targets, updates)

    def fingerprint(self, ahead: int) -> object:
        """What a prediction depends on, besides weights and optimizer state, which change only with an update."""
        rates = None if self._rates is None else _comparable(self._rates.scheduled(ahead))
        return ahead, [_comparable(group) for group, _ in self._options([])], rates

    def _options(self, updates: list[Groups]) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
        """The options of each parameter group, now and in each coming update, as numbers of the host."""
        for number, (group, *coming) in enumerate(zip(self._optimizer.param_groups, *updates, strict=True)):
            if self._on_device:
                numbers = self._numbers[number]
                yield numbers.options(group), [numbers.options(update) for update in coming]
            else:
                yield group, coming

    def _predict_linear(self, rule: Rule, targets: dict[int, Tensor], updates: list[Groups]) -> None:
        for group, options in self._options(updates):
            rate = sum(float(update.get("lr", 1.0)) for update in options)
            for batch in in_batches(self._updated_in(group)):
                updated = [self._describe(parameter, group) for parameter in batch]
                weights, directions = [parameter.weight for parameter in updated], list(map(rule.direction, updated))
                with _rounding(batch, [targets[id(parameter)] for parameter in batch]) as predicted:
                    move_weights(weights, directions, rate, list(map(as_real, predicted)))

    def _predict_decayed(self, targets: dict[int, Tensor], updates: list[Groups]) -> None:
        without_form: list[Parameter] = []
        done: set[int] = set()
        for group, options in self._options(updates):
            write, updated = closed_form(self._optimizer, options), self._updated_in(group)
            if write is None:
                without_form += updated
                continue
            without_form += [parameter for parameter in updated if self._updated[id(parameter)] is not None]
            for batch in in_batches([parameter for parameter in updated if self._updated[id(parameter)] is None]):
                described = [self._describe(parameter, group) for parameter in batch]
                with _rounding(batch, [targets[id(parameter)] for parameter in batch]) as predicted:
                    write(described, options, list(map(as_real, predicted)))
                done |= {id(parameter) for parameter in batch}
        if without_form:
            rest = [parameter for parameter in self._live if id(parameter) not in done]  # also those without a gradient
            numbers = [id(parameter) for parameter in rest]
            with _rounding(rest, [targets[number] for number in numbers]) as predicted:
                copy_tensors(predicted, rest)
                copies = targets | dict(zip(numbers, predicted, strict=True))
                zeros = {id(parameter): self._updated[id(parameter)] for parameter in without_form}
                run_shadow(self._optimizer, copies, zeros, updates)

    def _updated_in(self, group: Mapping[str, Any]) -> list[Parameter]:
        return [parameter for parameter in group["params"] if id(parameter) in self._updated]

    def _describe(self, parameter: Parameter, group: Mapping[str, Any]) -> UpdatedParameter:
        state = self._optimizer.state.get(parameter, {})
        step = state.get("step", 1)
        if parameter.is_complex():  # to an optimizer, a complex number is two numbers
            state = {name: as_real(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        return UpdatedParameter(
            weight=as_real(parameter.detach()),
            state=state,
            group=group,
            gradient=self._gradients.last.get(id(parameter)),
            step=self._steps[id(parameter)] if on_device(step) else int(step),
            printed=self.options.bias == "printed",
        )


@contextlib.contextmanager
def _rounding(parameters: Sequence[Parameter], targets: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors to predict parameters into: the targets, or tensors of the parameters' dtype that are rounded to them."""
    narrow = any(parameter.dtype != target.dtype for parameter, target in zip(parameters, targets, strict=True))
    predicted = [torch.empty_like(parameter) for parameter in parameters] if narrow else list(targets)
    yield predicted
    if narrow:
        copy_tensors(targets, predicted)


class _LastGradients:
    """The gradients of the last update, where a rule needs them: dense, and negated under `maximize`.

    A hook copies them before the step, because some optimizers overwrite them.
    """

    def __init__(self, rule: Rule | None) -> None:
        self._rule = rule
        self._observes = False
        self.last: dict[int, Tensor] = {}  # by id of the parameter

    def needed(self, group: Mapping[str, Any]) -> bool:
        return self._rule is not None and self._rule.gradient(group)

    def observe(self, optimizer: Optimizer) -> None:
        """Register the hook, once, if the rule needs gradients."""
        if not self._observes and any(map(self.needed, optimizer.param_groups)):
            optimizer.register_step_pre_hook(self._copy)
            self._observes = True

    @torch.no_grad()
    def _copy(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in filter(self.needed, optimizer.param_groups):
            gradients = {id(p): as_real(_dense(p.grad)) for p in group["params"] if p.grad is not None}
            for parameter in gradients.keys() - self.last.keys():
                self.last[parameter] = torch.empty_like(gradients[parameter])
            copies = [self.last[parameter] for parameter in gradients]
            copy_tensors(copies, list(gradients.values()))
            for (negated,) in by_kind(copies if group.get("maximize") else []):
                torch._foreach_neg_(negated)


def _comparable(value: Any) -> object:
    """A snapshot of options that can be compared; what might change later equals nothing."""
    if isinstance(value, Parameter):
        return id(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value if isinstance(value, str | int | float | complex | None) else object()


def _sparse_zero(parameter: Parameter, sparse_dim: int) -> Tensor:
    """A sparse gradient of zero, like that of `zeros_like`."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dim:], dtype=parameter.dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=True).coalesce()


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _member_ids(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
