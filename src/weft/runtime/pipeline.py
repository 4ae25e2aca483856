"""`weft.Pipeline`: the public face of the runtime."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from weft.errors import RunError, WeftError
from weft.runtime.assembly import Built, build, consistency, own_layers, plan, settings, without_weights
from weft.runtime.checkpoint import pipeline_state
from weft.runtime.engine import Chunk, How, LossFunction, Seeds, Waits, Worker
from weft.runtime.partition import chunk_layers, model_of
from weft.runtime.report import Report, measured_timeline, packed
from weft.runtime.tree import batch_size, map_tensors, pieces
from weft.runtime.update import Cure, SchedulerMaker, cure_for
from weft.runtime.weights import GradientSync, OptimizerMaker, gradient_sync_for
from weft.schedule import Schedule, Timeline, check_sizes, lower, verify_program, write_csv


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known after a step: of the newest mini-batch that this rank has completed, if any."""

    loss: float | None
    minibatch: int | None
    skipped: int  # mini-batches so far that were left out, for their loss was not finite
    norm: float | None  # of the gradients before clipping, where they are clipped


class Pipeline:
    """A model in training, cut into chunks over the ranks of a pipeline.

    With a process group (`weft.launch`, torchrun) there is one rank a process; without one, all `stages` are
    virtual ranks of this process. The model's layers belong to the pipeline from now on.
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
        recompute: bool | Sequence[bool] = False,
        lr_scheduler: SchedulerMaker | None = None,
        clip_norm: float | None = None,
        precision: Literal["fp32", "bf16"] | None = None,
        nan: Literal["stop", "skip"] = "stop",
        seed: int = 0,
        deadline: float = 60.0,
        cut: Sequence[str] | None = None,
        example: Any = None,
        device: str | torch.device | None = None,
        predict: Mapping[str, Any] | None = None,
        cure: Cure | None = None,
        telemetry: int | None = None,
    ) -> None:
        settings.check_choices(
            loss_fn=loss_fn,
            optimizer=optimizer,
            precision=precision,
            nan=nan,
            clip_norm=clip_norm,
            deadline=deadline,
            seed=seed,
            telemetry=telemetry,
        )
        chosen = settings.prediction_for(predict)
        self.replicas = replicas
        self.schedule = settings.schedule_for(
            schedule, stages, microbatches, replicas, None if predict is None else chosen
        )
        self._program = lower(self.schedule)
        slots = verify_program(self._program).slots + 1  # one more, so that a sender need not wait for the reader
        whole = model_of(model, cut=cut, example=example)
        recomputed = settings.each_chunk(recompute, self.schedule.chunks)
        settings.check_weights(self._program, recompute=recomputed, precision=precision)
        cure = cure_for(cure, self._program)
        device_here = settings.device_for(device)
        self._transport = settings.transport_for(self.schedule, slots=slots, deadline=deadline, device=device_here)
        counts = chunk_layers(balance, whole.layers, self.schedule.chunks, example=example)
        counts = self._transport.all_gather(counts)[0]  # measured times differ, so rank 0's decide
        self.balance = tuple(counts)
        described = {
            "schedule": write_csv(self.schedule),
            "replicas": replicas,
            "recompute": recomputed,
            "clip_norm": clip_norm,
            "precision": precision,
            "nan": nan,
            "seed": seed,
            "predict": chosen,
            "cure": repr(cure),
        }
        consistency.check(
            self._transport.all_gather({"settings": described, "model": consistency.fingerprint(whole.state)})
        )
        self._plan = plan(whole, counts, self._program)
        self._how = How(
            loss_fn=loss_fn,
            layers=len(whole.layers),
            microbatches=self.schedule.microbatches,
            seeds=Seeds(device_here),
            seed=seed,
            precision=torch.bfloat16 if precision == "bf16" else None,
            device=device_here,
        )
        here = settings.local_chunks(self.schedule, replicas)
        self._built: dict[tuple[int, int], Built] = {
            (replica, chunk): build(
                self._plan,
                chunk,
                layers,
                how=self._how,
                recompute=recomputed[chunk],
                optimizer=optimizer,
                lr_scheduler=lr_scheduler,
                predicts=settings.choice_of(self._program, chosen),
                cure=cure,
            )
            for (replica, chunk), layers in zip(here, own_layers(self._plan, [chunk for _, chunk in here]), strict=True)
        }
        gradient_sync = gradient_sync_for(
            self._program, set(here), self._plan.sets, self._transport, replicas=replicas, clip_norm=clip_norm
        )
        self._close = gradient_sync.sums.close
        self._make_workers(gradient_sync, skip_nan=nan == "skip", telemetry=telemetry or 0)
        self._plan = without_weights(self._plan)
        self._fed = 0  # mini-batches since the last flush
        self._broken: str | None = None

    def _make_workers(self, gradient_sync: GradientSync, *, skip_nan: bool, telemetry: int) -> None:
        """One worker for each rank of this process."""
        programs, placement = self._plan.programs, self.schedule.placement
        kinds = list(programs)
        for replica, rank in sorted({(replica, placement[chunk]) for replica, chunk in self._built}):
            chunks = {chunk: self._built[replica, chunk] for chunk in self.schedule.chunks_of(rank)}
            worker = Worker(
                rank=rank,
                replica=replica,
                programs=list(programs.values()),
                chunks={number: built.chunk for number, built in chunks.items()},
                set_programs={n: [kinds.index(holders) for holders in b.holders] for n, b in chunks.items()},
                gradient_sync=gradient_sync,
                send=self._transport.sender(replica * self.schedule.stages + rank),
                skip_nan=skip_nan,
                telemetry=telemetry,
            )
            self._transport.workers.append(worker)

    # Training

    def step(self, inputs: Any = None, targets: Any = None) -> Result:
        """Feed one mini-batch; an asynchronous pipeline is never drained. Every rank calls it equally often.

        Only ranks that need inputs (the first chunk's) or targets (the last one's) use them.
        """

        self._feed(inputs, targets, even=True)
        self._run(lambda worker: worker.cycle(self._fed))
        self._fed += 1
        return self._result()

    def flush(self) -> Result:
        """Let the pipeline run empty: afterwards every chunk has had every update."""
        if self._fed:
            for cycle in range(self._fed, self._fed + self._program.drain):
                self._run(lambda worker, cycle=cycle: worker.cycle(cycle, minibatches=self._fed))  # type: ignore[misc]
            self._run(lambda worker: worker.settle())
            for worker in self._transport.workers:
                worker.begin_anew(self._fed)
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

        With `metrics`, functions of output and target that give a mean as the loss does (an accuracy, say), it is a
        dict of all of them and the loss.
        """
        judges = dict(metrics or {})
        sums = [0.0] * (len(judges) + 2)  # loss, metrics, samples

        def judge(chunk: Chunk, number: int, output: Any, target: Any) -> None:
            samples = batch_size(target, what="targets")
            for place, value in enumerate(chunk.judge(output, target, list(judges.values()))):
                sums[place] += value * samples
            sums[-1] += samples

        with self._evaluating():
            for inputs, targets in loader:
                self._feed(inputs, targets, even=False)
                self._run(lambda worker: worker.evaluate(judge))
        *totals, samples = (sum(one) for one in zip(*self._transport.all_gather(sums), strict=True))
        if not samples:
            raise WeftError("evaluate needs at least one sample (got none from the loader)")
        means = {name: float(total / samples) for name, total in zip(("loss", *judges), totals, strict=True)}
        return means["loss"] if metrics is None else means

    def predict(self, inputs: Any = None) -> Tensor:
        """The model's output for a batch of any size, on every rank: drains, then forwards only, without gradients.

        Only ranks that hold the first chunk use the inputs.
        """
        outputs: dict[int, Tensor] = {}

        def keep(chunk: Chunk, number: int, output: Any, target: Any) -> None:
            if not isinstance(output, Tensor):
                raise WeftError(f"predict is for models whose output is one tensor (got {type(output).__name__})")
            outputs[number] = output.detach().cpu()

        with self._evaluating():
            self._feed(inputs, None, even=False, targeted=False)
            self._run(lambda worker: worker.evaluate(keep))
        mine = [[number, list(one.shape), str(one.dtype).removeprefix("torch.")] for number, one in outputs.items()]
        last = self.schedule.placement[-1]
        for number, shape, dtype in sorted(one for part in self._transport.all_gather(mine) for one in part):
            if number not in outputs:
                outputs[number] = torch.empty(shape, dtype=getattr(torch, dtype))
            rank = number // self.schedule.microbatches * self.schedule.stages + last
            self._transport.broadcast(outputs[number], rank)
        if not outputs:
            raise WeftError("predict needs at least one sample (got none)")
        return torch.cat([outputs[number] for number in sorted(outputs)])

    @torch.no_grad()
    def _share_buffers(self) -> None:
        """Let all replicas have the first one's running statistics, which are the model's."""
        homes = self._plan.homes
        for name, tensor in self._plan.model.state.items():
            if name in homes and not isinstance(tensor, Parameter):
                shared = self._whole(name)
                for (_, chunk), built in self._built.items():
                    if chunk == homes[name]:
                        built.tensor(name).copy_(shared)

    def _feed(self, inputs: Any, targets: Any, *, even: bool, targeted: bool = True) -> None:
        """Cut a batch into micro-batches, and give each rank what it needs of it."""
        self._check_whole()
        try:
            pieces_of = {
                "inputs": self._pieces(inputs, 0, "inputs", even=even),
                "targets": self._pieces(targets, self.schedule.chunks - 1, "targets", even=even) if targeted else [],
            }
            if all(pieces_of.values()):
                _check_pair(inputs, targets)
        except WeftError as problem:
            if self._transport.abort(str(problem)):
                self._broken = str(problem)
            raise
        m, first = self.schedule.microbatches, self.schedule.microbatches * self._fed if even else 0
        for worker in self._transport.workers:
            for what, chunk in (("inputs", 0), ("targets", self.schedule.chunks - 1)):
                if chunk in worker.chunks and pieces_of[what]:
                    mine = pieces_of[what][worker.replica * m :][:m]
                    getattr(worker, what).update(zip(range(first, first + m), mine, strict=True))

    def _pieces(self, given: Any, chunk: int, what: str, *, even: bool) -> list[Any]:
        """The micro-batches of inputs or targets, for all replicas, if the chunk that needs them is here."""
        holders = [worker.number for worker in self._transport.workers if chunk in worker.chunks]
        if not holders:
            return []
        if given is None:
            raise WeftError(f"rank {holders[0]} holds chunk {chunk} and needs {what} (got None)")
        m, replicas = self.schedule.microbatches, self.replicas
        samples = batch_size(given, what=what)
        if even and (samples == 0 or samples % (m * replicas)):
            parts = f"{m} micro-batches" + (f" x {replicas} replicas" if replicas > 1 else "")
            raise WeftError(
                f"a mini-batch is cut into equal micro-batches (samples: {samples}, {parts}); "
                f"use a multiple of {m * replicas} samples"
            )
        # Asynchronous pipelines still read a batch in later steps, when its owner may have filled it anew.
        keep = self._program.drain > 0 and even
        move = partial(Tensor.to, device=self._how.device, copy=keep)
        return [map_tensors(lambda tensor: move(tensor.detach()), piece) for piece in pieces(given, m * replicas)]

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise RunError(f"this pipeline broke before ({self._broken}); build a new one")
        if torch.is_autocast_enabled(self._how.device.type):
            raise WeftError('autocast around a step would keep its casts of old weights; use precision="bf16" instead')

    def _run(self, work: Callable[[Worker], Waits]) -> None:
        self._check_whole()
        self._how.seeds.remember()
        try:
            self._transport.run(work)
        except BaseException as problem:
            self._broken = str(problem) or type(problem).__name__
            raise
        finally:
            self._how.seeds.restore()

    def _result(self) -> Result:
        worker = self._transport.workers[0]
        done = worker.completed
        return Result(
            loss=None if done is None else done.loss,
            minibatch=None if done is None else done.minibatch,
            skipped=worker.skipped,
            norm=None if done is None else done.norm,
        )

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A drained pipeline, all of whose modules are in evaluation mode."""
        self.flush()
        if self.replicas > 1:
            self._share_buffers()
        modules = [one for built in self._built.values() for layer in built.chunk.layers for one in layer.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    def close(self) -> None:
        """Let go of threads and connections; every rank does it. A pipeline in a `with` does it at the end."""
        if self._broken is None:
            self.flush()
            self._broken = "it is closed"
            self._close()
            self._transport.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state, on every rank, with the plain model's names; drains."""
        self.flush()
        state: dict[str, Tensor] = {}
        homes = self._plan.homes
        for name, original in self._plan.model.state.items():
            if name not in homes:  # no layer uses it
                state[name] = original.detach().clone()
                continue
            state[name] = self._whole(name)
        return state

    def _whole(self, name: str) -> Tensor:
        """A copy of one tensor of the model's state, from the first replica to everybody."""
        home = self._plan.homes[name]
        here = self._built.get((0, home))
        form = self._plan.model.state[name]
        tensor = torch.empty_like(form, device="cpu") if here is None else here.tensor(name).detach().cpu().clone()
        self._transport.broadcast(tensor, self.schedule.placement[home])
        return tensor

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take all weights and buffers from a state_dict with the plain model's names; drains.

        The optimizers' own state is left as it is.
        """
        self.flush()
        known = self._plan.model.state
        if missing := [name for name in known if name not in state]:
            raise WeftError(
                f"the state has no {missing[0]} (missing: {len(missing)}); give the whole model's state_dict"
            )
        if strange := [name for name in state if name not in known]:
            raise WeftError(f"the model has no {strange[0]} (unknown: {len(strange)}); give this model's state_dict")
        for name, tensor in known.items():
            if tensor.shape != state[name].shape:
                raise WeftError(
                    f"{name} has another shape (model: {tuple(tensor.shape)}, state: {tuple(state[name].shape)}); "
                    "give this model's state_dict"
                )
        for name, tensor in known.items():
            if name not in self._plan.homes:  # no layer uses it
                tensor.detach().copy_(state[name])
        for built in self._built.values():
            for name in built.state:
                if name in known:
                    built.tensor(name).copy_(state[name])

    def save(self, path: str | os.PathLike[str], extra: Any = None) -> None:
        """Write all that this run goes on from into a new directory, with the caller's own `extra` (plain data).

        Drains. Every rank calls it; rank 0's `extra` is the one that is kept.
        """
        self._check_whole()
        self.flush()
        if self.replicas > 1:
            self._share_buffers()
        about = self.schedule.about() | {"replicas": self.replicas, "seed": self._how.seed}
        pipeline_state.save(path, self._plan, self._built, self._transport, about=about, extra=extra)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Go on from a checkpoint that any schedule has saved, on any ranks; returns its `extra`.

        Drains. Every rank calls it. A checkpoint that is damaged, or of another model or optimizer, is refused before
        anything has been changed.
        """
        self._check_whole()
        self.flush()
        install, extra = pipeline_state.prepare(path, self._plan, self._built, self._transport)
        try:
            install()
        except BaseException as problem:
            self._broken = f"a checkpoint was half loaded: {problem}"
            raise
        return extra

    # Figures

    def report(self) -> Report:
        """What every rank did with its time and memory so far; every rank has to ask for it."""
        mine = []
        for worker in self._transport.workers:
            worker.count(self._transport.nbytes(worker.number))
            mine.append({"rank": worker.number} | worker.meter.as_dict() | {"chunks": worker.delays()})
        ranks = [one for part in self._transport.all_gather(mine) for one in part]
        return Report(schedule=self.schedule, replicas=self.replicas, ranks=tuple(ranks))

    def meters(self) -> list[dict[str, Any]]:
        """The figures so far of this process's own ranks: asks no other rank, and so never stalls."""
        return [{"rank": worker.number} | worker.meter.as_dict() for worker in self._transport.workers]

    def reset_meters(self) -> None:
        """Count times and messages from now on."""
        for worker in self._transport.workers:
            worker.meter.reset()

    def timeline(self, minibatches: int | None = None) -> Timeline:
        """What the first replica did in the last mini-batches since a flush, measured; every rank has to ask.

        It is drawn as a simulated one is: `weft.draw.svg(pipe.timeline())`.
        """
        if minibatches is not None:
            check_sizes(minibatches=minibatches)
        zero = self._transport.zero
        mine = [
            [worker.rank, [packed(step, start - zero, end - zero) for step, start, end in cycle]]
            for worker in self._transport.workers
            if worker.replica == 0
            for cycle in list(worker.meter.cycles)[-(minibatches or len(worker.meter.cycles)) :]
        ]
        all_gather = [one for part in self._transport.all_gather(mine) for one in part]
        return measured_timeline(self.schedule, all_gather)


def _check_pair(inputs: Any, targets: Any) -> None:
    """Inputs and targets of one batch have as many samples, or each input has as many targets (one a token, say)."""
    sizes = batch_size(inputs, what="inputs"), batch_size(targets, what="targets")
    if sizes[1] % max(1, sizes[0]) or bool(sizes[0]) != bool(sizes[1]):
        raise WeftError(
            f"inputs and targets need as many samples, or a whole number of targets for each input "
            f"(inputs: {sizes[0]}, targets: {sizes[1]})"
        )
