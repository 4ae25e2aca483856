"""What a pipeline decides before it is built: schedule, device and ranks; and the choices that it refuses."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import WeftError
from weft.runtime.transport import Processes, Transport, Virtual
from weft.schedule import Program, Schedule
from weft.schedule import schedule as named_schedule
from weft.schedule.core import check_sizes


def check_choices(
    *, loss_fn: Any, optimizer: Any, precision: Any, nan: Any, clip_norm: Any, deadline: Any, seed: Any
) -> None:
    """Refuse settings that can't be."""
    if not callable(loss_fn):
        raise WeftError(f"loss_fn is a function of output and target (got {loss_fn!r})")
    if not callable(optimizer):
        raise WeftError(
            "optimizer is a function from parameters to a torch.optim.Optimizer, such as "
            f"lambda params: torch.optim.SGD(params, lr=0.1) (got {type(optimizer).__name__})"
        )
    if isinstance(loss_fn, nn.Module) and any(one.requires_grad for one in loss_fn.parameters()):
        raise WeftError("a loss_fn has no parameters to train; make its trained part the model's last layer")
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
        if (schedule.stages, schedule.microbatches) != (
            there,
            schedule.microbatches if microbatches is None else microbatches,
        ):
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
    newest = program.schedule.weights.backward == "newest"
    if program.ahead.any() or newest:
        does = "predicts weights" if program.ahead.any() else "runs backwards at other weights than their forwards"
        raise WeftError(
            f"{program.schedule.name} {does}, which the runtime does not do yet; it can be drawn, simulated and "
            "checked; use 2bw, wpipe or pipedream to train"
        )
    return program


def device_for(device: str | torch.device | None) -> torch.device:
    """The device of a rank: as told, or the local rank's GPU where the process group has NCCL, or the CPU."""
    if device is not None:
        return torch.device(device)
    joined = dist.is_available() and dist.is_initialized()
    if joined and torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()):
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
        return chosen
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
