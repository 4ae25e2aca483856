"""The training loop, as every rank runs it: feed, log, judge, save, and stop when asked to.

All that a mini-batch is made of is a function of its number and the seed, so a run that goes on from a checkpoint
needs nothing but the checkpoint. Decisions (to evaluate, to save, to stop) are taken from what all ranks know.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.draw import svg, trace
from weft.errors import WeftError
from weft.output import write_text
from weft.runtime import Report, Result
from weft.schedule import Timeline
from weft.train.data import Prefetch
from weft.train.job import Job, resolved
from weft.train.optimizers import share
from weft.train.peers import Peers, stop_wish
from weft.train.run.display import Display, State
from weft.train.run.evaluation import Evaluations
from weft.train.run.folder import Folder
from weft.train.run.metrics import Metrics, plain
from weft.train.run.watch import Clock, Watch
from weft.train.sampling import generate_text
from weft.train.setup import net_of, pipeline_of, supply_of, title_of


def train(job: Job, folder: str, checkpoint: str | None, restarts: int, show: str) -> dict[str, Any]:
    """Train a job on this rank, from the beginning or from a checkpoint; what came out, on every rank."""
    with stop_wish() as stop:
        loop = Loop(job, Folder(folder), stop=stop, resumed=checkpoint is not None, restarts=restarts, show=show)
        try:
            return loop.run(checkpoint)
        finally:
            loop.close()


class Loop:
    """One run, on one rank."""

    def __init__(
        self, job: Job, folder: Folder, *, stop: threading.Event, resumed: bool, restarts: int, show: str
    ) -> None:
        self.job, self.folder, self.restarts = job, folder, restarts
        self.peers = Peers(deadline=job.schedule.deadline)
        self.supply = supply_of(job, self.peers)
        self.updates = self.supply.updates
        self.net = net_of(job, self.supply.spec, resumed=resumed)
        self.pipe = pipeline_of(job, self.net, self.supply.spec, updates=self.updates)
        self.watch = Watch(self.pipe, self.peers, stop)
        self.judge = Evaluations(job.evaluate, self.supply.spec)
        self.clock = Clock()
        self.state = State(updates=self.updates)
        title = title_of(job, self.pipe.schedule)
        self.display = Display(self.state, title=title, show=show if self.peers.first else "none")
        self.metrics: Metrics | None = None  # of the first rank
        self.prefetch: Prefetch[Any] | None = None
        self._losses: dict[int, float] = {}  # by mini-batch, since the last line of metrics
        self._line = (0.0, 0)  # seconds and samples at that line
        self._sampled = -1  # last mini-batch whose staleness is in the metrics
        self._unflushed = self._skipped = 0
        self._timeline: Timeline | None = None

    def run(self, checkpoint: str | None) -> dict[str, Any]:
        """Until all updates are made, the metric gets no better, or somebody asks to stop."""
        if checkpoint is not None:
            self._resume(checkpoint)
        start = self.state.update
        if self.peers.first:
            self.folder.begin(self._resolved())  # not before its checkpoint is accepted
            if checkpoint is not None:
                best = self.judge.best
                self.folder.rewind(Path(checkpoint), best=None if best is None else best["update"])
            self.metrics = Metrics(self.folder.path, update=start, tensorboard=self.job.log.tensorboard)
        self.prefetch = Prefetch(self.supply.batch, start=start, stop=self.updates, deadline=self.job.schedule.deadline)
        how = "finished"
        with self.display:
            for note in self.net.notes:
                self.display.say(note)
            self.clock.start()
            for update in range(start, self.updates):
                if self.judge.tired:
                    break
                asked = self._step(update)
                if not self._pause(update + 1, asked=asked) and self._due(update + 1, self.job.log.every):
                    self._log()
                if asked:
                    how = "stopped"
                    break
            return self._end("stopped early" if self.judge.tired else how)

    def _resolved(self) -> Job:
        """The job with all numbers that it was run with, but the cut, where that is measured."""
        job = resolved(self.job)
        if job.schedule.balance == "time":
            job = replace(job, schedule=replace(job.schedule, layers=[]))
        return job

    def close(self) -> None:
        if self.prefetch is not None:
            self.prefetch.close()
        if self.metrics is not None:
            self.metrics.close()

    def _due(self, done: int, every: int) -> bool:
        return done == self.updates or bool(every and done % every == 0)

    # A mini-batch

    def _step(self, update: int) -> bool:
        """Feed one mini-batch; whether the run is asked to stop."""
        assert self.prefetch is not None
        batch = self.prefetch.take(update)
        self._note(self.pipe.step(batch.inputs, batch.targets))
        self._unflushed += 1
        return self.watch.after(update, batch.checksum)

    def _note(self, result: Result) -> None:
        """A mini-batch is completed, unless the newest one is still the one before."""
        if result.loss is not None and result.minibatch is not None and result.minibatch >= self.state.update:
            self._losses[result.minibatch] = result.loss
            self.state.update, self._skipped = result.minibatch + 1, result.skipped
            self.state.samples = self.state.update * self.job.train.batch

    # Judging and saving

    def _pause(self, done: int, *, asked: bool) -> bool:
        """Evaluate and save, where it is time to, or where it is the last chance; whether it was."""
        judge = self._due(done, self.job.evaluate.every) and self.supply.validation > 0
        save = self._due(done, self.job.checkpoint.every)
        if judge or save or asked:
            with self._drained():
                self._log()
                better = judge and self._judge()
                if self.job.log.telemetry:
                    self._staleness(self.pipe.report())
                if save or better or asked or self.judge.tired:
                    self._save(done, best=better)
        return judge or save or asked

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """With an empty pipeline and the clock stopped; letting it run empty is a part of training."""
        if self._unflushed > self.job.log.timeline or (self._timeline is None and self._unflushed):
            self._timeline = self.pipe.timeline(min(self.job.log.timeline, self._unflushed))
        self._note(self.pipe.flush())
        self._unflushed = 0
        self.watch.settle()
        self.clock.stop()
        self.state.seconds = self.clock.spent
        yield
        self.clock.start()

    def _judge(self) -> bool:
        """Evaluate on held-out data; whether it is the best so far."""
        found = self.pipe.evaluate(self.supply.held_out(), metrics=self.net.metrics or {})
        better = self.judge.take(found, self._place())
        self.state.judged = self.judge.words
        self._write("evaluation", self._place() | self.judge.last)
        best = ", the best so far" if better else ""
        self.display.say(f"update {self.state.update}: held out: {self.judge.words}{best}")
        return better

    def _save(self, done: int, *, best: bool) -> None:
        """A checkpoint, which `latest` names when it is whole."""
        name = self.peers.everyone(self.folder.next(done).name)[0]
        path = self.folder.checkpoints / name
        extra = {"update": done, "seconds": self.clock.spent, "judge": plain(self.judge.state())}
        extra |= {"layers": list(self.pipe.balance), "fixed": self._fixed()}
        self.pipe.save(path, extra=extra)
        if self.peers.first:
            self.folder.publish(path, best=best, keep=self.job.checkpoint.keep)
        self.peers.everyone(None)  # nobody goes on before that

    def _fixed(self) -> dict[str, Any]:
        """What the optimizers' state, or the count of samples, belongs to."""
        train = self.job.train
        return {name: getattr(train, name) for name in ("batch", "lr", "momentum", "betas", "weight_decay")}

    def _resume(self, checkpoint: str) -> None:
        extra = self.pipe.load(checkpoint)
        for name, value in self._fixed().items():
            if extra["fixed"][name] != value:
                raise WeftError(
                    f"train.{name} is a part of the checkpoint ({checkpoint}: {extra['fixed'][name]}, job: {value}); "
                    "a run goes on with its own: leave it out"
                )
        self.state.update = extra["update"]
        self.state.samples = extra["update"] * self.job.train.batch
        self.state.seconds = self.clock.spent = extra["seconds"]
        self.judge.load(extra["judge"])
        self._line = (self.state.seconds, self.state.samples)
        self._sampled = extra["update"] - 1

    # Figures

    def _log(self) -> None:
        """A line of metrics, and a new look of the display."""
        losses = [loss for loss in self._losses.values() if math.isfinite(loss)]
        self._losses.clear()
        if not losses or not self.peers.first:
            return
        state, train = self.state, self.job.train
        state.loss = sum(losses) / len(losses)
        state.lr = train.lr * share(train, state.update - 1 - self._skipped, self.updates)
        state.seconds = self.clock.seconds
        state.speed = (state.samples - self._line[1]) / max(1e-9, state.seconds - self._line[0])
        state.left = (self.updates - state.update) * train.batch / state.speed if state.speed else math.nan
        state.bubbles, state.memory = self.watch.figures()
        self._line = (state.seconds, state.samples)
        waited = 0.0 if self.prefetch is None else self.prefetch.waited
        self._write("train", self._place() | state.figures() | {"waited_for_data": waited})
        self.display.show()

    def _place(self) -> dict[str, Any]:
        return {"update": self.state.update, "samples": self.state.samples, "seconds": self.state.seconds}

    def _write(self, kind: str, figures: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, figures)

    def _staleness(self, report: Report) -> None:
        """New samples of how stale weights were, where they are taken."""
        found = [(one["chunk"], sample) for rank in report.ranks for one in rank["chunks"] for sample in one["samples"]]
        for chunk, sample in found:
            if sample["minibatch"] > self._sampled:
                place = {"update": sample["minibatch"] + 1, "chunk": chunk}
                self._write("staleness", place | {name: sample[name] for name in ("predicted", "stale")})
        self._sampled = max([self._sampled, *(sample["minibatch"] for _, sample in found)])

    # The end

    def _end(self, how: str) -> dict[str, Any]:
        """What came out: files of the first rank, and a summary for all."""
        self.watch.settle()
        report = self.pipe.report()
        resident = self.peers.everyone(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        summary = self._summary(how, report) | {"resident_bytes": resident}
        if self.peers.first:
            if self._timeline is not None:
                write_text(self.folder.path / "trace.json", trace(self._timeline, unit_us=1e6))
                write_text(self.folder.path / "timeline.svg", svg(self._timeline))
            self.folder.write_summary(summary)
        if how != "stopped" and (text := self._write_text()):
            write_text(self.folder.path / "sample.txt", text)
        self.pipe.close()
        return summary

    def _summary(self, how: str, report: Report) -> dict[str, Any]:
        state, first = self.state, report.ranks[: self.pipe.schedule.stages]
        chunks = [chunk for rank in first for chunk in rank["chunks"]]
        return {
            "how": how,
            "title": title_of(self.job, self.pipe.schedule),
            "schedule": self.job.schedule.name,
            "seed": self.job.train.seed,
            "task": self.supply.spec.task,
            "metric": self.job.evaluate.metric,
            "updates": self.updates,
            **self._place(),
            "samples_per_second": state.samples / max(1e-9, state.seconds),
            "final": self.judge.last,
            "best": self.judge.best,
            "entropy": self.supply.entropy,
            "weight_bytes": sum(rank["bytes"]["weights"] for rank in first),
            "delay": [one["delay"] for one in sorted(chunks, key=lambda one: int(one["chunk"]))],
            "layers": list(self.pipe.balance),
            "skipped": self.pipe.flush().skipped,
            "restarts": self.restarts,
            "ranks": [rank | {"chunks": [_bare(chunk) for chunk in rank["chunks"]]} for rank in report.ranks],
        }

    def _write_text(self) -> str:
        """What a language model writes, on the first rank."""
        spec, log = self.supply.spec, self.job.log
        if spec.task != "language" or not log.sample:
            return ""
        tokens = None if self.supply.data is None else self.supply.data.tokens
        mine = None if tokens is None else tokens.encode(log.prompt)
        prompt: list[int] | None = next((one for one in self.peers.everyone(mine) if one is not None), None)
        if prompt is None:  # numbers that stand for no text
            return ""
        written = generate_text(self.pipe, prompt, many=log.sample, spec=spec, seed=self.job.train.seed)
        return "" if tokens is None else tokens.decode(written)


def _bare(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk's figures without the samples of staleness, which are in the metrics."""
    return {name: value for name, value in chunk.items() if name != "samples"}
