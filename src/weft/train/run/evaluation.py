"""How good a model is on held-out data, which evaluation was the best, and when it is time to give up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.metrics import higher_is_better
from weft.train.data_spec import DataSpec
from weft.train.job import Evaluation


class Evaluations:
    """The evaluations of a run so far."""

    def __init__(self, choice: Evaluation, spec: DataSpec) -> None:
        self._choice, self._spec = choice, spec
        self.last: dict[str, float] = {}
        self.best: dict[str, Any] | None = None
        self.worse = 0  # evaluations since the best one

    @property
    def tired(self) -> bool:
        """Whether it is time to stop."""
        return 0 < self._choice.patience <= self.worse

    @property
    def words(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.last.items())

    def take(self, found: Mapping[str, float], place: Mapping[str, Any]) -> bool:
        """An evaluation at some place of the run; whether it is the best so far."""
        self.last = dict(found)
        if self._spec.task == "language":
            self.last["perplexity"] = math.exp(min(found["loss"], 700.0))
        value, sign = self.last[self._choice.metric], -1 if higher_is_better(self._choice.metric) else 1
        better = math.isfinite(value) and (self.best is None or sign * value < sign * self.best["value"])
        self.worse = 0 if better else self.worse + 1
        if better:
            self.best = dict(place) | {"value": value}
        return better

    def state(self) -> dict[str, Any]:
        return {"last": self.last, "best": self.best, "worse": self.worse}

    def load(self, state: Mapping[str, Any]) -> None:
        self.last, self.best, self.worse = state["last"], state["best"], state["worse"]
