"""Trains a job on one rank: builds its pipeline, lets display, metrics and folder subscribe, runs the loop."""

from __future__ import annotations

import math
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft import faults
from weft.errors import WeftError
from weft.runtime.comm import Collectives
from weft.runtime.process import progress, status, status_file, this_rank
from weft.simulate import slack
from weft.streams import unblocked_output
from weft.train.config import to_toml
from weft.train.data import Prefetch, differences
from weft.train.job import resolved
from weft.train.optimizers import rate_factor
from weft.train.run import Display, Ended, Folder, FolderWriter, Loop, LoopOptions, Metrics
from weft.train.sampling import generate_text
from weft.train.setup import collectives_of, long_deadline, net_of, open_rank_data, pipeline_of, title_of
from weft.train.signals import stop_on_signals
from weft.train.start import Start

FIXED = ("batch", "lr", "momentum", "betas", "weight_decay")  # belong to the optimizer's state, or count samples


def train_job(start: Start, folder: Folder, show: str) -> dict[str, Any]:
    """Train a job from the beginning or from a checkpoint; the summary, on every rank."""
    collectives = collectives_of(start.job)
    file = status_file(folder.status_file(collectives.rank), rank=collectives.rank)
    with unblocked_output(final=bool(this_rank.name)), stop_on_signals() as stop, file:
        return JobRun(start, folder, collectives, stop=stop).train(show)


