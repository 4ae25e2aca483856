"""The training loop of one rank: step, log, evaluate, save, and stop on request.

A mini-batch is a function of its number, so a resumed run needs nothing but its checkpoint. Decisions (to evaluate, to
save, to stop) depend only on what all ranks know. The loop knows no jobs: it gets plain values and functions.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weft.errors import StorageError
from weft.schedule import Timeline
from weft.train.run.events import Ended, Evaluated, Event, Saved, SaveFailed, StalenessSampled, Stepped, Subscriber
from weft.train.run.progress import Clock, Progress
from weft.train.run.state import RunState
from weft.train.run.watch import Watch

if TYPE_CHECKING:
    from weft.runtime import Pipeline, Result
    from weft.runtime.comm import Collectives
    from weft.runtime.process import Status


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank gets of a mini-batch, and a checksum of its sample numbers."""

    inputs: Any
    targets: Any
    checksum: int


class Batches(Protocol):
    """Where mini-batches come from; they are taken in order."""

    waited: float  # seconds in `take`

    def take(self, update: int, /) -> Batch: ...


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """When the loop does what; 0 updates between two of something: at the end only."""

    updates: int  # of the whole run
    batch: int  # samples of a mini-batch
    log_every: int
    evaluate_every: int
    save_every: int
    metric: str = "loss"  # decides which model is the best
    patience: int = 0  # evaluations without a better metric before the run ends; 0: no limit
    timeline: int = 3  # mini-batches in the timeline
    telemetry: bool = False  # whether the pipeline samples staleness
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that a resumed run must keep
    deadline: float = 60.0  # seconds in which this rank moves, while it trains or evaluates
    file_deadline: float = 600.0  # seconds in which some rank moves a byte, while all save or load


