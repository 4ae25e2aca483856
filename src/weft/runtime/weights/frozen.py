"""Parameters that are not trained, in the dtype that passes read.

They are rounded once. The originals stay, because `state_dict` and checkpoints keep every bit of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from weft.runtime.partition import Place
from weft.runtime.weights.versions import round_into, rounded


class FrozenWeights:
    """The frozen parameters of a chunk, and where its modules read them."""

    def __init__(
        self, masters: Sequence[Parameter], places: Sequence[Sequence[Place]], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._masters, self._leaves = list(masters), rounded(masters, dtypes)
        for leaf, leaf_places in zip(self._leaves, places, strict=True):
            for owner, name in leaf_places:
                setattr(owner, name, leaf)

    @property
    def master_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._masters)

    def refresh(self) -> None:
        """The masters were changed."""
        round_into(self._leaves, self._masters)
