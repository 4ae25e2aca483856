"""Ranks that read only inputs or only targets get the same pairs as a rank that reads both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.data.data_files import noise, write_cifar, write_images, write_pairs

from weft.errors import WeftError
from weft.train.data import Data, Draw, open_data
from weft.train.data.options import Cifar10, Parquet, Synthetic, TextFiles
from weft.train.data.sampler import BatchSampler, index_checksum

SEED, BATCH = 11, 4


def cifar(folder: Path) -> Any:
    write_cifar(folder)
    return Cifar10(path=str(folder))


def images(folder: Path) -> Any:
    return Parquet(train=write_images(folder / "train.parquet", noise(18, 40), list(range(18))), holdout=0.2)


def pairs(folder: Path) -> Any:
    return Parquet(train=write_pairs(folder / "train.parquet", 23), context=32, holdout=0.1)


def text(folder: Path) -> Any:
    (folder / "text.txt").write_text(" ".join(map(str, range(400))))
    return TextFiles(path=str(folder / "text.txt"), context=50)


def synthetic(form: str) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        return Synthetic(form=form, samples=17, context=12, size=8)

    make.__name__ = f"synthetic {form}"
    return make


SOURCES = [cifar, images, pairs, text, *(synthetic(form) for form in ("tokens", "pairs", "images", "values"))]


def digest(batch: Any) -> bytes:
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


def run(data: Data, part: str, updates: int) -> list[tuple[int, bytes]]:
    """The batches of a rank that reads one part, with the checksums of their samples."""
    sampler = BatchSampler(len(data.train), BATCH, SEED)
    seen = []
    for update in range(updates):
        indices, draw = sampler.indices(update), Draw(seed=SEED, epoch=sampler.epoch(update))
        seen.append((index_checksum(indices), digest(getattr(data.train, part)(indices, draw))))
    return seen


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.__name__))
def test_ranks_that_read_one_part_see_the_same_pairs(tmp_path: Path, source: Any) -> None:
    options = source(tmp_path)
    both = open_data(options, seed=SEED)
    first = open_data(options, seed=SEED, targets=False)
    last = open_data(options, seed=SEED, inputs=False)
    middle = open_data(options, seed=SEED, inputs=False, targets=False)
    ranks = (both, first, last, middle)
    prints = {(len(data.train), data.train.fingerprint, data.validation.fingerprint) for data in ranks}
    assert len(prints) == 1
    updates = 4 * (len(both.train) // BATCH)  # four epochs
    torch.manual_seed(0)
    np.random.seed(0)
    inputs = run(first, "inputs", updates)
    torch.manual_seed(1)
    targets = run(last, "targets", updates)
    assert inputs == run(both, "inputs", updates)
    assert targets == run(both, "targets", updates)
    assert [checksum for checksum, _ in inputs] == [checksum for checksum, _ in targets]
    for data, part in ((first, "targets"), (last, "inputs"), (middle, "inputs"), (middle, "targets")):
        with pytest.raises(WeftError, match=f"opened without {part}"):
            getattr(data.train, part)(np.array([0]), None)


def test_a_pair_belongs_to_one_sample(tmp_path: Path) -> None:
    """The questions contain their number, whose parity is the label, so a pair of two samples would be noticed."""
    options = pairs(tmp_path)
    first, last = open_data(options, seed=0, targets=False), open_data(options, seed=0, inputs=False)
    sampler = BatchSampler(len(first.train), BATCH, SEED)
    for update in range(3 * sampler.per_epoch):
        questions = first.train.inputs(sampler.indices(update), None)["input_ids"].tolist()
        labels = last.train.targets(sampler.indices(update), None).tolist()
        numbers = [int(bytes(row).split(b"cats ")[1].split(b"\x03")[0]) for row in questions]
        assert [number % 2 for number in numbers] == labels


def test_other_content_has_another_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for number, labels in enumerate(([0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 2])):
        path = write_images(tmp_path / f"{number}.parquet", noise(len(labels), 8), labels)
        prints.add(open_data(Parquet(train=path, validation=path), seed=0, inputs=False).train.fingerprint)
    assert len(prints) == 3
