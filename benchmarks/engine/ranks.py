"""What the ranks of one version of weft run: windows of each schedule, and of its layers without a pipeline.

Runs as a program of its own, `python -m benchmarks.engine.ranks TASK FILE`, with the version that PYTHONPATH names. So
it uses only what all versions have, and no other part of the benchmarks.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import weft
from benchmarks.engine.parts import Timers
from weft.errors import WeftError
from weft.train.data_spec import DataSpec
from weft.train.job import job_of
from weft.train.optimizers import optimizer_of, scheduler_of
from weft.train.setup import net_of, pipeline_of

START_TIMEOUT = 300.0  # seconds
FILL = 2  # mini-batches before a window
SPEC = DataSpec(task="language", form="tokens", vocabulary=256, context=64)  # of the main job's data
UPDATES = 1200


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule of a model on this rank, and the same layers alone."""

    pipe: weft.Pipeline
    step: Callable[[], object]
    alone: Callable[[], object]


def run(task: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """The figures of a mini-batch of each schedule, in each window; a version may not have a schedule."""
    timers = Timers()
    if task["profile"]:
        timers.install()
    cases = {}
    for name in task["schedules"]:
        try:
            cases[name] = _case(task, name)
        except WeftError:
            continue
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(task["windows"]):
        for name in random.Random(number).sample(list(cases), len(cases)):
            found[name].append(_window(cases[name], task["steps"], timers if task["profile"] else None))
    for case in cases.values():
        case.pipe.close()
    return found


def _window(case: Case, steps: int, timers: Timers | None) -> dict[str, float]:
    """Seconds of a mini-batch: of the meter, of CPU time in all threads and in the main one, and by part."""
    dist.barrier()
    for _ in range(FILL):
        case.step()
    case.pipe.reset_meters()
    if timers is not None:
        timers.clear()
    begin = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        case.step()
    wall, cpu, main = (now - then for now, then in zip(_clocks(), begin, strict=True))
    (meter,) = case.pipe.meters()
    figures = {"wall": wall, "cpu": cpu, "main": main, "busy": meter["busy"] + meter["updating"]}
    figures |= {"waiting": meter["waiting"], "actions": meter["actions"]}
    if timers is not None:
        figures |= {part: nanoseconds / 1e9 for part, nanoseconds in timers.read().items()}
    case.pipe.flush()
    dist.barrier()
    for _ in range(FILL):
        case.alone()
    begin_alone = time.process_time()
    for _ in range(steps):
        case.alone()
    figures["alone"] = time.process_time() - begin_alone
    return {name: value / steps for name, value in figures.items()}


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), time.thread_time()


def _case(task: dict[str, Any], name: str) -> Case:
    make = _main_job if task["model"] == "main" else _transformer
    return make(name, task["microbatches"], small=task["small"])


def _main_job(name: str, microbatches: int, *, small: bool) -> Case:
    """The model, batch and optimizer of `make train`; a cure is no part of what an action costs."""
    method, *options = name.split()
    sets = [f"schedule.name={method}", "schedule.ranks=2", f"schedule.microbatches={microbatches}"]
    sets += ["schedule.cure=none"]
    sets += [f"schedule.{key}={value}" for key, value in zip(options[::2], options[1::2], strict=True)]
    job = job_of(None, [*sets, *(["model.size=tiny"] if small else [])])
    net = net_of(job, SPEC)
    pipe = pipeline_of(job, net, SPEC, updates=UPDATES)
    inputs, targets = (torch.randint(SPEC.vocabulary, (job.train.batch, SPEC.context)) for _ in range(2))
    layers = list(weft.materialize(net_of(job, SPEC).model))
    alone = Alone(
        pipe, layers, net.loss_fn, optimizer_of(job.train), scheduler_of(job.train, UPDATES), (inputs, targets)
    )
    return Case(pipe=pipe, step=lambda: pipe.step(inputs, targets), alone=alone.step)


def _transformer(name: str, microbatches: int, *, small: bool) -> Case:
    """The transformer of the benchmark throughput."""
    width, tokens, samples = (64, 64, 2) if small else (256, 128, 4)

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0) for _ in range(8)]

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    method, *options = name.split()
    given: dict[str, Any] = {key: int(value) for key, value in zip(options[::2], options[1::2], strict=True)}
    schedule = weft.schedule(method, stages=2, microbatches=microbatches, **given)
    balance = [8 // schedule.chunks] * schedule.chunks
    pipe = weft.Pipeline(layers(), loss_fn=mse_loss, optimizer=optimizer, schedule=schedule, balance=balance)
    torch.manual_seed(1)
    batch = tuple(torch.randn(samples * microbatches, tokens, width) for _ in range(2))
    alone = Alone(pipe, layers(), mse_loss, optimizer, None, batch)
    return Case(pipe=pipe, step=lambda: pipe.step(*batch), alone=alone.step)


class Alone:
    """The layers that this rank has under a schedule: forwards, backwards and updates without a pipeline."""

    def __init__(
        self,
        pipe: weft.Pipeline,
        layers: Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        scheduler: Callable[[Any], Any] | None,
        batch: tuple[Tensor, ...],
    ) -> None:
        self._loss_fn, self._microbatches = loss_fn, pipe.schedule.microbatches
        inputs, self._targets = (part.chunk(self._microbatches) for part in batch)
        self._chunks: list[tuple[nn.Sequential, list[Tensor], Tensor | None]] = []  # inputs, and an output's gradient
        self._updates: list[Any] = []
        values, start = list(inputs), 0
        for number, size in enumerate(pipe.balance):
            chunk, last = nn.Sequential(*layers[start : start + size]), number == len(pipe.balance) - 1
            start += size
            with torch.no_grad():
                outputs = [chunk(value) for value in values]
            if pipe.schedule.placement[number] == dist.get_rank():
                given = [value.requires_grad_(number > 0) for value in values]
                self._chunks.append((chunk, given, None if last else torch.randn_like(outputs[0])))
                self._updates.append(optimizer(list(chunk.parameters())))
                if scheduler is not None:
                    self._updates.append(scheduler(self._updates[-1]))
            values = outputs

    def step(self) -> None:
        for chunk, values, gradient in self._chunks:
            for value, target in zip(values, self._targets, strict=True):
                output = chunk(value.detach().requires_grad_(value.requires_grad))
                if gradient is None:
                    loss = self._loss_fn(output, target)
                    loss.item()
                    torch.autograd.backward([loss], [torch.full_like(loss, 1 / self._microbatches)])
                else:
                    torch.autograd.backward([output], [gradient])
        for update in self._updates:
            update.step()
        for chunk, _, _ in self._chunks:
            chunk.zero_grad()


if __name__ == "__main__":
    ranks = weft.launch(run, json.loads(sys.argv[1]), ranks=2, threads=1, timeout=START_TIMEOUT)
    Path(sys.argv[2]).write_text(json.dumps(ranks), encoding="utf-8")
