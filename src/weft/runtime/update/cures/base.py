"""What a cure is: a policy for the whole pipeline, which takes part in the updates of each parameter set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.update.part import UpdatePart
from weft.schedule import Program, mean_delay

WITHOUT = "use cure=None (in a job: schedule.cure=none)"


class CurePart(UpdatePart):
    """What a cure does to one parameter set; this one does nothing. Its `step` surrounds that of the optimizer."""

    key = "cure"


@dataclass(frozen=True)
class Cure:
    """A policy against stale gradients; this one does nothing. Subclasses are frozen dataclasses of their settings."""

    above: ClassVar[float] = 0  # treats only chunks with a larger mean delay

    @property
    def remedy(self) -> str:
        """What to do about a schedule that has no chunk to treat."""
        return f"{WITHOUT}, or use a schedule with more delay"

    def check(self, program: Program) -> None:
        """Refuse a schedule that has no chunk to treat."""
        schedule = program.schedule
        largest = max(mean_delay(program, chunk) for chunk in range(schedule.chunks))
        if largest <= self.above:
            raise WeftError(
                f"{type(self).__name__} is for chunks with a mean delay above {self.above:g}, and {schedule.title} has "
                f"none (largest: {largest:.3g}); {self.remedy}"
            )

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> CurePart | None:
        """The part in updates of an optimizer's parameters, at this mean delay; None: no treatment."""
        return None


def cure_for(cure: Any, program: Program) -> Cure:
    """The cure of a pipeline, checked against its schedule; for None, one that does nothing."""
    if cure is None:
        return Cure()
    if not isinstance(cure, Cure):
        kind = cure if isinstance(cure, type) else type(cure)
        hint = "; it is an optimizer: give it as optimizer=" if issubclass(kind, Optimizer) else ""
        raise WeftError(f"cure is one of weft.cures, such as weft.cures.Optimistic() (got {cure!r}){hint}")
    cure.check(program)
    return cure


def check_rates(optimizer: Optimizer, cure: Cure) -> None:
    """Refuse an optimizer without a learning rate."""
    if any("lr" not in group for group in optimizer.param_groups):
        raise WeftError(
            f"{type(cure).__name__} needs the learning rate, and {type(optimizer).__name__} has none; {WITHOUT}"
        )
