"""What each of two ranks runs: contenders on a model whose gradients outweigh its activations, and single messages.

A rank runs the commands on its standard input (see `driver.py`), and exits at its end, or when its parent is gone.
"""

from __future__ import annotations

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
from benchmarks.contenders import (
    Contender,
    FirstUpdate,
    SteadyLayer,
    Task,
    check_first_update,
    ddp,
    first_update,
    pipeline,
    torch_pipeline,
)
from benchmarks.harness import exit_with_parent
from benchmarks.slow_link.driver import sent_bytes
from weft.errors import WeftError

JOIN = 300.0  # seconds


class WideLayer(nn.Module):
    """The feed-forward part of a transformer's layer: 8 x width x width weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = value + self.path(value)
        return result


def wide_task(*, layers: int, width: int, tokens: int, forward: float, backward: float) -> Task:
    """Wide layers and few tokens: a regression from vectors to vectors, at a steady pace."""
    return Task(
        layers=lambda: [SteadyLayer(WideLayer(width), forward=forward, backward=backward) for _ in range(layers)],
        make_batch=lambda samples: (torch.randn(samples, width), torch.randn(samples, width)),
        samples=tokens,
        loss_fn=functional.mse_loss,
    )


def build_contender(name: str, task: Task, microbatches: int) -> Contender:
    """By its name in the tables, such as weft 2bw warmup 2, torch 1F1B or DDP."""
    library, _, method = name.partition(" ")
    if library == "weft":
        return pipeline(method, task, microbatches, stages=dist.get_world_size())
    return torch_pipeline(method, task, microbatches) if library == "torch" else ddp(task, microbatches)


class Rank:
    """The commands of a rank: each public method is one, and its result is the answer."""

    def __init__(self) -> None:
        self._contenders: dict[tuple[str, int], Contender] = {}
        self._expected: dict[int, dict[str, FirstUpdate]] = {}  # by micro-batches

    def meet(self) -> None:
        """Wait for the other rank."""
        dist.barrier()

    def build(self, *, name: str, microbatches: int, model: dict[str, Any]) -> dict[str, float]:
        """Build a contender, check its first update, and return its first time and bytes."""
        task = wide_task(**model)
        if microbatches not in self._expected:
            self._expected[microbatches] = first_update(task, microbatches)
        contender = self._contenders[name, microbatches] = build_contender(name, task, microbatches)
        check_first_update(name, contender, self._expected[microbatches])
        return self.window(name=name, microbatches=microbatches, fill=1, steps=2)

    def window(self, *, name: str, microbatches: int, fill: int, steps: int) -> dict[str, float]:
        """Seconds and bytes sent of a mini-batch, once the pipeline is full."""
        contender = self._contenders[name, microbatches]
        dist.barrier()
        for _ in range(fill):
            contender.step()
        before, begin = sent_bytes(), time.perf_counter()
        for _ in range(steps):
            contender.step()
        seconds, sent = time.perf_counter() - begin, sent_bytes() - before
        contender.flush()
        dist.barrier()
        return {"seconds": seconds / steps, "sent": sent / steps}

    def carry(self, *, size: int, together: bool) -> float:
        """Seconds until the bytes of rank 0 are on rank 1, or, `together`, those of each rank on the other."""
        rank = dist.get_rank()
        sends, receives = rank == 0 or together, rank == 1 or together
        outgoing, incoming = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        receiving = dist.irecv(incoming, 1 - rank) if receives else None
        dist.barrier()
        begin = time.perf_counter()
        sending = dist.isend(outgoing, 1 - rank) if sends else None
        for work in (receiving, sending):
            if work is not None:
                work.wait()
        seconds = time.perf_counter() - begin
        dist.barrier()
        return seconds

    def message(self, *, size: int, times: int) -> float:
        """Median seconds of a message from rank 0 to rank 1 over an idle link, and a byte back."""
        there, back = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        seconds = []
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
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def serve(commands: TextIO, answers: TextIO) -> None:
    """Run the commands, line by line; exit after a failure."""
    rank = Rank()
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"value": getattr(rank, command.pop("do"))(**command)}
        except WeftError as problem:
            answer = {"refused": str(problem)}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "value" not in answer:
            os._exit(1)  # destroying the process group could block
    os._exit(0)  # likewise, if the other rank has exited first


def _main() -> None:
    exit_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # keep what libraries print out of the answers
        weft.launch(serve, sys.stdin, answers, ranks=int(os.environ["WORLD_SIZE"]), threads=1, timeout=JOIN)


if __name__ == "__main__":
    _main()
