"""PipeMare's learning-rate rescheduling: late chunks start with smaller steps.

    update t of a chunk that reads τ updates late:   lr · τ^(-p),   p = 1 - min(t / K, 1)

τ is the chunk's mean delay over its micro-batches, t counts the updates made so far, K is `anneal`. Chunks with τ ≤ 1
keep their rate: below one, the formula would raise it.

Yang, Zhang, Li, Ré, Aberger, De Sa: PipeMare: Asynchronous Pipeline Parallel DNN Training, MLSys 2021, technique T1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.nn import Parameter
from torch.optim import Optimizer

from weft.errors import WeftError
from weft.runtime.update.cures.base import Cure, Treatment, check_rates
from weft.schedule import Program, check_sizes


@dataclass(frozen=True, kw_only=True)
class PipeMare(Cure):
    """Divide the learning rate of late chunks by their delay, less and less over the first `anneal` updates."""

    anneal: int
    above: ClassVar[float] = 1

    def __post_init__(self) -> None:
        check_sizes(anneal=self.anneal)

    def check(self, program: Program) -> None:
        if program.ahead.any():
            raise WeftError(
                f"PipeMare goes by how late weights are, and {program.schedule.title} predicts them, by learning rates "
                "that PipeMare would change; leave cure out, predict nothing, or use weft.cures.GapAware()"
            )
        super().check(program)

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> Treatment:
        check_rates(optimizer, self)
        return _Rescheduled(optimizer, delay, self.anneal) if delay > self.above else Treatment()


class _Rescheduled(Treatment):
    def __init__(self, optimizer: Optimizer, delay: float, anneal: int) -> None:
        self._optimizer, self._delay, self._anneal = optimizer, delay, anneal
        self._updates = 0

    def resume(self, states: Sequence[dict[str, Any] | None], *, updates: int) -> None:
        self._updates = updates

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        scale = self._delay ** -(1 - min(self._updates / self._anneal, 1))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * scale
        try:
            yield
        finally:  # for the learning-rate scheduler, which goes on from its own
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        self._updates += 1
