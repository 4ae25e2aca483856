"""The pending updates of a rank: how far gradient sync is with them, and what worker and driver have to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from weft.runtime.engine.completions import Completions
from weft.runtime.engine.error_locator import ErrorLocator
from weft.runtime.weights import GradientSync, ParameterSet, PendingUpdate


class PendingUpdates:
    """Those of all parameter sets of a rank. Nothing here blocks."""

    def __init__(
        self,
        sets: Sequence[ParameterSet],
        gradient_sync: GradientSync,
        completions: Completions,
        locator: ErrorLocator,
    ) -> None:
        self._sets, self._gradient_sync = sets, gradient_sync
        self._completions, self._locator = completions, locator
        self.progress = 0  # stages of gradient sync finished

    def __iter__(self) -> Iterator[PendingUpdate]:
        return (update for parameters in self._sets for update in parameters.pending)

    def advance(self) -> bool:
        """Finish the stages of gradient sync whose sums are there, and start the next ones; whether there was any."""
        if not self._gradient_sync.stages:
            return False
        before = self.progress
        for parameters in self._sets:
            older = None
            for update in parameters.pending:
                self.progress += self._gradient_sync.advance(update, older)
                older = update
        return self.progress > before

    def hurry(self, update: PendingUpdate) -> bool:
        """Let streams wait for other ranks instead of the host."""
        hurries = self._gradient_sync.hurry(update)
        self.progress += hurries
        return hurries

    def sums_under_way(self) -> list[Future[Any]]:
        """Sums that the host waits for."""
        gradients = [update.sum for update in self if update.sum is not None and not update.sum.is_on_device]
        norms = [entry.norm.squares for entry in self._completions.unreported]
        return [*gradients, *(squares for squares in norms if not squares.done())]

    def sums_on_device(self) -> list[str]:
        """Sums that the device still waits for, for an error message."""
        return self._gradient_sync.sums.under_way()

    def awaits_device(self) -> bool:
        """Whether a device waits for other ranks' parts of a sum."""
        return any(update.sum is not None and update.sum.is_on_device for update in self)

    def has_stages_to_start(self) -> bool:
        """Whether another rank may come to wait for a sum that this one has not joined yet."""
        return any(len(update.stages) > 1 for update in self)

    def check_sums(self) -> None:
        """Raise what went wrong in a sum: LinkError if it was the connection, else an error with its place."""
        for update in self:
            if update.sum is not None and update.sum.has_failed:
                _, chunk, _ = update.member
                with self._locator.locating(chunk, update.minibatch):
                    update.sum.result()
        for entry in self._completions.unreported:
            if entry.norm.squares.has_failed:
                with self._locator.locating(entry.chunk, entry.completed.minibatch):
                    entry.norm.squares.result()