class Loop:
    """One run, on one rank.

    evaluate         metrics of the model on held-out data; None if there is none
    learning_rate    of the update of a number
    checkpoint_path  where to save after that many updates, the same on all ranks
    stop             is set on a rank to stop all of them
    data_identity    what a checkpoint after that many updates says about the data
    """

    def __init__(
        self,
        pipe: Pipeline,
        options: LoopOptions,
        *,
        evaluate: Callable[[], Mapping[str, float]] | None,
        learning_rate: Callable[[int], float],
        checkpoint_path: Callable[[int], Path],
        collectives: Collectives,
        status: Status,
        stop: threading.Event,
        data_identity: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        self.pipe, self.options = pipe, options
        self.state = RunState(layers=list(pipe.balance), fixed=dict(options.fixed))
        self.subscribers: list[Subscriber] = []
        self._evaluate, self._learning_rate, self._checkpoint_path = evaluate, learning_rate, checkpoint_path
        self._collectives, self._status, self._data_identity = collectives, status, data_identity
        self._watch = Watch(pipe, collectives, stop)
        self._clock = Clock()
        self._progress = Progress(updates=options.updates)
        self._losses: list[float] = []  # since the last log
        self._norms: list[float] = []
        self._sampled = -1  # last mini-batch whose staleness was reported
        self._unflushed = self._skipped = 0
        self._timeline: Timeline | None = None
        self._save_problem: str | None = None  # why the last save failed
        self._batches: Batches | None = None

    @property
    def progress(self) -> Progress:
        state = self.state
        samples = state.update * self.options.batch
        return replace(self._progress, update=state.update, samples=samples, seconds=state.seconds)

    def resume(self, checkpoint: str) -> RunState:
        """Continue from a checkpoint; its state, whose `fixed` settings and `data` the caller compares."""
        with self._status.during("load", limit=self.options.file_deadline):
            saved = RunState.from_extra(self.pipe.load(checkpoint, deadline=self.options.file_deadline))
        self.state = replace(saved, layers=self.state.layers, fixed=self.state.fixed)
        self._clock.spent = saved.seconds
        self._progress = self.progress
        self._sampled = saved.update - 1
        return saved

    def run(self, batches: Batches) -> Ended:
        """Train until all updates are made, patience is over, or a rank is asked to stop."""
        self._batches = batches
        with self._status.during("train", limit=self.options.deadline):
            outcome = self._train(batches)
        if self._save_problem is not None:
            raise StorageError(f"the run ends without its last checkpoint: {self._save_problem}")
        ended = Ended(outcome=outcome, progress=self.progress, report=self.pipe.report(), timeline=self._timeline)
        self._emit(ended)
        return ended

    def _train(self, batches: Batches) -> str:
        self._clock.start()
        outcome = "finished"
        for update in range(self.state.update, self.options.updates):
            if self._out_of_patience:
                break
            stop = self._step(batches.take(update), update)
            if not self._pause(update + 1, stop=stop) and self._due(update + 1, self.options.log_every):
                self._log()
            if stop:
                outcome = "stopped"
                break
        self._watch.read_all()
        return "stopped early" if self._out_of_patience else outcome

    @property
    def _out_of_patience(self) -> bool:
        return 0 < self.options.patience <= self.state.evaluations.worse

    def _due(self, done: int, every: int) -> bool:
        return done == self.options.updates or bool(every and done % every == 0)

    def _emit(self, event: Event) -> None:
        for subscriber in self.subscribers:
            subscriber(event)

    # A mini-batch

    def _step(self, batch: Batch, update: int) -> bool:
        """Feed a mini-batch; whether the run has to stop."""
        self._status.minibatch = update
        self._complete(self.pipe.step(batch.inputs, batch.targets))
        self._unflushed += 1
        return self._watch.exchange(update, batch.checksum)

    def _complete(self, result: Result) -> None:
        """Note the newest completed mini-batch, if it is a new one."""
        if result.loss is not None and result.minibatch is not None and result.minibatch >= self.state.update:
            self._losses.append(result.loss)
            if result.norm is not None:
                self._norms.append(result.norm)
            self.state.update, self._skipped = result.minibatch + 1, result.skipped

    def _log(self) -> None:
        losses, norms = (list(filter(math.isfinite, numbers)) for numbers in (self._losses, self._norms))
        self._losses.clear()
        self._norms.clear()
        if not losses:
            return
        self.state.seconds = self._clock.seconds
        now, before = self.progress, self._progress
        speed = (now.samples - before.samples) / max(1e-9, now.seconds - before.seconds)
        left = (self.options.updates - now.update) * self.options.batch
        bubbles, memory = self._watch.figures()
        self._progress = replace(
            now,
            loss=sum(losses) / len(losses),
            norm=sum(norms) / len(norms) if norms else None,
            lr=self._learning_rate(now.update - 1 - self._skipped),
            samples_per_second=speed,
            seconds_left=left / speed if speed else math.nan,
            bubbles=bubbles,
            memory=memory,
            resident=self._watch.resident,
            waited_for_data=0.0 if self._batches is None else self._batches.waited,
        )
        self._emit(Stepped(progress=self._progress))

    # Evaluations and checkpoints

    def _pause(self, done: int, *, stop: bool) -> bool:
        """Evaluate and save if it is time to, or the last chance; whether it was."""
        evaluate = self._evaluate is not None and self._due(done, self.options.evaluate_every)
        save = self._due(done, self.options.save_every)
        if not (evaluate or save or stop):
            return False
        self._drain()
        self._log()
        best = evaluate and self._add_evaluation()
        if self.options.telemetry:
            self._report_staleness()
        if save or best or stop or self._out_of_patience:
            self._save(best=best)
        self._clock.start()
        return True

    def _drain(self) -> None:
        """Empty the pipeline, which is a part of training; then stop the clock."""
        if self._unflushed > self.options.timeline or (self._timeline is None and self._unflushed):
            self._timeline = self.pipe.timeline(min(self.options.timeline, self._unflushed))
        self._complete(self.pipe.flush())
        self._unflushed = 0
        self._watch.read_all()
        self._clock.stop()
        self.state.seconds = self._clock.spent

    def _add_evaluation(self) -> bool:
        """Evaluate; whether the metric is the best so far."""
        assert self._evaluate is not None
        with self._status.during("evaluate", limit=self.options.deadline):
            metrics, progress = dict(self._evaluate()), self.progress
        best = self.state.evaluations.add(metrics, metric=self.options.metric, place=progress.place)
        self._emit(Evaluated(progress=progress, metrics=metrics, best=best))
        return best

    def _save(self, *, best: bool) -> None:
        """Save on all ranks or on none. Without room for a checkpoint a run goes on, and saves at the next chance."""
        with self._status.during("save", limit=self.options.file_deadline):
            if self._data_identity is not None:
                self.state.data = self._data_identity(self.state.update)
            deadline, self._save_problem = self.options.file_deadline, None
            together = functools.partial(
                self._collectives.together,
                deadline=deadline,
                progress=lambda: self._status.nbytes + self._status.moves,
            )
            try:
                path: Path = together(lambda: self._checkpoint_path(self.state.update), purpose="name a checkpoint")
                self.pipe.save(path, extra=self.state.as_extra(), deadline=deadline, only_finite=True)
                together(lambda: self._emit(Saved(path=path, best=best)), purpose="publish a checkpoint")
            except StorageError as problem:
                self._save_problem = str(problem)
                self._emit(SaveFailed(progress=self.progress, problem=self._save_problem))

    def _report_staleness(self) -> None:
        found = [
            (chunk["chunk"], sample)
            for rank in self.pipe.report().ranks
            for chunk in rank["chunks"]
            for sample in chunk["samples"]
        ]
        new = tuple(
            {
                "update": sample["minibatch"] + 1,
                "chunk": chunk,
                "predicted": sample["predicted"],
                "stale": sample["stale"],
            }
            for chunk, sample in found
            if sample["minibatch"] > self._sampled
        )
        self._sampled = max([self._sampled, *(sample["minibatch"] for _, sample in found)])
        self._emit(StalenessSampled(samples=new))
