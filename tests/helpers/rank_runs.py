"""Runs that are the same on virtual ranks of the CPU and on real ranks with pretend devices, to the bit.

A run trains, evaluates, predicts and trains on with mini-batches of other sizes. Every model has dropout.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from tests.helpers import pretend
from tests.helpers.pretend.ranks import STANDIN
from tests.helpers.schedules import FRESH, OTHER_BACKWARD, schedule_for
from torch import Tensor, nn
from torch.nn import functional

import weft

WIDTH = 16  # of every layer: a row fills a cache line, see `models.py`
LAYERS = 8
MICROBATCHES = 4
SIZES = (2, 2, 1, 2, 2, 3)  # rows of a micro-batch, by mini-batch: smaller and larger than the receive that is posted
PAUSE = 3  # the mini-batch before which the run evaluates and predicts
BAD = 1  # the mini-batch that is skipped, where one is
JITTER = 0.002  # seconds, at most
DEADLINE = 30.0  # seconds


class TiedOutput(nn.Module):
    """Multiplies by the weight of another layer."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.first = first

    def forward(self, value: Tensor) -> Tensor:
        return value @ self.first.weight


def model(*, tied: bool) -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Linear(WIDTH, WIDTH)
    middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS - 2)]
    return nn.Sequential(first, *middle, TiedOutput(first) if tied else nn.Linear(WIDTH, WIDTH))


@dataclass(frozen=True, kw_only=True)
class Case:
    """The options of a run, and what surrounds it on a device."""

    method: str
    ranks: int = 2
    replicas: int = 1
    tied: bool = False
    clip: bool = False
    skip: bool = False
    recompute: bool | Literal["layer"] = False
    predict: bool = False  # where the method can do without
    backend: str = STANDIN
    lag: int = 0  # of events and copies, in launches
    jitter: bool = False  # operations of communicators start late, by random times

    @property
    def stages(self) -> int:
        return self.ranks // self.replicas

    @property
    def is_allowed(self) -> bool:
        """Whether weft accepts these options together."""
        if self.predict and self.method not in ("2bw", "wpipe", FRESH):
            return False
        if self.recompute and self.method in OTHER_BACKWARD:
            return False
        if self.method == "interleaved" and self.stages == 1:
            return False
        return not self.jitter or self.backend == STANDIN

    def __str__(self) -> str:
        words = [f"{self.ranks}-ranks", self.method, *(["replicas"] if self.replicas > 1 else [])]
        words += [name for name in ("tied", "clip", "skip", "recompute", "predict", "jitter") if getattr(self, name)]
        words += ["staged"] * (self.backend != STANDIN) + [f"lag{self.lag}"] * (self.lag > 0)
        return "-".join(words)


@dataclass(kw_only=True)
class Run:
    """What came of a run."""

    state: dict[str, Tensor] = field(default_factory=dict, repr=False)
    losses: dict[int, float] = field(default_factory=dict)  # by mini-batch
    ranks: list[dict[int, str]] = field(default_factory=list)  # after each flush: what each rank knows of mini-batches
    figures: list[Any] = field(default_factory=list)  # evaluations and predictions


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def batch(number: int, rows: int, *, bad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
    return inputs, torch.full_like(targets, math.nan) if bad else targets


def pipeline(case: Case, device: str, **options: Any) -> weft.Pipeline:
    predict: dict[str, str] | None = {} if case.predict else None
    return weft.Pipeline(
        model(tied=case.tied),
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        schedule=schedule_for(case.method, stages=case.stages, microbatches=MICROBATCHES, predict=predict),
        microbatches=MICROBATCHES,
        stages=None if dist.is_initialized() else case.stages,
        replicas=case.replicas,
        clip_norm=0.1 if case.clip else None,
        nan="skip" if case.skip else "stop",
        recompute=case.recompute,
        predict=predict,
        device=device,
        **{"deadline": DEADLINE} | options,
    )


def train(pipe: weft.Pipeline, case: Case, before_step: Callable[[int], None] = lambda t: None) -> Run:
    ran = Run()
    for t, size in enumerate(SIZES):
        if t == PAUSE:
            _pause(pipe, ran)
        before_step(t)
        rows = size * MICROBATCHES * case.replicas
        _note(pipe.step(*batch(t, rows, bad=case.skip and t == BAD)), ran)
    _pause(pipe, ran)
    ran.state = {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}
    return ran


def _pause(pipe: weft.Pipeline, ran: Run) -> None:
    """Also with numbers of samples that micro-batches do not divide, and with fewer than micro-batches."""
    _note(pipe.flush(), ran)
    workers = pipe._driver.workers
    known = {worker.number: f"{worker.completions.newest}, {worker.completions.skipped} skipped" for worker in workers}
    ran.ranks.append(known)
    loader = [batch(100 + rows, rows) for rows in (13, 3)]
    ran.figures += [pipe.evaluate(loader), pipe.predict(loader[0][0]).tolist()]


def _note(result: weft.Result, ran: Run) -> None:
    if result.minibatch is not None and result.loss is not None:
        ran.losses[result.minibatch] = result.loss


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """A run on a rank with a pretend device."""

    run: Run
    races: list[str]  # what the sanitizer found
    outstanding: list[str]  # operations of communicators after the last flush


def train_on_rank(case: Case) -> RankRun:
    """For `pretend_launch`."""
    controls = pretend.load()
    from tests.helpers.pretend import nccl

    with pipeline(case, "pretend") as pipe:
        controls.set_lag(case.lag)
        if case.jitter:
            nccl.behave(nccl.Behaviour(delay=late))
        run = train(pipe, case)
        outstanding = [str(operation) for found in nccl.communicators() for operation in found.outstanding]
        nccl.behave(nccl.Behaviour())
        controls.set_lag(0)
    return RankRun(run=run, races=controls.errors(), outstanding=outstanding)


def late(operation: Any) -> None:
    """A random time before an operation, another one on every rank."""
    time.sleep(JITTER * random.Random(f"{dist.get_rank()} {operation}").random())


def train_on_cpu(case: Case) -> Run:
    """On virtual ranks."""
    with pipeline(case, "cpu") as pipe:
        return train(pipe, case)


def check_same(run: Run, expected: Run) -> None:
    """To the bit."""
    different = [name for name, tensor in expected.state.items() if not torch.equal(run.state[name], tensor)]
    assert list(run.state) == list(expected.state)
    assert different == []
    assert repr(run.figures) == repr(expected.figures)
    for known, expected_known in zip(run.ranks, expected.ranks, strict=True):
        assert known.items() <= expected_known.items()
    assert run.losses
    assert {t: repr(loss) for t, loss in run.losses.items()} == {t: repr(expected.losses[t]) for t in run.losses}
