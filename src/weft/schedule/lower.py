"""Lowering: the passes that turn a schedule, as its author writes it, into the form that all other code reads.

    updates      a chunk without updates gets one after the last backward of each mini-batch
    alignment    cycles are numbered so that the youngest mini-batch in cycle `c` is `c`
    norm order   where updates wait for one norm over all chunks, what reads an update comes after the norm
    reads        the `delay` of the version that each row reads, how far `ahead` it predicts, and which row predicts
    deaths       the row after which a version, or a prediction, is never read again
    hand-overs   which chunk's output an action needs, and which chunk takes its output

The result is a `Program` (`program.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import WeftError
from weft.schedule.actions import ANY_BACKWARD, BACKWARDS, NONE, RETIRING, Op, Rows, U, is_any, join
from weft.schedule.core import Schedule
from weft.schedule.norm_order import in_norm_order
from weft.schedule.program import Bools, Ints, Program
from weft.schedule.weights import Weights, of_chunk

MAX_LAG = np.iinfo(np.int16).max  # mini-batches between the youngest and the oldest of a stream


def lower(schedule: Schedule) -> Program:
    """Run all passes on a schedule."""
    streams = [_with_updates(rows, schedule.microbatches) for rows in schedule.streams]
    streams = _aligned(streams, schedule.microbatches)
    if schedule.weights.norm == "global":
        schedule = _in_norm_order(replace(schedule, streams=tuple(streams)))
        streams = list(schedule.streams)
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

    If a backward read other weights than its forward, the last chunk would have to wait for the first chunk's update.
    So both passes read those of the forward. What is predicted is predicted once per mini-batch, for all chunks.
    """
    weights, placement = program.schedule.weights, program.schedule.placement
    if not program.ahead.any():
        if weights.backward == "newest":
            program = lower(replace(program.schedule, weights=replace(weights, backward="forward")))
        return at_largest_delay(program, chunks)
    delay, ahead = 0, 0
    for chunk in chunks:
        rank = placement[chunk]
        forwards = (program.chunk[rank] == chunk) & (program.op[rank] == Op.F)
        delay = max(delay, int(program.delay[rank][forwards].max(initial=0)))
        ahead = max(ahead, int(program.ahead[rank][forwards].max(initial=0)))
    policy = Weights(delay=delay, ahead=ahead, bellwether=True)
    return lower(replace(program.schedule, weights=policy))


def at_largest_delay(program: Program, chunks: Sequence[int]) -> Program:
    """The program of weights that several chunks share: all of them read with the largest delay among them."""
    columns = {name: getattr(program, name).copy() for name in ("delay", "ahead", "predicts", "dies", "forgets")}
    shared = np.isin(program.chunk, chunks) & (program.op != NONE) & (program.op != Op.U)
    j = program.index % program.schedule.microbatches
    for one_pass in (shared & (program.op == Op.F), shared & (program.op != Op.F)):
        for name in ("delay", "ahead"):
            largest = np.zeros(program.schedule.microbatches, columns[name].dtype)
            np.maximum.at(largest, j[one_pass], columns[name][one_pass])
            columns[name][one_pass] = largest[j[one_pass]]
    for chunk in chunks:
        rank = program.schedule.placement[chunk]
        lines = {name: columns[name][rank] for name in columns}
        places = np.flatnonzero((program.chunk[rank] == chunk) & (program.op[rank] != NONE))
        lines["dies"][places] = lines["forgets"][places] = False
        _deaths(
            {"op": program.op[rank], "batch": program.batch[rank], **lines}, places, chunk, program.schedule.weights
        )
    return replace(program, **columns)


def _with_updates(rows: Rows, microbatches: int) -> Rows:
    """Pass 1: add an update after the last backward of each mini-batch, for chunks without updates."""
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
    """Pass 2: shift all indices so that the youngest mini-batch of the first cycle is 0."""
    youngest = max((int(_batch(rows, microbatches).max()) for rows in streams if rows.size), default=0)
    if youngest == 0:
        return streams
    streams = [rows.copy() for rows in streams]
    for rows in streams:
        rows["index"] -= youngest * np.where(rows["op"] == Op.U, 1, microbatches).astype(np.int32)
    return streams


def _in_norm_order(schedule: Schedule) -> Schedule:
    """Pass 2b, of schedules whose updates wait for a norm over all chunks."""
    m = schedule.microbatches
    before = [_lower_rank(rows, schedule) for rows in schedule.streams]
    streams = in_norm_order(schedule.streams, before, chunks=schedule.chunks, microbatches=m)
    after = [_lower_rank(rows, schedule) for rows in streams]
    reads = [[_reads_by_action(columns, m) for columns in lowered] for lowered in (before, after)]
    if reads[0] != reads[1]:
        raise WeftError(
            f"{schedule.name} would read other weights if updates waited for one norm over all chunks; "
            'use norm="group", which does not change the order of work'
        )
    return replace(schedule, streams=tuple(_aligned(streams, m)))


def _reads_by_action(columns: dict[str, npt.NDArray[Any]], microbatches: int) -> set[tuple[int, ...]]:
    """Op, chunk and micro-batch of each pass, and how late it reads."""
    passes = columns["op"] != Op.U
    table = (columns["op"], columns["chunk"], columns["index"] % microbatches, columns["delay"])
    return set(zip(*(column[passes].tolist() for column in table), strict=True))


