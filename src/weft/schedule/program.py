"""The lowered form of a schedule: tables of one cycle with one line per rank, which are the same for every cycle.

In cycle `c`, a row belongs to mini-batch `batch + c` and reads version `max(0, batch + c - delay)`. The verifier, the
simulator, the drawings and the engine all read this form; `lower.py` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.errors import WeftError
from weft.schedule.actions import NONE, Action, Op
from weft.schedule.core import Schedule
from weft.schedule.weights import Weights

Ints: TypeAlias = npt.NDArray[np.integer]
Bools: TypeAlias = npt.NDArray[np.bool_]


class Step(NamedTuple):
    """One action of a window, with all that a rank needs to run it."""

    action: Action
    minibatch: int
    version: int  # the version it reads; for an update, the version it makes
    ahead: int  # how many updates beyond the version the weights are predicted
    predicts: bool  # makes the prediction; other steps of its mini-batch reuse it
    dies: bool  # the version is not read again (for an update: the previous version, which it may overwrite)
    forgets: bool  # the prediction is not read again
    needs: int  # chunk whose output is the input, or -1
    feeds: int  # chunk that takes the output, or -1
    source: int  # rank that sends the input, or -1
    target: int  # rank that the output is sent to, or -1
    cycle: int
    row: int  # position in the stream

    def __str__(self) -> str:
        """`0F4@1!+2*~`: reads version 1, which dies, predicted 2 ahead (*: predicts here, ~: last use)."""
        prediction = f"+{self.ahead}" + "*" * self.predicts + "~" * self.forgets if self.ahead else ""
        return f"{self.action}@{self.version}" + "!" * self.dies + prediction


class Row(NamedTuple):
    """A row of a rank's stream, for all cycles."""

    first: Step  # in cycle 0, and before there was a version 0
    period: int  # what its index grows by from cycle to cycle

    def step(self, cycle: int) -> Step:
        """The row in a cycle. Version 0 stands for all earlier versions, and none of those dies."""
        first = self.first
        (op, chunk, index), version = first.action, first.version + cycle
        return Step(
            Action(op, chunk, index + cycle * self.period),
            first.minibatch + cycle,
            max(0, version),
            first.ahead,
            first.predicts,
            first.dies and version >= 0,
            first.forgets,
            first.needs,
            first.feeds,
            first.source,
            first.target,
            cycle,
            first.row,
        )

    def is_in(self, cycle: int, minibatches: int | None) -> bool:
        """Whether its mini-batch in a cycle is one of a window (None: of an endless run)."""
        minibatch = self.first.minibatch + cycle
        return minibatch >= 0 and (minibatches is None or minibatch < minibatches)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A lowered schedule: every column is an array of ranks x rows for one cycle."""

    schedule: Schedule
    op: npt.NDArray[np.int8]
    chunk: npt.NDArray[np.int16]
    index: npt.NDArray[np.int32]
    batch: npt.NDArray[np.int16]
    delay: npt.NDArray[np.int16]
    ahead: npt.NDArray[np.int16]
    predicts: Bools
    dies: Bools
    forgets: Bools
    needs: Ints  # op x chunk: chunk whose output it needs, or -1
    feeds: Ints  # op x chunk: chunk that takes its output, or -1

    @property
    def drain(self) -> int:
        """Number of extra cycles after a window's mini-batches until the last backward is done."""
        return max(0, -int(self.batch.min(initial=0)))

    def check_size(self, cycles: int, limit: int, *, doing: str) -> None:
        """Refuse a number of cycles that would take too much time or memory."""
        rows = int((self.op != NONE).sum()) * cycles
        if rows > limit:
            raise WeftError(
                f"{doing} {self.schedule.title} takes {rows} actions, but the limit is {limit} "
                f"({self.drain} of {cycles} mini-batches to drain); use fewer stages, micro-batches or mini-batches"
            )

    def rows(self, rank: int) -> list[Row]:
        """What a rank does in every cycle."""
        microbatches, placement = self.schedule.microbatches, (*self.schedule.placement, -1)  # chunk -1 is nowhere
        columns = (self.op, self.chunk, self.index, self.batch, self.delay, self.ahead)
        flags = (self.predicts, self.dies, self.forgets)
        table = zip(*(column[rank].tolist() for column in columns + flags), strict=True)
        all_needs, all_feeds, found = self.needs.tolist(), self.feeds.tolist(), []
        for row, (op, chunk, index, batch, delay, ahead, predicts, dies, forgets) in enumerate(table):
            if op != NONE:
                needs, feeds = all_needs[op][chunk], all_feeds[op][chunk]
                first = Step(
                    action=Action(Op(op), chunk, index),
                    minibatch=batch,
                    version=batch + 1 if op == Op.U else batch - delay,
                    ahead=ahead,
                    predicts=predicts,
                    dies=dies,
                    forgets=forgets,
                    needs=needs,
                    feeds=feeds,
                    source=-1 if placement[needs] == rank else placement[needs],
                    target=-1 if placement[feeds] == rank else placement[feeds],
                    cycle=0,
                    row=row,
                )
                found.append(Row(first, 1 if op == Op.U else microbatches))
        return found

    def cycle(self, rank: int, cycle: int, *, minibatches: int | None = None) -> Iterator[Step]:
        """The steps of a rank in one cycle of a window of mini-batches (None: of an endless run)."""
        return (row.step(cycle) for row in self.rows(rank) if row.is_in(cycle, minibatches))

    def steps(self, rank: int, *, minibatches: int) -> Iterator[Step]:
        """The steps of a rank in a window of mini-batches, from an empty pipeline to an empty pipeline.

        After the window only the newest version is read, whether the last read of the others was in the window or not.
        """
        rows = self.rows(rank)
        for cycle in range(minibatches + self.drain):
            yield from (row.step(cycle) for row in rows if row.is_in(cycle, minibatches))


def prediction_of(step: Step, weights: Weights) -> tuple[bool, int, int]:
    """The prediction that a step uses: whether a backward made it, and whose it is.

    That of a micro-batch, or of those of a mini-batch that predict as far ahead.
    """
    by_backward = weights.backward == "newest" and step.action.op != Op.F
    if weights.shares_predictions(step.action.chunk):
        return by_backward, step.minibatch, step.ahead
    return by_backward, step.action.index, 0
