"""What the runtime reaches of what the machine can do, beside `torch.distributed.pipelining`.

    throughput   two ranks of one thread, eight transformer layers; over the limit: both cores computing their half
                 of the layers alone, at the same time
    paced        eight ranks on layers that sleep (F 10 ms, B 20 ms); over the simulated throughput
    engine       what an action costs beyond the same forwards and backwards called by hand, on virtual ranks

Contenders take turns within one run, several rounds; ratios are of one round each. Ends with 1 if a target is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

import weft
from benchmarks.writing import environment, spread, write
from weft.schedule import lower
from weft.schedule.actions import NONE

README = Path(__file__).parent / "README.md"
WIDTH, TOKENS, BATCH, LAYERS = 256, 128, 4, 8
MICROBATCHES = (2, 4, 8)
ROUNDS = 5
WINDOW = 16  # micro-batches, of each contender in each round
WEFT = ("gpipe", "1f1b", "interleaved", "zb-h1", "2bw", "wpipe")
PEERS: dict[str, tuple[Any, str]] = {  # schedule, stages of each rank
    "GPipe": (pipelining.ScheduleGPipe, "one"),
    "1F1B": (pipelining.Schedule1F1B, "one"),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, "loop"),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, "loop"),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, "loop"),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, "v"),
    "DualPipeV": (pipelining.ScheduleDualPipeV, "v"),
}
FEWEST = {"DualPipeV": 4}  # micro-batches that it takes on two ranks
TARGETS = {"throughput": 0.93, "paced": 0.93, "engine": 150.0}
PACED_RANKS, PACED = 8, ("1f1b", "2bw", "wpipe")
FORWARD, BACKWARD = 0.010, 0.020


def transformer(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0) for _ in range(layers))
    )


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


# Throughput


def throughput(microbatches: int) -> dict[str, list[tuple[float, float]]]:
    """Micro-batches a second of each contender in each round, and of the limit just before and after, on this rank."""
    batch = torch.randn(BATCH * microbatches, TOKENS, WIDTH)
    limit = _alone(microbatches, batch)
    contenders: dict[str, Callable[[], None]] = {}
    flushes: dict[str, Callable[[], Any]] = {}
    for name in WEFT:
        pipe = weft.Pipeline(
            transformer(LAYERS),
            loss_fn=nn.functional.mse_loss,
            optimizer=optimizer,
            schedule=name,
            microbatches=microbatches,
        )
        contenders[f"weft {name}"] = lambda pipe=pipe: pipe.step(batch, batch)  # type: ignore[misc]
        flushes[f"weft {name}"] = pipe.flush
    for name in PEERS:
        if microbatches >= FEWEST.get(name, 1):
            contenders[f"torch {name}"] = _peer(name, microbatches, batch)

    def rate(step: Callable[[], None], steps: int, flush: Callable[[], Any] = lambda: None) -> float:
        for _ in range(max(1, 4 // microbatches)):  # until the pipeline is full
            step()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        end = time.perf_counter()
        flush()
        dist.barrier()
        return steps * microbatches / (end - begin)

    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        before = rate(limit, WINDOW // 2 // microbatches)
        for name, step in contenders.items():
            reached = rate(step, WINDOW // microbatches, flushes.get(name, lambda: None))
            after = rate(limit, WINDOW // 2 // microbatches)
            rates[name].append((reached, statistics.harmonic_mean([before, after])))
            before = after
    return rates


def _alone(microbatches: int, batch: Tensor) -> Callable[[], None]:
    """This rank's share of the layers, without a pipeline."""
    model = transformer(LAYERS // dist.get_world_size())
    update = optimizer(model.parameters())

    def step() -> None:
        for piece in batch.chunk(microbatches):
            output = model(piece.detach().requires_grad_())
            torch.autograd.backward([nn.functional.mse_loss(output, piece) / microbatches])
        update.step()
        update.zero_grad()

    return step


def _peer(name: str, microbatches: int, batch: Tensor) -> Callable[[], None]:
    """The same model under a schedule of `torch.distributed.pipelining`."""
    kind, placed = PEERS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    held = {"one": [rank], "loop": [rank, world + rank], "v": [rank, 2 * world - 1 - rank]}[placed]
    count = len(held) * world
    size = LAYERS // count
    modules = [transformer(LAYERS)[number * size : (number + 1) * size] for number in held]
    stages = [
        pipelining.PipelineStage(module, number, count, torch.device("cpu"))
        for number, module in zip(held, modules, strict=True)
    ]
    run = kind(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=nn.functional.mse_loss)
    update = optimizer([parameter for module in modules for parameter in module.parameters()])
    inputs = (batch,) if 0 in held else ()
    target = {"target": batch, "losses": []} if count - 1 in held else {}

    def step() -> None:
        run.step(*inputs, **target)
        update.step()
        update.zero_grad()

    return step


# Paced


class _Pace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return value + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD)
        return gradient, gradient.sum()


class Paced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Pace.apply(value, self.weight)  # type: ignore[no-untyped-call]
        return result


