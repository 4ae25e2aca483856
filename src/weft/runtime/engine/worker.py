"""The engine: one rank, a loop over actions. It knows actions, not methods.

A cycle is a generator that yields only where it has to wait, for a message or for a sum; whoever drives it waits in
its place. So real ranks, which block, and virtual ones, which take turns in one process, run the same lines.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from weft.errors import Diverged, RunError, WeftError
from weft.runtime.comm import Key, Message, describe, key_of
from weft.runtime.engine.chunk import Chunk, InFlight
from weft.runtime.engine.meters import Meter
from weft.runtime.engine.staleness import Staleness
from weft.runtime.tree import batch_size
from weft.runtime.weights import GradientSync, Leaves, ParameterSet, PendingUpdate, gradient_bytes
from weft.schedule import Action, Op, Program, Step, prediction_of

FIRST_UPDATES = 3
EMPTY = ("empty",)  # the skeleton of a micro-batch without samples


class Wait(NamedTuple):
    """What a rank can't go on without: a message, or a sum."""

    source: int
    key: Key
    future: Future[None] | None

    def __str__(self) -> str:
        return f"{describe(self.key)} from rank {self.source}" if self.future is None else "gradients of other ranks"


Waits: TypeAlias = Iterator[Wait]
Judge: TypeAlias = Callable[[Chunk, int, Any, Any], None]


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A mini-batch that a rank is done with."""

    minibatch: int
    loss: float
    skipped: bool
    norm: float | None


class Worker:
    """One rank of a pipeline with its chunks.

    `programs` holds the lowered schedule, and behind it, for tied parameters, the same rows at other delays; each
    parameter set goes by one of them (`set_programs`).
    """

    def __init__(
        self,
        *,
        rank: int,
        replica: int,
        programs: Sequence[Program],
        chunks: dict[int, Chunk],
        set_programs: dict[int, list[int]],
        gradient_sync: GradientSync,
        send: Callable[[int, Message], None],
        skip_nan: bool,
        telemetry: int = 0,
    ) -> None:
        self.rank, self.replica, self.programs, self.chunks = rank, replica, programs, chunks
        self.schedule = programs[0].schedule
        self.number = replica * self.schedule.stages + rank  # among all ranks of all replicas
        self._set_programs, self._settler, self._send, self._skip_nan = set_programs, gradient_sync, send, skip_nan
        self.inbox: dict[Key, Message] = {}
        self.inputs: dict[int, Any] = {}  # of micro-batches that have not begun
        self.targets: dict[int, Any] = {}
        self.meter = Meter()
        self.completed: Completed | None = None
        self.skipped = 0
        self.begun = 0  # mini-batches of this run that were before the last flush
        self._losses: dict[tuple[int, int], list[float]] = defaultdict(list)  # by chunk and mini-batch
        self._pending: dict[int, deque[PendingUpdate]] = defaultdict(deque)  # by id of the parameter set
        self._updated: dict[int, int] = defaultdict(int)  # mini-batch -> chunks that are done with it
        self._summing: set[tuple[int, int]] = set()  # chunk and mini-batch: gradients that are being summed up
        self._activations = 0
        self._link_bytes = 0
        self.staleness = {chunk: Staleness(telemetry) for chunk in chunks}
        self._runs: dict[Op, Callable[[Sequence[Step]], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weights,
        }
        self._hold_weights()
        self.meter.hold(weights=sum(chunk.weight_bytes for chunk in chunks.values()))

    def cycle(self, cycle: int, *, minibatches: int | None = None) -> Waits:
        """Run a cycle: what one more mini-batch brings, or a part of the drain."""
        self.meter.begin_cycle(first=cycle == 0)
        rows = zip(*(one.cycle(self.rank, cycle, minibatches=minibatches) for one in self.programs), strict=True)
        for steps in rows:
            step = steps[0]
            with self._naming(step.action.chunk, self.begun + step.minibatch, step.action):
                if step.action.op == Op.U:
                    yield from self._update(steps)
                    continue
                yield from self._ready(steps)
                start = self.meter.start()
                self._runs[step.action.op](steps)
                self._release(steps)
                self.meter.end(step, start)
        if self.programs[0].drain == 0:  # nothing is left to do meanwhile
            yield from self._settle_all()

    @contextlib.contextmanager
    def _naming(self, chunk: int, minibatch: int, action: Action | None = None) -> Iterator[None]:
        """Let an error tell where it happened; without an action, in an update."""
        try:
            yield
        except RunError:
            raise
        except Exception as problem:
            unit = "update"
            if action is not None and action.op != Op.U:
                unit = f"micro-batch {action.index % self.schedule.microbatches}"
            place = f"rank {self.number}, chunk {chunk}, mini-batch {minibatch}, {unit}"
            place += "" if action is None else f" ({action})"
            if isinstance(problem, WeftError):
                kind = Diverged if isinstance(problem, Diverged) else WeftError
                raise kind(f"{place}: {problem}") from problem
            raise RunError(f"{place}: {type(problem).__name__}: {problem}") from problem

    # Waiting

    def _ready(self, steps: Sequence[Step]) -> Waits:
        """Wait for the weights that a pass reads and for the message that it takes."""
        step = steps[0]
        chunk = step.action.chunk
        for one, program in zip(self.chunks[chunk].sets, self._set_programs[chunk], strict=True):
            while one.versions.newest < steps[program].version:
                yield from self._settle(chunk, one)
        if step.needs >= 0:
            key = key_of(step)
            while key not in self.inbox:
                yield Wait(step.source, key, None)

    def settle(self) -> Waits:
        """Make all updates that are due, some time after the last cycle."""
        self.meter.resume()
        yield from self._settle_all()

    def _settle_all(self) -> Waits:
        for chunk in self.chunks.values():
            for one in chunk.sets:
                while self._pending[id(one)]:
                    yield from self._settle(chunk.number, one)
        self.meter.wait_over()

    def _settle(self, chunk: int, one: ParameterSet) -> Waits:
        """Make the first update of a parameter set that is due, as soon as its gradients are there."""
        settlement = self._pending[id(one)][0]
        while not settlement.done.done() or settlement.done.exception() is not None:
            yield Wait(-1, (Op.U, chunk, settlement.minibatch), settlement.done)
        start = self.meter.start()
        with self._naming(chunk, settlement.minibatch):
            self._apply(chunk, one, self._pending[id(one)].popleft())
        self._hold_gradients()
        self.meter.updated(start)

    # Actions

    def _forward(self, steps: Sequence[Step]) -> None:
        step = steps[0]
        chunk, index, m = self.chunks[step.action.chunk], step.action.index, self.schedule.microbatches
        flight = InFlight(
            minibatch=self.begun + step.minibatch,
            microbatch=self.replica * m + index % m,
            target=self.targets.pop(index, None) if chunk.last else None,
            given=self.inputs.pop(index) if step.needs < 0 else self.inbox.pop(key_of(step)).open(),
            weights=self._weights(steps),
        )
        if index % m == 0:
            if self.staleness[chunk.number].due(flight.minibatch):
                self._sample(steps, flight)
            for one, leaves in zip(chunk.sets, flight.weights, strict=True):
                one.first_read(leaves)
            self._hold_buffers()
        output, wants = chunk.forward(index, flight)
        if chunk.last:
            self._check_loss(flight.loss)
        else:
            self._hand_over(step, Message.of(key_of(step, taker=step.feeds), output, grads=wants))
        self._hold_activations(flight.nbytes)

    def _weights(self, steps: Sequence[Step]) -> list[Leaves]:
        """What a pass reads, of each parameter set of its chunk: a version, or a prediction beyond it."""
        chunk = steps[0].action.chunk
        read = []
        for one, program in zip(self.chunks[chunk].sets, self._set_programs[chunk], strict=True):
            step = steps[program]
            if not step.ahead:
                read.append(one.versions.read(step.version))
                continue
            key = prediction_of(step, self.programs[program].schedule.weights)
            if step.predicts:
                assert one.versions.newest == step.version
                one.predict(key, step.ahead)
                self._hold_buffers()
            read.append(one.predicted(key))
        return read

    def _sample(self, steps: Sequence[Step], flight: InFlight) -> None:
        """Take down what the first forward of a mini-batch reads, and which version that comes from.

        Of the chunk's own parameters; tied ones may be updated at another time.
        """
        step, own = steps[0], self.chunks[steps[0].action.chunk].sets[0]
        read = flight.weights[0]
        stale = own.versions.read(step.version) if step.ahead else read
        self.staleness[step.action.chunk].take(flight.minibatch, read, stale)

    def _backward(self, steps: Sequence[Step]) -> None:
        step = steps[0]
        chunk, index = self.chunks[step.action.chunk], step.action.index
        flight = chunk.flights[index]
        gradients: list[Tensor | None] = []
        loss = flight.loss
        if step.needs >= 0:
            message = self.inbox.pop(key_of(step))
            loss, gradients = message.loss, message.open()
            self._check_loss(loss)
        self._losses[chunk.number, step.minibatch].append(loss)
        self._hold_activations(flight.rebuilt)
        whole = step.action.op == Op.B
        run = chunk.backward if whole else chunk.backward_inputs
        owed = run(index, gradients, self._weights(steps) if chunk.backward_reads_other_weights else None)
        if step.feeds >= 0:
            self._hand_over(step, Message.of(key_of(step, taker=step.feeds), owed, loss=loss))
        if whole:
            self._hold_first_gradients(step)
            self._hold_activations(-flight.nbytes - flight.rebuilt)

    def _backward_weights(self, steps: Sequence[Step]) -> None:
        chunk, index = self.chunks[steps[0].action.chunk], steps[0].action.index
        flight = chunk.flights[index]
        chunk.backward_weights(index, self._weights(steps) if chunk.backward_reads_other_weights else None)
        self._hold_first_gradients(steps[0])
        self._hold_activations(-flight.nbytes - flight.rebuilt)

    def _hand_over(self, step: Step, message: Message) -> None:
        if step.target < 0:
            self.inbox[message.key] = message.apart() if step.action.op == Op.F else message
            return
        self._send(step.target, message)
        self.meter.messages += 1
        self.meter.message_bytes += sum(tensor.nbytes for tensor in message.tensors)

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss) and not self._skip_nan:
            raise Diverged(
                f"the loss is {loss}; lower the learning rate or look at the data "
                '(nan="skip" leaves such mini-batches out and counts them)'
            )

    def _release(self, steps: Sequence[Step]) -> None:
        """Let go of the versions and predictions that are not read again."""
        chunk = steps[0].action.chunk
        for one, program in zip(self.chunks[chunk].sets, self._set_programs[chunk], strict=True):
            if steps[program].dies:
                one.versions.release(steps[program].version)
            if steps[program].forgets:
                one.forget(prediction_of(steps[program], self.programs[program].schedule.weights))

    # Updates

    def _update(self, steps: Sequence[Step]) -> Waits:
        step = steps[0]
        chunk = self.chunks[step.action.chunk]
        self._hold_gradients()
        for one in chunk.sets:
            while self._pending[id(one)] and self._pending[id(one)][0].done.done() and one.predictor is None:
                yield from self._settle(chunk.number, one)  # a prediction is from the version that it names, no later
        start = self.meter.start()
        losses = self._losses.pop((chunk.number, step.minibatch))
        self._summing.discard((chunk.number, step.minibatch))
        for number, (one, program) in enumerate(zip(chunk.sets, self._set_programs[chunk.number], strict=True)):
            settlement = PendingUpdate(
                minibatch=self.begun + step.minibatch,
                parameters=one.versions.live,
                gradients=one.take_gradients(),
                loss=sum(losses) / len(losses),
                skip=not all(map(math.isfinite, losses)),
            )
            if steps[program].dies:
                one.versions.release(steps[program].version - 1)
            member = (self.replica, chunk.number, number)
            if self._settler.needed(member):
                self._pending[id(one)].append(settlement)
                self._settler.begin(member, settlement)
            else:
                self._apply(chunk.number, one, settlement)
        self._hold_gradients()
        self.meter.end(step, start)

    def _apply(self, chunk: int, one: ParameterSet, settlement: PendingUpdate) -> None:
        own = one is self.chunks[chunk].sets[0]  # its own parameters; tied ones may still be on their way
        if own and self.staleness[chunk].due(settlement.minibatch):
            self.staleness[chunk].met(settlement.minibatch, one.versions.live)
        if settlement.skip:
            one.skip()
        else:
            one.update(settlement.gradients)
        self._hold_weights()
        if own:
            self._complete(
                Completed(
                    minibatch=settlement.minibatch,
                    loss=settlement.loss,
                    skipped=settlement.skip,
                    norm=settlement.norm,
                )
            )

    def _complete(self, completed: Completed) -> None:
        """A chunk is done with a mini-batch; the rank is when its last chunk is."""
        self._updated[completed.minibatch] += 1
        if self._updated[completed.minibatch] == len(self.chunks):
            del self._updated[completed.minibatch]
            self.completed = completed
            self.skipped += completed.skipped

    def delays(self) -> list[dict[str, Any]]:
        """Of each chunk: updates that its first forwards are late, updates that they predict, and the samples."""
        program, found = self.programs[0], []
        for chunk, staleness in self.staleness.items():
            first = (program.chunk == chunk) & (program.op == Op.F) & (program.index % self.schedule.microbatches == 0)
            delay, ahead = (int(column[first].max(initial=0)) for column in (program.delay, program.ahead))
            found.append({"chunk": chunk, "delay": delay, "ahead": ahead, "samples": list(staleness.samples)})
        return found

    def begin_anew(self, minibatches: int) -> None:
        """After a flush: versions and micro-batches count from 0."""
        self.begun += minibatches
        for chunk in self.chunks.values():
            for one in chunk.sets:
                one.restart()

    # Evaluation

    def evaluate(self, judge: Judge) -> Waits:
        """Forwards only, of one batch, in the order in which the schedule runs them.

        Where the outputs are, `judge` is given the last chunk, the micro-batch (counted over all replicas), its
        output and its target.
        """
        for step in self.programs[0].steps(self.rank, minibatches=1):
            if step.action.op == Op.F:
                with self._naming(step.action.chunk, self.begun + step.minibatch, step.action):
                    if step.needs >= 0:
                        key = key_of(step)
                        while key not in self.inbox:
                            yield Wait(step.source, key, None)
                    self._evaluate(step, judge)

    def _evaluate(self, step: Step, judge: Judge) -> None:
        chunk, index = self.chunks[step.action.chunk], step.action.index
        if step.needs >= 0:
            message = self.inbox.pop(key_of(step))
            empty = message.skeleton == EMPTY
            given = None if empty else message.open()
        else:
            given = self.inputs.pop(index)
            empty = batch_size(given, what="inputs") == 0
        if not chunk.last:
            taken = key_of(step, taker=step.feeds)
            sent = Message(taken, [], EMPTY, []) if empty else Message.of(taken, chunk.evaluate(given))
            self._hand_over(step, sent)
            return
        target = self.targets.pop(index, None)
        if not empty:
            number = self.replica * self.schedule.microbatches + index
            judge(chunk, number, chunk.evaluate(given), target)

    # Bytes

    def _hold_activations(self, change: int) -> None:
        self._activations += change
        self.meter.hold(activations=self._activations)

    def _hold_first_gradients(self, step: Step) -> None:
        """Gradients are there from a mini-batch's first backward in a chunk on, beside the activations that it read."""
        if (which := (step.action.chunk, step.minibatch)) not in self._summing:
            self._summing.add(which)
            self._hold_gradients()

    def _hold_gradients(self) -> None:
        pending = (settlement for some in self._pending.values() for settlement in some)
        self.meter.hold(
            gradients=sum(one.gradient_bytes for one in self._sets())
            + sum(gradient_bytes(gradient) for settlement in pending for gradient in settlement.gradients)
        )

    def _hold_weights(self, *, optimizer: bool = False) -> None:
        """Count what parameters take; the optimizers' state, which grows at their first step only, while it does."""
        self.meter.hold(extra_versions=sum(one.versions.extra_bytes for one in self._sets()))
        if optimizer or self.meter.updates < FIRST_UPDATES * len(self._sets()):
            self.meter.hold(optimizer=sum(one.optimizer_bytes for one in self._sets()))
        self.meter.updates += 1

    def count(self, buffers: int) -> None:
        """Count all bytes anew, for a report; `buffers` are the transport's."""
        self._hold_gradients()
        self._hold_weights(optimizer=True)
        self._link_bytes = buffers
        self._hold_buffers()

    def _hold_buffers(self) -> None:
        held = sum(one.buffer_bytes for one in self._sets())
        samples = sum(one.nbytes for one in self.staleness.values())
        self.meter.hold(buffers=self._link_bytes + held + samples)

    def _sets(self) -> list[ParameterSet]:
        return [one for chunk in self.chunks.values() for one in chunk.sets]
