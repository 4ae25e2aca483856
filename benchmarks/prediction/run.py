"""What weight prediction brings, and what it costs.

    learning   eight virtual ranks learn to predict the next character: the loss of every method beside that of
               synchronous training, from the same start on the same batches
    cost       two real ranks: throughput with prediction over without, in windows that take turns; and what it holds

Ends with 1 if a target of the cost is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from benchmarks.writing import environment, spread, write
from weft.bench.layers import TASKS

README = Path(__file__).parent / "README.md"
EXACT, PUBLISHED = {"versions": "exact"}, {"versions": "published"}

# Learning

RANKS, SEEDS, UPDATES = 8, (0, 1, 2), 150
SETTINGS = ((2, 4e-3), (8, 4e-3), (2, 1.6e-2))  # micro-batches, learning rate
SYNCHRONOUS = "synchronous (`1f1b`)"
SAMPLES, CONTEXT, SIZE, HEADS = 16, 32, 32, 2
METHODS: dict[str, tuple[str, dict[str, str] | None]] = {
    SYNCHRONOUS: ("1f1b", None),
    "stale": ("stale", None),
    "stashed (`pipedream`)": ("pipedream", None),
    "`2bw`": ("2bw", None),
    "`xpipe`, published": ("xpipe", PUBLISHED),
    "`xpipe`, exact": ("xpipe", EXACT),
    "`xpipe`, exact, decayed": ("xpipe", EXACT | {"extrapolation": "decayed"}),
    "`spectrain`": ("spectrain", PUBLISHED),
    "`pipeoptim`": ("pipeoptim", PUBLISHED),
    "`wpipe`": ("wpipe", None),
    "`wpipe`, published": ("wpipe", PUBLISHED),
    "`wpipe`, exact": ("wpipe", EXACT),
}


class Embed(nn.Module):
    """Characters and places to vectors."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, SIZE), nn.Parameter(0.02 * torch.randn(CONTEXT, SIZE))

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.characters(text) + self.places
        return result


