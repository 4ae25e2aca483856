"""What a pipeline decides before it is built: schedule, device, ranks, and who adds up what."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.runtime.settlement import Settler
from weft.runtime.sums import AllReduce, Group, Member, Sums
from weft.runtime.transport import Processes, Transport, Virtual
from weft.schedule import Op, Program, Schedule
from weft.schedule import schedule as named_schedule
from weft.schedule.core import check_sizes

MOST_NORMS = 2  # WPipe's two groups; more would be a clipping of single stages


def check_choices(*, precision: Any, nan: Any, clip_norm: Any, deadline: Any, seed: Any) -> None:
    """Refuse settings that can't be."""
    if precision not in (None, "fp32", "bf16"):
        raise WeftError(f'precision is "fp32" or "bf16" (got {precision!r})')
    if nan not in ("stop", "skip"):
        raise WeftError(f'nan is "stop" or "skip": what to do with a mini-batch whose loss is not finite (got {nan!r})')
    if clip_norm is not None and not (_is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise WeftError(f"clip_norm is a number above 0, or None (got {clip_norm!r})")
    if not (_is_number(deadline) and 0 < deadline < math.inf):
        raise WeftError(f"deadline is a number of seconds above 0 (got {deadline!r})")
    if type(seed) is not int:
        raise WeftError(f"seed is a whole number (got {seed!r})")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def each_chunk(choice: bool | Sequence[bool], chunks: int) -> list[bool]:
    """A choice for all chunks, or one for each."""
    if isinstance(choice, bool):
        return [choice] * chunks
    chosen = list(choice)
    if len(chosen) != chunks or any(not isinstance(one, bool) for one in chosen):
        raise WeftError(f"recompute is true, false, or one of them a chunk (got {chosen}, chunks: {chunks})")
    return chosen


def schedule_for(schedule: str | Schedule, stages: int | None, microbatches: int | None, replicas: int) -> Schedule:
    """The schedule that a pipeline runs, for as many stages as there are ranks."""
    check_sizes(replicas=replicas)
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
        if world % replicas:
            raise WeftError(f"replicas must divide the number of ranks (ranks: {world}, replicas: {replicas})")
        there = world // replicas
        if stages not in (None, there):
            raise WeftError(
                f"stages is the number of ranks over replicas (stages: {stages}, ranks: {world}, "
                f"replicas: {replicas}); leave it out, or start {(stages or 0) * replicas} ranks"
            )
    else:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise WeftError(
                f"this process is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), but there is no process group, and "
                "every one would train alone; start from weft.launch, or call torch.distributed.init_process_group"
            )
        there = stages if stages is not None else schedule.stages if isinstance(schedule, Schedule) else 1
    if isinstance(schedule, Schedule):
        if (schedule.stages, schedule.microbatches) != (there, microbatches or schedule.microbatches):
            raise WeftError(
                f"the schedule is for {schedule.stages} stages and {schedule.microbatches} micro-batches "
                f"(stages: {there}, microbatches: {microbatches}); build it for those"
            )
        return schedule
    if microbatches is None:
        raise WeftError("a schedule by name needs microbatches, the number of parts of a mini-batch")
    return named_schedule(schedule, stages=there, microbatches=microbatches)


def runnable(program: Program) -> Program:
    """Refuse what the engine can't run."""
    if program.ahead.any() or program.schedule.weights.backward == "newest":
        raise WeftError(
            f"{program.schedule.name} predicts weights, which the runtime does not do yet; it can be drawn, "
            "simulated and checked; use 2bw, wpipe or pipedream to train"
        )
    return program


def device_for(device: str | torch.device | None) -> torch.device:
    """The device of a rank: as told, or the local rank's GPU where the process group has NCCL, or the CPU."""
    if device is not None:
        return torch.device(device)
    joined = dist.is_available() and dist.is_initialized()
    if joined and torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def transport_for(schedule: Schedule, *, slots: int, deadline: float, device: torch.device) -> Transport:
    if dist.is_available() and dist.is_initialized():
        return Processes(schedule, slots=slots, deadline=deadline, device=device)
    return Virtual(schedule)


def local_chunks(schedule: Schedule, replicas: int) -> list[tuple[int, int]]:
    """Replica and chunk of all that lives in this process."""
    if dist.is_available() and dist.is_initialized():
        replica, rank = divmod(dist.get_rank(), schedule.stages)
        return [(replica, chunk) for chunk in schedule.chunks_of(rank)]
    return [(replica, chunk) for replica in range(replicas) for chunk in range(schedule.chunks)]


def norm_groups(program: Program) -> list[list[int]]:
    """Chunks that can share a norm without a stall: neighbours that read equally late, micro-batch by micro-batch.

    The norm of a mini-batch is known when its last backward is done, in the first chunk. A chunk that reads less late
    than the first one would have to wait for it: WPipe's second group, so its two groups have a norm each.
    """
    groups: list[list[int]] = []
    for chunk in range(program.schedule.chunks):
        if chunk and _delays(program, chunk) == _delays(program, chunk - 1):
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


def settler_for(
    program: Program,
    here: set[tuple[int, int]],
    sets: Sequence[Sequence[tuple[int, ...]]],
    transport: Transport,
    *,
    replicas: int,
    clip_norm: float | None,
) -> Settler:
    """Who adds up what: replicas of a parameter set, holders of tied ones, chunks that share a norm.

    `sets` has, for every chunk of the model, the holders of each of its parameter sets.
    """
    schedule = program.schedule
    members: list[Member] = [
        (replica, chunk, number)
        for replica in range(replicas)
        for chunk in range(schedule.chunks)
        for number in range(len(sets[chunk]))
    ]
    averages, ties, norms = [], [], []
    if replicas > 1:
        for chunk, number in dict.fromkeys(member[1:] for member in members):
            name = f"replicas of chunk {chunk}, set {number}"
            averages.append(Group(name=name, members=tuple(m for m in members if m[1:] == (chunk, number))))
    for replica in range(replicas):
        for holders in sorted({holders for chunk in sets for holders in chunk if holders}):
            tied = tuple(m for m in members if m[0] == replica and sets[m[1]][m[2]] == holders)
            ties.append(Group(name=f"tied chunks {holders} of replica {replica}", members=tied))
    if clip_norm is not None:
        groups = norm_groups(program)
        if len(groups) > MOST_NORMS:
            raise WeftError(
                f"clip_norm needs one norm over all chunks, and {schedule.name}'s chunks update at {len(groups)} "
                "different delays, so it would have to wait; use 2bw, wpipe (a norm for each of its two groups) "
                "or a synchronous schedule"
            )
        # Tied weights count where they are read last of all, for before that their sum is not known.
        latest = {chunk: max(_delays(program, chunk)) for chunk in range(schedule.chunks)}
        home = {m: max(sets[m[1]][m[2]] or m[1:2], key=lambda chunk: (latest[chunk], -chunk)) for m in members}
        for replica in range(replicas):
            for chunks in groups:
                inside = tuple(m for m in members if m[0] == replica and home[m] in chunks)
                name = f"norm of chunks {chunks[0]} to {chunks[-1]} of replica {replica}"
                norms.append(Group(name=name, members=inside))
    across: dict[str, AllReduce] = {}
    for group in (*averages, *ties, *norms):
        ranks = sorted({replica * schedule.stages + schedule.placement[chunk] for replica, chunk, _ in group.members})
        if isinstance(transport, Processes) and len(ranks) > 1:
            across[group.name] = transport.all_reduce(ranks)
    local = {member for member in members if member[:2] in here}
    return Settler(
        sums=Sums(local, across),
        replicas=replicas,
        clip_norm=clip_norm,
        averages={member: group for group in averages for member in group.members},
        ties={member: group for group in ties for member in group.members},
        norms={member: group for group in norms for member in group.members},
    )