def _batch(rows: Rows, microbatches: int) -> Ints:
    """The mini-batch of each row, relative to its cycle."""
    return np.where(rows["op"] == Op.U, rows["index"], rows["index"] // microbatches)


def _lower_rank(rows: Rows, schedule: Schedule) -> dict[str, npt.NDArray[np.generic]]:
    """Passes 3 and 4 for the stream of one rank."""
    op, chunk, index = (np.ascontiguousarray(rows[name]) for name in ("op", "chunk", "index"))
    batch = _batch(rows, schedule.microbatches)
    zeros = np.zeros(len(rows), np.int16)
    if batch.size and batch.min() < -MAX_LAG:
        raise WeftError(f"streams may reach back at most {MAX_LAG} mini-batches (got {-int(batch.min())})")
    columns = {"op": op, "chunk": chunk, "index": index, "batch": batch, "delay": zeros, "ahead": zeros.copy()}
    for name in ("predicts", "dies", "forgets"):
        columns[name] = np.zeros(len(rows), np.bool_)
    for number in np.unique(chunk).tolist():
        places = np.flatnonzero(chunk == number)
        _reads(columns, places, number, schedule)
        _deaths(columns, places, number, schedule.weights)
    return columns


def _reads(columns: dict[str, npt.NDArray[Any]], places: Ints, chunk: int, schedule: Schedule) -> None:
    """Pass 3: `delay`, `ahead` and `predicts` of one chunk's rows, which are at `places`.

    A split backward reads once: its W uses the weights of its I.
    """
    weights, microbatches = schedule.weights, schedule.microbatches
    op, batch, j = columns["op"][places], columns["batch"][places], columns["index"][places] % microbatches
    forward, backward = op == Op.F, is_any(op, ANY_BACKWARD)
    newest = batch - _newest(op, batch)  # the delay of a row that reads the newest version
    delay, ahead, predicts = np.zeros_like(batch), np.zeros_like(batch), np.zeros(len(places), np.bool_)

    def choose(mask: Bools, wanted_delay: int | None, wanted_ahead: int | None) -> None:
        first = mask & (j == 0)
        found = newest if not weights.bellwether else np.full_like(batch, newest[first].max(initial=0))
        delay[mask] = found[mask] if wanted_delay is None else wanted_delay
        ahead[mask] = delay[mask] if wanted_ahead is None else wanted_ahead
        users: Ints = np.flatnonzero(mask & (ahead > 0))
        if weights.bellwether:
            users = users[j[users] == 0]
        elif weights.shares_predictions(chunk):
            users = _ends(users, ahead, batch, places, len(columns["op"]), last=False)
        predicts[users] = True

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
    columns["delay"][places], columns["ahead"][places], columns["predicts"][places] = delay, ahead, predicts


def _newest(op: Ints, batch: Ints) -> Ints:
    """The newest version of a chunk, relative to the cycle, at the start of each of its rows."""
    updates = np.flatnonzero(op == Op.U)
    if not updates.size:
        return np.zeros_like(batch)
    newest: Ints = batch[updates].min() + (np.arange(len(op)) > updates[0])
    return newest


def _ends(users: Ints, ahead: Ints, batch: Ints, places: Ints, height: int, *, last: bool) -> Ints:
    """Of the users that predict equally far, the first or the last of a mini-batch, in whatever cycles they are."""
    when = (places.astype(np.int64) - batch.astype(np.int64) * height) * (1 if last else -1)
    alike = (users[ahead[users] == value] for value in np.unique(ahead[users]))
    return np.array([group[when[group].argmax()] for group in alike], np.int64)


def _deaths(columns: dict[str, npt.NDArray[Any]], places: Ints, chunk: int, weights: Weights) -> None:
    """Pass 4: `dies` and `forgets` of one chunk's rows.

    Version `v` is read in cycle `v + delay - batch`; the last of these reads over all cycles counts. A version whose
    last read comes before the update that replaces it dies in that update, which may then write in place.
    """
    op, batch = columns["op"][places], columns["batch"][places].astype(np.int64)
    delay, ahead, predicts = (columns[name][places] for name in ("delay", "ahead", "predicts"))
    place, height = places.astype(np.int64), len(columns["op"])
    updates = np.flatnonzero(op == Op.U)
    reads = np.flatnonzero((op != Op.U) & ((ahead == 0) | predicts))
    if updates.size and reads.size:
        when = (delay[reads] - batch[reads]) * height + place[reads]
        replaced = -int(batch[updates[0]]) * height + int(place[updates[0]])
        last = reads[when.argmax()] if when.max() > replaced else updates[0]
        columns["dies"][places[last]] = True

    users = np.flatnonzero((op != Op.U) & (ahead > 0))
    if not users.size:
        return
    forward = op[users] == Op.F
    shared = weights.backward == "forward"  # backwards reuse the prediction of the forward
    for group in [users] if shared else [users[forward], users[~forward]]:
        if not group.size:
            continue
        if weights.shares_predictions(chunk):
            group = _ends(group, ahead, batch, places, height, last=True)
        elif not (op[group] == Op.F).all():
            group = group[is_any(op[group], RETIRING)]
        columns["forgets"][places[group]] = True


def _hand_overs(chunks: int) -> tuple[Ints, Ints]:
    """Pass 5: which chunk's output an op in a chunk needs, and which chunk takes its output."""
    needs = np.full((len(Op), chunks), -1)
    feeds = needs.copy()
    previous, following = np.arange(chunks) - 1, np.append(np.arange(1, chunks), -1)
    needs[Op.F], feeds[Op.F] = previous, following
    for op in BACKWARDS:
        needs[op], feeds[op] = following, previous
    return needs, feeds