class Attention(nn.Module):
    """To what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, value: Tensor) -> Tensor:
        parts = self.into(self.norm(value)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, held = parts.unbind()
        found = nn.functional.scaled_dot_product_attention(query, key, held, is_causal=True)
        result: Tensor = value + self.out(found.transpose(1, 2).flatten(2))
        return result


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = value + self.out(nn.functional.gelu(self.into(self.norm(value))))
        return result


def language_model(characters: int, seed: int) -> nn.Sequential:
    """Seven transformer layers that can be cut in two, so that there are sixteen parts."""
    torch.manual_seed(seed)
    layers = (layer() for _ in range(RANKS - 1) for layer in (Attention, Perceptron))
    return nn.Sequential(Embed(characters), *layers, nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, characters)))


def characters_of(folder: Path | None) -> tuple[str, Tensor]:
    """The text's name, and its characters as numbers from 0: tiny Shakespeare, or Python's own library."""
    if folder is not None:
        name, text = "tiny Shakespeare", (folder / "text/tinyshakespeare.txt").read_bytes()
    else:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        name, text = "Python's library", b"".join(file.read_bytes() for file in files)
    return name, torch.unique(torch.frombuffer(bytearray(text), dtype=torch.uint8), return_inverse=True)[1]


def batches(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (SAMPLES,), generator=generator)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def stale(microbatches: int) -> weft.Schedule:
    """Asynchronous 1F1B at the newest weights in both passes: nothing is stashed, nothing predicted."""
    order = weft.schedule("pipeoptim", stages=RANKS, microbatches=microbatches)
    return weft.Schedule(
        name="stale",
        stages=RANKS,
        microbatches=microbatches,
        streams=order.streams,
        weights=weft.Weights(delay=None, backward="newest"),
    )


def final_loss(text: Tensor, method: str, microbatches: int, rate: float, seed: int) -> float:
    """The mean training loss of the last tenth of the updates; infinite if it was not finite before."""
    name, predict = METHODS[method]
    pipe = weft.Pipeline(
        language_model(int(text.max()) + 1, seed),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, fused=True),
        schedule=stale(microbatches) if name == "stale" else name,
        microbatches=microbatches,
        stages=RANKS,
        predict=predict,
    )
    losses: dict[int, float] = {}
    try:
        steps = range(UPDATES + RANKS // microbatches + 1)  # until the last update is made everywhere
        for _, batch in zip(steps, batches(text, seed), strict=False):
            result = pipe.step(*batch)
            if result.loss is not None and result.minibatch is not None:
                losses[result.minibatch] = result.loss
    except weft.WeftError:
        return float("inf")
    return statistics.mean(losses[number] for number in range(UPDATES - UPDATES // 10, UPDATES))


Losses: TypeAlias = "dict[tuple[str, int, float], list[float]]"  # by method and setting, one a seed


def learning(text: Tensor) -> Losses:
    """The final losses of every method that takes so many micro-batches."""
    losses: Losses = {}
    for microbatches, rate in SETTINGS:
        for method, (name, _) in METHODS.items():
            if microbatches >= RANKS or name not in ("2bw", "wpipe"):
                some = [final_loss(text, method, microbatches, rate, seed) for seed in SEEDS]
                losses[method, microbatches, rate] = some
                print(f"{method}, m = {microbatches}, rate {rate}: {spread(some, 3)}", file=sys.stderr, flush=True)
    return losses


def learning_table(losses: Losses) -> list[str]:
    heads = [f"m = {microbatches}, rate {rate:g} | to synchronous" for microbatches, rate in SETTINGS]
    lines = [f"| method | {' | '.join(heads)} |", "| --- |" + 2 * len(SETTINGS) * " ---: |"]
    for method in METHODS:
        cells = []
        for setting in SETTINGS:
            some, base = (losses.get((one, *setting)) for one in (method, SYNCHRONOUS))
            if some is None or base is None:
                cells += ["–", "–"]
                continue
            apart = [one - other for one, other in zip(some, base, strict=True)]
            least, middle, most = (f"{one:+.3f}" for one in (min(apart), statistics.median(apart), max(apart)))
            cells += [spread(some, 3), "" if method == SYNCHRONOUS else f"{middle} ({least} to {most})"]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


# Cost

ROUNDS, MICROBATCHES, WINDOW = 5, 4, 4  # a window is so many mini-batches
THROUGHPUT, TELEMETRY, EVERY = 0.97, 0.01, 50
HELD_AT = (10, 50, 100)
OPTIMIZERS: dict[str, Any] = {
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


class Run(NamedTuple):
    """A pipeline to be measured."""

    schedule: str
    versions: str | None = None
    telemetry: int | None = None

    def __str__(self) -> str:
        return f"`{self.schedule}`" + ("" if self.versions is None else f", {self.versions}")

    def pipe(self, model: nn.Sequential, optimizer: str, stages: int | None = None) -> weft.Pipeline:
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


SAMPLED = Run("2bw", "exact", telemetry=1), Run("2bw", "exact")
PAIRS = [  # with, and without
    (Run("2bw", "exact"), Run("2bw")),
    (Run("wpipe", "exact"), Run("wpipe")),
    (Run("wpipe", "published"), Run("wpipe")),
    (Run("xpipe", "exact"), Run("pipedream")),
    (Run("xpipe", "published"), Run("pipedream")),
    SAMPLED,
]


def throughput(optimizer: str, rounds: int) -> list[list[tuple[float, float, float]]]:
    """Of each pair, in each round: the seconds of a window of the plain one, of the other, of the plain one again."""
    batch, _ = TASKS["transformer"].batch(MICROBATCHES)
    pipes = {run: run.pipe(TASKS["transformer"].model(), optimizer) for pair in PAIRS for run in pair}

    def seconds(run: Run) -> float:
        pipes[run].step(batch, batch)  # until the pipeline is full
        begin = time.perf_counter()
        for _ in range(WINDOW):
            pipes[run].step(batch, batch)
        end = time.perf_counter()
        pipes[run].flush()
        dist.barrier()
        return end - begin

    for run in pipes:  # the first updates make the optimizer's state and the buffers
        seconds(run)
    return [[(seconds(plain), seconds(run), seconds(plain)) for _ in range(rounds)] for run, plain in PAIRS]


def held(run: Run, optimizer: str) -> list[float]:
    """The most that a rank holds for predictions after so many updates, in units of a chunk's weights."""
    batch, found = torch.randn(MICROBATCHES, 16), []
    pipe = run.pipe(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), optimizer, stages=2)
    for update in range(1, HELD_AT[-1] + 1):
        pipe.step(batch, batch)
        if update in HELD_AT:
            ranks = [one["bytes"] for one in pipe.report().ranks]
            chunks = len(pipe.schedule.chunks_of(0))
            found.append(max(one["buffers"] / one["weights"] * chunks for one in ranks))
    return found


