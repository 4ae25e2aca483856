"""Makes the updates of one parameter set: puts their parts together and lets each do its work."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.runtime.update.cures.base import Cure
from weft.runtime.update.makers import OptimizerMaker, SchedulerMaker, make_optimizer, make_scheduler
from weft.runtime.update.optimizer import OptimizerPart, SchedulerPart
from weft.runtime.update.part import UpdatePart
from weft.runtime.update.predictor import PredictionOptions, Predictor
from weft.runtime.update.rates_ahead import RatesAhead


class Updater:
    """`parts` are those of an update, from the inside out. Without parameters there are none."""

    optimizer: Optimizer | None = None
    lr_scheduler: LRScheduler | None = None
    predictor: Predictor | None = None
    cure: Cure | None = None  # that treats these parameters

    def __init__(
        self,
        live: list[Parameter],
        *,
        names: Sequence[str],
        optimizer: OptimizerMaker,
        lr_scheduler: SchedulerMaker | None = None,
        predicts: PredictionOptions | None = None,
        cure: Cure | None = None,
        delay: float = 0,
    ) -> None:
        self.live = live
        self.updates = 0  # made so far, without skipped mini-batches
        self.parts: list[UpdatePart] = []
        if not live:
            return
        self.optimizer = make_optimizer(optimizer, names, live)
        self.parts.append(OptimizerPart(self.optimizer, live))
        if lr_scheduler is not None:
            self.lr_scheduler = make_scheduler(lr_scheduler, self.optimizer)
            self.parts.append(SchedulerPart(self.lr_scheduler))
        if predicts is not None:
            rates = None
            if lr_scheduler is not None and self.lr_scheduler is not None:
                rates = RatesAhead(self.optimizer, lr_scheduler, self.lr_scheduler)
            self.predictor = Predictor(self.optimizer, live, options=predicts, rates=rates)
            self.parts.append(self.predictor)
        if cure is not None and (treatment := cure.treat(self.optimizer, live, delay)) is not None:
            self.cure = cure
            self.parts.insert(1, treatment)

    def first_read(self, weights: Sequence[Tensor]) -> None:
        """The first forward of the next mini-batch reads these weights."""
        for part in self.parts:
            part.first_read(weights)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update the live parameters in place."""
        for parameter, gradient in zip(self.live, gradients, strict=True):
            parameter.grad = gradient
        with contextlib.ExitStack() as entered:
            for part in reversed(self.parts):
                entered.enter_context(part.step())
        for parameter in self.live:
            parameter.grad = None
        self.updates += 1

    def skip(self) -> None:
        """A mini-batch makes no update."""
        for part in self.parts:
            part.skip()

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(part.nbytes for part in self.parts[:1])

    @property
    def buffer_bytes(self) -> int:
        """Bytes that all other parts hold."""
        return sum(part.nbytes for part in self.parts[1:])
