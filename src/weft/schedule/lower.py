"""From what an author writes to what everybody reads: the passes that complete a schedule.

    updates      a chunk without updates gets one behind the last backward of each mini-batch
    alignment    cycles count so that the youngest mini-batch in cycle `c` is `c`
    reads        how far behind each pass reads (`delay`), how far ahead it predicts, and which row predicts
    deaths       the row after which a version, or a prediction, is never read again
    hand-overs   which chunk's output an action needs, and which chunk takes its own

The result is a `Program`: tables of one cycle with a line a rank, in which nothing depends on the number of
the cycle. In cycle `c`, a row speaks of mini-batch `batch + c` and reads version `max(0, batch + c - delay)`.
The verifier, the simulator, the pictures and the engine all read this one form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.errors import WeftError
from weft.schedule.actions import ANY_BACKWARD, BACKWARDS, NONE, RETIRING, Action, Op, Rows, U, is_any, join
from weft.schedule.core import Schedule
from weft.schedule.weights import Weights, of_chunk

MOST_BEHIND = np.iinfo(np.int16).max  # mini-batches between the youngest and the oldest of a stream

Ints: TypeAlias = npt.NDArray[np.integer]
Bools: TypeAlias = npt.NDArray[np.bool_]


class Step(NamedTuple):
    """One action of a window, with all that a rank has to know to run it."""

    action: Action
    minibatch: int
    version: int  # that it reads; of an update, that it makes
    ahead: int  # updates that the weights are predicted beyond the version
    predicts: bool  # makes that prediction; the others of its mini-batch reuse it
    dies: bool  # the version is not read again (of an update: the version before, which it may overwrite)
    forgets: bool  # the prediction is not read again
    needs: int  # chunk whose output is its input, or -1
    feeds: int  # chunk that takes its output, or -1
    source: int  # rank that its input comes from by message, or -1
    target: int  # rank that its output goes to by message, or -1
    cycle: int
    row: int  # its place in the stream

    def __str__(self) -> str:
        """`0F4@1!+2*~`: at version 1, which dies, predicted 2 ahead (* here, ~ for the last time)."""
        prediction = f"+{self.ahead}" + "*" * self.predicts + "~" * self.forgets if self.ahead else ""
        return f"{self.action}@{self.version}" + "!" * self.dies + prediction


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A lowered schedule: every column is an array of ranks x rows, for one cycle."""

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
    needs: Ints  # op x chunk: the chunk whose output it needs, or -1
    feeds: Ints  # op x chunk: the chunk that takes its output, or -1

    @property
    def drain(self) -> int:
        """Cycles that a window takes after those of its mini-batches, until the last backward is done."""
        return max(0, -int(self.batch.min(initial=0)))

    def check_size(self, cycles: int, most: int, *, doing: str) -> None:
        """Refuse to run so many cycles that it would not end in reasonable time or memory."""
        rows = int((self.op != NONE).sum()) * cycles
        if rows > most:
            raise WeftError(
                f"{doing} {self.schedule.title} takes {rows} actions, {most} at the most "
                f"({self.drain} of {cycles} mini-batches to drain); use fewer stages, micro-batches or mini-batches"
            )

    def cycle(self, rank: int, cycle: int, *, minibatches: int | None = None) -> Iterator[Step]:
        """What a rank runs in one cycle of a window of mini-batches (None: of a run without end)."""
        microbatches, placement = self.schedule.microbatches, self.schedule.placement
        columns = (self.op, self.chunk, self.index, self.batch, self.delay, self.ahead)
        flags = (self.predicts, self.dies, self.forgets)
        table = zip(*(column[rank].tolist() for column in columns + flags), strict=True)
        for row, (op, chunk, index, batch, delay, ahead, predicts, dies, forgets) in enumerate(table):
            minibatch = batch + cycle
            if op == NONE or minibatch < 0 or (minibatches is not None and minibatch >= minibatches):
                continue
            needs, feeds = int(self.needs[op, chunk]), int(self.feeds[op, chunk])
            yield Step(
                action=Action(Op(op), chunk, index + cycle * (1 if op == Op.U else microbatches)),
                minibatch=minibatch,
                version=minibatch + 1 if op == Op.U else max(0, minibatch - delay),
                ahead=ahead,
                predicts=predicts,
                dies=dies and minibatch >= delay,  # version 0 serves all that would read an earlier one
                forgets=forgets,
                needs=needs,
                feeds=feeds,
                source=-1 if needs < 0 or placement[needs] == rank else placement[needs],
                target=-1 if feeds < 0 or placement[feeds] == rank else placement[feeds],
                cycle=cycle,
                row=row,
            )

    def steps(self, rank: int, *, minibatches: int) -> Iterator[Step]:
        """What a rank runs in a window of mini-batches, from an empty pipeline to an empty pipeline.

        After the window no version but the newest is read again, whether its `dies` was in the window or not.
        """
        for cycle in range(minibatches + self.drain):
            yield from self.cycle(rank, cycle, minibatches=minibatches)


