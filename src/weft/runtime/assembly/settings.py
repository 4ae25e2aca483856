"""What a pipeline decides before it is built: schedule, device and ranks; and the choices that it refuses."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import WeftError
from weft.runtime.comm import InProcessTransport, ProcessTransport, Transport
from weft.runtime.update import Choice
from weft.schedule import METHODS, Program, Schedule, check_sizes, lower
from weft.schedule import schedule as named_schedule
from weft.text import did_you_mean


def check_choices(
    *,
    loss_fn: Any,
    optimizer: Any,
    precision: Any,
    nan: Any,
    clip_norm: Any,
    deadline: Any,
    seed: Any,
    telemetry: Any,
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
    if telemetry is not None:
        check_sizes(telemetry=telemetry)


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


PREDICT = {
    "versions": ("published", "exact"),
    "bias": ("adam", "printed"),
    "extrapolation": ("linear", "decayed"),
}


def prediction_for(predict: Mapping[str, Any] | None) -> dict[str, str]:
    """The choices of `predict=`, each one of those that there are."""
    if predict is not None and not isinstance(predict, Mapping):
        raise WeftError(f'predict holds choices, such as {{"versions": "exact"}} (got {predict!r})')
    chosen = dict(predict or {})
    for name, value in chosen.items():
        if name not in PREDICT:
            known = ", ".join(PREDICT)
            raise WeftError(f"predict has no choice {name!r}{did_you_mean(name, PREDICT)}; its choices are: {known}")
        if value not in PREDICT[name]:
            raise WeftError(f"predict's {name} is {' or '.join(map(repr, PREDICT[name]))} (got {value!r})")
    return chosen


def choice_of(program: Program, chosen: Mapping[str, str]) -> Choice | None:
    """How the weights of a pipeline are predicted, if they are."""
    if not program.predicts.any():
        return None
    return Choice(**{name: chosen[name] for name in ("bias", "extrapolation") if name in chosen})


def schedule_option(schedule: str | Schedule, predict: Mapping[str, str] | None) -> dict[str, str]:
    """The option that a schedule by name takes from `predict=`; a refusal where there is nothing to predict."""
    if predict is None:
        return {}
    if isinstance(schedule, Schedule):
        named = METHODS.get(schedule.name)
        always = named is not None and "versions" in named.options
        if not (always or "predict" in schedule.options or lower(schedule).ahead.any()):
            raise WeftError(
                f"this {schedule.name} was built without prediction, so there is nothing to choose; leave predict out, "
                'or build one that predicts, such as weft.schedule("wpipe", ..., predict="exact")'
            )
        made = schedule.options.get("versions", schedule.options.get("predict", "published"))
        if predict.get("versions", made) != made:
            raise WeftError(
                f"the schedule has its own count of versions (schedule: {made}, predict: {predict['versions']}); leave "
                'it out, or build the schedule with it, such as weft.schedule("xpipe", ..., versions="exact")'
            )
        return {}
    method = METHODS.get(schedule)
    if method is None:
        return {}  # named_schedule tells what there is
    for option in ("versions", "predict"):
        if option in method.options:
            return {option: predict.get("versions", "published")}
    able = [name for name, one in METHODS.items() if {"versions", "predict"} & set(one.options)]
    why = "is synchronous: it meets no other weights than it reads" if not method.asynchronous else "keeps its versions"
    raise WeftError(f"predict= is for {', '.join(able)}; {schedule} {why}, so leave predict out")


def schedule_for(
    schedule: str | Schedule,
    stages: int | None,
    microbatches: int | None,
    replicas: int,
    predict: Mapping[str, str] | None = None,
) -> Schedule:
    """The schedule that a pipeline runs, for as many stages as there are ranks."""
    options = schedule_option(schedule, predict)
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
    return named_schedule(schedule, stages=there, microbatches=microbatches, **options)


def check_weights(program: Program, *, recompute: Sequence[bool], precision: str | None) -> None:
    """Refuse what does not go with the weights that a schedule reads."""
    schedule = program.schedule
    if schedule.weights.backward == "forward":
        return
    does = f"{schedule.name} runs backwards at other weights than their forwards"
    other = (
        "use a schedule whose backward is at its forward's weights, such as wpipe or 2bw, with prediction or without"
    )
    if any(recompute):
        raise WeftError(
            f"{does}, so a forward can't be computed again for its backward; leave recompute out, or {other}"
        )
    if precision == "bf16":
        raise WeftError(
            f"{does}, but what autocast saves are casts of the forward's weights; leave precision out, or {other}"
        )


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
        return ProcessTransport(schedule, slots=slots, deadline=deadline, device=device)
    return InProcessTransport(schedule)


def local_chunks(schedule: Schedule, replicas: int) -> list[tuple[int, int]]:
    """Replica and chunk of all that lives in this process."""
    if dist.is_available() and dist.is_initialized():
        replica, rank = divmod(dist.get_rank(), schedule.stages)
        return [(replica, chunk) for chunk in schedule.chunks_of(rank)]
    return [(replica, chunk) for replica in range(replicas) for chunk in range(schedule.chunks)]