def paced() -> dict[str, list[float]]:
    """Measured over simulated throughput of each schedule in each round."""
    microbatches, steps = PACED_RANKS, 4
    ratios: dict[str, list[float]] = {name: [] for name in PACED}
    batch = torch.randn(microbatches, 4)
    pipes, periods = {}, {}
    for name in PACED:
        schedule = weft.schedule(name, stages=PACED_RANKS, microbatches=microbatches)
        held = schedule.chunks // PACED_RANKS  # layers of a stage, which is what a uniform cost is of
        cost = weft.Cost.uniform(schedule, forward=held * FORWARD, backward=held * BACKWARD)
        periods[name] = weft.simulate(schedule, cost).period
        layers = [Paced() for _ in range(schedule.chunks)]
        pipes[name] = weft.Pipeline(layers, loss_fn=nn.functional.mse_loss, optimizer=optimizer, schedule=schedule)
    for _ in range(3):
        for name, pipe in pipes.items():
            for _ in range(3):
                pipe.step(batch, batch)
            begin = time.perf_counter()
            for _ in range(steps):
                pipe.step(batch, batch)
            ratios[name].append(steps * periods[name] / (time.perf_counter() - begin))
            pipe.flush()
            dist.barrier()
    return ratios


# Engine


def engine() -> dict[str, list[float]]:
    """Microseconds that an action costs beyond the same work by hand, in each round."""
    torch.set_num_threads(1)
    microbatches, stages, repeats = 8, 2, 10
    batch = torch.randn(microbatches, 4, 16)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(8)))

    costs: dict[str, list[float]] = {}
    for name in ("1f1b", "2bw", "wpipe"):
        pipe = weft.Pipeline(
            model(),
            loss_fn=nn.functional.mse_loss,
            optimizer=optimizer,
            schedule=name,
            microbatches=microbatches,
            stages=stages,
        )
        actions = int((lower(pipe.schedule).op != NONE).sum())
        by_hand = _by_hand(model(), pipe.balance, microbatches, batch)
        costs[name] = []
        for _ in range(ROUNDS):
            for _ in range(2):
                by_hand()
                pipe.step(batch, batch)
            mine, its = 0.0, 0.0
            for _ in range(repeats):
                begin = time.perf_counter()
                by_hand()
                middle = time.perf_counter()
                pipe.step(batch, batch)
                mine, its = mine + middle - begin, its + time.perf_counter() - middle
            costs[name].append((its - mine) / repeats / actions * 1e6)
    return costs


def _by_hand(model: nn.Sequential, balance: tuple[int, ...], microbatches: int, batch: Tensor) -> Callable[[], None]:
    """The same chunks, micro-batch by micro-batch, without versions, messages or meters."""
    ends = [sum(balance[: number + 1]) for number in range(len(balance))]
    chunks = [model[end - size : end] for size, end in zip(balance, ends, strict=True)]
    updates = [optimizer(chunk.parameters()) for chunk in chunks]

    def step() -> None:
        for piece in batch.chunk(microbatches):
            value, graph = piece, []
            for chunk in chunks:
                given = value.detach().requires_grad_(chunk is not chunks[0])
                value = chunk(given)
                graph.append((given, value))
            loss = nn.functional.mse_loss(value, piece)
            loss.item()
            torch.autograd.backward([loss], [torch.full_like(loss, 1 / microbatches)])
            for (given, _), (_, value) in zip(graph[:0:-1], graph[-2::-1], strict=True):
                torch.autograd.backward([value], [given.grad])
        for update in updates:
            update.step()
            update.zero_grad()

    return step


def main() -> int:
    failed: list[str] = []
    lines = ["| m | contender | of the limit, median (least to most) |", "| ---: | --- | ---: |"]
    for microbatches in MICROBATCHES:
        ranks = weft.launch(throughput, microbatches, ranks=2, timeout=900.0)
        ratios = {
            name: [
                2 * min(rate for rate, _ in both) / sum(limit for _, limit in both)
                for both in zip(*(rank[name] for rank in ranks), strict=True)
            ]
            for name in ranks[0]
        }
        best = max(statistics.median(some) for name, some in ratios.items() if name.startswith("torch"))
        for name, some in ratios.items():
            lines.append(f"| {microbatches} | {name} | {spread(some)} |")
        for name in ("weft 2bw", "weft wpipe"):
            reached = statistics.median(ratios[name])
            if reached < TARGETS["throughput"] or reached <= best:
                failed.append(f"{name}, m = {microbatches}: {reached:.3f} (torch's best: {best:.3f})")
    lines += ["", "| schedule | measured over simulated, eight ranks |", "| --- | ---: |"]
    measured = weft.launch(paced, ranks=PACED_RANKS, timeout=300.0)
    for name in PACED:
        some = [min(all_ranks) for all_ranks in zip(*(rank[name] for rank in measured), strict=True)]
        lines.append(f"| {name} | {spread(some, 3)} |")
        if statistics.median(some) < TARGETS["paced"]:
            failed.append(f"paced {name}: {statistics.median(some):.3f}")
    lines += ["", "| schedule | microseconds an action |", "| --- | ---: |"]
    for name, some in engine().items():
        lines.append(f"| {name} | {spread(some, 0)} |")
        if statistics.median(some) > TARGETS["engine"]:
            failed.append(f"engine {name}: {statistics.median(some):.0f} us")
    lines += ["", f"{ROUNDS} interleaved rounds (paced: 3), {environment('torch')}"]
    text = "\n".join(lines)
    print(text)
    if "--write" in sys.argv[1:]:
        write(README, text)
    for one in failed:
        print(f"missed: {one}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
