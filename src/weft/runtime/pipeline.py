"""`weft.Pipeline`: the public face of the runtime."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Never, overload

import torch
from torch import Tensor

from weft import faults
from weft.errors import RunError, WeftError
from weft.runtime import checkpoint
from weft.runtime.assembly import Settings, assemble, refuse_unknown
from weft.runtime.device import current_stream, within_stream
from weft.runtime.engine import LossFunction, Outputs, Scores, Work, evaluate, feed
from weft.runtime.initial import Weights
from weft.runtime.process import give_back_memory, status
from weft.runtime.report import Report, empty_process, explain_resident, gather_report, gather_timeline
from weft.runtime.update import Cure, OptimizerMaker, SchedulerMaker
from weft.schedule import RecomputeChoice, Schedule, Timeline, check_sizes

SCORES = "its device to compute scores"  # what an evaluation may wait for
FILE_DEADLINE = 600.0  # seconds in which a save or a load moves no byte


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known after a step: the newest mini-batch that this rank has completed, if any."""

    loss: float | None
    minibatch: int | None
    skipped: int  # mini-batches so far that a chunk of this rank skipped: their loss or gradients were not finite
    norm: float | None  # of the whole gradient, before clipping; None without clip_norm and nan="skip"


class Pipeline:
    """A model in training, cut into chunks over the ranks of a pipeline.

    With a process group (`weft.launch`, torchrun) there is one rank a process; without one, all `stages` are
    virtual ranks of this process. The model's layers belong to the pipeline from now on; those that other ranks hold
    are moved to the meta device. A model that is built there (`with weft.on_meta():`) has its weights made where they
    are needed: as the model initializes itself, or from `weights`, a file or folder of safetensors.
    """

    def __init__(
        self,
        model: Any,
        *,
        loss_fn: LossFunction,
        optimizer: OptimizerMaker,
        schedule: str | Schedule = "wpipe",
        microbatches: int | None = None,
        stages: int | None = None,
        replicas: int = 1,
        balance: str | Sequence[int] = "parameters",
        recompute: RecomputeChoice | Sequence[RecomputeChoice] | None = None,
        lr_scheduler: SchedulerMaker | None = None,
        clip_norm: float | None = None,
        norm: Literal["group", "global"] = "group",
        precision: Literal["fp32", "bf16", "bf16-autocast"] | None = None,
        nan: Literal["stop", "skip"] = "stop",
        max_skips: int = 10,
        seed: int = 0,
        deadline: float = 60.0,
        weights: Weights = None,
        cut: Sequence[str] | None = None,
        example: Any = None,
        device: str | torch.device | None = None,
        predict: Mapping[str, Any] | None = None,
        cure: Cure | None = None,
        telemetry: int | None = None,
        **unknown: Never,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "model", "unknown")}
        refuse_unknown(unknown, given)
        self._empty = empty_process(model)
        self._assembly = assemble(model, Settings(**given), checkpoint.stored_weights)
        self.schedule, self.replicas, self.balance = self._assembly.schedule, replicas, self._assembly.balance
        self._driver = self._assembly.driver
        self._fed = 0  # mini-batches since the last flush
        self._broken: str | None = None
        self._iterating = False  # over the state, which other ranks do at the same time
        self._gave_state = False  # since the last step: tensors that the user may have dropped meanwhile
        self._stream = current_stream(self._assembly.compute.device)  # that it computes on

    # Training

    def step(self, inputs: Any = None, targets: Any = None) -> Result:
        """Feed one mini-batch; an asynchronous pipeline is never drained. Every rank calls it equally often.

        Only ranks that need inputs (the first chunk's) or targets (the last one's) use them.
        """
        if self._gave_state:
            give_back_memory()
            self._gave_state = False
        self._feed(inputs, targets, even=True)
        self._run(lambda worker: worker.cycle(self._fed))
        self._fed += 1
        return self._result()

    def flush(self) -> Result:
        """Drain the pipeline: afterwards every chunk has had every update."""
        fed = self._fed
        if fed:
            faults.hit("flush")
            for cycle in range(fed, fed + self._assembly.program.drain):
                self._run(lambda worker, cycle=cycle: worker.cycle(cycle, minibatches=fed))  # type: ignore[misc]
            self._run(lambda worker: worker.finish_updates())
            self._settle()
            for worker in self._driver.workers:
                worker.restart(fed)
            self._fed = 0
        return self._result()

    @overload
    def evaluate(self, loader: Iterable[tuple[Any, Any]]) -> float: ...

    @overload
    def evaluate(
        self, loader: Iterable[tuple[Any, Any]], *, metrics: Mapping[str, LossFunction]
    ) -> dict[str, float]: ...

    def evaluate(
        self, loader: Iterable[tuple[Any, Any]], *, metrics: Mapping[str, LossFunction] | None = None
    ) -> float | dict[str, float]:
        """The mean loss over all samples of a loader: drains, then forwards only, without gradients.

        With `metrics`, functions of output and target that return a mean as the loss does (an accuracy, say), it is a
        dict of the loss and all of them.
        """
        scores = Scores(metrics or {})
        with self._evaluating():
            for inputs, targets in loader:
                self._feed(inputs, targets, even=False)
                faults.hit("evaluate")
                self._run(lambda worker: evaluate(worker, scores.add))
                self._run(
                    lambda worker: worker.wait_for_device(lambda: scores.read(self.schedule.microbatches), SCORES)
                )
            self._run(lambda worker: worker.wait_for_device(scores.read, SCORES))
        means = scores.means(self._assembly.collectives)
        return means["loss"] if metrics is None else means

    def predict(self, inputs: Any = None) -> Tensor:
        """The model's output for a batch of any size, on every rank: drains, then forwards only, without gradients.

        Only ranks that hold the first chunk use the inputs.
        """
        outputs = Outputs()
        with self._evaluating():
            self._feed(inputs, None, even=False, with_targets=False)
            self._run(lambda worker: evaluate(worker, outputs.add))
            self._run(lambda worker: worker.wait_for_device(outputs.are_there, "its outputs"))
        return outputs.gathered(self._assembly.collectives, self.schedule)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A drained pipeline, with all modules in evaluation mode."""
        self.flush()
        checkpoint.share_buffers(self._assembly)
        layers = [layer for built in self._assembly.chunks.values() for layer in built.chunk.layers]
        modules = [module for layer in layers for module in layer.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
            self._settle()
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def _settle(self) -> None:
        """Leave nothing under way between devices; every rank has taken all its messages."""
        transport = self._assembly.transport
        transport.settle()
        self._run(lambda worker: worker.wait_for_device(transport.idle, "its messages to be received"))

    def _feed(self, inputs: Any, targets: Any, *, even: bool, with_targets: bool = True) -> None:
        self._check_usable()
        try:
            with within_stream(self._stream):
                feed(
                    self._driver.workers,
                    inputs,
                    targets,
                    first=self.schedule.microbatches * self._fed if even else 0,
                    replicas=self.replicas,
                    uploads=self._assembly.compute.uploads,
                    even=even,
                    with_targets=with_targets,
                )
        except WeftError as problem:
            if self._assembly.transport.abort(str(problem)):
                self._broken = str(problem)
            raise

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise RunError(f"this pipeline broke before ({self._broken}); build a new one")
        self._check_iterated()
        if torch.is_autocast_enabled(self._assembly.compute.device.type):
            raise WeftError('autocast around a step would keep its casts of old weights; use precision="bf16" instead')

    def _run(self, work: Work) -> None:
        self._check_usable()
        seeds = self._assembly.compute.seeds
        seeds.save()
        status.moves += 1
        try:
            with within_stream(self._stream):
                self._driver.run(work)
        except BaseException as problem:
            self._broken = str(problem) or type(problem).__name__
            raise
        finally:
            seeds.restore()

    def _result(self) -> Result:
        worker = self._driver.workers[0]
        last = worker.completions.newest
        return Result(
            loss=None if last is None else last.loss,
            minibatch=None if last is None else last.minibatch,
            skipped=worker.completions.skipped,
            norm=None if last is None else last.norm,
        )

    def close(self) -> None:
        """Close threads and connections; every rank calls it. `with Pipeline(...)` closes at the end of the block."""
        if self._broken is None:
            self.flush()
            self._broken = "it is closed"
            self._assembly.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()

    # State

    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The whole model's state with the plain model's names, on every rank; drains. Every rank calls it.

        With `rank0_only`, other ranks get an empty dict, and never hold a tensor of another rank.
        """
        return dict(self.iter_state_dict(rank0_only=rank0_only))

    def iter_state_dict(self, *, rank0_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The names and tensors of `state_dict`, one at a time, so that no rank has to hold the whole model; drains.

        Every rank iterates to the end before the next step, and takes less than the deadline for each tensor. With
        `rank0_only`, other ranks send what they hold, and their loops have no turn.
        """
        self._check_iterated()
        self.flush()
        self._gave_state = True
        return self._iterated(
            checkpoint.iter_state_dict(
                self._assembly, lambda: (self._driver.workers[0].begun, self._fed), rank0_only=rank0_only
            )
        )

    def _iterated(self, state: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Remember whether an iteration came to its last tensor."""
        rest = len(self._assembly.layout.model.state)
        self._iterating = self._assembly.collectives.world > 1
        for tensor in state:
            rest -= 1
            self._iterating = self._iterating and rest > 0
            yield tensor
        self._iterating = False

    def _check_iterated(self) -> None:
        """A rank that goes on alone would be sent tensors in the place of others."""
        if self._iterating:
            raise RunError(
                "this rank left iter_state_dict before its last tensor, and other ranks are still there; iterate to "
                "the end on every rank"
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all weights and buffers from a state_dict with the plain model's names; drains.

        The optimizers' own state stays as it is.
        """
        self.flush()
        with within_stream(self._stream):
            checkpoint.load_state_dict(self._assembly, state)

    def save(
        self,
        path: str | os.PathLike[str],
        extra: Any = None,
        *,
        deadline: float = FILE_DEADLINE,
        only_finite: bool = False,
    ) -> None:
        """Write a checkpoint of this run into a new directory, with the caller's own `extra` (plain data).

        Drains. Every rank calls it; rank 0's `extra` is the one that is saved. A save takes as long as ranks write; it
        fails if none of them has written a byte for `deadline` seconds. `only_finite` refuses weights that are not
        finite. If one rank can't write, all raise StorageError, and the pipeline can go on.
        """
        self._check_usable()
        self.flush()
        checkpoint.share_buffers(self._assembly)
        checkpoint.save(path, self._assembly, extra=extra, deadline=deadline, only_finite=only_finite)

    def load(self, path: str | os.PathLike[str], *, deadline: float = FILE_DEADLINE) -> Any:
        """Resume from a checkpoint that any schedule has saved, on any number of ranks; returns its `extra`.

        Drains. Every rank calls it. A checkpoint that is damaged, or of another model or optimizer, is refused before
        anything has changed; an I/O error after that breaks the pipeline. It fails if no rank has read a byte for
        `deadline` seconds.
        """
        self._check_usable()
        self.flush()
        install, extra = checkpoint.prepare(path, self._assembly, deadline=deadline)
        try:
            with within_stream(self._stream):
                install()
        except BaseException as problem:
            self._broken = f"a checkpoint was half loaded: {problem}"
            raise
        return extra

    # Figures

    def report(self) -> Report:
        """How every rank has used time and memory so far; every rank calls it."""
        return gather_report(self._assembly, self._empty)

    def resident(self) -> dict[str, int]:
        """The resident set of this process now and at its peak, and what the peak consists of; asks no other rank."""
        return explain_resident(self._assembly, self._empty)

    @property
    def actions(self) -> int:
        """Actions that this process's ranks have executed so far: it grows while a step runs."""
        return sum(worker.meter.actions for worker in self._driver.workers)

    def meters(self) -> list[dict[str, Any]]:
        """The figures so far of this process's own ranks: asks no other rank, and so never stalls."""
        return [{"rank": worker.number} | worker.meter.as_dict() for worker in self._driver.workers]

    def reset_meters(self) -> None:
        """Count times and messages from now on."""
        for worker in self._driver.workers:
            worker.meter.reset()

    def timeline(self, minibatches: int | None = None) -> Timeline:
        """What the first replica did in the last mini-batches since a flush, measured; every rank calls it.

        Draw it like a simulated one: `weft.draw.svg(pipe.timeline())`.
        """
        if minibatches is not None:
            check_sizes(minibatches=minibatches)
        return gather_timeline(self._assembly, minibatches)
