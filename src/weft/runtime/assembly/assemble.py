"""A rank, or all virtual ones, put together from a model and the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from weft import faults
from weft.errors import WeftError
from weft.runtime.assembly import consistency, resolve
from weft.runtime.assembly.build import BuiltChunk, build_chunk
from weft.runtime.assembly.description import describe_loss, describe_updates, versions
from weft.runtime.assembly.dtypes import check_dtypes
from weft.runtime.assembly.hooks import check_hooks
from weft.runtime.assembly.initial_weights import start_weights
from weft.runtime.assembly.layout import Layout, layout_of
from weft.runtime.assembly.settings import Settings
from weft.runtime.comm import Collectives, Transport
from weft.runtime.device import Uploads
from weft.runtime.engine import PRECISIONS, Blocking, ComputeSettings, Driver, Seeds, TurnTaking, Worker
from weft.runtime.initial import OpenWeights
from weft.runtime.partition import LayeredModel, chunk_layers, layered_model
from weft.runtime.process import give_back_memory
from weft.runtime.update import cure_for
from weft.runtime.weights import GradientSync, gradient_sync_for
from weft.schedule import Program, RecomputeChoice, Schedule, check_autocast, lower, verify_program, write_csv

BUILD = "build the chunks"  # purpose of collective calls
SAME_OPTIMIZER = (
    "build the pipeline with the same arguments everywhere, and give layers options of their own by parameter groups"
)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What a pipeline is made of in this process."""

    settings: Settings
    program: Program
    layout: Layout
    balance: tuple[int, ...]  # layers of each chunk
    compute: ComputeSettings
    transport: Transport
    chunks: Mapping[tuple[int, int], BuiltChunk]  # by replica and number
    gradient_sync: GradientSync
    driver: Driver

    @property
    def schedule(self) -> Schedule:
        return self.program.schedule

    @property
    def collectives(self) -> Collectives:
        return self.transport.collectives

    def close(self) -> None:
        """Close threads and connections; every process calls it."""
        self.gradient_sync.close()
        self.transport.close()


def assemble(model: Any, settings: Settings, open_weights: OpenWeights) -> Assembly:
    """Build this process's chunks and workers; all processes call it together, and refuse what they disagree on.

    `open_weights` opens what the user names as weights.
    """
    program = lower(resolve.schedule_for(settings))
    schedule = program.schedule
    slots = verify_program(program).slots + 1  # one more, so that a sender need not wait for the reader
    precision = PRECISIONS[settings.precision or "fp32"]
    whole = layered_model(model, cut=settings.cut, example=settings.example, dtype=precision.weights)
    recompute = resolve.recompute_for(settings, schedule, checkpointing=whole.checkpointing)
    if precision.autocast is not None:
        check_autocast(schedule)
    check_dtypes(whole, precision)
    check_hooks(whole, program, precision)
    cure = cure_for(settings.cure, program)
    collectives = resolve.collectives_for(settings)
    device = resolve.device_for(settings.device, whole.state.values(), collectives)
    transport = resolve.transport_for(
        schedule,
        settings.replicas,
        slots=slots,
        deadline=settings.deadline,
        device=device,
        collectives=collectives,
    )
    counts = _layer_counts(whole, schedule, settings, device, collectives)
    _compare_ranks(whole, schedule, settings, recompute, collectives)
    layout = start_weights(layout_of(whole, counts, program), collectives, settings, open_weights)
    layers = len(whole.layers)
    del whole  # which has the weights of other ranks, too, if it was built for real
    give_back_memory()
    compute = ComputeSettings(
        loss_fn=settings.loss_fn,
        layers=layers,
        microbatches=schedule.microbatches,
        seeds=Seeds(device),
        seed=settings.seed,
        precision=precision,
        device=device,
        uploads=Uploads(device),
    )
    local = resolve.local_chunks(schedule, settings.replicas)
    predicts = resolve.prediction_for(program, settings.predict or {})
    build = partial(build_chunk, layout, settings=settings, compute=compute, predicts=predicts, cure=cure)
    chunks = _build_chunks(build, layout, local, recompute, collectives)
    gradient_sync = gradient_sync_for(
        program,
        set(local),
        layout.sets,
        transport.all_reduce,
        device=device if transport.blocking else None,
        replicas=settings.replicas,
        clip_norm=settings.clip_norm,
        skip_nan=settings.nan == "skip",
    )
    return Assembly(
        settings=replace(settings, example=None, weights=None),  # which nothing needs any more
        program=program,
        layout=layout.without_layers(),
        balance=tuple(counts),
        compute=compute,
        transport=transport,
        chunks=chunks,
        gradient_sync=gradient_sync,
        driver=_driver(layout, chunks, transport, gradient_sync, settings),
    )


