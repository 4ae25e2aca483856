"""A job: the typed configuration of `weft train`. The default job trains a small GPT on Python's own sources.

Torch-free, so that a mistake is reported at once. The help of each key is what `--print-config` and the documentation
show.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.environment import is_rank
from weft.errors import WeftError
from weft.schedule import (
    DEFAULT_SLACK,
    METHODS,
    Schedule,
    check_autocast,
    load_csv,
    load_schedule_function,
    lower,
    predicting_methods,
    recompute_choices,
    verify,
)
from weft.schedule import schedule as by_name
from weft.text import did_you_mean
from weft.train.config import load, option, tagged
from weft.train.data import DATA, CustomData
from weft.train.models import MODELS, CustomModel
from weft.train.trust import check_trust

FORMAT = 3  # of jobs; 2 had no schedule.fresh; 1 had no key for its format, and its bf16 was autocast
KEYS_OF_FORMAT_1 = {"name", "model", "data", "schedule", "train", "evaluate", "checkpoint", "log"}
MOST_RANKS = 4  # by default
CHOSEN_HERE = ("fresh", "predict")  # options of schedules whose values in jobs mean something else
SCHEDULE_OPTIONS = ("chunks", "warmup", "vertical_sync", "fresh", "slack", "split", "predict")  # not of all methods
KEYS_OF_CURES = {"c": "optimistic", "cured": "optimistic", "anneal": "pipemare"}  # in `schedule`
OPTIMIZERS = ("adamw", "adam", "sgd", "nadam", "nadamw", "radam", "rmsprop", "adagrad", "adamax", "muon")


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice:
    """How the ranks work together."""

    name: str = option("wpipe", "a name that `weft schedules` lists, a file.csv, or package.module:function")
    ranks: int = option(
        0,
        f"number of processes; 0: one for each core, {MOST_RANKS} at most, or as many as torchrun started",
        least=0,
    )
    virtual: bool = option(False, "run all ranks in one process, in turns, to study many ranks on few cores")
    replicas: int = option(1, "copies of the whole pipeline; each mini-batch is divided among them", least=1)
    microbatches: int = option(0, "micro-batches of a mini-batch, for each replica; 0: two for each stage", least=0)
    chunks: int = option(0, "interleaved: chunks of each rank; 0: the default of the schedule", least=0)
    warmup: int = option(0, "2bw, wpipe: multiplies the forwards ahead, to hide slow links; 0: the default, 1", least=0)
    vertical_sync: bool = option(False, "pipedream: all stages use the same version")
    fresh: bool | str = option(
        "auto",
        "wpipe: forwards read the newest version, which makes fewer micro-batches late; auto: true for wpipe",
        allowed=("auto", True, False),
    )
    slack: float = option(DEFAULT_SLACK, "weave: time of a hop to hide, in forwards of a stage", least=0)
    split: bool = option(True, "weave: split backwards, so that fewer micro-batches are in flight")
    predict: str = option(
        "", "weight prediction (xpipe, spectrain and pipeoptim always predict)", allowed=("", "published", "exact")
    )
    bias: str = option("adam", "bias correction of predicted Adam steps", allowed=("adam", "printed"))
    extrapolation: str = option("linear", "how weights are predicted", allowed=("linear", "decayed"))
    cure: str = option(
        "auto",
        "correction of updates for stale weights; auto: optimistic, which helps synchronous training, too, but none if "
        "weights are predicted or the optimizer is nadamw",
        allowed=("auto", "none", "optimistic", "pipemare", "gapaware"),
    )
    c: float = option(1.0, "optimistic: weight of what is new in an update; 0: the mean delay of the chunk", least=0)
    cured: str = option("all", "optimistic: all chunks, or late ones: those with a delay", allowed=("all", "late"))
    anneal: int = option(1000, "pipemare: updates until all chunks have the full learning rate", least=1)
    recompute: bool | str | list[Any] = option(
        False,
        "keep only the inputs of a chunk (true) or of its layers (layer), and repeat the forward in the backward; "
        "a list: of each chunk",
        allowed=(False, True, "layer"),
    )
    balance: str = option("parameters", "what is balanced between chunks", allowed=("parameters", "time"))
    layers: list[int] = option([], "number of layers of each chunk; empty: balanced", least=1)
    deadline: float = option(60.0, "seconds that a rank waits for another rank before the run fails", above=0)
    timeout: float = option(300.0, "seconds for a rank to import what it needs and meet the others", above=0)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How weights are updated."""

    updates: int = option(1200, "mini-batches of the whole run, unless epochs is given", least=1)
    epochs: int = option(0, "passes over the data of the whole run; 0: use updates", least=0)
    batch: int = option(24, "samples of a mini-batch, all replicas together", least=1)
    optimizer: str = option(
        "adamw", f"{', '.join(OPTIMIZERS)}, or package.module:function(params, lr=), or (named_parameters, lr=)"
    )
    lr: float = option(3e-3, "peak learning rate", above=0)
    warmup: int = option(60, "updates until the learning rate reaches lr", least=0)
    decay: str = option("cosine", "how the learning rate falls after that", allowed=("constant", "linear", "cosine"))
    floor: float = option(0.05, "final learning rate, as a share of lr", least=0, most=1)
    momentum: float = option(0.9, "sgd, rmsprop, muon: momentum", least=0)
    betas: list[float] = option([0.8, 0.95], "Adam family, muon: betas; late gradients need less momentum than 0.9")
    weight_decay: float = option(0.01, "decoupled in adamw, nadamw and muon", least=0)
    clip_norm: float = option(0.0, "maximum norm of a mini-batch's gradients; 0: no limit", least=0)
    norm: str = option(
        "group",
        "chunks that share a norm (clip_norm, nan=skip): group: those that need not wait for it; global: all",
        allowed=("group", "global"),
    )
    precision: str = option(
        "fp32",
        "bf16: compute with bf16 weights of fp32 masters; bf16-autocast: autocast over fp32 weights",
        allowed=("fp32", "bf16", "bf16-autocast"),
    )
    nan: str = option(
        "stop",
        "what to do if a loss is not finite, or gradients are not (stop: with clip_norm only)",
        allowed=("stop", "skip"),
    )
    max_skips: int = option(10, "nan=skip: skipped mini-batches in a row that end the run as diverged", least=1)
    seed: int = option(0, "random seed of initial weights, data order and dropout")
    threads: int = option(1, "threads of each rank", least=1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the model is evaluated on held-out data; an evaluation drains an asynchronous pipeline."""

    every: int = option(300, "updates between evaluations; 0: only at the end", least=0)
    samples: int = option(960, "maximum number of samples, from the first on; 0: all", least=0)
    batch: int = option(0, "samples of a mini-batch; 0: as in training", least=0)
    metric: str = option("loss", "decides which model is best: loss, or a metric of the task, such as accuracy")
    patience: int = option(0, "stop after this many evaluations without a better metric; 0: never", least=0)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the whole state is saved; a checkpoint drains an asynchronous pipeline."""

    every: int = option(300, "updates between checkpoints; 0: only at the end", least=0)
    keep: int = option(2, "newest checkpoints to keep, in addition to the best", least=1)
    grace: float = option(60.0, "seconds to finish and save after a request to stop", above=0)
    deadline: float = option(600.0, "seconds without a byte read or written after which a save or load fails", above=0)


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is recorded, and where."""

    folder: str = option("runs", "folder of all runs")
    every: int = option(10, "updates between two lines of metrics.jsonl", least=1)
    telemetry: int = option(0, "mini-batches between two samples of how stale weights are; 0: none", least=0)
    tensorboard: bool = option(False, "also write TensorBoard events (pip install 'weft[tensorboard]')")
    sample: int = option(400, "tokens that a language model generates at the end; 0: none", least=0)
    prompt: str = option("def ", "the prompt for them")
    timeline: int = option(3, "mini-batches in trace.json and in the timeline of the report", least=1)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    name: str = option("", "name of the run's folder; empty: model and schedule, numbered")
    format: int = option(FORMAT, "version of this format, which weft writes", least=FORMAT, most=FORMAT)
    model: Any = tagged(MODELS, "gpt", "model to train", custom=CustomModel)
    data: Any = tagged(DATA, "python", "data to train on", custom=CustomData)
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    train: Training = field(default_factory=Training)
    evaluate: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    log: Log = field(default_factory=Log)


def job_of(file: str | None, sets: Sequence[str] = ()) -> Job:
    """The job of a file, with `key=value` settings on top."""
    job = load(Job, file, sets, upgrade=_upgrade)
    check(job)
    _check_cure(job)
    return job


def job_of_run(folder: Path, sets: Sequence[str] = (), *, trust: bool = False) -> Job:
    """The job of an existing run, with settings on top; torchrun decides the number of ranks.

    Unless `trust`, code that the folder of another user names is refused, before it is imported.
    """
    job = read_job_of_run(folder, [*(["schedule.ranks=0"] if is_rank() else []), *sets])
    if not trust:
        found = user_code_of(read_job_of_run(folder))
        kept = {key: name for key, name in user_code_of(job).items() if found.get(key) == name}  # not set by the user
        check_trust(folder, "job.toml", code=kept)
    check(job)
    return job


def read_job_of_run(folder: Path, sets: Sequence[str] = ()) -> Job:
    """The job of an existing run, without a check of its keys together; imports no code that it names."""
    file = folder / "job.toml"
    if not file.is_file():
        raise WeftError(f"{folder} is not a run: it has no job.toml; name a folder such as runs/gpt-wpipe")
    return load(Job, str(file), sets, upgrade=_upgrade)


def _upgrade(table: dict[str, Any]) -> None:
    """Let a job that an earlier weft wrote mean what it meant then.

    A complete job without a format is one of format 1; what users write is seldom complete, and has today's defaults.
    """
    is_first = "format" not in table and table.keys() >= KEYS_OF_FORMAT_1
    schedule, train = (table.get(key) for key in ("schedule", "train"))
    if is_first and isinstance(train, dict) and train.get("precision") == "bf16":
        train["precision"] = "bf16-autocast"
    if is_first or table.get("format") == 2:
        table["format"] = FORMAT
        if isinstance(schedule, dict):
            schedule.setdefault("fresh", False)  # as in the paper


def user_code_of(job: Job) -> dict[str, str]:
    """The keys that name code of a user, which runs when it is imported, and their values."""
    names = {
        "model.name": job.model.name if isinstance(job.model, CustomModel) else "",
        "data.name": job.data.name if isinstance(job.data, CustomData) else "",
        "schedule.name": job.schedule.name if is_function(job.schedule.name) else "",
        "train.optimizer": job.train.optimizer if ":" in job.train.optimizer else "",
    }
    return {key: name for key, name in names.items() if name}


def is_function(schedule: str) -> bool:
    """Whether a schedule is a function of a user."""
    return ":" in schedule and not schedule.endswith(".csv")


def check(job: Job) -> None:
    """Refuse combinations of keys that do not work together."""
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
        raise WeftError(f"train.optimizer must be one of {', '.join(OPTIMIZERS)} (got {train.optimizer!r}){hint}")
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        raise WeftError(f"train.betas must be two numbers of at least 0 and below 1 (got {train.betas})")
    if train.norm == "global" and not train.clip_norm and train.nan != "skip":
        raise WeftError(
            "train.norm=global lets updates wait for a norm, which only train.clip_norm and train.nan=skip need "
            f"(train.clip_norm: {train.clip_norm:g}, train.nan: {train.nan}); set one of them, or leave train.norm out"
        )
    if any(sign in job.name for sign in "/\\") or job.name in (".", ".."):
        raise WeftError(f"name must not contain slashes (got {job.name!r}); set log.folder to choose the place")
    recompute_choices(job.schedule.recompute, schedule)  # type: ignore[arg-type]  # which checks it
    if train.precision == "bf16-autocast":
        check_autocast(schedule)
    if job.schedule.layers and len(job.schedule.layers) != schedule.chunks:
        raise WeftError(
            f"schedule.layers needs one number for each chunk ({schedule.chunks} for {schedule.title}; "
            f"got {len(job.schedule.layers)})"
        )
    job.data.check()


def _check_cure(job: Job) -> None:
    """Refuse keys of another cure than the one that a new job chooses; those of a run may be left from before."""
    for key, cure in KEYS_OF_CURES.items():
        value, default = getattr(job.schedule, key), getattr(ScheduleChoice(), key)
        if value != default and cure_name(job) != cure:
            raise WeftError(
                f"schedule.{key} is for schedule.cure={cure} (schedule.{key}: {value}, cure: {cure_name(job)}); set "
                f"schedule.cure={cure}, or leave schedule.{key} at {default}"
            )


def ranks_of(job: Job) -> int:
    """The number of ranks, all replicas together."""
    asked, replicas = job.schedule.ranks, job.schedule.replicas
    if not job.schedule.virtual and is_rank():
        world = int(os.environ["WORLD_SIZE"])
        if asked not in (0, world):
            raise WeftError(
                f"schedule.ranks must be the number of processes (schedule.ranks: {asked}, WORLD_SIZE: {world}); "
                f"leave it out, or start {asked} processes"
            )
        asked = world
    ranks = asked or max(replicas, min(MOST_RANKS, _cores()) // replicas * replicas)
    if ranks % replicas:
        raise WeftError(
            f"schedule.replicas must divide the number of ranks (schedule.replicas: {replicas}, ranks: {ranks}); "
            f"use {ranks // replicas * replicas or replicas} ranks"
        )
    return ranks


def _cores() -> int:
    """Cores that this process may use, where the system reports that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolved(job: Job) -> Job:
    """The job with the default numbers of ranks and micro-batches filled in."""
    ranks, microbatches = ranks_of(job), schedule_of(job).microbatches
    return replace(job, schedule=replace(job.schedule, ranks=ranks, microbatches=microbatches))


def reads_newest(choice: ScheduleChoice) -> bool:
    """Whether the schedule is asked for fresh reads: by default if it has the choice."""
    method = METHODS.get(choice.name)
    return choice.fresh is True or (choice.fresh == "auto" and method is not None and "fresh" in method.options)


def cure_name(job: Job) -> str:
    """The cure that a job chooses: by default one, where nothing else corrects for stale weights."""
    if job.schedule.cure != "auto":
        return job.schedule.cure
    return "none" if job.train.optimizer == "nadamw" or _predicts(job) else "optimistic"


def _predicts(job: Job) -> bool:
    """Whether weights are predicted; of a method that does not depend on the number of ranks."""
    method = METHODS.get(job.schedule.name)
    if method is None:
        return bool(lower(schedule_of(job)).predicts.any())
    return method.prediction_option == "versions" or bool(job.schedule.predict)


def schedule_of(job: Job) -> Schedule:
    """The schedule that a job runs."""
    choice = job.schedule
    stages = ranks_of(job) // choice.replicas
    sizes = {"stages": stages, "microbatches": choice.microbatches or 2 * stages}
    given, default = ({key: getattr(keys, key) for key in SCHEDULE_OPTIONS} for keys in (choice, ScheduleChoice()))
    options = {key: value for key, value in given.items() if key not in CHOSEN_HERE and value != default[key]}
    if reads_newest(choice):
        options["fresh"] = True
    if choice.name.endswith(".csv"):
        schedule = load_csv(choice.name)
        if (schedule.stages, choice.microbatches or schedule.microbatches) != (stages, schedule.microbatches):
            raise WeftError(
                f"{choice.name} is for {schedule.stages} stages and {schedule.microbatches} micro-batches (the job has "
                f"{stages} and {choice.microbatches}); set schedule.ranks and schedule.microbatches to those"
            )
    elif is_function(choice.name):
        schedule = load_schedule_function(choice.name)(**sizes, **options)
    else:
        method = METHODS.get(choice.name)
        if choice.predict and method is not None:
            if method.prediction_option is None:
                able = ", ".join(predicting_methods())
                raise WeftError(f"schedule.predict is for {able} (schedule.name: {choice.name}); leave it out")
            options[method.prediction_option] = choice.predict
        return by_name(choice.name, **sizes, **options)
    verify(schedule)
    return schedule