def cost(rounds: int) -> tuple[list[str], list[str]]:
    """The table, and the targets that are missed."""
    missed: list[str] = []
    lines = ["| optimizer | with | without | throughput, with over without | buffers after 10, 50, 100 updates |"]
    lines += ["| --- | --- | --- | ---: | ---: |"]
    notes = []
    for optimizer in OPTIMIZERS:
        ranks = weft.launch(throughput, optimizer, rounds, ranks=2, timeout=1800.0)
        for (run, plain), *measured in zip(PAIRS, *ranks, strict=True):
            slowest = [[max(window) for window in zip(*both, strict=True)] for both in zip(*measured, strict=True)]
            ratios = [(before + after) / 2 / taken for before, taken, after in slowest]
            if (run, plain) == SAMPLED:
                shares = [100 * (1 / ratio - 1) / EVERY for ratio in ratios]  # every mini-batch was sampled
                notes.append(f"{optimizer}: `telemetry={EVERY}` takes {spread(shares)} % of a step's time.")
                if statistics.median(shares) > 100 * TELEMETRY:
                    missed.append(f"telemetry, {optimizer}: {statistics.median(shares):.2f} %")
                continue
            buffers = held(run, optimizer)
            lines.append(
                f"| {optimizer} | {run} | {plain} | {spread(ratios)} | {', '.join(f'{x:g}' for x in buffers)} |"
            )
            if statistics.median(ratios) < THROUGHPUT:
                missed.append(f"throughput of {run}, {optimizer}: {statistics.median(ratios):.3f}")
            if len(set(buffers)) > 1 or (run.versions == "exact" and buffers[-1] > 1):
                missed.append(f"buffers of {run}, {optimizer}: {buffers}")
    return [*lines, "", *notes], missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with text/tinyshakespeare.txt; else Python's own library")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the throughput")
    parser.add_argument("--part", choices=("learning", "cost"), help="only one part")
    parser.add_argument("--write", action="store_true", help="put what was measured into the README")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, list[str]] = {}
    missed: list[str] = []
    if options.part != "cost":
        name, text = characters_of(options.data)
        told = f"{name}, {len(SEEDS)} seeds, {UPDATES} updates with AdamW, eight virtual ranks; {environment('torch')}."
        tables["learning"] = [*learning_table(learning(text)), "", told]
    if options.part != "learning":
        load = os.getloadavg()[0]
        table, missed = cost(options.rounds)
        told = f"{options.rounds} rounds; processes that wanted a core before: {load:.1f}; {environment('torch')}."
        tables["cost"] = [*table, "", told]
    for name, lines in tables.items():
        print("\n".join(lines), end="\n\n")
        if options.write:
            write(README, "\n".join(lines), name=name)
    for one in missed:
        print(f"missed: {one}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
