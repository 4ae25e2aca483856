"""What is trained: three studies on real data, the methods that are compared with synchronous training, and all runs.

All runs of a study and a seed start from the same weights and see the same samples in the same order. No run is
evaluated before its end, because an evaluation flushes an asynchronous pipeline and so makes it less stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import require_files
from weft.schedule import schedule

SYNCHRONOUS, PARALLEL = "synchronous", "data parallelism"
OPTIMIZERS = {
    "sgd": ("train.optimizer=sgd", "train.momentum=0.9", "train.weight_decay=0.0005"),
    "adamw": ("train.optimizer=adamw", "train.betas=[0.9, 0.999]", "train.weight_decay=0.01"),
}
SEEDS, EXTRA_SEEDS = (0, 1, 2), (3, 4, 5)  # extra ones: of synchronous training, for the noise
FEWEST = 2  # micro-batches, unless the method needs one for each rank


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model on a data set; `files` are in the data folder."""

    title: str
    settings: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    layers: int  # of the model
    updates: int
    batch: int
    evaluated: int  # held-out samples
    rates: dict[str, tuple[float, ...]]  # of the sweep, by optimizer
    sweep_seeds: tuple[int, ...] = (100,)  # several if a rate that is good on one seed fails on another
    metric: str
    like: str = "transformer"  # the most similar model of the throughput benchmark
    every_size: tuple[str, ...] = ()  # optimizers for which `fixed` methods too run on all numbers of ranks

    def sets(self, folder: Path) -> list[str]:
        """The settings of its job."""
        require_files(folder, [file for _, file in self.files])
        train = (f"train.updates={self.updates}", f"train.batch={self.batch}", "train.warmup=20")
        held = (f"evaluate.samples={self.evaluated}", "evaluate.batch=100", "schedule.virtual=true")
        return [*self.settings, *(f"{key}={folder / file}" for key, file in self.files), *train, *held]


STUDIES = {
    "text": Study(
        title="tiny Shakespeare, GPT of 7 layers x 32, context 32",
        settings=("model.name=gpt", "model.layers=7", "model.width=32", "data.name=text", "data.context=32"),
        files=(("data.path", "text/tinyshakespeare.txt"),),
        layers=16,
        updates=240,
        batch=16,
        evaluated=1000,
        rates={"sgd": (0.05, 0.1, 0.2, 0.4), "adamw": (1e-3, 2e-3, 4e-3, 8e-3)},
        metric="accuracy",
        every_size=("adamw",),
    ),
    "qqp": Study(
        title="question pairs, BERT of 3 layers x 32, 24 tokens",
        settings=(
            *("model.name=bert", "model.layers=3", "model.width=32", "model.heads=4", "model.dropout=0.0"),
            *("data.name=parquet", "data.tokens=wordpiece", "data.vocabulary_size=4000", "data.context=24"),
        ),
        files=(
            ("data.train", "qqp/train.parquet"),
            ("data.validation", "qqp/validation.parquet"),
            ("data.vocabulary", "text/bert-base-uncased-vocab.txt"),
        ),
        layers=8,
        updates=240,
        batch=32,
        evaluated=2000,
        rates={"sgd": (0.01, 0.02, 0.04, 0.08), "adamw": (5e-4, 1e-3, 2e-3, 4e-3)},
        sweep_seeds=(100, 101, 102),
        metric="accuracy",
    ),
    "cifar10": Study(
        title="CIFAR-10, ResNeXt of 8 blocks, 8 channels after the stem",
        settings=("model.name=resnext50_32x4d", "model.width=8", "data.name=parquet"),
        files=(("data.train", "cifar10/train.parquet"), ("data.validation", "cifar10/test.parquet")),
        layers=10,
        updates=240,
        batch=32,
        evaluated=1000,
        rates={"sgd": (0.02, 0.04, 0.08, 0.16), "adamw": (2e-3, 4e-3, 8e-3, 1.6e-2)},
        metric="accuracy",
        like="resnext",
    ),
}
QUICK = {
    "text": Study(
        title="Python's own sources, a GPT of 3 layers x 32",
        settings=("model.name=gpt", "model.layers=3", "model.width=32", "data.name=python", "data.context=16"),
        layers=8,
        updates=6,
        batch=4,
        evaluated=16,
        rates={"sgd": (0.1,), "adamw": (2e-3,)},
        metric="accuracy",
    )
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A schedule and its numbers of ranks. `fixed`: its law is the same on any number of ranks."""

    schedule: str
    predict: str = ""
    replicas: int = 1
    ranks: tuple[int, ...] = (2, 4, 8)
    fixed: bool = False

    @property
    def rate(self) -> str:
        """Its name in the throughput benchmark."""
        return f"{self.schedule} predict {self.predict}" if self.predict else self.schedule


METHODS = {
    SYNCHRONOUS: Method(schedule="1f1b", ranks=(2,)),
    PARALLEL: Method(schedule="1f1b", ranks=(2,), replicas=2),
    "pipedream": Method(schedule="pipedream"),
    "2bw": Method(schedule="2bw", fixed=True),
    "wpipe": Method(schedule="wpipe", fixed=True),
    "wpipe, predicted": Method(schedule="wpipe", predict="exact", fixed=True),
    "xpipe": Method(schedule="xpipe"),
    "spectrain": Method(schedule="spectrain"),
    "pipeoptim": Method(schedule="pipeoptim"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    study: str
    method: str
    ranks: int
    optimizer: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.study}, {self.optimizer} {self.rate:g}, {self.method}, p = {self.ranks}, seed {self.seed}"

    def sets(self, study: Study, folder: Path) -> list[str]:
        """The settings of its job."""
        method = METHODS[self.method]
        stages = self.ranks // method.replicas
        microbatches = max(FEWEST, self.ranks if method.fixed else 0) // method.replicas
        chunks = schedule(method.schedule, stages=stages, microbatches=microbatches).chunks
        return [
            *study.sets(folder),
            *OPTIMIZERS[self.optimizer],
            f"train.lr={self.rate}",
            f"train.seed={self.seed}",
            f"schedule.name={method.schedule}",
            f"schedule.ranks={stages * method.replicas}",
            f"schedule.replicas={method.replicas}",
            f"schedule.microbatches={microbatches}",
            f"schedule.predict={method.predict}",
            f"schedule.layers={even_cut(study.layers, chunks)}",
        ]


def even_cut(layers: int, chunks: int) -> list[int]:
    """Layers of each chunk, as even as possible; the middle cut does not depend on the number of chunks."""
    ends = [(layers * number + chunks // 2) // chunks for number in range(chunks + 1)]
    return [end - start for start, end in pairwise(ends)]


def comparisons(name: str, study: Study, optimizer: str, rate: float, *, quick: bool) -> list[Run]:
    """Every method on every number of ranks that adds information, seed by seed."""
    cells = [
        (method, ranks)
        for method, details in METHODS.items()
        for ranks in details.ranks
        if ranks == 2 or (not quick and (optimizer in study.every_size or not details.fixed))
    ]
    seeds = SEEDS[:1] if quick else SEEDS
    runs = [(method, ranks, seed) for seed in seeds for method, ranks in cells]
    runs += [] if quick else [(SYNCHRONOUS, 2, seed) for seed in EXTRA_SEEDS]
    return [
        Run(study=name, method=method, ranks=ranks, optimizer=optimizer, rate=rate, seed=seed)
        for method, ranks, seed in runs
    ]