class JobRun:
    """A run of a job on one rank."""

    def __init__(self, start: Start, folder: Folder, collectives: Collectives, *, stop: threading.Event) -> None:
        job = start.job
        self.start, self.job, self.folder, self.collectives = start, job, folder, collectives
        folder.lock = None if start.lock is None else (start.lock[0], start.lock[1])
        with status.during("open the data", limit=long_deadline(job)):
            self.data = open_rank_data(job, collectives)
        with status.during("build the model", limit=long_deadline(job)):
            self.net = net_of(job, self.data.spec, resumed=start.checkpoint is not None)
            self.pipe = pipeline_of(job, self.net, self.data.spec, updates=self.data.updates)
        status.minibatch = None
        self.title = title_of(job, self.pipe.schedule)
        self.loop = Loop(
            self.pipe,
            self._options(),
            evaluate=self._evaluate if self.data.validation else None,
            learning_rate=lambda update: job.train.lr * rate_factor(job.train, update, self.data.updates),
            checkpoint_path=self._checkpoint_path,
            collectives=self.collectives,
            status=status,
            stop=stop,
            data_identity=self.data.identity_at,
        )

    def train(self, show: str) -> dict[str, Any]:
        """Run the loop to its end; the summary."""
        if self.start.checkpoint is not None:
            self._resume(self.start.checkpoint)
        first, deadline = self.loop.state.update, self.job.schedule.deadline
        with ExitStack() as stack:
            metrics = self._begin()
            if metrics is not None:
                stack.enter_context(metrics)
            batches = Prefetch(self.data.batch, start=first, stop=self.data.updates, deadline=deadline)
            stack.enter_context(batches)
            if metrics is not None:
                display = stack.enter_context(Display(self.loop.progress, title=self.title, show=show))
                for note in self.net.notes:
                    display.say(note)
                writer = FolderWriter(self.folder, keep=self.job.checkpoint.keep)
                self.loop.subscribers = [metrics, writer, display]
            with status.counting(lambda: self.pipe.actions):
                ended = self.loop.run(batches)
            with status.during("end", limit=long_deadline(self.job)):
                return self._finish(ended)

    def _options(self) -> LoopOptions:
        job = self.job
        return LoopOptions(
            updates=self.data.updates,
            batch=job.train.batch,
            log_every=job.log.every,
            evaluate_every=job.evaluate.every,
            save_every=job.checkpoint.every,
            metric=job.evaluate.metric,
            patience=job.evaluate.patience,
            timeline=job.log.timeline,
            telemetry=bool(job.log.telemetry),
            fixed={name: getattr(job.train, name) for name in FIXED},
            deadline=job.schedule.deadline,
            file_deadline=job.checkpoint.deadline,
        )

    def _resume(self, checkpoint: str) -> None:
        saved = self.loop.resume(checkpoint)
        if saved.update > self.data.updates:
            raise WeftError(
                f"the checkpoint is beyond the end of the job ({checkpoint}: {saved.update} updates, job: "
                f"{self.data.updates}); raise train.updates or train.epochs, or choose another one with --checkpoint"
            )
        for name, value in self.loop.state.fixed.items():
            if saved.fixed[name] != value:
                raise WeftError(
                    f"train.{name} is part of the checkpoint ({checkpoint}: {saved.fixed[name]}, job: {value}) and "
                    f"can't be changed by a resumed run; set train.{name}={str(saved.fixed[name]).replace(' ', '')}"
                )
        changes = [
            f"{change.name} (checkpoint: {change.before}, now: {change.now})"
            for change in differences(saved.data, self.data.identity_at(saved.update))
        ]
        if changes and not self.start.new_data:
            raise WeftError(
                f"a resumed run needs the data of its checkpoint ({checkpoint}), and this differs: "
                f"{'; '.join(changes)}; restore it, or accept it by adding --allow-new-data to the command"
            )

    def _begin(self) -> Metrics | None:
        """Let the first rank prepare the folder, now that the job and the checkpoint are accepted; all wait for it."""
        with status.during("prepare the folder", limit=self.job.checkpoint.deadline):
            return self.collectives.together(
                lambda: self._open_folder() if self.collectives.first else None,
                purpose="prepare the folder of the run",
                deadline=self.job.checkpoint.deadline,
                progress=progress,
            )

    def _open_folder(self) -> Metrics:
        job, state, checkpoint = resolved(self.job), self.loop.state, self.start.checkpoint
        if job.schedule.balance == "time":  # a measured partition is not a setting
            job = replace(job, schedule=replace(job.schedule, layers=[]))
        best = state.evaluations.best
        self.folder.begin(
            to_toml(job),
            invocation=self.start.invocation,
            overwrite=self.start.overwrite,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            best=None if best is None else best["update"],
        )
        return Metrics(self.folder.path, update=state.update, tensorboard=self.job.log.tensorboard)

    def _checkpoint_path(self, update: int) -> Path:
        """A new path; that of the first rank counts."""
        if not self.collectives.first:
            return self.folder.checkpoints
        self.folder.check_owned()
        return self.folder.next(update)

    def _evaluate(self) -> dict[str, float]:
        metrics = self.pipe.evaluate(self.data.held_out(), metrics=self.net.metrics or {})
        if self.data.spec.task == "language":
            metrics["perplexity"] = math.exp(min(metrics["loss"], 700.0))
        return metrics

    def _finish(self, ended: Ended) -> dict[str, Any]:
        """Write the results; the summary."""
        skipped = self._all_gather(self.pipe.flush().skipped, "report skipped mini-batches")
        summary = self._summary(ended) | {"ranks": _without_samples(ended), "skipped": max(skipped)}
        summary |= {"restarts": self.start.restarts, "invocation": self.start.invocation}
        if self.collectives.first:
            self.folder.write_summary(summary)
        if ended.outcome != "stopped" and (text := self._sample_text()):
            self.folder.write_extra("sample.txt", text)
        faults.hit("end")
        self.pipe.close()
        return summary

    def _summary(self, ended: Ended) -> dict[str, Any]:
        evaluations, progress = self.loop.state.evaluations, ended.progress
        spare = slack(self.pipe.schedule)
        replica = ended.report.ranks[: self.pipe.schedule.stages]
        chunks = sorted((chunk for rank in replica for chunk in rank["chunks"]), key=lambda chunk: int(chunk["chunk"]))
        return {
            "how": ended.outcome,
            "title": self.title,
            "schedule": self.job.schedule.name,
            "seed": self.job.train.seed,
            "task": self.data.spec.task,
            "metric": self.job.evaluate.metric,
            "updates": self.data.updates,
            **progress.place,
            "samples_per_second": progress.samples / max(1e-9, progress.seconds),
            "final": evaluations.last,
            "best": evaluations.best,
            "entropy": self.data.entropy,
            "weight_bytes": sum(rank["bytes"]["weights"] for rank in replica),
            "delay": [chunk["delay"] for chunk in chunks],
            "mean_delay": ended.report.mean_delay,
            "slack": None if spare is None else spare.as_dict(),
            "layers": list(self.pipe.balance),
        }

    def _sample_text(self) -> str:
        """Text that a language model generates, on ranks that know its tokens."""
        log, spec = self.job.log, self.data.spec
        if spec.task != "language" or not log.sample:
            return ""
        tokens = None if self.data.data is None else self.data.data.tokens
        prompts = self._all_gather(None if tokens is None else tokens.encode(log.prompt), "encode the prompt")
        prompt: list[int] | None = next((prompt for prompt in prompts if prompt is not None), None)
        if prompt is None:  # synthetic tokens stand for no text
            return ""
        generated = generate_text(self.pipe, prompt, tokens=log.sample, context=spec.context, seed=self.job.train.seed)
        return "" if tokens is None else tokens.decode(generated)

    def _all_gather(self, data: Any, purpose: str) -> list[Any]:
        return self.collectives.all_gather(data, purpose=purpose, deadline=long_deadline(self.job))


def _without_samples(ended: Ended) -> list[dict[str, Any]]:
    """The figures of all ranks, without the samples of staleness, which are in the metrics."""
    return [
        rank | {"chunks": [{name: chunk[name] for name in chunk if name != "samples"} for chunk in rank["chunks"]]}
        for rank in ended.report.ranks
    ]
