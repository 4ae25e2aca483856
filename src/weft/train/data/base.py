"""What a data set is to a training loop, and the one source of chance that all of them share.

Everything random is a pure function of numbers (seed, epoch, index): whoever asks, in whatever batch and on whatever
rank, gets the same answer. No global generator is ever touched.
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
    """Which draw of the random parts of a sample (augmentation, offsets) is meant."""

    seed: int
    epoch: int


class Dataset(Protocol):
    """Samples by number; inputs and targets of a number belong together, wherever they are read."""

    @property
    def spec(self) -> DataSpec:
        """All but `channels` and `size` hold on every rank; those are 0 where no inputs are read, unless the format
        or the options say them."""

    @property
    def fingerprint(self) -> str:
        """Of length and targets (of text: of all tokens), short hex; equal on ranks that read the same data."""

    def __len__(self) -> int: ...

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> Any:
        """A batch for the first chunk: a tensor or a dict of tensors. Without a draw: as in evaluation."""

    def targets(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        """A batch for the last chunk."""


class Tokenizer(Protocol):
    """Text to numbers and back."""

    @property
    def size(self) -> int:
        """All numbers are below it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a job trains on and is judged by. `tokens` is there for text, on ranks that read inputs at least."""

    train: Dataset
    validation: Dataset
    tokens: Tokenizer | None = None


def generator(purpose: str, *numbers: int) -> np.random.Generator:
    """The generator of these numbers for this purpose; purposes are independent of each other."""
    import numpy as np

    key = [zlib.crc32(purpose.encode()), *(number % 2**64 for number in numbers)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
