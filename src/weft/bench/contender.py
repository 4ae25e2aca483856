"""Who takes part in a benchmark of throughput: something that makes updates, and can be asked for its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.bench.layers import Task, optimizer
from weft.bench.schedules import schedule_named
from weft.errors import RunError
from weft.runtime.pipeline import Pipeline

RELATIVE, ABSOLUTE = 1e-4, 1e-6  # of weights after the first update: sums in another order


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of a benchmark, on this rank. All ranks call the same functions in the same order."""

    step: Callable[[], object]  # feeds one mini-batch, the same every time
    weights: Callable[[], Mapping[str, Tensor]]  # those that this rank knows, by their names in the whole model
    flush: Callable[[], object] = _nothing


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
    return Contender(step=lambda: pipe.step(inputs, targets), weights=pipe.state_dict, flush=pipe.flush)


def first_update(task: Task, microbatches: int) -> dict[str, Tensor]:
    """The weights after one mini-batch of plain training, micro-batch by micro-batch."""
    model = task.model()
    update = optimizer(model.parameters())
    inputs, targets = task.batch(microbatches)
    for piece, target in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        torch.autograd.backward([task.loss_fn(model(piece), target) / microbatches])
    update.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def check_first_update(name: str, contender: Contender, expected: Mapping[str, Tensor]) -> None:
    """Make one update; RunError unless its weights are those of plain training."""
    contender.step()
    contender.flush()
    weights = contender.weights()
    if not weights:
        raise RunError(f"{name} knows no weights on this rank, so nothing can be compared")
    for label, value in weights.items():
        if label not in expected:
            raise RunError(f"{name} has a weight {label} that the model does not have")
        if not torch.allclose(value.detach(), expected[label], rtol=RELATIVE, atol=ABSOLUTE):
            apart = float((value.detach() - expected[label]).abs().max())
            raise RunError(
                f"{name}: after the first update {label} is {apart:.1e} from plain training "
                f"(allowed: {ABSOLUTE:g} + {RELATIVE:g} of its size), so it computes something else"
            )
