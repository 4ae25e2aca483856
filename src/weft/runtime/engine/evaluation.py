"""Forwards without gradients, in the order in which the schedule runs them, and what becomes of the outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.comm import Collectives, Message, incoming_key, outgoing_key
from weft.runtime.device import HostCopy
from weft.runtime.engine.chunk import Chunk, LossFunction
from weft.runtime.engine.waiting import Waits
from weft.runtime.engine.worker import Worker
from weft.runtime.tree import batch_size
from weft.schedule import Op, Schedule, Step

EMPTY = ("empty",)  # the skeleton of a micro-batch without samples

# Where the outputs are: is given the last chunk, the micro-batch (counted over all replicas), its output and its target
TakeOutput: TypeAlias = Callable[[Chunk, int, Any, Any], None]


def evaluate(worker: Worker, take_output: TakeOutput) -> Waits:
    """Run one batch through the chunks of a rank."""
    for step in worker.programs[0].steps(worker.rank, minibatches=1):
        if step.action.op == Op.F:
            with worker.locator.locating(step.action.chunk, worker.begun + step.minibatch, step.action):
                yield from worker.wait_for_message(step)
                _forward(worker, step, take_output)


def _forward(worker: Worker, step: Step, take_output: TakeOutput) -> None:
    chunk, index = worker.chunks[step.action.chunk], step.action.index
    if step.needs >= 0:
        message = worker.inbox.pop(incoming_key(step))
        empty = message.skeleton == EMPTY
        given = None if empty else message.unpack()
    else:
        given = worker.inputs.pop(index)
        empty = batch_size(given, what="inputs") == 0
    if not chunk.last:
        key = outgoing_key(step)
        worker.hand_over(step, Message(key, [], EMPTY, []) if empty else Message.pack(key, chunk.evaluate(given)))
        return
    target = worker.targets.pop(index, None)
    if not empty:
        number = worker.replica * worker.schedule.microbatches + index
        take_output(chunk, number, chunk.evaluate(given), target)


class Scores:
    """The loss and metrics of all samples, added up where the outputs are."""

    def __init__(self, metrics: Mapping[str, LossFunction]) -> None:
        self._metrics = metrics
        self._sums = [0.0] * (len(metrics) + 2)  # loss, metrics, samples
        self._unread: deque[tuple[HostCopy, int]] = deque()  # scores of a micro-batch, and its samples

    def add(self, chunk: Chunk, microbatch: int, output: Any, target: Any) -> None:
        samples = batch_size(target, what="targets")
        self._unread.append((chunk.score(output, target, list(self._metrics.values())), samples))
        self.read()  # what is there: a metric may return a tensor that it overwrites

    def read(self, most: int = 0) -> bool:
        """Read scores until at most this many are left; False: a device has not computed them yet."""
        while len(self._unread) > most:
            scores, samples = self._unread[0]
            if not scores.ready:
                return False
            self._unread.popleft()
            for place, value in enumerate(scores.numbers()):
                self._sums[place] += value * samples
            self._sums[-1] += samples
        return True

    def means(self, collectives: Collectives) -> dict[str, float]:
        """The means over the samples of all ranks, after all scores were read; every process asks."""
        assert not self._unread
        gathered = collectives.all_gather(self._sums, purpose="add up an evaluation")
        *totals, samples = (sum(values) for values in zip(*gathered, strict=True))
        if not samples:
            raise WeftError("evaluate needs at least one sample (got none from the loader)")
        names = ("loss", *self._metrics)
        return {name: float(total / samples) for name, total in zip(names, totals, strict=True)}


class Outputs:
    """The outputs of a batch by micro-batch, collected where they are computed."""

    def __init__(self) -> None:
        self._outputs: dict[int, HostCopy] = {}

    def add(self, chunk: Chunk, microbatch: int, output: Any, target: Any) -> None:
        if not isinstance(output, Tensor):
            raise WeftError(f"predict is for models whose output is one tensor (got {type(output).__name__})")
        self._outputs[microbatch] = HostCopy([output.detach()])

    def are_there(self) -> bool:
        """Whether a device has computed all of them."""
        return all(output.ready for output in self._outputs.values())

    def gathered(self, collectives: Collectives, schedule: Schedule) -> Tensor:
        """The outputs of all ranks in one tensor, on every rank; every process asks."""
        purpose = "gather predictions"
        outputs = {number: copy.tensors[0] for number, copy in self._outputs.items()}
        last = schedule.placement[-1]
        own = [
            [number, list(output.shape), str(output.dtype).removeprefix("torch.")] for number, output in outputs.items()
        ]
        gathered = collectives.all_gather(own, purpose=purpose)
        for number, shape, dtype in sorted(form for forms in gathered for form in forms):
            if number not in outputs:
                outputs[number] = torch.empty(shape, dtype=getattr(torch, dtype))
            rank = number // schedule.microbatches * schedule.stages + last
            collectives.broadcast(outputs[number], rank, purpose=purpose)
        if not outputs:
            raise WeftError("predict needs at least one sample (got none)")
        return torch.cat([outputs[number] for number in sorted(outputs)])
