"""What is trained: models on real data. All runs of a study and a seed see the same samples in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import require_files


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model on a data set; `files` are in the data folder. The plan says which methods train it, and how often."""

    title: str
    settings: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    layers: int  # of the model
    updates: int
    tuning: int  # updates of the runs that search rate, momentum and decay
    batch: int
    rate: float  # where the search begins
    like: str = ""  # the study whose best settings are those where the search begins, except for the rate
    searched: tuple[str, ...] = ("rate", "beta", "decay")  # nothing: the settings are those of the other study
    metric: str = "accuracy"
    judged_by_loss: bool = True  # or by the metric
    batch_norm: bool = False
    optimizer: str = "adamw"

    def sets(self, folder: Path) -> list[str]:
        """The settings of its job."""
        require_files(folder, [file for _, file in self.files])
        return [
            *("schedule.virtual=true", "schedule.cure=none"),
            *(f"train.batch={self.batch}", f"evaluate.batch={3 * self.batch}", "evaluate.samples=0"),
            *self.settings,
            *(f"{key}={folder / file}" for key, file in self.files),
        ]


LARGER = ("model.name=gpt", "model.layers=8", "model.width=256", "data.context=64", "data.name=text")
GPT = ("model.name=gpt", "model.layers=4", "model.width=128", "data.context=64")
STUDIES = {
    "text": Study(
        title="tiny Shakespeare, GPT of 4 blocks x 128, 64 bytes",
        settings=(*GPT, "data.name=text"),
        files=(("data.path", "text/tinyshakespeare.txt"),),
        layers=10,
        updates=1000,
        tuning=500,
        batch=32,
        rate=3e-3,
    ),
    "python": Study(
        title="Python's own sources, GPT of 4 blocks x 128, 64 bytes",
        settings=(*GPT, "data.name=python"),
        layers=10,
        updates=1000,
        tuning=500,
        batch=32,
        rate=3e-3,
        like="text",
        searched=(),
    ),
    "qqp": Study(
        title="question pairs, BERT of 3 blocks x 64, 32 tokens",
        settings=(
            *("model.name=bert", "model.layers=3", "model.width=64", "model.heads=4", "model.dropout=0.0"),
            *("data.name=parquet", "data.tokens=wordpiece", "data.vocabulary_size=4000", "data.context=32"),
        ),
        files=(
            ("data.train", "qqp/train.parquet"),
            ("data.validation", "qqp/validation.parquet"),
            ("data.vocabulary", "text/bert-base-uncased-vocab.txt"),
        ),
        layers=8,
        updates=600,
        tuning=300,
        batch=32,
        rate=1e-3,
        like="text",
        judged_by_loss=False,
    ),
    "cifar10": Study(
        title="CIFAR-10, ResNeXt of 8 blocks, 8 channels after the stem",
        settings=("model.name=resnext50_32x4d", "model.width=8", "data.name=parquet"),
        files=(("data.train", "cifar10/train.parquet"), ("data.validation", "cifar10/test.parquet")),
        layers=10,
        updates=600,
        tuning=300,
        batch=64,
        rate=4e-3,
        like="text",
        judged_by_loss=False,
        batch_norm=True,
    ),
    **{
        name: Study(
            title=f"tiny Shakespeare, GPT of 8 blocks x 256, 64 bytes, {title}",
            settings=LARGER,
            files=(("data.path", "text/tinyshakespeare.txt"),),
            layers=18,
            updates=400,
            tuning=200,
            batch=32,
            rate=rate,
            like="text",
            searched=("rate",),
            optimizer=optimizer,
        )
        for name, title, optimizer, rate in (
            ("larger", "AdamW", "adamw", 1.5e-3),
            ("larger-muon", "Muon", "muon", 3e-3),
        )
    },
}
QUICK = {
    "text": Study(
        title="Python's own sources, GPT of 3 blocks x 32, 16 bytes",
        settings=(
            *("model.name=gpt", "model.layers=3", "model.width=32", "data.name=python", "data.context=16"),
            "evaluate.samples=16",
        ),
        layers=8,
        updates=6,
        tuning=4,
        batch=32,
        rate=2e-3,
    )
}


def even_cut(layers: int, chunks: int) -> list[int]:
    """Layers of each chunk, as even as possible; the middle cut does not depend on the number of chunks."""
    ends = [(layers * number + chunks // 2) // chunks for number in range(chunks + 1)]
    return [end - start for start, end in pairwise(ends)]
