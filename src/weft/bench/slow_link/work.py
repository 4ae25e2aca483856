"""What each of two ranks runs: contenders on a model whose gradients outweigh its activations, and messages alone.

A rank does what the lines on its standard input say (`ranks.py`), and ends when there are no more, or when the process
that started it is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
import traceback
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.bench.contender import Contender, Update, check_first_update, first_update, pipeline
from weft.bench.layers import Steady, Task
from weft.bench.peers import ddp, torch_pipeline
from weft.bench.slow_link.ranks import sent
from weft.errors import WeftError

JOIN = 300.0  # seconds


class Wide(nn.Module):
    """The feed-forward part of a transformer's layer: 8 x width x width weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = value + self.path(value)
        return result


def wide(*, layers: int, width: int, tokens: int, forward: float, backward: float) -> Task:
    """Wide layers and few tokens: a regression from vectors to vectors, at a steady pace."""
    return Task(
        layers=lambda: [Steady(Wide(width), forward=forward, backward=backward) for _ in range(layers)],
        microbatch=lambda count: (torch.randn(count, width), torch.randn(count, width)),
        samples=tokens,
        loss_fn=functional.mse_loss,
    )


def contender(name: str, task: Task, microbatches: int) -> Contender:
    """By its name in the tables: weft 2bw warmup 2, torch 1F1B, DDP."""
    library, _, method = name.partition(" ")
    if library == "weft":
        return pipeline(method, task, microbatches, stages=dist.get_world_size())
    return torch_pipeline(method, task, microbatches) if library == "torch" else ddp(task, microbatches)


class Rank:
    """What a rank can be told to do; every method is an order, its result the answer."""

    def __init__(self) -> None:
        self._contenders: dict[tuple[str, int], Contender] = {}
        self._expected: dict[int, dict[str, Update]] = {}  # the first ones, by micro-batches

    def meet(self) -> None:
        """Be there, and see that the other one is."""
        dist.barrier()

    def build(self, *, name: str, microbatches: int, model: dict[str, Any]) -> dict[str, float]:
        """Make a contender, see that it computes what plain training does, and look at its time and bytes."""
        task = wide(**model)
        if microbatches not in self._expected:
            self._expected[microbatches] = first_update(task, microbatches)
        made = self._contenders[name, microbatches] = contender(name, task, microbatches)
        check_first_update(name, made, self._expected[microbatches])
        return self.window(name=name, microbatches=microbatches, fill=1, steps=2)

    def window(self, *, name: str, microbatches: int, fill: int, steps: int) -> dict[str, float]:
        """Seconds and bytes sent of a mini-batch, once the pipeline is full."""
        one = self._contenders[name, microbatches]
        dist.barrier()
        for _ in range(fill):
            one.step()
        before, begin = sent(), time.perf_counter()
        for _ in range(steps):
            one.step()
        seconds, count = time.perf_counter() - begin, sent() - before
        one.flush()
        dist.barrier()
        return {"seconds": seconds / steps, "sent": count / steps}

    def carry(self, *, size: int, together: bool) -> float:
        """Seconds until bytes from rank 0 are on rank 1, or from each on the other at the same time."""
        rank = dist.get_rank()
        gives, takes = rank == 0 or together, rank == 1 or together
        mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        taking = dist.irecv(theirs, 1 - rank) if takes else None
        dist.barrier()
        begin = time.perf_counter()
        giving = dist.isend(mine, 1 - rank) if gives else None
        for work in (taking, giving):
            if work is not None:
                work.wait()
        seconds = time.perf_counter() - begin
        dist.barrier()
        return seconds

    def message(self, *, size: int, times: int) -> float:
        """Seconds of one message from rank 0 to rank 1 over an idle link, and a word back: the median."""
        there, back = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        taken = []
        for _ in range(times):
            dist.barrier()
            time.sleep(0.02)
            begin = time.perf_counter()
            if dist.get_rank() == 0:
                dist.send(there, 1)
                dist.recv(back, 1)
            else:
                dist.recv(there, 0)
                dist.send(back, 0)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


def serve(orders: TextIO, answers: TextIO) -> None:
    """Do what is told, line by line; a failure is told and ends it."""
    rank = Rank()
    for line in orders:
        order = json.loads(line)
        try:
            answer = {"value": getattr(rank, order.pop("do"))(**order)}
        except WeftError as problem:
            answer = {"refused": str(problem)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "value" not in answer:
            os._exit(1)  # taking the group apart could block
    os._exit(0)  # so could it when the other one has gone first


def _main() -> None:
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no rank outlives its parent
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        weft.launch(serve, sys.stdin, answers, ranks=int(os.environ["WORLD_SIZE"]), threads=1, timeout=JOIN)


if __name__ == "__main__":
    _main()
