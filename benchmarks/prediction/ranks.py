"""What each of two ranks runs: pipelines with and without prediction, in windows that take turns."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import weft
from benchmarks.contenders import SMALL_TASKS, TASKS

MICROBATCHES = 4
WINDOW = 4  # mini-batches
OPTIMIZERS: dict[str, Any] = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


class Contender(NamedTuple):
    """A pipeline to measure."""

    schedule: str
    versions: str | None = None
    telemetry: int | None = None

    def __str__(self) -> str:
        return f"`{self.schedule}`" + ("" if self.versions is None else f", {self.versions}")

    def pipeline(self, model: nn.Sequential, optimizer: str, stages: int | None = None) -> weft.Pipeline:
        return weft.Pipeline(
            model,
            loss_fn=nn.functional.mse_loss,
            optimizer=OPTIMIZERS[optimizer],
            schedule=self.schedule,
            microbatches=MICROBATCHES,
            stages=stages,
            predict=None if self.versions is None else {"versions": self.versions},
            telemetry=self.telemetry,
        )


SAMPLED = Contender("2bw", "exact", telemetry=1), Contender("2bw", "exact")
PAIRS = [  # with and without prediction
    (Contender("2bw", "exact"), Contender("2bw")),
    (Contender("wpipe", "exact"), Contender("wpipe")),
    (Contender("wpipe", "published"), Contender("wpipe")),
    (Contender("xpipe", "exact"), Contender("pipedream")),
    (Contender("xpipe", "published"), Contender("pipedream")),
    SAMPLED,
]


def measure_windows(optimizer: str, rounds: int, small: bool) -> list[list[tuple[float, float, float]]]:
    """Of each pair, in each round: the seconds of a window without, with, and again without prediction."""
    task = (SMALL_TASKS if small else TASKS)["transformer"]
    batch, _ = task.batch(MICROBATCHES)
    contenders = dict.fromkeys(contender for pair in PAIRS for contender in pair)
    pipes = {contender: contender.pipeline(task.model(), optimizer) for contender in contenders}

    def seconds(contender: Contender) -> float:
        pipe = pipes[contender]
        pipe.step(batch, batch)  # until the pipeline is full
        begin = time.perf_counter()
        for _ in range(WINDOW):
            pipe.step(batch, batch)
        end = time.perf_counter()
        pipe.flush()
        dist.barrier()
        return end - begin

    for contender in pipes:  # the first updates create the optimizer's state and the buffers
        seconds(contender)
    measured = [
        [(seconds(without), seconds(with_), seconds(without)) for _ in range(rounds)] for with_, without in PAIRS
    ]
    for pipe in pipes.values():
        pipe.close()
    return measured
