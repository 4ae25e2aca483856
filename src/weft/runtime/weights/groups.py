"""The groups of gradient sync: replicas of a parameter set, holders of tied ones, chunks that share a norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from weft.runtime.comm import AllReduce
from weft.runtime.weights.all_reduce import Group, GroupSums, Member
from weft.runtime.weights.gradient_sync import Average, GradientSync, Norm, Stage, Tie
from weft.runtime.weights.whole_norm import WholeNorms
from weft.schedule import NONE, Op, Program, Schedule, shared_weights

MOST_NORMS = 2  # WPipe's two groups; with more, tied weights have a norm of their own


def norm_groups(program: Program) -> list[list[int]]:
    """Chunks that can share a norm without a stall: neighbours that read equally late, micro-batch by micro-batch.

    The norm of a mini-batch is known when its last backward is done, in the first chunk. A chunk that reads less late
    than the first one would have to wait for it: WPipe's second group, so its two groups have a norm each. So would a
    chunk whose next backward reads the update at once, unless its rank has work of other chunks in between. Two chunks
    of a rank can't share a norm if the rank reads the update of one of them before it makes that of the other, as
    `weave` may at the turn of its V. With a global norm chunks do wait, and all of them share it.
    """
    schedule = program.schedule
    if schedule.weights.norm == "global":
        return [list(range(schedule.chunks))]
    at_once = schedule.weights.backward == "newest" and schedule.chunks == schedule.stages
    groups: list[list[int]] = []
    for chunk in range(schedule.chunks):
        delays = _delays(program, chunk)
        alike = chunk and delays == _delays(program, chunk - 1) and not (at_once and any(delays))
        if alike and _update_before_reads(program, [*groups[-1], chunk]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _delays(program: Program, chunk: int) -> list[int]:
    """How late a chunk's forwards read, by micro-batch."""
    rank = program.schedule.placement[chunk]
    forward = (program.op[rank] == Op.F) & (program.chunk[rank] == chunk)
    order = np.argsort(program.index[rank][forward] % program.schedule.microbatches)
    delays: list[int] = program.delay[rank][forward][order].tolist()
    return delays


def _update_before_reads(program: Program, chunks: Sequence[int]) -> bool:
    """Whether every rank updates all of these chunks that it holds before it reads an update of one of them."""
    found: dict[int, tuple[float, float]] = {}  # by rank: when the last update is made, and the first one read
    for chunk in chunks:
        rank = program.schedule.placement[chunk]
        made, read = found.get(rank, (-math.inf, math.inf))
        found[rank] = max(made, _made_after(program, chunk)), min(read, _read_after(program, [chunk]))
    return all(made < read for made, read in found.values())


def _made_after(program: Program, chunk: int) -> float:
    """How many cycles after the start of a mini-batch's own a chunk is updated."""
    update = (program.op == Op.U) & (program.chunk == chunk)
    height = program.op.shape[1]
    return float((-program.batch + np.arange(height) / height)[update].max())


def _read_after(program: Program, chunks: Sequence[int]) -> float:
    """How many cycles after the start of a mini-batch's own the first of these chunks reads its update."""
    reads = (program.op != NONE) & (program.op != Op.U) & np.isin(program.chunk, chunks)
    height = program.op.shape[1]
    return float((program.delay - program.batch + 1 + np.arange(height) / height)[reads].min())


def gradient_sync_for(
    program: Program,
    local: set[tuple[int, int]],
    sets: Sequence[Sequence[tuple[int, ...]]],
    all_reduce: Callable[..., AllReduce | None],
    *,
    device: torch.device | None,
    replicas: int,
    clip_norm: float | None,
    skip_nan: bool,
) -> GradientSync:
    """The gradient sync of this process, which holds the chunks `local` (replica and number).

    `sets` has, for every chunk of the model, the holders of each of its parameter sets. `all_reduce` makes a sum over
    some ranks, None where this process has no part in it. `device`: of sums that have streams of their own.

    Communicators are few, because each takes memory of a device (about 100 MB with NCCL):

    - one for all averages of a rank: they start with its updates, in the order of the program, which is the same for
      all replicas of the rank;
    - one for each group of holders of tied weights: their order is that of mini-batches;
    - none for norms, which are numbers: the host adds them up.
    """
    schedule = program.schedule
    members: list[Member] = [
        (replica, chunk, number)
        for replica in range(replicas)
        for chunk in range(schedule.chunks)
        for number in range(len(sets[chunk]))
    ]
    ties = _by_member(_ties(members, sets))
    stages: list[Stage] = []
    whole_norms: WholeNorms | None = None
    if replicas > 1:
        stages.append(Average(groups=_by_member(_averages(members, schedule)), replicas=replicas))
    if ties:
        stages.append(Tie(groups=ties))
    if clip_norm is not None or skip_nan:
        chunks = norm_groups(program)
        shared = _cover_most_chunks(chunks, schedule)
        norms = _by_member(_norms(members, sets, chunks, _tied_homes(sets, program) if shared else {}))
        stages.append(Norm(groups=norms, ties=ties if shared else {}, limit=clip_norm))
        if len(chunks) > 1:
            whole_norms = _whole_norms(program, members, ties)
    across: dict[str, AllReduce] = {}
    for line, (ranks, on_device) in _communicators(stages, whole_norms, schedule).items():
        over_ranks = all_reduce(ranks, on_device=on_device) if len(ranks) > 1 else None
        if over_ranks is not None:
            across[line] = over_ranks
    sums = GroupSums({member for member in members if member[:2] in local}, across, device=device)
    tied = {holders: _read_after(shared_weights(program, holders), holders) for holders in _tied(sets)}
    read_after = {
        (replica, chunk, number): tied[holders] if (holders := sets[chunk][number]) else _read_after(program, [chunk])
        for replica, chunk, number in members
    }
    return GradientSync(sums=sums, stages=stages, read_after=read_after, whole_norms=whole_norms)


