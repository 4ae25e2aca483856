"""The loop without a job: any pipeline, any batches, and events for any subscriber."""

import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import Diverged, StorageError
from weft.runtime.comm import Collectives
from weft.runtime.process import Status
from weft.train.run import (
    Batch,
    Ended,
    Evaluated,
    Event,
    Loop,
    LoopOptions,
    Saved,
    SaveFailed,
    StalenessSampled,
    Stepped,
)

UPDATES, ROWS = 12, 8


class Batches:
    """Random mini-batches, by their number."""

    waited = 0.25

    def __init__(self, on_take: Any = None) -> None:
        self._on_take = on_take

    def take(self, update: int, /) -> Batch:
        if self._on_take is not None:
            self._on_take(update)
        made = torch.Generator().manual_seed(update)
        return Batch(
            inputs=torch.randn(ROWS, 4, generator=made), targets=torch.randn(ROWS, 2, generator=made), checksum=update
        )


class Run:
    """A loop over a small pipeline, and the events that it has emitted."""

    def __init__(
        self, folder: Path, *, stop: threading.Event | None = None, clip_norm: float | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.pipe = weft.Pipeline(
            model,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            schedule=weft.schedule("2bw", stages=2, microbatches=2),
            telemetry=4 if options.get("telemetry") else None,
            clip_norm=clip_norm,
        )
        self.status = Status()
        self.losses = iter([3.0, 2.0, 2.5, 2.5])
        sizes = {"updates": UPDATES, "batch": ROWS, "log_every": 2, "evaluate_every": 4, "save_every": 6}
        self.loop = Loop(
            self.pipe,
            LoopOptions(**sizes | options),
            evaluate=lambda: {"loss": next(self.losses)},
            learning_rate=lambda update: 0.01 * update,
            checkpoint_path=lambda update: folder / f"update-{update}",
            collectives=Collectives(deadline=10.0),
            status=self.status,
            stop=stop or threading.Event(),
        )
        self.events: list[Event] = []
        self.loop.subscribers.append(self.events.append)

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}


def test_events_tell_a_subscriber_all(tmp_path: Path) -> None:
    run = Run(tmp_path)
    ended = run.loop.run(Batches())
    assert [event.progress.update for event in run.of(Stepped)][-1] == UPDATES
    assert [event.progress.update for event in run.of(Evaluated)] == [4, 8, 12]
    assert [event.best for event in run.of(Evaluated)] == [True, True, False]
    assert [(event.path.name, event.best) for event in run.of(Saved)] == [
        ("update-4", True),
        ("update-6", False),
        ("update-8", True),
        ("update-12", False),
    ]
    assert all(event.path.is_dir() for event in run.of(Saved))
    assert run.events[-1] is ended
    last = run.of(Stepped)[-1].progress
    assert (last.samples, last.waited_for_data, last.lr) == (UPDATES * ROWS, 0.25, 0.01 * (UPDATES - 1))
    assert ended.outcome == "finished"
    assert ended.timeline is not None
    assert [type(event) for event in run.events[-4:]] == [Stepped, Evaluated, Saved, Ended]


