"""What ranks exchange after every mini-batch, without a stall: whether to stop, which samples they got, their figures.

Each rank hands in a few numbers and reads those of `LAG` mini-batches ago, which have arrived meanwhile. So all ranks
learn of a request to stop at the same mini-batch, notice if they were fed different samples, and know each other's
figures for the display.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.errors import RunError
from weft.metrics import RESIDENT_PARTS

if TYPE_CHECKING:
    from weft.runtime import Pipeline
    from weft.runtime.comm import Collectives

LAG = 4  # mini-batches; ranks of a pipeline are never further apart
RESIDENT = ("now", "peak", *RESIDENT_PARTS, "ranks")  # of `Pipeline.resident`
RESIDENT_EVERY = 0.5  # seconds between two looks at the resident set, which take longer than the rest
HEAD = 3 + len(RESIDENT)  # mini-batch, checksum of its samples, request to stop; then for each rank of the process:
FIGURES = 4  # seconds busy, waiting, updating, and peak bytes


class Watch:
    """All ranks of a run, seen from one of them, a few mini-batches late."""

    def __init__(self, pipe: Pipeline, collectives: Collectives, stop: threading.Event) -> None:
        self._pipe, self._collectives, self._stop = pipe, collectives, stop
        self._pending: deque[Callable[[], list[list[float]]]] = deque()
        self._figures: list[list[float]] = []
        self._before: list[list[float]] = []
        self._own_resident: dict[str, int] = {}
        self._looked = -math.inf
        self.resident: tuple[dict[str, int], ...] = ()  # of each process

    def exchange(self, minibatch: int, checksum: int) -> bool:
        """After a mini-batch was fed, whose samples have this checksum; whether a rank was asked to stop."""
        if time.monotonic() > self._looked + RESIDENT_EVERY:
            self._own_resident, self._looked = self._pipe.resident(), time.monotonic()
        numbers = [float(minibatch), float(checksum), float(self._stop.is_set())]
        numbers += [float(self._own_resident[name]) for name in RESIDENT]
        for meter in self._pipe.meters():
            numbers += [meter["busy"], meter["waiting"], meter["updating"], float(meter["peak_bytes"]["total"])]
        self._pending.append(self._collectives.start_all_gather(numbers, purpose="compare mini-batches"))
        return len(self._pending) > LAG and self._read_oldest()

    def read_all(self) -> None:
        """Read what was handed in and not read yet, for example before a checkpoint."""
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> bool:
        received = self._pending.popleft()()
        first = received[0]
        for rank, numbers in enumerate(received):
            if numbers[:2] != first[:2]:
                raise RunError(
                    f"ranks were fed different samples (rank 0: mini-batch {first[0]:.0f}, checksum {first[1]:.0f}; "
                    f"rank {rank}: mini-batch {numbers[0]:.0f}, checksum {numbers[1]:.0f}); every rank must read the "
                    "same data in the same order"
                )
        self._figures = [
            numbers[start : start + FIGURES] for numbers in received for start in range(HEAD, len(numbers), FIGURES)
        ]
        self.resident = tuple(
            {name: int(number) for name, number in zip(RESIDENT, numbers[3:HEAD], strict=True)} for numbers in received
        )
        return any(numbers[2] for numbers in received)

    def figures(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Of each rank: the share of its time that it has waited since the last call, and its peak bytes."""
        before = self._before or [[0.0] * FIGURES] * len(self._figures)
        spent = [
            [now - then for now, then in zip(new[:3], old[:3], strict=True)]
            for new, old in zip(self._figures, before, strict=True)
        ]
        self._before = self._figures
        bubbles = tuple(waiting / max(1e-9, busy + waiting + updating) for busy, waiting, updating in spent)
        return bubbles, tuple(int(figures[3]) for figures in self._figures)
