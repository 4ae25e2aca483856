"""PipeMare's learning-rate rescheduling: chunks with a delay start with smaller steps.

    update t of a chunk with mean delay τ:   lr · τ^(-p),   p = 1 - min(t / K, 1)

t counts the updates made so far, K is `anneal`. Chunks with τ ≤ 1 keep their rate: the formula would not lower it.

Yang, Zhang, Li, Ré, Aberger, De Sa: PipeMare: Asynchronous Pipeline Parallel DNN Training, MLSys 2021, technique T1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.update.cures.base import WITHOUT, Cure, CurePart, check_rates
from weft.runtime.update.part import PartState
from weft.schedule import Program, check_sizes


@dataclass(frozen=True, kw_only=True)
class PipeMare(Cure):
    """Divide the learning rate of a chunk by its delay, less and less over the first `anneal` updates."""

    anneal: int
    above: ClassVar[float] = 1

    def __post_init__(self) -> None:
        check_sizes(anneal=self.anneal)

    def check(self, program: Program) -> None:
        if program.ahead.any():
            raise WeftError(
                f"PipeMare is for schedules that read old weights, and {program.schedule.title} predicts newer ones, "
                f"from learning rates that PipeMare would change; {WITHOUT}, predict nothing, or use "
                "weft.cures.GapAware()"
            )
        super().check(program)

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> CurePart | None:
        check_rates(optimizer, self)
        return _RateScaling(optimizer, delay, self.anneal) if delay > self.above else None


class _RateScaling(CurePart):
    """Has no state: a checkpoint knows the number of updates."""

    def __init__(self, optimizer: Optimizer, delay: float, anneal: int) -> None:
        self._optimizer, self._delay, self._anneal = optimizer, delay, anneal
        self._updates = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        scale = self._delay ** -(1 - min(self._updates / self._anneal, 1))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        try:
            yield
        finally:  # the learning-rate scheduler continues from the unscaled rate
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._updates += 1

    def load(self, state: PartState, *, updates: int) -> None:
        self._updates = updates
