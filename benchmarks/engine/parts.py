"""CPU time of the main thread by part of the runtime: timers around functions, whatever version of weft has them.

A part's time is without that of the parts inside it, and without the timers themselves.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

KERNELS = ("layers and loss", "autograd", "optimizer", "predictions", "copies")  # what schedules are made for
REST = "the rest"  # of the outermost function
CALIBRATION = 20_000  # calls

RUNTIME = "weft.runtime"
FUNCTIONS = {  # by module and name; a star: a generator. Those that a version of weft has not are left out
    "layers and loss": ["engine.chunk:call_layer", "engine.chunk:Chunk._loss"],
    "autograd": ["torch.autograd:backward"],
    "optimizer": ["torch.optim:Adam.step", "torch.optim:SGD.step"],
    "predictions": ["update.predictor:Predictor.predict", "update.predictor:Predictor.fingerprint"],
    "copies": ["weights.versions:copy_tensors", "comm.links:_write", "comm.messages:Message.detached_copy"],
    "send": ["comm.links:SendLink.send"],
    "receive": ["comm.links:ReceiveLink.receive"],
    "pack and unpack": ["comm.messages:Message.pack", "comm.messages:Message.unpack"],
    "versions": [
        "weights.parameter_set:ParameterSet.install",
        "weights.parameter_set:ParameterSet.collect",
        "weights.parameter_set:ParameterSet.take_gradients",
        "weights.versions:SharedVersions.update",
    ],
    "hooks": [
        "engine.weight_substitution:WeightSubstitution.forward_reads",
        "engine.weight_substitution:WeightSubstitution._unpack",
    ],
    "steps": ["*engine.worker:tasks", "*engine.task:TaskList.cycle"],
    "seeds": ["engine.randomness:Seeds.set", "engine.chunk:mix", "engine.chunk:start_of"],
    "meters": [
        "engine.meters:Meter.start",
        "engine.meters:Meter.end",
        "engine.memory:MemoryAccount.change_activations",
        "engine.memory:MemoryAccount.first_backward",
        "engine.memory:MemoryAccount.count_gradients",
        "engine.memory:MemoryAccount.count_weights",
        "engine.memory:MemoryAccount.count_buffers",
    ],
    "forwards": ["engine.worker:Worker._forward", "engine.chunk:Chunk.forward"],
    "backwards": ["engine.worker:Worker._backward", "engine.chunk:Chunk.backward"],
    REST: ["pipeline:Pipeline.step"],
}


class Timers:
    """The timers of this process, once they are installed."""

    def __init__(self, clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock = clock
        self._open: list[list[int]] = []  # of each function that runs: nanoseconds of those inside it, and their number
        self.clear()
        self._inside, self._outside = 0.0, 0.0
        self._inside, self._outside = self._calibrated()

    def clear(self) -> None:
        self._spent: dict[str, int] = defaultdict(int)
        self._calls: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # of the part, and from it

    def install(self) -> None:
        for part, names in FUNCTIONS.items():
            for name in names:
                self._install(part, name.removeprefix("*"), is_generator=name.startswith("*"))

    def read(self) -> dict[str, float]:
        """Nanoseconds of each part since the last `clear`."""
        return {
            part: spent - self._calls[part][0] * self._inside - self._calls[part][1] * self._outside
            for part, spent in self._spent.items()
        }

    def _install(self, part: str, name: str, *, is_generator: bool) -> None:
        module, path = name.split(":")
        owner: Any = importlib.import_module(module if module.startswith("torch") else f"{RUNTIME}.{module}")
        *owners, last = path.split(".")
        for attribute in owners:
            owner = getattr(owner, attribute, None)
        found = None if owner is None else vars(owner).get(last)
        if found is None:
            return
        if isinstance(found, staticmethod):
            setattr(owner, last, staticmethod(self._timed(part, found.__func__)))
        else:
            setattr(owner, last, (self._timed_generator if is_generator else self._timed)(part, found))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._open.append([0, 0])
            begin = self._clock()
            try:
                return function(*args, **options)
            finally:
                spent = self._clock() - begin
                inner, calls = self._open.pop()
                self._spent[part] += spent - inner
                counted = self._calls[part]
                counted[0] += 1
                counted[1] += calls
                if self._open:
                    self._open[-1][0] += spent
                    self._open[-1][1] += 1

        return timed

    def _timed_generator(self, part: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        end = object()

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Iterator[Any]:
            generator = function(*args, **options)
            advance = self._timed(part, lambda: next(generator, end))
            while (item := advance()) is not end:
                yield item

        return timed

    def _calibrated(self) -> tuple[float, float]:
        """Nanoseconds that a timer adds to its own part, and to the part around it; on a warm core."""
        nothing = self._timed("nothing", lambda: None)
        begin = self._clock()
        for _ in range(CALIBRATION):
            nothing()
        whole, inside = self._clock() - begin, self._spent["nothing"]
        begin = self._clock()
        for _ in range(CALIBRATION):
            pass
        loop = self._clock() - begin
        self.clear()
        return inside / CALIBRATION, (whole - inside - loop) / CALIBRATION
