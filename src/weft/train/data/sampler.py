"""Which samples an update is computed from: a pure function of the seed and the update.

So every rank has the same order without communication, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from weft.errors import WeftError
from weft.train.data.base import generator


class BatchSampler:
    """A new permutation of all samples in each epoch, cut into batches; an incomplete last batch is dropped."""

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        if batch > samples:
            raise WeftError(
                f"a batch must not be larger than the data (train.batch: {batch}, samples: {samples}); lower it"
            )
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.per_epoch = samples // batch

    def epoch(self, update: int) -> int:
        return update // self.per_epoch

    def indices(self, update: int) -> np.ndarray:
        """The samples of an update; updates count from 0 over the whole run."""
        start = update % self.per_epoch * self.batch
        return _permutation(self.samples, self.seed, self.epoch(update))[start : start + self.batch]


def index_checksum(indices: np.ndarray) -> int:
    """A small number with which ranks check that they use the same samples."""
    return zlib.crc32(np.ascontiguousarray(indices, dtype="<i8").tobytes())


@lru_cache(maxsize=4)
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    order = generator("order", seed, epoch).permutation(samples)
    order.setflags(write=False)
    return order
