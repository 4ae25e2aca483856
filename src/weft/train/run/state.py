"""What a run has done so far. Checkpoints carry exactly this as `extra`, under these keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.metrics import higher_is_better
from weft.output import json_safe


@dataclass(kw_only=True)
class Evaluations:
    """The evaluations so far, as far as later decisions depend on them."""

    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] | None = None  # update, samples, seconds and value
    worse: int = 0  # evaluations since the best

    def add(self, metrics: Mapping[str, float], *, metric: str, place: Mapping[str, Any]) -> bool:
        """Add an evaluation at a place of the run; whether its metric is the best so far."""
        self.last = dict(metrics)
        value, sign = self.last[metric], -1 if higher_is_better(metric) else 1
        better = math.isfinite(value) and (self.best is None or sign * value < sign * self.best["value"])
        self.worse = 0 if better else self.worse + 1
        if better:
            self.best = dict(place) | {"value": value}
        return better


@dataclass(kw_only=True)
class RunState:
    """The state of a run between two mini-batches; weights and optimizers are in the pipeline."""

    update: int = 0  # mini-batches completed
    seconds: float = 0.0  # of training, without evaluations and checkpoints
    evaluations: Evaluations = field(default_factory=Evaluations)
    layers: list[int] = field(default_factory=list)  # of each chunk
    fixed: dict[str, Any] = field(default_factory=dict)  # settings that a resumed run must keep
    data: dict[str, Any] = field(default_factory=dict)  # what identifies the data; earlier versions saved nothing

    def as_extra(self) -> dict[str, Any]:
        """The plain data of a checkpoint."""
        return {
            "update": self.update,
            "seconds": self.seconds,
            "judge": json_safe(asdict(self.evaluations)),
            "layers": list(self.layers),
            "fixed": dict(self.fixed),
            "data": dict(self.data),
        }

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> RunState:
        return cls(
            update=extra["update"],
            seconds=extra["seconds"],
            evaluations=Evaluations(**extra["judge"]),
            layers=extra["layers"],
            fixed=extra["fixed"],
            data=extra.get("data", {}),
        )
