"""From settings to what runs: the schedule for the ranks there are, the device, the transport."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import Tensor

from weft.environment import is_first
from weft.errors import WeftError
from weft.runtime.assembly.devices import RankDevice, check_devices, describe_devices, say_once
from weft.runtime.assembly.settings import Settings
from weft.runtime.comm import Collectives, InProcessTransport, ProcessTransport, Transport
from weft.runtime.device import choose_device, device_identity, gather_facts, use_device
from weft.runtime.process import hang_dump, this_rank, watch_parent
from weft.runtime.update import PredictionOptions
from weft.runtime.weights import norm_groups
from weft.schedule import (
    METHODS,
    Program,
    RecomputeChoice,
    Schedule,
    check_sizes,
    lower,
    predicting_methods,
    recompute_choices,
    splits_backwards,
)
from weft.schedule import schedule as named_schedule

DEVICES = "choose their devices"  # purpose of collective calls


def _schedule_option(schedule: str | Schedule, predict: Mapping[str, str] | None) -> dict[str, str]:
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
        return {}  # named_schedule refuses it
    if method.prediction_option is not None:
        return {method.prediction_option: predict.get("versions", "published")}
    why = "is synchronous: it meets no other weights than it reads" if not method.asynchronous else "keeps its versions"
    raise WeftError(f"predict= is for {', '.join(predicting_methods())}; {schedule} {why}, so leave predict out")


def schedule_for(settings: Settings) -> Schedule:
    """The schedule that a pipeline runs, for as many stages as there are ranks."""
    schedule = _schedule_for(settings)
    if settings.norm == "global" and len(norm_groups(lower(schedule))) > 1:
        return replace(schedule, weights=replace(schedule.weights, norm="global"))
    return schedule


def _schedule_for(settings: Settings) -> Schedule:
    schedule, stages, microbatches, replicas = (
        settings.schedule,
        settings.stages,
        settings.microbatches,
        settings.replicas,
    )
    options = _schedule_option(schedule, settings.predict)
    check_sizes(replicas=replicas)
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
        if world % replicas:
            raise WeftError(f"replicas must divide the number of ranks (ranks: {world}, replicas: {replicas})")
        available = world // replicas
        if stages not in (None, available):
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
        available = stages if stages is not None else schedule.stages if isinstance(schedule, Schedule) else 1
    if isinstance(schedule, Schedule):
        if (schedule.stages, schedule.microbatches) != (
            available,
            schedule.microbatches if microbatches is None else microbatches,
        ):
            raise WeftError(
                f"the schedule is for {schedule.stages} stages and {schedule.microbatches} micro-batches "
                f"(stages: {available}, microbatches: {microbatches}); build it for those"
            )
        return schedule
    if microbatches is None:
        raise WeftError(
            "a schedule by name needs microbatches, the number of parts of a mini-batch (microbatches: None); use for "
            f"example {2 * available}, two for each stage"
        )
    return named_schedule(schedule, stages=available, microbatches=microbatches, **options)


def prediction_for(program: Program, predict: Mapping[str, str]) -> PredictionOptions | None:
    """How a pipeline predicts weights, if its schedule does."""
    if not program.predicts.any():
        return None
    return PredictionOptions(**{name: predict[name] for name in ("bias", "extrapolation") if name in predict})


def recompute_for(settings: Settings, schedule: Schedule, *, checkpointing: bool) -> list[RecomputeChoice]:
    """How each chunk is recomputed: as asked for, or else as a cut model with gradient checkpointing asks for it."""
    if settings.recompute is not None or not checkpointing:
        return recompute_choices(settings.recompute or False, schedule)
    choice: RecomputeChoice = True if splits_backwards(schedule) else "layer"
    outcome = f"becomes recompute={choice!r}; give recompute= to choose another"
    if schedule.weights.backward != "forward":
        choice = False
        outcome = f"is off, since {schedule.name} runs backwards at other weights than their forwards"
    if is_first():
        say_once(f"a model that is cut loses its gradient checkpointing, which {outcome}")
    return recompute_choices(choice, schedule)


def collectives_for(settings: Settings) -> Collectives:
    """This process among the ranks. They exchange their devices first: links and sums depend on them."""
    if dist.is_available() and dist.is_initialized():
        hang_dump.enable()
        watch_parent()
    return Collectives(deadline=settings.deadline)


def device_for(device: str | torch.device | None, tensors: Iterable[Tensor], collectives: Collectives) -> torch.device:
    """The device of this rank, which becomes the current one; what one rank can't choose, all refuse."""

    def choose() -> RankDevice:
        choice = choose_device(gather_facts(device, tensors, is_launched=bool(this_rank.name)))
        return RankDevice(
            host=socket.gethostname(),
            device=choice.device,
            identity=device_identity(torch.device(choice.device)),
            reason=choice.reason,
            may_share=choice.may_share,
        )

    own = collectives.together(choose, purpose=DEVICES)
    ranks = [RankDevice(**data) for data in collectives.all_gather(asdict(own), purpose=DEVICES)]
    check_devices(ranks)
    if collectives.first:
        for line in describe_devices(ranks):
            say_once(line)
    chosen = torch.device(own.device)
    use_device(chosen)
    return chosen


def transport_for(
    schedule: Schedule, replicas: int, *, slots: int, deadline: float, device: torch.device, collectives: Collectives
) -> Transport:
    """Real ranks where there is a process group, virtual ones where there is none."""
    if dist.is_available() and dist.is_initialized():
        return ProcessTransport(schedule, slots=slots, deadline=deadline, device=device, collectives=collectives)
    return InProcessTransport(schedule, replicas)


def local_chunks(schedule: Schedule, replicas: int) -> list[tuple[int, int]]:
    """Replica and number of every chunk of this process."""
    if dist.is_available() and dist.is_initialized():
        replica, rank = divmod(dist.get_rank(), schedule.stages)
        return [(replica, chunk) for chunk in schedule.chunks_of(rank)]
    return [(replica, chunk) for replica in range(replicas) for chunk in range(schedule.chunks)]