def test_progress_has_the_mean_norm_of_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the mini-batches whose loss arrived since the last event; without clipping there is none."""
    reported: dict[int, float] = {}
    complete = Loop._complete

    def noting(loop: Loop, result: Any) -> None:
        reported.update({} if result.minibatch is None else {result.minibatch: result.norm})
        complete(loop, result)

    monkeypatch.setattr(Loop, "_complete", noting)
    run = Run(tmp_path, clip_norm=0.1)
    run.loop.run(Batches())
    ends = [0, *(event.progress.update for event in run.of(Stepped))]
    means = [fmean(norm for t, norm in reported.items() if first <= t < end) for first, end in pairwise(ends)]
    assert [event.progress.norm for event in run.of(Stepped)] == pytest.approx(means)
    assert len(set(means)) > 2
    plain = Run(tmp_path / "plain")
    plain.loop.run(Batches())
    assert {event.progress.norm for event in plain.of(Stepped)} == {None}


def test_a_resumed_loop_is_identical_to_an_uninterrupted_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.loop.run(Batches())
    resumed = Run(tmp_path / "resumed")
    next(resumed.losses)
    state = resumed.loop.resume(str(tmp_path / "update-6"))
    assert (state.update, state.evaluations.best) == (6, run.of(Evaluated)[0].progress.place | {"value": 3.0})
    resumed.loop.run(Batches())
    before, after = run.weights(), resumed.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [event.progress.update for event in resumed.of(Evaluated)] == [8, 12]
    for run_of_events in (run, resumed):
        assert run_of_events.of(Stepped)[-1].progress.loss == run.of(Stepped)[-1].progress.loss


def test_a_request_to_stop_ends_with_a_checkpoint(tmp_path: Path) -> None:
    stop = threading.Event()
    run = Run(tmp_path, stop=stop, evaluate_every=0, save_every=0)
    ended = run.loop.run(Batches(on_take=lambda update: stop.set() if update == 2 else None))
    assert ended.outcome == "stopped"
    assert 3 <= ended.progress.update < UPDATES
    (saved,) = run.of(Saved)
    assert saved.path.name == f"update-{ended.progress.update}"
    assert run.of(Evaluated) == []


def test_patience_ends_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path, evaluate_every=2, patience=1)
    ended = run.loop.run(Batches())
    assert (ended.outcome, ended.progress.update) == ("stopped early", 6)
    assert run.of(Saved)[-1].path.name == "update-6"


def test_staleness_is_reported_once(tmp_path: Path) -> None:
    run = Run(tmp_path, telemetry=True)
    run.loop.run(Batches())
    samples = [sample for event in run.of(StalenessSampled) for sample in event.samples]
    assert [sample["update"] for sample in samples if sample["chunk"] == 0] == [1, 5, 9]


def test_the_room_imports_neither_jobs_nor_torch() -> None:
    """Jobs build on it, not the other way round; and reading a run's folder must not take seconds."""
    code = "import sys, weft.train.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert not {"torch", "weft.train.job", "weft.train.data", "weft.train.models"} & set(done.stdout.split())


class FullDisk:
    """Saves of a pipeline, some of which fail."""

    def __init__(self, run: Run, *failing: int) -> None:
        self.save, self.calls, self.failing = run.pipe.save, 0, failing

    def __call__(self, path: Path, **options: Any) -> None:
        self.calls += 1
        if self.calls in self.failing:
            raise StorageError("no space")
        self.save(path, **options)


def test_a_failed_save_is_an_event_and_the_next_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, evaluate_every=0)
    monkeypatch.setattr(run.pipe, "save", FullDisk(run, 1))
    assert run.loop.run(Batches()).outcome == "finished"
    assert [(event.progress.update, event.problem) for event in run.of(SaveFailed)] == [(6, "no space")]
    assert [event.path.name for event in run.of(Saved)] == ["update-12"]


def test_a_subscriber_that_can_not_publish_is_a_failed_save(tmp_path: Path) -> None:
    run = Run(tmp_path, evaluate_every=0)

    def publish(event: Event) -> None:
        if isinstance(event, Saved) and event.path.name == "update-6":
            raise StorageError("no space for latest")

    run.loop.subscribers.insert(0, publish)
    run.loop.run(Batches())
    assert [event.problem for event in run.of(SaveFailed)] == ["no space for latest"]


def test_a_run_without_its_last_checkpoint_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, evaluate_every=0)
    monkeypatch.setattr(run.pipe, "save", FullDisk(run, 2))
    with pytest.raises(StorageError, match="the run ends without its last checkpoint: no space"):
        run.loop.run(Batches())
    assert run.of(Ended) == []


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """The run ends as diverged, and the checkpoint before them stays."""
    run = Run(tmp_path, evaluate_every=0)

    def poison() -> dict[str, float]:
        """In the evaluation before the last save, where no loss will show it."""
        for worker in run.pipe._driver.workers:
            worker.chunks[worker.rank].sets[0].versions.live[0].data.fill_(float("nan"))
        return {"loss": 1.0}

    run.loop._evaluate, run.loop.options = poison, replace(run.loop.options, evaluate_every=UPDATES)
    with pytest.raises(Diverged, match=r"the weights of chunk 0 are not finite \(0.weight\), so they are not saved"):
        run.loop.run(Batches())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-6"]


def test_a_loop_says_what_it_does(tmp_path: Path) -> None:
    """For the parent, and for the file of the rank's status."""
    run = Run(tmp_path)
    phases = []
    run.loop.subscribers.append(lambda event: phases.append((type(event), run.status.phase, run.status.limit)))
    run.loop.run(Batches())
    assert (Saved, "save", 600.0) in phases
    assert (Stepped, "train", 60.0) in phases
    assert run.status.phase == "start"
    assert run.status.minibatch == UPDATES - 1
