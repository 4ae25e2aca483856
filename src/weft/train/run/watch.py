"""What a rank hands in after every mini-batch, and what it learns from the others': see `peers`."""

from __future__ import annotations

import threading
import time

from weft.errors import RunError
from weft.runtime import Pipeline
from weft.train.peers import Peers

HEAD = 3  # mini-batch, checksum of its samples, wish to stop; then of each rank of the process:
FIGURES = 4  # seconds busy, waiting, updating, and bytes held at their peak


class Watch:
    """All ranks of a run, seen from one of them, a few mini-batches late."""

    def __init__(self, pipe: Pipeline, peers: Peers, stop: threading.Event) -> None:
        self._pipe, self._peers, self._stop = pipe, peers, stop
        self._figures: list[list[float]] = []
        self._before: list[list[float]] = []

    def after(self, minibatch: int, samples: int) -> bool:
        """A mini-batch is fed, of samples with this checksum; whether some rank wished to stop."""
        mine = [float(minibatch), float(samples), float(self._stop.is_set())]
        for meter in self._pipe.meters():
            mine += [meter["busy"], meter["waiting"], meter["updating"], float(meter["peak_bytes"]["total"])]
        heard = self._peers.tell(mine)
        return heard is not None and self._hear(heard)

    def settle(self) -> None:
        """Look at what was handed in and not looked at yet: before a checkpoint, say."""
        for heard in self._peers.rest():
            self._hear(heard)

    def _hear(self, heard: list[list[float]]) -> bool:
        for rank, one in enumerate(heard):
            if one[:2] != heard[0][:2]:
                raise RunError(
                    f"ranks were fed different samples (rank 0: mini-batch {heard[0][0]:.0f}, checksum "
                    f"{heard[0][1]:.0f}; rank {rank}: mini-batch {one[0]:.0f}, checksum {one[1]:.0f}); every rank must "
                    "read the same data in the same order"
                )
        self._figures = [one[at : at + FIGURES] for one in heard for at in range(HEAD, len(one), FIGURES)]
        return any(one[2] for one in heard)

    def figures(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Of each rank: the share of its time that it has waited since the last look, and its memory."""
        before = self._before or [[0.0] * FIGURES] * len(self._figures)
        spent = [
            [a - b for a, b in zip(now[:3], then[:3], strict=True)]
            for now, then in zip(self._figures, before, strict=True)
        ]
        self._before = self._figures
        bubbles = tuple(waiting / max(1e-9, busy + waiting + updating) for busy, waiting, updating in spent)
        return bubbles, tuple(int(one[3]) for one in self._figures)


class Clock:
    """Seconds of training: without set-up, evaluations and checkpoints, and with those before a resume."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self.spent + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.spent, self._since = self.seconds, None
