"""What a cure is: a policy for the whole pipeline that gives each parameter set a treatment of its own.

The engine tells a treatment three things, in the order of mini-batches: which weights a mini-batch's first forward
reads, that its update is made (the treatment stands around the optimizer's step), or that it is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.schedule import Op, Program


class Treatment:
    """What is done to one parameter set; this one does nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return 0

    def read(self, weights: Sequence[Tensor]) -> None:
        """The first forward of the next mini-batch reads these."""

    def update(self) -> contextlib.AbstractContextManager[None]:
        """Around the optimizer's step of the oldest mini-batch, whose gradients the parameters hold."""
        return contextlib.nullcontext()

    def skip(self) -> None:
        """The oldest mini-batch makes no update."""

    def state(self, place: int) -> dict[str, Any] | None:
        """What a checkpoint keeps of it for one of the set's parameters, in a drained pipeline."""
        return None

    def resume(self, states: Sequence[dict[str, Any] | None], *, updates: int) -> None:
        """Go on from the states of all parameters (None: not treated then), after so many updates of the run."""


@dataclass(frozen=True)
class Cure:
    """A policy against stale gradients; this one is none. Subclasses are frozen dataclasses of their settings."""

    above: ClassVar[float] = 0  # only chunks that read more updates late than this are treated

    def check(self, program: Program) -> None:
        """Refuse a schedule that this is no cure for."""
        schedule = program.schedule
        largest = max(lateness(program, chunk) for chunk in range(schedule.chunks))
        if largest <= self.above:
            raise WeftError(
                f"{type(self).__name__} is for chunks that read more than {self.above:g} updates late, and none of "
                f"{schedule.title} does (the latest: {largest:.3g}); leave cure out, or use a schedule with more delay"
            )

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> Treatment:
        """The treatment of the parameters of an optimizer, whose forwards read `delay` updates late."""
        return Treatment()


def cure_for(cure: Any, program: Program) -> Cure:
    """The cure of a pipeline: the one that is given, if it is one for its schedule; or none."""
    if cure is None:
        return Cure()
    if not isinstance(cure, Cure):
        raise WeftError(f"cure is one of weft.cures, such as weft.cures.PipeMare(anneal=1000) (got {cure!r})")
    cure.check(program)
    return cure


def lateness(program: Program, chunk: int) -> float:
    """How many updates late a chunk's forwards read, in the mean over the micro-batches of a mini-batch."""
    forwards = (program.op == Op.F) & (program.chunk == chunk)
    return float(program.delay[forwards].mean()) if forwards.any() else 0.0


def check_rates(optimizer: Optimizer, cure: Cure) -> None:
    if any("lr" not in group for group in optimizer.param_groups):
        raise WeftError(
            f"{type(cure).__name__} goes by the learning rate, and {type(optimizer).__name__} has none; leave cure out"
        )
