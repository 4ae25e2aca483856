"""The engine: one rank, a loop over actions. It knows actions, not methods.

A cycle is a generator that yields only where it has to wait, for a message or for other ranks' gradients; the driver
waits in its place. So real ranks, which block, and virtual ranks, which take turns in one process, run the same lines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.runtime.comm import Inbox, Message, Send, incoming_key, outgoing_key
from weft.runtime.device import mark, record_use, wait_for_mark
from weft.runtime.engine.chunk import Chunk
from weft.runtime.engine.completions import Completions, check_loss, loss_numbers
from weft.runtime.engine.device_meter import meter_for
from weft.runtime.engine.error_locator import ErrorLocator
from weft.runtime.engine.in_flight import InFlight
from weft.runtime.engine.memory import MemoryAccount
from weft.runtime.engine.pending_updates import PendingUpdates
from weft.runtime.engine.staleness import Staleness
from weft.runtime.engine.task import Task, TaskList
from weft.runtime.engine.waiting import DEVICE, GRADIENTS, NOTHING, Wait, Waits
from weft.runtime.weights import GradientSync, ParameterSet, PendingUpdate
from weft.schedule import Op, Program, Step, max_ahead, max_delay, mean_delay, mean_over_chunks


class Worker:
    """One rank of a pipeline with its chunks.

    `programs` holds the lowered schedule, and after it, for tied parameters, the same rows at other delays; each
    parameter set follows one of them (`set_programs`, by chunk).
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
        inbox: Inbox,
        send: Send,
        skip_nan: bool,
        max_skips: int,
        deadline: float = 60.0,
        telemetry: int = 0,
    ) -> None:
        self.rank, self.replica, self.programs, self.chunks = rank, replica, programs, chunks
        self.schedule = programs[0].schedule
        self.device = next(iter(chunks.values())).compute.device
        self.number = replica * self.schedule.stages + rank  # among all ranks of all replicas
        self._set_programs, self._gradient_sync = set_programs, gradient_sync
        self._tasks = TaskList(programs, set_programs, chunks, rank=rank)
        self._skip_nan = skip_nan
        self.inbox, self._send = inbox, send
        self.inputs: dict[int, Any] = {}  # of micro-batches that have not begun
        self.targets: dict[int, Any] = {}
        self.begun = 0  # mini-batches of this run before the last flush
        self._losses: dict[tuple[int, int], list[float | Tensor]] = defaultdict(list)  # by chunk and mini-batch
        self._sets = [parameters for chunk in chunks.values() for parameters in chunk.sets]
        self.completions = Completions(
            chunks=len(chunks),
            sets=len(self._sets),
            skip_nan=skip_nan,
            max_skips=max_skips,
            late=self.device.type != "cpu",
        )
        self.locator = ErrorLocator(rank=self.number, microbatches=self.schedule.microbatches, chunks=chunks)
        self.pending = PendingUpdates(self._sets, gradient_sync, self.completions, self.locator)
        self._update_order = {
            number: gradient_sync.by_urgency([(replica, number, place) for place in range(len(chunk.sets))])
            for number, chunk in chunks.items()
        }
        self.staleness = {chunk: Staleness(telemetry) for chunk in chunks}
        self.meter = meter_for(self.device, deadline)
        self.memory = MemoryAccount(self.meter, chunks, self.staleness)
        # By the number of the op; a dict would call the hash function of an enum, which is slow.
        self._passes = (self._forward, self._backward, self._backward, self._backward_weights)

    def cycle(self, cycle: int, *, minibatches: int | None = None) -> Waits:
        """Run a cycle: what one more mini-batch brings, or a part of the drain."""
        self.meter.begin_cycle(first=cycle == 0)
        for task in self._tasks.cycle(cycle, minibatches=minibatches):
            try:
                self.pending.advance()
                if task.step.action.op == Op.U:
                    yield from self._update(task)
                else:
                    yield from self._pass(task)
            except Exception as problem:
                self.locator.raise_located(
                    problem, task.chunk.number, self.begun + task.step.minibatch, task.step.action
                )
        if self.programs[0].drain == 0:  # nothing else is left to do meanwhile
            yield from self._finish_updates()
        yield from self._join_awaited_sums(cycle)
        yield from self._report(self.begun + cycle)

    def _pass(self, task: Task) -> Waits:
        """Run a forward or a backward, as soon as its weights and its message are there."""
        step = task.step
        for set_step in task.sets:
            while not set_step.ready:
                yield from self._finish_update(task.chunk.number, set_step.parameters)
        if step.needs >= 0 and incoming_key(step) not in self.inbox:
            yield from self.wait_for_message(step)
        start = self.meter.start(step.action)
        self._passes[step.action.op](task)
        for set_step in task.sets:
            set_step.release()
        self.meter.end(step, start)

    # Waiting

    def wait_for_message(self, step: Step) -> Waits:
        if step.needs >= 0:
            key = incoming_key(step)
            while key not in self.inbox:
                self.pending.advance()
                yield Wait(step.source, key, self.pending.progress)

    def finish_updates(self) -> Waits:
        """Make all updates that are pending, some time after the last cycle, and read all losses."""
        self.meter.resume()
        yield from self._finish_updates()
        end = mark(self.device)  # compute has waited for all sums by then
        yield from self.wait_for_device(lambda: end is None or end.query(), "its device to finish all updates")
        yield from self._read_losses(all_of_them=True)
        yield from self._report(math.inf)

    def _finish_updates(self) -> Waits:
        for chunk in self.chunks.values():
            for parameters in chunk.sets:
                while parameters.pending:
                    yield from self._finish_update(chunk.number, parameters)
        self.meter.end_wait()

    def _join_awaited_sums(self, cycle: int) -> Waits:
        """Start all parts of sums that other ranks wait for in this cycle, which this rank may end earlier."""
        for parameters in self._sets:
            for update in parameters.pending:
                while self._gradient_sync.awaited(update, self.begun + cycle):
                    if not (self.pending.advance() or (update is parameters.pending[0] and self.pending.hurry(update))):
                        yield Wait(GRADIENTS, (Op.U, update.member[1], update.minibatch), self.pending.progress)

    def _finish_update(self, chunk: int, parameters: ParameterSet) -> Waits:
        """Make the oldest pending update of a parameter set, as soon as its gradients are final."""
        update = parameters.pending[0]
        while not update.done:
            if not (self.pending.advance() or self.pending.hurry(update)):
                yield Wait(GRADIENTS, (Op.U, chunk, update.minibatch), self.pending.progress)
        yield from self._wait_for_outcome(chunk, update)
        start = self.meter.start()
        wait_for_mark(update.ready, self.device)
        record_use(update.present(), self.device)
        with self.locator.locating(chunk, update.minibatch):
            self._apply(chunk, parameters, parameters.pending.popleft())
        self.memory.count_gradients(chunk)
        self.meter.end_delayed_update(start)
        yield from self._read_losses()

    def _wait_for_outcome(self, chunk: int, update: PendingUpdate) -> Waits:
        """Only where the host has to decide whether the update is made."""
        if self._skip_nan:
            yield from self.wait_for_device(update.is_known, f"the gradients of chunk {chunk} on its device")

    def wait_for_device(self, ready: Callable[[], bool], what: str) -> Waits:
        """Wait until the device has got to something."""
        while not ready():
            self.pending.advance()
            yield Wait(DEVICE, NOTHING, self.pending.progress, what)

    # Passes

    def _forward(self, task: Task) -> None:
        step, chunk = task.step, task.chunk
        index, m = step.action.index, self.schedule.microbatches
        in_flight = InFlight(
            minibatch=self.begun + step.minibatch,
            microbatch=self.replica * m + index % m,
            target=self.targets.pop(index, None) if chunk.last else None,
            given=self.inputs.pop(index) if step.needs < 0 else self.inbox.pop(incoming_key(step)).unpack(),
            weights=task.weights(),
        )
        if index % m == 0:
            if self.staleness[chunk.number].due(in_flight.minibatch):
                self._sample(task, in_flight)
            for parameters, leaves in zip(chunk.sets, in_flight.weights, strict=True):
                parameters.first_read(leaves)
        if index % m == 0 or task.predicts:
            self.memory.count_buffers()
        output, wants = chunk.forward(index, in_flight)
        if chunk.last:
            self._check_loss(in_flight.loss)
        else:
            self.hand_over(step, Message.pack(outgoing_key(step), output, grads=wants))
        self.memory.change_activations(in_flight.nbytes)

    def _sample(self, task: Task, in_flight: InFlight) -> None:
        """Record what the first forward of a mini-batch reads, and which version that comes from.

        Of the chunk's own parameters; tied ones may be updated at another time.
        """
        step, own = task.step, task.chunk.sets[0]
        read = in_flight.weights[0]
        stale = own.versions.read(step.version) if step.ahead else read
        self.staleness[task.chunk.number].sample(in_flight.minibatch, read, stale)

    def _backward(self, task: Task) -> None:
        step, chunk = task.step, task.chunk
        index = step.action.index
        in_flight = chunk.in_flight[index]
        gradients: list[Tensor | None] = []
        loss = in_flight.loss
        if step.needs >= 0:
            message = self.inbox.pop(incoming_key(step))
            loss, gradients = message.loss, message.unpack()
            if isinstance(loss, Tensor):
                loss = loss.clone()  # it is a view of the whole message
            self._check_loss(loss)
        self._losses[chunk.number, step.minibatch].append(loss)
        self.memory.change_activations(in_flight.rebuilt)
        held = in_flight.nbytes + in_flight.rebuilt
        whole = step.action.op == Op.B
        run = chunk.backward if whole else chunk.backward_inputs
        input_gradients = run(index, gradients, self._backward_reads(task))
        if step.feeds >= 0:
            self.hand_over(step, Message.pack(outgoing_key(step), input_gradients, loss=loss))
        if whole:
            self._end_backward(step, in_flight)
        else:
            self.memory.change_activations(in_flight.nbytes - held)

    def _backward_weights(self, task: Task) -> None:
        chunk, index = task.chunk, task.step.action.index
        in_flight = chunk.in_flight[index]
        chunk.backward_weights(index, self._backward_reads(task))
        self._end_backward(task.step, in_flight)

    def _backward_reads(self, task: Task) -> list[Any] | None:
        """The weights of a backward, where they are not the forward's."""
        if not task.chunk.backward_reads_other_weights:
            return None
        weights = task.weights()
        if task.predicts:
            self.memory.count_buffers()
        return weights

    def _end_backward(self, step: Step, in_flight: InFlight) -> None:
        self.memory.first_backward(step)
        self.memory.change_activations(-in_flight.nbytes - in_flight.rebuilt)

    def hand_over(self, step: Step, message: Message) -> None:
        if step.target < 0:
            self.inbox[message.key] = message.detached_copy() if step.action.op == Op.F else message
            return
        self._send(step.target, message)
        self.meter.messages += 1
        self.meter.message_bytes += sum(tensor.nbytes for tensor in message.tensors)

    def _check_loss(self, loss: float | Tensor) -> None:
        """A loss on a device is checked when it is read."""
        if not self._skip_nan and not isinstance(loss, Tensor):
            check_loss(loss)

    # Updates

    def _update(self, task: Task) -> Waits:
        step, chunk = task.step, task.chunk
        self.memory.count_gradients(chunk.number)
        for parameters in chunk.sets:
            while parameters.pending and parameters.pending[0].done and not parameters.predicts:
                yield from self._finish_update(chunk.number, parameters)  # predictions are from the version they name
        start = self.meter.start(step.action)
        numbers = loss_numbers(self._losses.pop((chunk.number, step.minibatch)))
        self.memory.end_of_backwards(step)
        for member in self._update_order[chunk.number]:
            parameters, set_step, _ = task.sets[member[2]]
            update = PendingUpdate(
                member=member,
                minibatch=self.begun + step.minibatch,
                parameters=parameters.versions.live,
                gradients=parameters.take_gradients(),
                numbers=numbers,
            )
            if set_step.dies:
                parameters.versions.release(set_step.version - 1)
            if self._gradient_sync.needed(update.member):
                parameters.pending.append(update)
                self._gradient_sync.begin(update)
            else:
                update.copy_numbers()
                self._apply(chunk.number, parameters, update)
        self.memory.count_gradients(chunk.number)
        self.meter.end(step, start)
        yield from self._read_losses()

    def _apply(self, chunk: int, parameters: ParameterSet, update: PendingUpdate) -> None:
        skips = self.completions.must_skip(update)
        own = parameters is self.chunks[chunk].sets[0]  # not tied ones, which may still be pending
        if own and self.staleness[chunk].due(update.minibatch):
            versions = parameters.versions
            self.staleness[chunk].measure(update.minibatch, versions.read(versions.newest))
        if skips:
            parameters.skip()
        else:
            parameters.update(update.gradients)
        update.drop_gradients()
        self.memory.count_weights()
        self.completions.add(chunk, update, own=own, skipped=skips)

    def _read_losses(self, *, all_of_them: bool = False) -> Waits:
        """Read the losses of finished mini-batches that are due."""
        while (due := self.completions.due(all_of_them=all_of_them)) is not None:
            chunk, update = due.chunk, due.update
            if not update.is_known():
                what = f"mini-batch {update.minibatch} of chunk {chunk} on its device"
                yield from self.wait_for_device(update.is_known, what)
            with self.locator.locating(chunk, update.minibatch):
                self.completions.read()

    def _report(self, cycle: float) -> Waits:
        """Report the mini-batches whose norms of the whole gradient are due in this cycle."""
        unreported, norms = self.completions.unreported, self._gradient_sync.whole_norms
        while unreported and norms is not None and norms.is_due(unreported[0].completed.minibatch, cycle):
            chunk, completed, norm = unreported[0]
            while not norm.squares.done():
                if not self.pending.advance():
                    yield Wait(GRADIENTS, (Op.U, chunk, completed.minibatch), self.pending.progress)
            yield from self.wait_for_device(norm.is_known, f"the norm of mini-batch {completed.minibatch}")
            self.completions.report()

    def restart(self, minibatches: int) -> None:
        """After a flush of `minibatches`: versions and micro-batches count from 0."""
        self.begun += minibatches
        for parameters in self._sets:
            parameters.restart()

    def delays(self) -> list[dict[str, Any]]:
        """Of each chunk: how many updates late its forwards read, how many they predict at most, and the samples.

        The mean delay is over micro-batches and parameters, also tied ones, which have their own delay.
        """
        program, found = self.programs[0], []
        for chunk, staleness in self.staleness.items():
            sizes = [parameters.numel for parameters in self.chunks[chunk].sets]
            delays = [mean_delay(self.programs[number], chunk) for number in self._set_programs[chunk]]
            found.append(
                {
                    "chunk": chunk,
                    "parameters": sum(sizes),
                    "delay": max_delay(program, chunk),
                    "mean_delay": mean_over_chunks(delays, sizes),
                    "ahead": max_ahead(program, chunk),
                    "samples": list(staleness.samples),
                }
            )
        return found
