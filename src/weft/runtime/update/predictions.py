"""Buffers of predicted weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch.nn import Parameter

from weft.runtime.update.predictor import Predictor


@dataclass(kw_only=True, eq=False)
class _Buffer:
    """Predicted weights, and what they were predicted from."""

    leaves: list[Parameter]
    fingerprint: object = None  # of the prediction; None: outdated
    versions: list[int] = field(default_factory=list)  # autograd's, of the leaves: they count writes
    readers: int = 0


class Predictions:
    """The predicted weights of a parameter set, under the keys of their readers.

    Readers share a buffer if they ask for the same prediction. A buffer without readers is filled again.
    """

    def __init__(self, predictor: Predictor | None, new_leaves: Callable[[], list[Parameter]]) -> None:
        self._predictor, self._new_leaves = predictor, new_leaves
        self._buffers: list[_Buffer] = []
        self._by_key: dict[Hashable, _Buffer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or not."""
        return sum(leaf.nbytes for buffer in self._buffers for leaf in buffer.leaves)

    def make(self, key: Hashable, ahead: int) -> None:
        """Predict the weights this number of updates ahead, for the reader `key`."""
        fingerprint = None if self._predictor is None else self._predictor.fingerprint(ahead)
        buffer = next((buffer for buffer in self._buffers if _holds(buffer, fingerprint)), None)
        if buffer is None:
            buffer = self._fill(ahead, fingerprint)
        buffer.readers += 1
        self._by_key[key] = buffer

    def _fill(self, ahead: int, fingerprint: object) -> _Buffer:
        spare = [buffer for buffer in self._buffers if not buffer.readers]
        if not spare:
            spare = [_Buffer(leaves=self._new_leaves())]
            self._buffers += spare
        buffer = next((buffer for buffer in spare if buffer.fingerprint is None), spare[0])
        if self._predictor is not None:
            self._predictor.predict(buffer.leaves, ahead)
        buffer.fingerprint, buffer.versions = fingerprint, [leaf._version for leaf in buffer.leaves]
        return buffer

    def read(self, key: Hashable) -> list[Parameter]:
        return self._by_key[key].leaves

    def forget(self, key: Hashable) -> None:
        """This reader is done."""
        self._by_key.pop(key).readers -= 1

    def invalidate(self) -> None:
        """The weights have changed: later predictions start from other ones."""
        for buffer in self._buffers:
            buffer.fingerprint = None


def _holds(buffer: _Buffer, fingerprint: object) -> bool:
    """Whether a buffer holds this prediction: not if a layer has written into it (`Embedding(max_norm=)` does)."""
    same = fingerprint is not None and buffer.fingerprint == fingerprint
    return same and buffer.versions == [leaf._version for leaf in buffer.leaves]
