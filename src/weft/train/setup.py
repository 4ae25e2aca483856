"""Builds what a job names: the data on the ranks that need it, the model, the pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft import faults
from weft.errors import WeftError
from weft.runtime import Pipeline
from weft.runtime.comm import Collectives
from weft.runtime.partition import state_tensors
from weft.runtime.storage import Form
from weft.runtime.update import Cure, OptimizerMaker
from weft.schedule import Schedule, lower
from weft.train.cure import cure_of
from weft.train.data import BatchSampler, Data, Draw, differences, entropy, identity_of, index_checksum, open_data
from weft.train.data_spec import DataSpec
from weft.train.job import Job, schedule_of
from weft.train.models import Net, build_model
from weft.train.optimizers import optimizer_of, scheduler_of
from weft.train.run import Batch

LONG = 10  # times the deadline, for work that takes one rank long and another no time: opening the data


@dataclass(frozen=True, kw_only=True)
class RankData:
    """The data of a job on one rank: the halves of a batch that it needs, of the same samples on every rank."""

    job: Job
    spec: DataSpec
    entropy: float | None  # of single tokens, in nats
    identity: dict[str, dict[str, Any]]  # on which all ranks agree
    inputs: bool  # whether this rank needs them
    targets: bool
    data: Data | None

    @property
    def train(self) -> int:
        """Samples to train on."""
        return int(self.identity["train"]["samples"])

    @property
    def validation(self) -> int:
        return int(self.identity["validation"]["samples"])

    @property
    def sampler(self) -> BatchSampler:
        return BatchSampler(self.train, self.job.train.batch, self.job.train.seed)

    @property
    def updates(self) -> int:
        """Mini-batches of the whole run."""
        train, sampler = self.job.train, self.sampler  # which refuses a batch that is larger than the data
        return train.epochs * sampler.per_epoch if train.epochs else train.updates

    def batch(self, update: int) -> Batch:
        """The mini-batch of an update, which counts from 0 over the whole run: a function of that and the seed."""
        indices = self.sampler.indices(update)
        return self._batch(indices, Draw(seed=self.job.train.seed, epoch=self.sampler.epoch(update)), held_out=False)

    def identity_at(self, update: int) -> dict[str, Any]:
        """What identifies the data, and the order in which it goes on at an update."""
        return self.identity | {"order": index_checksum(self.sampler.indices(update))}

    def held_out(self) -> Iterator[tuple[Any, Any]]:
        """The data of an evaluation, batch by batch."""
        samples = min(self.validation, self.job.evaluate.samples or self.validation)
        size = self.job.evaluate.batch or self.job.train.batch
        for first in range(0, samples, size):
            batch = self._batch(np.arange(first, min(samples, first + size)), None, held_out=True)
            yield batch.inputs, batch.targets

    def _batch(self, indices: np.ndarray[Any, Any], draw: Draw | None, *, held_out: bool) -> Batch:
        inputs = targets = None
        if self.data is not None:
            part = self.data.validation if held_out else self.data.train
            inputs = part.inputs(indices, draw) if self.inputs else None
            targets = part.targets(indices, draw) if self.targets else None
        return Batch(inputs=inputs, targets=targets, checksum=index_checksum(indices))


def long_deadline(job: Job) -> float:
    """Seconds that ranks wait while one of them opens its data or writes files."""
    return LONG * job.schedule.deadline


def collectives_of(job: Job) -> Collectives:
    return Collectives(deadline=job.schedule.deadline, longest=long_deadline(job))


def open_rank_data(job: Job, collectives: Collectives) -> RankData:
    """Open the data on the ranks that need it; the others take its description from the rank of the first chunk."""
    schedule = schedule_of(job)
    stages = set(range(schedule.stages)) if collectives.world == 1 else {collectives.rank % schedule.stages}
    inputs, targets = schedule.placement[0] in stages, schedule.placement[-1] in stages
    data = open_data(job.data, seed=job.train.seed, inputs=inputs, targets=targets) if inputs or targets else None
    description = None if data is None else _describe(data, targets=targets)
    faults.hit("data")
    descriptions = collectives.all_gather(description, purpose="open the data", deadline=long_deadline(job))
    source = schedule.placement[0] if collectives.world > 1 else 0
    first = descriptions[source]
    for rank, description in enumerate(descriptions):
        if description is None:
            continue
        for difference in differences(first["identity"], description["identity"]):
            raise WeftError(
                f"all ranks must read the same data ({difference.name}, on rank {source}: {difference.before}, on rank "
                f"{rank}: {difference.now}); give them the same files"
            )
    entropies = [description["entropy"] for description in descriptions if description is not None]
    return RankData(
        job=job,
        spec=DataSpec(**first["spec"]),
        entropy=next((entropy for entropy in entropies if entropy is not None), None),
        identity=first["identity"],
        inputs=inputs,
        targets=targets,
        data=data,
    )


def _describe(data: Data, *, targets: bool) -> dict[str, Any]:
    return {
        "spec": asdict(data.train.spec),
        "identity": identity_of(data),
        "entropy": entropy(data.train) if targets and data.train.spec.task == "language" else None,
    }


def data_spec_of(job: Job) -> DataSpec:
    """What a model has to know about the data of a job, without a run."""
    return open_data(job.data, seed=job.train.seed, targets=False).train.spec


class LoadedLater:
    """A source of weights for a model that a checkpoint will fill: nothing is initialized or read before."""

    def __init__(self, model: nn.Module) -> None:
        self._forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state_tensors(model).items()}

    def names(self) -> Collection[str]:
        return self._forms.keys()

    def form(self, name: str) -> Form:
        return self._forms[name]

    def read_into(self, name: str, tensor: Tensor) -> None:
        pass


def net_of(job: Job, spec: DataSpec, *, resumed: bool = False) -> Net:
    """The model of a job; a resumed run takes its weights from the checkpoint only."""
    options = replace(job.model, weights="") if resumed and hasattr(job.model, "weights") else job.model
    net = build_model(options, spec, seed=job.train.seed)
    if resumed and isinstance(net.model, nn.Module):
        net = replace(net, weights=LoadedLater(net.model))
    known = ("loss", *net.metrics)
    if job.evaluate.metric not in known:
        raise WeftError(
            f"evaluate.metric must be one of {', '.join(known)} for this task (got {job.evaluate.metric!r})"
        )
    return net


def pipeline_of(
    job: Job,
    net: Net,
    spec: DataSpec,
    *,
    updates: int,
    other_optimizer: OptimizerMaker | None = None,
    other_cure: Cure | None = None,
) -> Pipeline:
    """The pipeline of a job, on the ranks of this process group or on virtual ranks.

    Another optimizer or cure takes the place of the job's.
    """
    schedule, choice = schedule_of(job), job.schedule
    predicts = bool(lower(schedule).predicts.any())
    return Pipeline(
        net.model,
        weights=net.weights,
        loss_fn=net.loss_fn,
        optimizer=other_optimizer or optimizer_of(job.train),
        lr_scheduler=scheduler_of(job.train, updates),
        schedule=schedule,
        replicas=choice.replicas,
        balance=choice.layers or choice.balance,
        example=example_of(spec, job.train.batch // (schedule.microbatches * choice.replicas)),
        recompute=choice.recompute or None,  # type: ignore[arg-type]  # which the check of a job knows to be right
        clip_norm=job.train.clip_norm or None,
        norm=job.train.norm,  # type: ignore[arg-type]  # one of those that are allowed
        precision=job.train.precision,  # type: ignore[arg-type]  # one of those that are allowed
        nan="skip" if job.train.nan == "skip" else "stop",
        max_skips=job.train.max_skips,
        seed=job.train.seed,
        deadline=choice.deadline,
        predict={"bias": choice.bias, "extrapolation": choice.extrapolation} if predicts else None,
        cure=other_cure or cure_of(job),
        telemetry=job.log.telemetry or None,
    )


def example_of(spec: DataSpec, samples: int) -> Any:
    """Inputs like those of a micro-batch, to measure how long layers take; the same on every rank."""
    shapes = {"images": (spec.channels, spec.size, spec.size), "values": (spec.features,)}
    if spec.form in shapes:
        return torch.zeros(samples, *shapes[spec.form])
    tokens = torch.zeros(samples, spec.context, dtype=torch.int64)
    if spec.form == "tokens":
        return tokens
    return {"input_ids": tokens, "token_type_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def title_of(job: Job, schedule: Schedule) -> str:
    replicas = f" x {job.schedule.replicas} replicas" if job.schedule.replicas > 1 else ""
    return f"{job.model.name} on {job.data.name}: {schedule.title}{replicas}"
