"""Who takes part in a benchmark of throughput: something that makes updates, and can be asked for its weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.bench.layers import Task, optimizer
from weft.bench.schedules import schedule_named
from weft.errors import RunError
from weft.runtime.pipeline import Pipeline

APART = 1e-3  # of the norm of an update: gradients are summed in another order
ROUNDED = 0.25 * torch.finfo(torch.float32).eps  # of the norm of the weights, which round the sum again


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of a benchmark, on this rank. All ranks call the same functions in the same order."""

    step: Callable[[], object]  # feeds one mini-batch, the same every time
    weights: Callable[[], Mapping[str, Tensor]]  # those that this rank knows, by their names in the whole model
    flush: Callable[[], object] = _nothing
    close: Callable[[], object] = _nothing  # lets go of threads and connections
    order: str = ""  # of its actions, as a file of a schedule, where somebody else made it


def turns(names: Iterable[str], number: int) -> list[str]:
    """The order of contenders in a round: shuffled, the same on all ranks, so that nobody has a steady neighbour."""
    shuffled = list(names)
    random.Random(number).shuffle(shuffled)
    return shuffled


def pipeline(name: str, task: Task, microbatches: int, *, stages: int) -> Contender:
    """A schedule of weft, by its name with options."""
    schedule = schedule_named(name, stages, microbatches)
    model = task.model()
    size = len(model) // schedule.chunks
    pipe = Pipeline(
        model,
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        schedule=schedule,
        balance=[size] * schedule.chunks,
    )
    inputs, targets = task.batch(microbatches)
    return Contender(
        step=lambda: pipe.step(inputs, targets), weights=pipe.state_dict, flush=pipe.flush, close=pipe.close
    )


class Update(NamedTuple):
    """A weight before and after the first update."""

    before: Tensor
    after: Tensor

    def apart(self, value: Tensor) -> tuple[float, float, float]:
        """Norms: how far a value is from the weight after the update, how far it may be, and that of the update.

        Few updates are large beside their weights, so nothing is compared with those but what they round away; and
        never more than half of an update is let pass, lest weights that nobody updated pass too.
        """
        before, after = self.before.double(), self.after.double()
        made = float((after - before).norm())
        allowed = min(APART * made + ROUNDED * float(after.norm()), made / 2)
        return float((value.detach().double() - after).norm()), allowed, made


def first_update(task: Task, microbatches: int) -> dict[str, Update]:
    """What one mini-batch of plain training makes of the weights, micro-batch by micro-batch."""
    model = task.model()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    update = optimizer(model.parameters())
    inputs, targets = task.batch(microbatches)
    for piece, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        torch.autograd.backward([task.loss_fn(model(piece), target) / microbatches])
    update.step()
    return {name: Update(before[name], one.detach()) for name, one in model.named_parameters()}


def check_first_update(name: str, contender: Contender, expected: Mapping[str, Update]) -> None:
    """Make one update; RunError unless it is that of plain training."""
    contender.step()
    contender.flush()
    weights = contender.weights()
    if not weights:
        raise RunError(f"{name} knows no weights on this rank, so nothing can be compared")
    for label, value in weights.items():
        if label not in expected:
            raise RunError(f"{name} has a weight {label} that the model does not have")
        apart, allowed, made = expected[label].apart(value)
        if not apart <= allowed:
            raise RunError(
                f"{name}: after the first update {label} is {apart:.1e} from plain training, "
                f"whose update is {made:.1e} (norms; allowed: {allowed:.1e}), so it computes something else"
            )
