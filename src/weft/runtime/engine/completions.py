"""The mini-batches that a rank has finished: their losses, and which of them were skipped.

On a device, an update is made before the host knows its loss. The host reads that one update later, when it is long
done; so it never waits for what is under way, and is never much further than its device.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import Diverged
from weft.runtime.weights import PendingUpdate, WholeNorm

REMEDY = (
    "lower the learning rate or look at the data "
    '(nan="skip", train.nan=skip in a job, skips such mini-batches and counts them)'
)


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A mini-batch that a rank has finished."""

    minibatch: int
    loss: float
    skipped: bool  # by one of its chunks
    norm: float | None  # of the whole gradient, before clipping


class Unread(NamedTuple):
    """An update that a chunk has made, or skipped, and whose loss is to be read."""

    chunk: int
    update: PendingUpdate
    skipped: bool  # whether some chunk had skipped its mini-batch by then


class Unreported(NamedTuple):
    """A mini-batch that this rank has finished, and whose norm other ranks may not have added to."""

    chunk: int
    completed: Completed
    norm: WholeNorm


class Completions:
    """`sets` are the parameter sets of a rank, over all its `chunks`; `late`: losses are read an update later."""

    def __init__(self, *, chunks: int, sets: int, skip_nan: bool, max_skips: int, late: bool) -> None:
        self.newest: Completed | None = None
        self.skipped = 0  # mini-batches that some chunk of this rank skipped
        self._chunks, self._sets, self._skip_nan, self._max_skips, self._late = chunks, sets, skip_nan, max_skips, late
        self._skipped_in_a_row = 0
        self._skips: set[int] = set()  # mini-batches with a skip, until all parameter sets have had them
        self._unread: deque[Unread] = deque()
        self.unreported: deque[Unreported] = deque()
        self._updated: dict[int, int] = defaultdict(int)  # mini-batch -> chunks whose loss was read
        self._finished: dict[int, int] = defaultdict(int)  # mini-batch -> parameter sets that have, tied ones too

    def resume(self, *, skipped: int, newest: Completed | None) -> None:
        """Continue the counts of a run that was saved."""
        self.skipped, self.newest = skipped, newest
        self._skipped_in_a_row = 0

    def must_skip(self, update: PendingUpdate) -> bool:
        """Whether an update is not made. An error, where one that is not finite ends the run and is known in time."""
        if self._skip_nan:
            return not update.is_finite
        if update.is_known():
            self._check_norm(update)
        return False

    def add(self, chunk: int, update: PendingUpdate, *, own: bool, skipped: bool) -> None:
        """A parameter set of a chunk, its own or a tied one, has finished a mini-batch."""
        minibatch = update.minibatch
        if skipped:
            self._skips.add(minibatch)
        if own:
            self._unread.append(Unread(chunk, update, minibatch in self._skips))
        self._finished[minibatch] += 1
        if self._finished[minibatch] == self._sets:
            del self._finished[minibatch]
            self._count_skip(update)

    def due(self, *, all_of_them: bool = False) -> Unread | None:
        """The update whose loss is to be read next; the newest ones can wait."""
        most = self._chunks if self._late and not all_of_them else 0
        return self._unread[0] if len(self._unread) > most else None

    def read(self) -> None:
        """Read the loss that is due; the host knows it by now."""
        entry = self._unread.popleft()
        update, minibatch = entry.update, entry.update.minibatch
        if self._late and not self._skip_nan:
            check_loss(update.loss)
            self._check_norm(update)
        self._updated[minibatch] += 1
        if self._updated[minibatch] == self._chunks:
            del self._updated[minibatch]
            completed = Completed(minibatch=minibatch, loss=update.loss, skipped=entry.skipped, norm=update.norm_value)
            if update.whole_norm is None:
                self.newest = completed
            else:
                self.unreported.append(Unreported(entry.chunk, completed, update.whole_norm))

    def report(self) -> None:
        """Report the oldest mini-batch whose norm was awaited; the host knows it by now."""
        entry = self.unreported.popleft()
        self.newest = replace(entry.completed, norm=entry.norm.value)

    def _check_norm(self, update: PendingUpdate) -> None:
        norm = update.norm_value
        if norm is not None and not math.isfinite(norm):
            raise Diverged(f"the norm of the gradients is {norm} (loss: {update.loss}); {REMEDY}")

    def _count_skip(self, update: PendingUpdate) -> None:
        """All parameter sets have finished a mini-batch."""
        if update.minibatch not in self._skips:
            self._skipped_in_a_row = 0
            return
        self._skips.remove(update.minibatch)
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == self._max_skips:
            raise Diverged(
                f"{self._max_skips} mini-batches in a row were skipped, because their loss or gradients are not finite "
                f"(loss: {update.loss}, norm of the gradients: {update.norm_value}); lower the learning rate or look "
                f"at the data, or raise max_skips={self._max_skips}"
            )


def check_loss(loss: float) -> None:
    """End a run whose loss is not finite."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss}; {REMEDY}")


def loss_numbers(losses: Sequence[float | Tensor]) -> Tensor:
    """The mean loss of a mini-batch, and above 0 if one of its micro-batches is not finite; where the losses are."""
    on_device = [loss for loss in losses if isinstance(loss, Tensor)]
    if not on_device:
        numbers = [loss for loss in losses if not isinstance(loss, Tensor)]
        return torch.tensor(
            [sum(numbers) / len(numbers), float(not all(map(math.isfinite, numbers)))], dtype=torch.float64
        )
    stacked = torch.stack(on_device).to(torch.float64)
    mean = stacked.cumsum(0)[-1] / len(on_device)  # added one after the other, as on the CPU
    return torch.stack([mean, stacked.isfinite().logical_not_().any().to(torch.float64)])
