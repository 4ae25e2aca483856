"""What the two halves of a backward cost, over a whole one: CPU time of one thread.

`halves` runs half of a model's layers in one process, round by round: forward and whole backward, forward and both
halves. `two_ranks` runs pipelines on two ranks, in windows that take turns. `python -m benchmarks.engine.split` prints
both as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import SMALL_TASKS, TASKS, Task, pipeline
from benchmarks.contenders.layers import resnext, transformer
from weft import launch
from weft.runtime.engine import SplitBackward
from weft.runtime.process import configure_malloc

SCHEDULES = ("2bw", "zb-h1")
WARM_UP = 3  # rounds that are not counted
START_TIMEOUT = 300.0  # seconds
LARGER_TASKS = {
    "transformer, width 512": transformer(layers=4, width=512),
    "resnext, 256 channels": resnext(layers=4, channels=256),
}


def halves(task: Task, *, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU time in each round: of the forward, the whole backward, the gradient of the input alone, and
    both halves. The layers are the second half of the model, without its last one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = task.model()
        layers, middle = model[len(model) // 2 : -1], model[: len(model) // 2]
        with torch.no_grad():
            given = middle(task.batch(1)[0])
        gradient = torch.randn_like(layers(given))
        found: list[dict[str, float]] = [_round(layers, given, gradient) for _ in range(WARM_UP + rounds)]
    finally:
        torch.set_num_threads(threads)
    return {name: [times[name] for times in found[WARM_UP:]] for name in found[0]}


def _round(layers: nn.Module, given: Tensor, gradient: Tensor) -> dict[str, float]:
    times: dict[str, float] = {}

    def forward() -> tuple[Tensor, Tensor]:
        start = given.clone().requires_grad_()
        return start, layers(start)

    start, output = _timed(times, "F", forward)
    _timed(times, "B", torch.autograd.backward, [output], [gradient])
    start, output = forward()
    _timed(times, "input alone", torch.autograd.grad, [output], [start], [gradient])
    start, output = forward()
    split = _timed(times, "I", _first_half, output, gradient, start)
    del start, output
    _timed(times, "W", split.weight_gradients)
    return times


def _first_half(output: Tensor, gradient: Tensor, start: Tensor) -> SplitBackward:
    split = SplitBackward([output], [gradient], [start])
    split.input_gradients()
    return split


def _timed(times: dict[str, float], name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    begin = time.thread_time()
    result = call(*arguments)
    times[name] = (time.thread_time() - begin) * 1e3
    return result


def two_ranks(model: str, microbatches: int, *, rounds: int, steps: int, small: bool = False) -> dict[str, list[float]]:
    """Milliseconds of CPU time a micro-batch in each round, of both ranks together."""
    arguments = (model, microbatches, rounds, steps, small)
    first, second = launch(_run_rank, *arguments, ranks=2, threads=1, timeout=START_TIMEOUT)
    return {name: [sum(pair) for pair in zip(first[name], second[name], strict=True)] for name in first}


def _run_rank(model: str, microbatches: int, rounds: int, steps: int, small: bool) -> dict[str, list[float]]:
    task = (SMALL_TASKS if small else TASKS)[model]
    contenders = {name: pipeline(name, task, microbatches, stages=2) for name in SCHEDULES}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(1 + rounds):
        for name in SCHEDULES if number % 2 else reversed(SCHEDULES):
            contender = contenders[name]
            dist.barrier()
            begin = time.process_time()
            for _ in range(steps):
                contender.step()
            contender.flush()
            if number:
                times[name].append((time.process_time() - begin) / (steps * microbatches) * 1e3)
    for contender in contenders.values():
        contender.close()
    return times


def over(times: dict[str, list[float]], parts: Sequence[str], whole: str) -> float:
    """The sum of parts over the whole: the median over rounds."""
    sums: list[float] = [sum(found) for found in zip(*(times[part] for part in parts), strict=True)]
    return float(statistics.median(found / of for found, of in zip(sums, times[whole], strict=True)))


def main(*, quick: bool) -> None:
    rounds, tasks = (5, SMALL_TASKS) if quick else (40, {**TASKS, **LARGER_TASKS})
    configure_malloc()
    for name, task in tasks.items():
        times = halves(task, rounds=rounds)
        shown = {part: round(statistics.median(each), 2) for part, each in times.items()}
        print(json.dumps({"model": name, **shown, "I + W over B": round(over(times, ("I", "W"), "B"), 3)}), flush=True)
    for name in TASKS:
        for microbatches in (4, 8):
            times = two_ranks(name, microbatches, rounds=3 if quick else 5, steps=2 if quick else 4, small=quick)
            ratio = round(over(times, ("zb-h1",), "2bw"), 3)
            print(json.dumps({"model": name, "microbatches": microbatches, "zb-h1 over 2bw": ratio}), flush=True)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
