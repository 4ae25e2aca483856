"""A job: all that `weft train` is told, typed, with defaults that train a small GPT on Python's own sources.

Torch-free, so that a wrong configuration is refused at once. What a key means is said here, once: it is the help of
`--print-config` and of the documentation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.environment import is_rank
from weft.errors import WeftError
from weft.schedule import METHODS, Schedule, load_csv, load_schedule_function, verify
from weft.schedule import schedule as by_name
from weft.text import did_you_mean
from weft.train.config import load, option, tagged
from weft.train.data import DATA, CustomData
from weft.train.models import MODELS, CustomModel

MOST_RANKS = 4  # that a job takes of a machine by itself
OPTIMIZERS = ("adamw", "adam", "sgd", "nadam", "nadamw", "radam", "rmsprop", "adagrad", "adamax")


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """How the ranks work together."""

    name: str = option("wpipe", "a name that `weft schedules` lists, a file.csv, or package.module:function")
    ranks: int = option(
        0, f"processes; 0: one for each core, {MOST_RANKS} at most; torchrun's, under torchrun", least=0
    )
    virtual: bool = option(False, "all ranks take turns in one process, for studies of many ranks on few cores")
    replicas: int = option(1, "copies of the whole pipeline that share each mini-batch", least=1)
    microbatches: int = option(0, "parts of a mini-batch, for each replica; 0: two for each stage", least=0)
    chunks: int = option(0, "chunks a rank, of interleaved; 0: as the schedule has it", least=0)
    warmup: int = option(
        0, "times the usual forwards ahead, of 2bw and wpipe, to hide slow links; 0: as usual", least=0
    )
    vertical_sync: bool = option(False, "of pipedream: all stages at one version")
    predict: str = option(
        "", "predict weights (xpipe, spectrain, pipeoptim always do)", allowed=("", "published", "exact")
    )
    bias: str = option("adam", "bias correction of predicted Adam steps", allowed=("adam", "printed"))
    extrapolation: str = option("linear", "how weights are predicted", allowed=("linear", "decayed"))
    cure: str = option("none", "another cure for stale weights", allowed=("none", "pipemare", "gapaware"))
    anneal: int = option(1000, "of pipemare: updates until all chunks have the full rate", least=1)
    recompute: bool = option(False, "keep inputs only, and run forwards again in the backward")
    balance: str = option("parameters", "what chunks are evened out by", allowed=("parameters", "time"))
    layers: list[int] = option([], "of each chunk; empty: by balance", least=1)
    deadline: float = option(60.0, "seconds that a rank waits for another one before the run ends", above=0)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How weights are updated."""

    updates: int = option(1200, "mini-batches in all, unless epochs are given", least=1)
    epochs: int = option(0, "passes over the data in all; 0: go by updates", least=0)
    batch: int = option(24, "samples of a mini-batch, over all replicas", least=1)
    optimizer: str = option("adamw", f"{', '.join(OPTIMIZERS)}, or package.module:function(params, lr=)")
    lr: float = option(3e-3, "learning rate at its highest", above=0)
    warmup: int = option(60, "updates in which the rate rises to lr", least=0)
    decay: str = option("cosine", "how the rate falls after that", allowed=("constant", "linear", "cosine"))
    floor: float = option(0.05, "share of lr that it falls to", least=0, most=1)
    momentum: float = option(0.9, "of sgd and rmsprop", least=0)
    betas: list[float] = option([0.7, 0.95], "of the Adam family; late gradients want less momentum than 0.9")
    weight_decay: float = option(0.01, "decoupled in adamw and nadamw", least=0)
    clip_norm: float = option(0.0, "largest norm of a mini-batch's gradients; 0: no limit", least=0)
    precision: str = option("fp32", "bf16: autocast", allowed=("fp32", "bf16"))
    nan: str = option("stop", "a mini-batch whose loss is not finite", allowed=("stop", "skip"))
    seed: int = option(0, "of initial weights, data order and dropout")
    threads: int = option(1, "that a rank computes with", least=1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the model is judged on held-out data; this drains an asynchronous pipeline."""

    every: int = option(300, "updates between evaluations; 0: at the end only", least=0)
    samples: int = option(960, "at most, the first ones; 0: all", least=0)
    batch: int = option(0, "samples of a mini-batch here; 0: as in training", least=0)
    metric: str = option("loss", "what is best: loss (also as perplexity) or a metric of the task, such as accuracy")
    patience: int = option(0, "stop after so many evaluations without a better metric; 0: never", least=0)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the whole state is saved; this drains an asynchronous pipeline."""

    every: int = option(300, "updates between checkpoints; 0: at the end only", least=0)
    keep: int = option(2, "newest ones that are kept, beside the best", least=1)
    grace: float = option(60.0, "seconds that a run which is asked to stop has to finish and save", above=0)


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is told, and where it is kept."""

    folder: str = option("runs", "where runs are kept")
    every: int = option(10, "updates between lines of metrics.jsonl", least=1)
    telemetry: int = option(0, "mini-batches between samples of how stale weights are; 0: none", least=0)
    tensorboard: bool = option(False, "write TensorBoard events too (pip install 'weft[tensorboard]')")
    sample: int = option(400, "tokens of text that a language model writes at the end", least=0)
    prompt: str = option("def ", "how that text begins")
    timeline: int = option(3, "mini-batches in trace.json and in the report's timeline", least=1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    name: str = option("", "of the run's folder; empty: from model and schedule, numbered")
    model: Any = tagged(MODELS, "gpt", "what is trained", custom=CustomModel)
    data: Any = tagged(DATA, "python", "on what", custom=CustomData)
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    train: Training = field(default_factory=Training)
    evaluate: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    log: Log = field(default_factory=Log)


def job_of(file: str | None, sets: Sequence[str] = ()) -> Job:
    """The job of a file, with `key=value` settings on top."""
    job = load(Job, file, sets)
    check(job)
    return job


def check(job: Job) -> None:
    """Refuse what no single key shows to be wrong."""
    schedule, train = schedule_of(job), job.train
    parts = schedule.microbatches * job.schedule.replicas
    if train.batch % parts:
        raise WeftError(
            f"train.batch must be a multiple of micro-batches x replicas (train.batch: {train.batch}, micro-batches: "
            f"{schedule.microbatches}, schedule.replicas: {job.schedule.replicas}); "
            f"use {-(-train.batch // parts) * parts}"
        )
    if ":" not in train.optimizer and train.optimizer not in OPTIMIZERS:
        hint = did_you_mean(train.optimizer, OPTIMIZERS)
        raise WeftError(f"train.optimizer is one of {', '.join(OPTIMIZERS)} (got {train.optimizer!r}){hint}")
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        raise WeftError(f"train.betas are two numbers of at least 0 and below 1 (got {train.betas})")
    if any(sign in job.name for sign in "/\\") or job.name in (".", ".."):
        raise WeftError(f"name is a folder's name, without slashes (got {job.name!r}); log.folder says where it is")
    if job.schedule.layers and len(job.schedule.layers) != schedule.chunks:
        raise WeftError(
            f"schedule.layers has one number a chunk ({schedule.chunks} for {schedule.title}; "
            f"got {len(job.schedule.layers)})"
        )
    job.data.check()


def ranks_of(job: Job) -> int:
    """How many ranks there are, of all replicas."""
    asked, replicas = job.schedule.ranks, job.schedule.replicas
    if not job.schedule.virtual and is_rank():
        there = int(os.environ["WORLD_SIZE"])
        if asked not in (0, there):
            raise WeftError(
                f"schedule.ranks is the number of processes there are (schedule.ranks: {asked}, WORLD_SIZE: {there}); "
                "leave it out, or start as many"
            )
        asked = there
    ranks = asked or max(replicas, min(MOST_RANKS, _cores()) // replicas * replicas)
    if ranks % replicas:
        raise WeftError(
            f"schedule.replicas must divide the number of ranks (schedule.replicas: {replicas}, ranks: {ranks})"
        )
    return ranks


def _cores() -> int:
    """Of this process; not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolved(job: Job) -> Job:
    """With the numbers of ranks and micro-batches that are chosen by themselves."""
    ranks, microbatches = ranks_of(job), schedule_of(job).microbatches
    return replace(job, schedule=replace(job.schedule, ranks=ranks, microbatches=microbatches))


def schedule_of(job: Job) -> Schedule:
    """The schedule that a job runs."""
    choice = job.schedule
    stages = ranks_of(job) // choice.replicas
    sizes = {"stages": stages, "microbatches": choice.microbatches or 2 * stages}
    options: dict[str, Any] = {
        key: getattr(choice, key) for key in ("chunks", "warmup", "vertical_sync") if getattr(choice, key)
    }
    if choice.name.endswith(".csv"):
        schedule = load_csv(choice.name)
        if (schedule.stages, choice.microbatches or schedule.microbatches) != (stages, schedule.microbatches):
            raise WeftError(
                f"{choice.name} is for {schedule.stages} stages and {schedule.microbatches} micro-batches (there are "
                f"{stages} and {choice.microbatches}); set schedule.ranks and schedule.microbatches to those"
            )
    elif ":" in choice.name:
        schedule = load_schedule_function(choice.name)(**sizes, **options)
    else:
        method = METHODS.get(choice.name)
        if choice.predict and method is not None:
            options[_prediction_option(choice.name)] = choice.predict
        return by_name(choice.name, **sizes, **options)
    verify(schedule)
    return schedule


def _prediction_option(name: str) -> str:
    """What a method calls its choice of prediction."""
    for key in ("versions", "predict"):
        if key in METHODS[name].options:
            return key
    able = [other for other, one in METHODS.items() if {"versions", "predict"} & set(one.options)]
    raise WeftError(f"schedule.predict is for {', '.join(able)} (schedule.name: {name}); leave it out")
