"""Runs with many options at once, which are the same on every device: to the bit, on one with the CPU's kernels.

A run feeds mini-batches of two sizes. Every model has dropout, and its target is a tuple, so a mini-batch can have a
loss that is not finite whatever the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from tests.helpers.models import BALANCE, SCHEDULERS, WIDTH, Attention, is_hidden
from tests.helpers.oracle import MakeOptimizer
from tests.helpers.schedules import FRESH, OTHER_BACKWARD, PREDICTING, schedule_for
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.schedule import METHODS

UPDATES = 4
BAD = 1  # the mini-batch that is skipped, where one is
ROWS = 16  # of a mini-batch; every third one has half as many
CHANCE = 0.2  # of dropout; 1 / (1 - 0.2) has few digits, so devices that divide by it and those that multiply agree

Targets = tuple[Tensor, Tensor]  # classes, and a factor of the loss


def _dropout(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(layer, nn.Dropout(CHANCE))


def mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(CHANCE)) for _ in range(8)))


def convolution() -> nn.Sequential:
    """BatchNorm has buffers, and `Flatten` has no parameters at all."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        _dropout(nn.Conv2d(4, 4, 3, stride=2, bias=False)),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)),
        nn.Flatten(),
        _dropout(nn.Linear(4, WIDTH)),
        nn.Linear(WIDTH, WIDTH),
    )


def transformer() -> nn.Sequential:
    """The embedding and the output layer are one parameter."""
    model = nn.Sequential(
        nn.Embedding(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        _dropout(Attention()),
        nn.LayerNorm(WIDTH),
        _dropout(nn.Linear(WIDTH, WIDTH)),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH, bias=False),
    )
    model[7].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {"mlp": mlp, "conv": convolution, "transformer": transformer}
SHAPES = {"mlp": (WIDTH,), "conv": (1, 4, 4), "transformer": (4,)}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
    "muon": weft.optimizers.muon(0.02, hidden=is_hidden),
}
TREATMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "exact": {"predict": {"versions": "exact"}},
    "decayed": {"predict": {"extrapolation": "decayed"}},
    "printed": {"predict": {"bias": "printed"}},
    "pipemare": {"cure": weft.cures.PipeMare(anneal=4)},
    "gapaware": {"cure": weft.cures.GapAware()},
    "optimistic": {"cure": weft.cures.Optimistic()},
}


def loss_fn(output: Tensor, target: Targets) -> Tensor:
    classes, factor = target
    return functional.cross_entropy(output.flatten(0, -2), classes.flatten()) * factor.mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """The options of a run."""

    method: str
    stages: int = 2
    model: str = "mlp"
    optimizer: str = "adam"
    treatment: str = "none"  # of stale weights
    clip_norm: float | None = None
    replicas: int = 1
    nan: Literal["stop", "skip"] = "stop"
    recompute: bool | Literal["layer"] = False
    precision: Literal["fp32", "bf16", "bf16-autocast"] = "fp32"
    meta: bool = False  # whether it is built on the meta device
    telemetry: int | None = None
    lr_scheduler: str | None = None
    pause: str = "none"  # in the middle: "evaluate", or "resume" in a new pipeline
    lag: int = 0  # of events and copies, in launches; on the CPU there is none

    @property
    def microbatches(self) -> int:
        """As many as stages; fewer where a delay of more than one update is wanted, more for fresh reads."""
        return 2 if self.treatment == "pipemare" else 2 * self.stages if self.method == FRESH else self.stages

    @property
    def balance(self) -> list[int]:
        return BALANCE[self.stages * (2 if self.method in ("wpipe", FRESH, "weave", "interleaved") else 1)]

    @property
    def is_allowed(self) -> bool:
        """Whether weft accepts these options together."""
        predicts = self.treatment in ("exact", "decayed", "printed")
        autocast = self.precision == "bf16-autocast"
        if self.method == FRESH and self.stages > 2:
            return False  # too few rows for BatchNorm
        if (self.method in OTHER_BACKWARD or self.treatment == "exact") and (self.recompute or autocast):
            return False
        if self.method in ("zb-h1", "weave") and self.recompute == "layer":
            return False
        if predicts:
            return self.method in (*PREDICTING, "2bw", "wpipe", FRESH, "weave")
        if self.treatment == "pipemare":
            return self.method == "pipedream" and self.stages == 4
        return self.treatment in ("none", "optimistic") or METHODS[self.method.removesuffix("-fresh")].asynchronous

    def __str__(self) -> str:
        words = [self.method, f"p{self.stages}", self.model, self.optimizer]
        words += [word for word in (self.treatment, self.pause) if word != "none"]
        words += ["clip"] * (self.clip_norm is not None) + ["replicas"] * (self.replicas > 1)
        words += ["skip"] * (self.nan == "skip") + [self.precision] * (self.precision != "fp32")
        words += ["recompute"] * bool(self.recompute) + ["layer"] * (self.recompute == "layer")
        words += ["meta"] * self.meta
        words += ["telemetry"] * (self.telemetry is not None) + ["halved"] * (self.lr_scheduler is not None)
        return "-".join(words + [f"lag{self.lag}"] * (self.lag > 0))