def _layer_counts(
    model: LayeredModel, schedule: Schedule, settings: Settings, device: torch.device, collectives: Collectives
) -> list[int]:
    """The number of layers of each chunk; measured times differ, so rank 0's decide."""
    _check_layers(len(model.layers), schedule)
    counts = chunk_layers(
        settings.balance,
        model.layers,
        schedule.chunks,
        example=settings.example,
        device=device,
        dtypes=model.dtypes,
    )
    agreed: list[int] = collectives.all_gather(counts, purpose="agree on the cut")[0]
    return agreed


def _check_layers(layers: int, schedule: Schedule) -> None:
    """Where a stage has several chunks, a schedule with one chunk a stage needs fewer layers."""
    each = schedule.chunks // schedule.stages
    if layers < schedule.chunks and each > 1:
        fewer = "1 stage, or " if layers // each == 1 else f"{layers // each} stages, or " if layers >= each else ""
        raise WeftError(
            f"a pipeline needs at least one layer per chunk (layers: {layers}, chunks: {schedule.chunks}, {each} a "
            f"stage under {schedule.name}); use {fewer}a schedule with one chunk a stage, such as 2bw"
        )


def _build_chunks(
    build: Callable[..., BuiltChunk],
    layout: Layout,
    local: Sequence[tuple[int, int]],
    recompute: Sequence[RecomputeChoice],
    collectives: Collectives,
) -> dict[tuple[int, int], BuiltChunk]:
    """Build the chunks of this process, and compare the optimizers of all."""

    def build_all() -> dict[tuple[int, int], BuiltChunk]:
        layers_of = zip(local, layout.layers_of([number for _, number in local]), strict=True)
        return {place: build(place[1], layers, recompute=recompute[place[1]]) for place, layers in layers_of}

    chunks = collectives.together(build_all, purpose=BUILD)
    sets = [parameters for built in chunks.values() for parameters in built.chunk.sets]
    consistency.check_same(collectives.all_gather(describe_updates(sets), purpose=BUILD), remedy=SAME_OPTIMIZER)
    return chunks


def _compare_ranks(
    model: LayeredModel,
    schedule: Schedule,
    settings: Settings,
    recompute: Sequence[RecomputeChoice],
    collectives: Collectives,
) -> None:
    """Refuse different versions, settings and models."""
    compared = {"schedule": write_csv(schedule)} | settings.compared()
    compared |= {"recompute": recompute, "predict": dict(settings.predict or {})}
    compared |= describe_loss(settings.loss_fn)
    own = {"versions": versions(), "settings": compared, "model": consistency.fingerprint(model.state)}
    faults.hit("agreement")
    consistency.check(collectives.all_gather(own, purpose="compare settings and model"))


def _driver(
    layout: Layout,
    chunks: Mapping[tuple[int, int], BuiltChunk],
    transport: Transport,
    gradient_sync: GradientSync,
    settings: Settings,
) -> Driver:
    """A worker for each rank of this process, and what drives them."""
    programs = layout.programs
    schedule = programs[()].schedule
    kinds = list(programs)
    workers = []
    for replica, rank in sorted({(replica, schedule.placement[number]) for replica, number in chunks}):
        own = {number: chunks[replica, number] for number in schedule.chunks_of(rank)}
        versions = [parameters.versions for built in own.values() for parameters in built.chunk.sets]
        for kept in versions:
            kept.share_free([other for other in versions if other is not kept])
        number = replica * schedule.stages + rank
        workers.append(
            Worker(
                rank=rank,
                replica=replica,
                programs=list(programs.values()),
                chunks={number: built.chunk for number, built in own.items()},
                set_programs={n: [kinds.index(holders) for holders in layout.sets[n]] for n in own},
                gradient_sync=gradient_sync,
                inbox=transport.inbox(number),
                send=transport.sender(number),
                skip_nan=settings.nan == "skip",
                max_skips=settings.max_skips,
                deadline=settings.deadline,
                telemetry=settings.telemetry or 0,
            )
        )
    return Blocking(workers[0], transport) if transport.blocking else TurnTaking(workers, deadline=settings.deadline)
