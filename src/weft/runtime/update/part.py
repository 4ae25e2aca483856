"""The protocol of an update: everything that happens when a parameter set gets its next version is a *part* of it.

    predictor ( scheduler ( cure ( optimizer ) ) )

A parameter set lists its parts from the inside out, the optimizer first. `step` of a part is a context manager around
the steps of the parts inside it: a cure changes the gradients before the optimizer's step, the learning-rate scheduler
steps after it. A part also says what a checkpoint keeps of it and how many bytes it holds, so that no other code has to
know which parts there are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PartState:
    """What a checkpoint keeps of a part."""

    parameters: Sequence[Any] | None = None  # the state of each parameter of the set; None: the part has no such state
    shared: Any = None  # of the optimizer and the scheduler only: what belongs to no single parameter


class UpdatePart:
    """A part of the updates of one parameter set; this one does nothing."""

    key: ClassVar[str]  # names its state in a checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return 0

    def first_read(self, weights: Sequence[Tensor]) -> None:
        """The first forward of the next mini-batch reads these weights."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Take part in the update by the oldest mini-batch in flight; the live parameters hold its gradients."""
        return contextlib.nullcontext()

    def skip(self) -> None:
        """The oldest mini-batch in flight makes no update."""

    def state(self) -> PartState:
        """What a checkpoint keeps. The pipeline is drained: no mini-batch is in flight."""
        return PartState()

    def check(self, state: PartState) -> None:
        """Raise a ValueError if `load` can't take this state; change nothing. Larger tensors are stand-ins of zeros."""

    def load(self, state: PartState, *, updates: int) -> None:
        """Continue from a state, after this number of updates. The parts inside this one are loaded already.

        The state of a parameter is read from its file when it is taken: free the old one first, and take each once.
        A parameter whose saved run did not have this part has the state None.
        """