def prediction_of(step: Step, weights: Weights) -> tuple[bool, int]:
    """Which prediction a step uses: a backward's own or a forward's, and the mini-batch or micro-batch it is for."""
    own = weights.backward == "newest" and step.action.op != Op.F
    return own, step.minibatch if weights.bellwether else step.action.index


def lower(schedule: Schedule) -> Program:
    """Run all passes over a schedule."""
    streams = [_with_updates(rows, schedule.microbatches) for rows in schedule.streams]
    streams = _aligned(streams, schedule.microbatches)
    shape = (schedule.stages, max(map(len, streams)))
    needs, feeds = _hand_overs(schedule.chunks)
    program = Program(
        schedule=schedule,
        op=np.full(shape, NONE, np.int8),
        chunk=np.zeros(shape, np.int16),
        index=np.zeros(shape, np.int32),
        batch=np.zeros(shape, np.int16),
        delay=np.zeros(shape, np.int16),
        ahead=np.zeros(shape, np.int16),
        predicts=np.zeros(shape, np.bool_),
        dies=np.zeros(shape, np.bool_),
        forgets=np.zeros(shape, np.bool_),
        needs=needs,
        feeds=feeds,
    )
    for rank, rows in enumerate(streams):
        for name, column in _lower_rank(rows, schedule).items():
            getattr(program, name)[rank, : len(rows)] = column
    return program


def shared_weights(program: Program, chunks: Sequence[int]) -> Program:
    """The program of weights that several chunks share.

    Where backwards are at other weights than their forwards, that would make the last chunk wait for the first one's
    update; so shared weights are predicted once a mini-batch, and both passes of all chunks read that.
    """
    weights, placement = program.schedule.weights, program.schedule.placement
    if not program.ahead.any() and weights.backward == "forward":
        return at_largest_delay(program, chunks)
    late, ahead = 0, 0
    for chunk in chunks:
        rank = placement[chunk]
        forwards = (program.chunk[rank] == chunk) & (program.op[rank] == Op.F)
        late = max(late, int(program.delay[rank][forwards].max(initial=0)))
        ahead = max(ahead, int(program.ahead[rank][forwards].max(initial=0)))
    policy = Weights(delay=late, ahead=ahead, bellwether=True)
    return lower(replace(program.schedule, weights=policy))


def at_largest_delay(program: Program, chunks: Sequence[int]) -> Program:
    """The program of weights that several chunks share: each of them reads as late as the latest of them does."""
    columns = {name: getattr(program, name).copy() for name in ("delay", "ahead", "predicts", "dies", "forgets")}
    shared = np.isin(program.chunk, chunks) & (program.op != NONE) & (program.op != Op.U)
    j = program.index % program.schedule.microbatches
    for mine in (shared & (program.op == Op.F), shared & (program.op != Op.F)):
        for name in ("delay", "ahead"):
            largest = np.zeros(program.schedule.microbatches, columns[name].dtype)
            np.maximum.at(largest, j[mine], columns[name][mine])
            columns[name][mine] = largest[j[mine]]
    for chunk in chunks:
        rank = program.schedule.placement[chunk]
        lines = {name: columns[name][rank] for name in columns}
        mine = np.flatnonzero((program.chunk[rank] == chunk) & (program.op[rank] != NONE))
        lines["dies"][mine] = lines["forgets"][mine] = False
        _deaths({"op": program.op[rank], "batch": program.batch[rank], **lines}, mine, program.schedule.weights)
    return replace(program, **columns)


def _with_updates(rows: Rows, microbatches: int) -> Rows:
    """Pass 1: an update behind the last backward of each mini-batch, for chunks that have none."""
    updated = set(np.unique(rows["chunk"][rows["op"] == Op.U]).tolist())
    places, updates = [], []
    for chunk in np.unique(rows["chunk"]).tolist():
        retiring = np.flatnonzero((rows["chunk"] == chunk) & is_any(rows["op"], RETIRING))
        if chunk in updated or not retiring.size:
            continue
        batch = rows["index"][retiring] // microbatches
        oldest = batch.min()  # the mini-batch that this cycle completes
        places.append(retiring[batch == oldest].max() + 1)
        updates.append(U(chunk, int(oldest)))
    return np.insert(rows, places, join(*updates)) if updates else rows


def _aligned(streams: list[Rows], microbatches: int) -> list[Rows]:
    """Pass 2: an order has no beginning of its own; let the youngest mini-batch of the first cycle be 0."""
    youngest = max((int(_batch(rows, microbatches).max()) for rows in streams if rows.size), default=0)
    if youngest == 0:
        return streams
    streams = [rows.copy() for rows in streams]
    for rows in streams:
        rows["index"] -= youngest * np.where(rows["op"] == Op.U, 1, microbatches).astype(np.int32)
    return streams