def _communicators(
    stages: Sequence[Stage], whole_norms: WholeNorms | None, schedule: Schedule
) -> dict[str, tuple[list[int], bool]]:
    """The ranks of each communicator, and whether it adds up tensors of devices."""
    groups = [(group, not isinstance(stage, Norm)) for stage in stages for group in stage.groups.values()]
    if whole_norms is not None:
        groups += [(group, False) for group in whole_norms.groups.values()]
    return {
        group.line: (
            sorted({replica * schedule.stages + schedule.placement[chunk] for replica, chunk, _ in group.members}),
            on_device,
        )
        for group, on_device in groups
    }


def _by_member(groups: Sequence[Group]) -> dict[Member, Group]:
    return {member: group for group in groups for member in group.members}


def _averages(members: list[Member], schedule: Schedule) -> list[Group]:
    return [
        Group(
            name=f"replicas of chunk {chunk}, set {number}",
            members=tuple(member for member in members if member[1:] == (chunk, number)),
            communicator=f"replicas of rank {schedule.placement[chunk]}",
        )
        for chunk, number in dict.fromkeys(member[1:] for member in members)
    ]


def _ties(members: list[Member], sets: Sequence[Sequence[tuple[int, ...]]]) -> list[Group]:
    found: dict[tuple[int, tuple[int, ...]], list[Member]] = {}
    for replica, chunk, number in members:
        if holders := sets[chunk][number]:
            found.setdefault((replica, holders), []).append((replica, chunk, number))
    return [
        Group(name=f"tied chunks {holders} of replica {replica}", members=tuple(tied))
        for (replica, holders), tied in found.items()
    ]


def _cover_most_chunks(groups: Sequence[Sequence[int]], schedule: Schedule) -> bool:
    """Whether there are at most two norms, none of them of a single rank among several."""
    alone = schedule.stages > 1 and any(len({schedule.placement[chunk] for chunk in chunks}) == 1 for chunks in groups)
    return len(groups) <= MOST_NORMS and not alone


def _tied_homes(sets: Sequence[Sequence[tuple[int, ...]]], program: Program) -> dict[tuple[int, ...], int]:
    """Tied weights count in the chunk that reads them last, because their sum is not known before."""
    latest = {chunk: max(_delays(program, chunk)) for chunk in range(program.schedule.chunks)}
    return {holders: max(holders, key=lambda chunk: (latest[chunk], -chunk)) for holders in _tied(sets)}


def _tied(sets: Sequence[Sequence[tuple[int, ...]]]) -> set[tuple[int, ...]]:
    """The chunks that hold each of the tied sets."""
    return {holders for chunk_sets in sets for holders in chunk_sets if holders}


def _norms(
    members: list[Member],
    sets: Sequence[Sequence[tuple[int, ...]]],
    groups: Sequence[Sequence[int]],
    tied_homes: Mapping[tuple[int, ...], int],
) -> list[Group]:
    """A group for some chunks of each replica.

    Tied weights without a home have a norm of their own, so that no chunk waits for their sum. It is the same for all
    holders, who have the same sum, so they need not ask each other.
    """
    found: dict[str, list[Member]] = {}
    for replica, chunk, number in members:
        holders = sets[chunk][number]
        if holders and holders not in tied_homes:
            name = f"norm of set {number} of chunk {chunk} of replica {replica}"
        else:
            home = tied_homes.get(holders, chunk)
            chunks = next(chunks for chunks in groups if home in chunks)
            name = f"norm of chunks {chunks[0]} to {chunks[-1]} of replica {replica}"
        found.setdefault(name, []).append((replica, chunk, number))
    return [Group(name=name, members=tuple(group)) for name, group in found.items()]


def _whole_norms(program: Program, members: list[Member], ties: Mapping[Member, Group]) -> WholeNorms:
    """All chunks of each replica.

    All of them are updated a cycle before ranks report the norm, which is on its way meanwhile. A synchronous pipeline
    has nothing else to do, and reports it at once.
    """
    found: dict[int, list[Member]] = {}
    for member in members:
        found.setdefault(member[0], []).append(member)
    return WholeNorms(
        groups=_by_member(
            [Group(name=f"norm of replica {replica}", members=tuple(group)) for replica, group in found.items()]
        ),
        ties=ties,
        after=max(_made_after(program, chunk) for chunk in range(program.schedule.chunks)) + (program.drain > 0),
    )
