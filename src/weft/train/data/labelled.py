"""Data sets with one label per sample: targets, subsets and the validation split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weft.errors import WeftError
from weft.train.data.base import Data, Dataset, Draw, Tokenizer, generator
from weft.train.data.fingerprints import fingerprint
from weft.train.data_spec import DataSpec


class LabelledDataset:
    """Targets from an array of labels: class numbers, or the values of a regression [samples, classes]."""

    def __init__(self, spec: DataSpec, labels: np.ndarray, *, targets: bool, input_fingerprint: str = "") -> None:
        self.spec = spec
        self._labels = labels
        self._has_targets = targets
        self.fingerprint = fingerprint(labels)
        self.input_fingerprint = input_fingerprint

    def __len__(self) -> int:
        return len(self._labels)

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        check_opened_with(self._has_targets, "targets")
        return torch.from_numpy(self._labels[indices])


@dataclass(frozen=True)
class Subset:
    """The samples `rows` of a data set, in this order."""

    whole: Dataset
    rows: np.ndarray

    @property
    def spec(self) -> DataSpec:
        return self.whole.spec

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.rows, self.whole.fingerprint)

    @property
    def input_fingerprint(self) -> str:
        whole = getattr(self.whole, "input_fingerprint", "")
        return whole and fingerprint(self.rows, whole)

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> Any:
        return self.whole.inputs(self.rows[indices], draw)

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        return self.whole.targets(self.rows[indices], draw)


def first_samples(dataset: Dataset, samples: int) -> Dataset:
    return Subset(dataset, np.arange(samples))


def split_holdout(dataset: Dataset, share: float, tokens: Tokenizer | None = None) -> Data:
    """Split off a share of the samples for validation; the split is the same for every seed of training."""
    count = max(1, round(len(dataset) * share))
    if count >= len(dataset):
        raise WeftError(f"a holdout needs at least 2 samples (got {len(dataset)}); set data.validation")
    rows = generator("holdout", len(dataset)).permutation(len(dataset))
    return Data(
        train=Subset(dataset, np.sort(rows[count:])), validation=Subset(dataset, np.sort(rows[:count])), tokens=tokens
    )


def infer_task(labels: np.ndarray, where: str) -> tuple[str, np.ndarray]:
    """The task and the labels as targets: classification for whole numbers, regression for others."""
    if not len(labels):
        raise WeftError(f"{where} has no samples; use a file that has samples")
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise WeftError(f"labels of {where} must be finite numbers; remove samples without one")
        return "regression", labels.astype(np.float32).reshape(len(labels), -1)
    if labels.min() < 0:
        raise WeftError(
            f"labels of {where} must be 0 or above (got {labels.min()}); test splits are often published without labels"
        )
    return "classification", labels.astype(np.int64)


def count_classes(train: np.ndarray, others: np.ndarray, task: str, where: str) -> int:
    """The number of classes in the training data; validation data must not have others."""
    if task == "regression":
        return int(train.shape[1])
    classes = int(train.max()) + 1
    if len(others) and others.max() >= classes:
        raise WeftError(
            f"labels of {where} must be classes of the training data, which has {classes} (got {others.max()})"
        )
    return classes


def check_opened_with(opened: bool, what: str) -> None:
    if not opened:
        raise WeftError(f"this rank's data was opened without {what}; open it with {what}=True")
