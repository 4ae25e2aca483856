"""The interface of a data set, and the random generator that all data sets use.

Everything random is a pure function of numbers (seed, epoch, index), so every rank gets the same sample in every
batch. No global generator is used.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weft.train.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Seed and epoch of the random parts of a sample (augmentation, offsets)."""

    seed: int
    epoch: int


class Dataset(Protocol):
    """Samples by number; inputs and targets of a number belong together, on whatever rank they are read."""

    @property
    def spec(self) -> DataSpec:
        """The same on every rank, except `channels` and `size`: they are 0 on ranks that read no inputs, unless the
        format or the options define them."""

    @property
    def fingerprint(self) -> str:
        """A short hex hash of length and targets (for text: of all tokens); equal on ranks that read the same data.

        A data set may also have an `input_fingerprint`, of its inputs; it is empty on ranks that read none. What lacks
        one, or has an empty one, is not compared.
        """

    def __len__(self) -> int: ...

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> Any:
        """A batch for the first chunk: a tensor or a dict of tensors. `draw` is None in evaluations."""

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        """A batch for the last chunk."""


class Tokenizer(Protocol):
    """Text to numbers and back."""

    @property
    def size(self) -> int:
        """The number of tokens; all ids are below it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a job. `tokens` is set for text, at least on ranks that read inputs."""

    train: Dataset
    validation: Dataset
    tokens: Tokenizer | None = None


def generator(purpose: str, *numbers: int) -> np.random.Generator:
    """The generator for these numbers and this purpose; purposes are independent of each other."""
    import numpy as np

    key = [zlib.crc32(purpose.encode()), *(number % 2**64 for number in numbers)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