@dataclass(kw_only=True)
class Run:
    """What came of a run."""

    state: dict[str, Tensor] = field(default_factory=dict, repr=False)
    losses: dict[int, float] = field(default_factory=dict)  # that steps have returned, by mini-batch
    newest: list[int] = field(default_factory=list)  # the mini-batch that each step returned; -1: none
    last: weft.Result | None = None  # of the last flush
    figures: list[Any] = field(default_factory=list)  # evaluations, predictions, telemetry


def build(case: Case, device: str) -> nn.Sequential:
    """The model of a case. One that is built on the meta device is real on the CPU, with the same values."""
    torch.manual_seed(1)
    if not case.meta:
        return MODELS[case.model]()
    with weft.on_meta():
        model = MODELS[case.model]()
    return weft.materialize(model) if device == "cpu" else model


def batch(model: str, number: int, rows: int, *, bad: bool = False) -> tuple[Tensor, Targets]:
    generator = torch.Generator().manual_seed(100 + number)
    shape = (rows, *SHAPES[model])
    words = model == "transformer"
    inputs = torch.randint(WIDTH, shape, generator=generator) if words else torch.randn(shape, generator=generator)
    classes = torch.randint(WIDTH, shape if words else shape[:1], generator=generator)
    return inputs, (classes, torch.full((rows,), math.nan if bad else 1.0))


def pipeline(case: Case, device: str, **other: Any) -> weft.Pipeline:
    """The pipeline of a case; `other` arguments come instead of those of the case."""
    treatment = TREATMENTS[case.treatment]
    sizes: dict[str, Any] = {"stages": case.stages, "microbatches": case.microbatches}
    options: dict[str, Any] = {
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZERS[case.optimizer],
        "schedule": schedule_for(case.method, **sizes, predict=treatment.get("predict")),
        **sizes,
        "balance": case.balance,
        "clip_norm": case.clip_norm,
        "replicas": case.replicas,
        "nan": case.nan,
        "recompute": case.recompute,
        "precision": case.precision,
        "telemetry": case.telemetry,
        "lr_scheduler": None if case.lr_scheduler is None else SCHEDULERS[case.lr_scheduler],
        "device": device,
    }
    return weft.Pipeline(build(case, device), **options | treatment | other)


def train(case: Case, device: str, folder: Path) -> Run:
    """Run a case on virtual ranks."""
    ran = Run()
    pipe = pipeline(case, device)
    for t in range(UPDATES):
        if t == UPDATES // 2 and case.pause != "none":
            pipe = _pause(pipe, case, device, folder, ran)
        rows = case.replicas * (ROWS // 2 if t % 3 == 2 else ROWS)
        result = pipe.step(*batch(case.model, t, rows, bad=t == BAD and case.nan == "skip"))
        _note(result, ran)
    ran.last = pipe.flush()
    _note(ran.last, ran)
    ran.state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
    ran.figures.append([chunk["samples"] for rank in pipe.report().ranks for chunk in rank["chunks"]])
    _evaluate(pipe, case, ran)
    pipe.close()
    return ran


def _note(result: weft.Result, ran: Run) -> None:
    ran.newest.append(-1 if result.minibatch is None else result.minibatch)
    if result.minibatch is not None and result.loss is not None:
        assert repr(ran.losses.setdefault(result.minibatch, result.loss)) == repr(result.loss)


def _pause(pipe: weft.Pipeline, case: Case, device: str, folder: Path, ran: Run) -> weft.Pipeline:
    if case.pause == "evaluate":
        _evaluate(pipe, case, ran)
        return pipe
    pipe.save(folder / device.replace(":", "-"))
    pipe.close()
    pipe = pipeline(case, device)
    pipe.load(folder / device.replace(":", "-"))
    return pipe


def _evaluate(pipe: weft.Pipeline, case: Case, ran: Run) -> None:
    """Of numbers of samples that micro-batches do not divide, also of fewer samples than micro-batches."""
    loader = [batch(case.model, 50 + rows, rows) for rows in (9, 3)]
    metrics = {"right": lambda output, target: (output.argmax(-1) == target[0]).float().mean()}
    ran.figures.append(pipe.evaluate(loader, metrics=metrics))
    ran.figures.append(pipe.predict(loader[0][0]).tolist())
