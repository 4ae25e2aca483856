"""Random data with a rule that a model can learn: for tests and benchmarks, without downloads.

Everything is a function of the option `seed`; training and validation data follow the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from weft.train.data.base import Data, Dataset, Draw, generator
from weft.train.data.fingerprints import checksum, fingerprint
from weft.train.data.labelled import LabelledDataset, check_opened_with
from weft.train.data.options import Synthetic
from weft.train.data.sentences import FramedSentences, SentenceDataset
from weft.train.data.tokenizer import ByteTokenizer
from weft.train.data_spec import DataSpec

POOL = 64  # noise images; enough that they do not reveal the class


class Successors:
    """Lines of tokens [samples, context + 1]; the target of a token is the next token."""

    def __init__(self, spec: DataSpec, lines: np.ndarray, *, inputs: bool, targets: bool) -> None:
        self.spec = spec
        self.fingerprint = fingerprint(lines)  # covers the inputs too
        self._lines = lines
        self._has = {"inputs": inputs, "targets": targets}

    def __len__(self) -> int:
        return len(self._lines)

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        check_opened_with(self._has["inputs"], "inputs")
        return torch.from_numpy(self._lines[indices, :-1])

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        check_opened_with(self._has["targets"], "targets")
        return torch.from_numpy(self._lines[indices, 1:])


class Values(LabelledDataset):
    """Features from an array."""

    def __init__(self, spec: DataSpec, values: np.ndarray, labels: np.ndarray, *, inputs: bool, targets: bool) -> None:
        super().__init__(spec, labels, targets=targets, input_fingerprint=checksum(values) if inputs else "")
        self._values = values
        self._has_inputs = inputs

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        check_opened_with(self._has_inputs, "inputs")
        return torch.from_numpy(self._values[indices])


class Patches(LabelledDataset):
    """Noise with one bright patch in a grid of patches, whose position is the class; made on demand."""

    def __init__(self, spec: DataSpec, pool: np.ndarray, labels: np.ndarray, *, inputs: bool, targets: bool) -> None:
        super().__init__(spec, labels, targets=targets, input_fingerprint=checksum(pool) if inputs else "")
        self._pool = pool
        self._has_inputs = inputs
        self._grid = int(np.ceil(np.sqrt(spec.classes)))

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        check_opened_with(self._has_inputs, "inputs")
        batch = self._pool[np.asarray(indices) % len(self._pool)]
        cell = np.arange(self.spec.size) * self._grid // self.spec.size  # grid cell of each row, and of each column
        down, right = np.divmod(self._labels[indices], self._grid)
        bright = (cell == down[:, None])[:, None, :, None] & (cell == right[:, None])[:, None, None, :]
        return torch.from_numpy(batch + 2 * bright.astype(np.float32))


def read(options: Synthetic, *, seed: int, inputs: bool, targets: bool) -> Data:
    forms: dict[str, Callable[..., Dataset]]
    forms = {"tokens": _tokens, "pairs": _pairs, "images": _images, "values": _values}
    make = forms[options.form]
    train, validation = (
        make(options, generator(part, options.seed), samples, inputs=inputs, targets=targets)
        for part, samples in (("train", options.samples), ("validation", options.validation_samples))
    )
    return Data(train=train, validation=validation)


def _tokens(options: Synthetic, chance: np.random.Generator, samples: int, **has: bool) -> Successors:
    spec = DataSpec(task="language", form="tokens", vocabulary=options.vocabulary, context=options.context)
    successor = generator("rule", options.seed).permutation(options.vocabulary)
    lines = chance.integers(options.vocabulary, size=(samples, options.context + 1))
    ruled = chance.random(lines.shape) >= options.noise
    for place in range(1, lines.shape[1]):
        lines[:, place] = np.where(ruled[:, place], successor[lines[:, place - 1]], lines[:, place])
    return Successors(spec, lines, **has)


def _pairs(
    options: Synthetic, chance: np.random.Generator, samples: int, *, inputs: bool, targets: bool
) -> SentenceDataset:
    spec = DataSpec(
        task="classification",
        form="pairs",
        vocabulary=options.vocabulary,
        context=options.context,
        classes=options.classes,
    )
    labels = chance.integers(options.classes, size=samples)
    words = chance.integers(4 + options.classes, options.vocabulary, size=(2, samples, options.context))
    longest = max(1, (options.context - 3) // 2)
    lengths = chance.integers(1, longest + 1, size=(2, samples))
    place = (chance.random(samples) * lengths[1]).astype(np.int64)
    ruled = chance.random(samples) >= options.noise
    words[1, np.arange(samples), place] = 4 + np.where(ruled, labels, chance.integers(options.classes, size=samples))
    # framed like bytes: 0, 2 and 3 are special, 1 is unused, then the classes, then the other words
    columns = [
        [row[:length].tolist() for row, length in zip(*sentences, strict=True)]
        for sentences in zip(words, lengths, strict=True)
    ]
    framed = FramedSentences(columns, ByteTokenizer(), options.context) if inputs else None
    return SentenceDataset(spec, framed, labels, targets=targets)


def _images(options: Synthetic, chance: np.random.Generator, samples: int, **has: bool) -> Patches:
    spec = DataSpec(
        task="classification", form="images", classes=options.classes, channels=options.channels, size=options.size
    )
    labels = chance.integers(options.classes, size=samples)
    shape = (POOL, options.channels, options.size, options.size)
    pool = chance.standard_normal(shape, dtype=np.float32) if has["inputs"] else np.zeros(0, dtype=np.float32)
    return Patches(spec, pool, labels, **has)


def _values(options: Synthetic, chance: np.random.Generator, samples: int, **has: bool) -> Values:
    spec = DataSpec(task=options.task, form="values", features=options.features, classes=options.classes)
    rule = generator("rule", options.seed).standard_normal((options.features, options.classes), dtype=np.float32)
    values = chance.standard_normal((samples, options.features), dtype=np.float32)
    clean = values @ rule / np.float32(np.sqrt(options.features))
    noisy = clean + options.noise * chance.standard_normal(clean.shape, dtype=np.float32)
    labels: Any = noisy if options.task == "regression" else noisy.argmax(1)
    return Values(spec, values, labels, **has)
