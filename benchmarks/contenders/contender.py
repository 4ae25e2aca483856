"""What takes part in a comparison of throughput: it makes updates and returns its weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders.layers import Task, make_optimizer
from benchmarks.harness import schedule_named
from weft import Pipeline
from weft.errors import RunError
from weft.schedule import Schedule

TOLERANCE = 1e-3  # of the norm of an update: gradients are summed in another order
ROUNDING = 0.25 * torch.finfo(torch.float32).eps  # of the norm of the weights, which round the sum again


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Contender:
    """The part of a contender on this rank. All ranks call the same functions in the same order."""

    step: Callable[[], object]  # feeds one mini-batch, the same every time
    weights: Callable[[], Mapping[str, Tensor]]  # those that this rank has, by their names in the whole model
    flush: Callable[[], object] = _nothing
    close: Callable[[], object] = _nothing  # ends threads and connections
    order: str = ""  # of its actions, as a CSV file of a schedule, if torch made it


def shuffled(names: Iterable[str], round_number: int) -> list[str]:
    """The order of contenders in a round: random, but the same on all ranks, so that neighbours change."""
    order = list(names)
    random.Random(round_number).shuffle(order)
    return order


def pipeline(name: str | Schedule, task: Task, microbatches: int, *, stages: int) -> Contender:
    """The task under a schedule of weft, by its name with options, or under one that is given."""
    schedule = name if isinstance(name, Schedule) else schedule_named(name, stages, microbatches)
    model = task.model()
    size = len(model) // schedule.chunks
    pipe = Pipeline(
        model,
        loss_fn=task.loss_fn,
        optimizer=make_optimizer,
        schedule=schedule,
        balance=[size] * schedule.chunks,
    )
    inputs, targets = task.batch(microbatches)
    return Contender(
        step=lambda: pipe.step(inputs, targets), weights=pipe.state_dict, flush=pipe.flush, close=pipe.close
    )


class FirstUpdate(NamedTuple):
    """A weight before and after the first update."""

    before: Tensor
    after: Tensor

    def distances(self, value: Tensor) -> tuple[float, float, float]:
        """Norms: how far a value is from the weight after the update, how far it may be, and that of the update.

        Few updates are large beside their weights, so the tolerance is relative to the update, plus what rounding the
        weights takes; and at most half an update, so that weights without an update fail.
        """
        before, after = self.before.double(), self.after.double()
        update = float((after - before).norm())
        allowed = min(TOLERANCE * update + ROUNDING * float(after.norm()), update / 2)
        return float((value.detach().double() - after).norm()), allowed, update


def first_update(task: Task, microbatches: int) -> dict[str, FirstUpdate]:
    """What one mini-batch of plain training does to the weights, micro-batch by micro-batch."""
    model = task.model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model.parameters())
    inputs, targets = task.batch(microbatches)
    for piece, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        torch.autograd.backward([task.loss_fn(model(piece), target) / microbatches])
    optimizer.step()
    return {name: FirstUpdate(before[name], parameter.detach()) for name, parameter in model.named_parameters()}


def check_first_update(name: str, contender: Contender, expected: Mapping[str, FirstUpdate]) -> None:
    """Make one update; RunError unless it is that of plain training."""
    contender.step()
    contender.flush()
    weights = contender.weights()
    if not weights:
        raise RunError(f"{name} returns no weights on this rank, so nothing can be compared")
    for label, value in weights.items():
        if label not in expected:
            raise RunError(f"{name} has a weight {label} that the model does not have")
        distance, allowed, update = expected[label].distances(value)
        if not distance <= allowed:
            raise RunError(
                f"{name}: after the first update {label} is {distance:.1e} from plain training, "
                f"whose update is {update:.1e} (norms; allowed: {allowed:.1e}), so it computes something else"
            )