def _batch(rows: Rows, microbatches: int) -> Ints:
    """The mini-batch that each row speaks of, relative to its cycle."""
    return np.where(rows["op"] == Op.U, rows["index"], rows["index"] // microbatches)


def _lower_rank(rows: Rows, schedule: Schedule) -> dict[str, npt.NDArray[np.generic]]:
    """Passes 3 and 4 for the stream of one rank."""
    op, chunk, index = (np.ascontiguousarray(rows[name]) for name in ("op", "chunk", "index"))
    batch = _batch(rows, schedule.microbatches)
    zeros = np.zeros(len(rows), np.int16)
    if batch.size and batch.min() < -MOST_BEHIND:
        raise WeftError(f"streams reach back {MOST_BEHIND} mini-batches at the most (got {-int(batch.min())})")
    columns = {"op": op, "chunk": chunk, "index": index, "batch": batch, "delay": zeros, "ahead": zeros.copy()}
    for name in ("predicts", "dies", "forgets"):
        columns[name] = np.zeros(len(rows), np.bool_)
    for one in np.unique(chunk).tolist():
        _reads(columns, np.flatnonzero(chunk == one), one, schedule)
        _deaths(columns, np.flatnonzero(chunk == one), schedule.weights)
    return columns


def _reads(columns: dict[str, npt.NDArray[Any]], mine: Ints, chunk: int, schedule: Schedule) -> None:
    """Pass 3: `delay`, `ahead` and `predicts` of one chunk's rows (`mine` are their places).

    A backward in two halves reads once: its W has the weights of its I.
    """
    weights, microbatches = schedule.weights, schedule.microbatches
    op, batch, j = columns["op"][mine], columns["batch"][mine], columns["index"][mine] % microbatches
    forward, backward = op == Op.F, is_any(op, ANY_BACKWARD)
    newest = batch - _newest(op, batch)  # the delay of whoever reads the newest version
    delay, ahead, predicts = np.zeros_like(batch), np.zeros_like(batch), np.zeros(len(mine), np.bool_)

    def choose(mask: Bools, wanted: int | None, steps: int | None) -> None:
        first = mask & (j == 0)
        own = newest if not weights.bellwether else np.full_like(batch, newest[first].max(initial=0))
        delay[mask] = own[mask] if wanted is None else wanted
        ahead[mask] = delay[mask] if steps is None else steps
        predicts[mask] = (ahead[mask] > 0) & (first[mask] if weights.bellwether else True)

    choose(forward, of_chunk(weights.delay, chunk), of_chunk(weights.ahead, chunk))
    if weights.backward == "newest":
        choose(backward & (op != Op.W), None, of_chunk(weights.ahead_backward, chunk))
        source, readers = is_any(op, BACKWARDS), op == Op.W
    else:
        source, readers = forward, backward
    if readers.any():
        by_microbatch = np.zeros((2, microbatches), batch.dtype)
        by_microbatch[:, j[source]] = delay[source], ahead[source]
        delay[readers], ahead[readers] = by_microbatch[:, j[readers]]
    columns["delay"][mine], columns["ahead"][mine], columns["predicts"][mine] = delay, ahead, predicts


def _newest(op: Ints, batch: Ints) -> Ints:
    """The newest version, relative to the cycle, that a chunk has when each of its rows begins."""
    updates = np.flatnonzero(op == Op.U)
    if not updates.size:
        return np.zeros_like(batch)
    newest: Ints = batch[updates].min() + (np.arange(len(op)) > updates[0])
    return newest


def _deaths(columns: dict[str, npt.NDArray[Any]], mine: Ints, weights: Weights) -> None:
    """Pass 4: `dies` and `forgets` of one chunk's rows.

    Version `v` is read in cycle `v + delay - batch`; what counts is the read that comes last of all cycles. A
    version whose last read comes before the update that replaces it dies in that update, which may then
    write in place.
    """
    op, batch = columns["op"][mine], columns["batch"][mine].astype(np.int64)
    delay, ahead, predicts = (columns[name][mine] for name in ("delay", "ahead", "predicts"))
    place, height = mine.astype(np.int64), len(columns["op"])
    updates = np.flatnonzero(op == Op.U)
    reads = np.flatnonzero((op != Op.U) & ((ahead == 0) | predicts))
    if updates.size and reads.size:
        when = (delay[reads] - batch[reads]) * height + place[reads]
        replaced = -int(batch[updates[0]]) * height + int(place[updates[0]])
        last = reads[when.argmax()] if when.max() > replaced else updates[0]
        columns["dies"][mine[last]] = True

    users = np.flatnonzero((op != Op.U) & (ahead > 0))
    if not users.size:
        return
    forward = op[users] == Op.F
    shared = weights.backward == "forward"  # the backwards reuse what the forward predicted
    for group in [users] if shared else [users[forward], users[~forward]]:
        if not group.size:
            continue
        if weights.bellwether:
            group = group[[(place[group] - batch[group] * height).argmax()]]
        elif not (op[group] == Op.F).all():
            group = group[is_any(op[group], RETIRING)]
        columns["forgets"][mine[group]] = True


def _hand_overs(chunks: int) -> tuple[Ints, Ints]:
    """Pass 5: whose output an op in a chunk needs, and who takes its own."""
    needs = np.full((len(Op), chunks), -1)
    feeds = needs.copy()
    before, behind = np.arange(chunks) - 1, np.append(np.arange(1, chunks), -1)
    needs[Op.F], feeds[Op.F] = before, behind
    for op in BACKWARDS:
        needs[op], feeds[op] = behind, before
    return needs, feeds
