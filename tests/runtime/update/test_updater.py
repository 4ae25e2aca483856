"""The protocol of an update: the order of its parts, and what a cure gets without a line elsewhere."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import weft
from weft.runtime.update import PredictionOptions, Updater
from weft.runtime.update.predictor import Predictor


class Count(weft.cures.CurePart):
    """Counts the updates of each parameter in a tensor, and logs all calls."""

    def __init__(self, live: Sequence[Parameter]) -> None:
        self.counts = [torch.zeros(1) for _ in live]
        self.log: list[str] = []
        self.updates = -1

    @property
    def nbytes(self) -> int:
        return sum(count.nbytes for count in self.counts)

    def first_read(self, weights: Sequence[Tensor]) -> None:
        self.log.append("read")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.log.append("before")
        yield
        self.log.append("after")
        for count in self.counts:
            count.add_(1)

    def skip(self) -> None:
        self.log.append("skip")

    def state(self) -> weft.cures.PartState:
        return weft.cures.PartState(parameters=[{"count": count} for count in self.counts])

    def load(self, state: weft.cures.PartState, *, updates: int) -> None:
        self.updates = updates
        for count, saved in zip(self.counts, state.parameters or (), strict=True):
            count.copy_(torch.zeros(1) if saved is None else saved["count"])


@dataclass(frozen=True)
class Counting(weft.cures.Cure):
    def treat(self, optimizer: torch.optim.Optimizer, live: Sequence[Parameter], delay: float) -> Count | None:
        return Count(live) if delay > 0 else None


def test_a_cure_surrounds_the_optimizer_and_scheduler_and_predictor_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Logged(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            log.append("optimizer")

    class LoggedRate(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            log.append("scheduler")

    @contextlib.contextmanager
    def observe(self: Predictor) -> Iterator[None]:
        yield
        log.append(f"predictor, gradient {live[0].grad is not None}")

    log: list[str] = []
    monkeypatch.setattr(Predictor, "step", observe)
    live = [Parameter(torch.ones(2))]
    updater = Updater(
        live,
        names=["weight"],
        optimizer=lambda params: Logged(params, lr=0.1),
        lr_scheduler=lambda optimizer: LoggedRate(optimizer, 1),
        predicts=PredictionOptions(extrapolation="decayed"),
        cure=Counting(),
        delay=1,
    )
    (cure,) = (part for part in updater.parts if isinstance(part, Count))
    cure.log = log
    log.clear()  # schedulers step once when they are built
    updater.first_read(live)
    updater.step([torch.ones(2)])
    assert log == ["read", "before", "optimizer", "after", "scheduler", "predictor, gradient True"]
    assert live[0].grad is None
    log.clear()
    updater.skip()
    assert log == ["skip"]


def test_without_parameters_there_is_nothing_to_update() -> None:
    updater = Updater([], names=[], optimizer=lambda params: torch.optim.SGD(params, lr=0.1), cure=Counting())
    updater.step([])
    assert (updater.optimizer, updater.parts, updater.optimizer_bytes, updater.buffer_bytes) == (None, [], 0, 0)


def pipeline(cure: weft.cures.Cure | None) -> weft.Pipeline:
    return weft.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule="2bw",
        microbatches=2,
        stages=2,
        cure=cure,
    )


def parts(pipe: weft.Pipeline) -> list[Count]:
    sets = [parameters for built in pipe._assembly.chunks.values() for parameters in built.chunk.sets]
    return [part for parameters in sets for part in parameters.updater.parts if isinstance(part, Count)]


def test_a_users_cure_is_saved_loaded_and_counted(tmp_path: Path) -> None:
    """Also from and into a pipeline without it."""
    pipe = pipeline(Counting())
    for _ in range(3):
        pipe.step(torch.ones(4, 4), torch.ones(4, 4))
    pipe.save(tmp_path / "with")
    assert [rank["peak_bytes"]["buffers"] for rank in pipe.report().ranks] == [8, 8]  # weight and bias
    assert [count.item() for part in parts(pipe) for count in part.counts] == [3, 3, 3, 3]
    other = pipeline(Counting())
    other.load(tmp_path / "with")
    assert [(part.updates, *part.counts) for part in parts(other)] == [(3, 3, 3), (3, 3, 3)]
    without = pipeline(None)
    without.load(tmp_path / "with")
    without.save(tmp_path / "without")
    other.load(tmp_path / "without")
    assert [(part.updates, *part.counts) for part in parts(other)] == [(3, 0, 0), (3, 0, 0)]


@dataclass(frozen=True)
class Sharing(weft.cures.Cure):
    def treat(self, optimizer: torch.optim.Optimizer, live: Sequence[Parameter], delay: float) -> weft.cures.CurePart:
        class Shared(weft.cures.CurePart):
            def state(self) -> weft.cures.PartState:
                return weft.cures.PartState(shared={"count": 3})

        return Shared()


def test_state_that_a_checkpoint_would_lose_is_refused(tmp_path: Path) -> None:
    """Another run may divide the parameters into other sets, so only state by parameter can be found again."""
    pipe = weft.Pipeline(
        torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4))),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule="2bw",
        microbatches=2,
        stages=2,
        cure=Sharing(),
    )
    with pytest.raises(weft.WeftError, match=r"state of a cure by parameter.*keep it in PartState.parameters"):
        pipe.save(tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())
