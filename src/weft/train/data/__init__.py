"""The data of a job: `open_data` reads what the options name, on the ranks that need it.

A data set gives inputs and targets by sample number (`base.py`); `readers/` has one module for each source. Importing
this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import WeftError
from weft.train.data.base import Data, Dataset, Draw, Tokenizer
from weft.train.data.identity import differences, identity_of
from weft.train.data.options import DATA, CustomData, TextOptions
from weft.train.data.prefetch import Prefetch
from weft.train.data.sampler import BatchSampler, index_checksum

__all__ = [
    "DATA",
    "BatchSampler",
    "CustomData",
    "Data",
    "Dataset",
    "Draw",
    "Prefetch",
    "TextOptions",
    "Tokenizer",
    "differences",
    "entropy",
    "identity_of",
    "index_checksum",
    "open_data",
]


def open_data(options: Any, *, seed: int, inputs: bool = True, targets: bool = True) -> Data:
    """Open the data that the options describe.

    `inputs=False`: this rank reads no inputs, so images are not decoded and sentences not tokenized; its spec lacks
    `channels` and `size` unless the format or the options define them. `targets=False`: it reads no targets. Lengths
    and fingerprints of targets are complete on every rank. The seed is passed to the user's functions; the content and
    the split of a built-in source do not depend on it.
    """
    options.check()
    reader = importlib.import_module(f"weft.train.data.readers.{options.reader}")
    data: Data = reader.read(options, seed=seed, inputs=inputs, targets=targets)
    limit = getattr(options, "samples", 0)
    if 0 < limit < len(data.train):
        from weft.train.data.labelled import first_samples

        data = Data(train=first_samples(data.train, limit), validation=data.validation, tokens=data.tokens)
    return data


def entropy(dataset: Dataset) -> float:
    """The entropy of the targets in nats: the loss of a model that knows only how often each target occurs."""
    import numpy as np

    if dataset.spec.task == "regression":
        raise WeftError("entropy needs tokens or classes as targets (task: regression)")
    counts = np.zeros(1, dtype=np.int64)
    for start in range(0, len(dataset), 4096):
        part = dataset.targets(np.arange(start, min(start + 4096, len(dataset))), None).flatten().numpy()
        part = np.bincount(part, minlength=len(counts))
        part[: len(counts)] += counts
        counts = part
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
