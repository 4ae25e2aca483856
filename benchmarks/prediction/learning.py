"""What prediction does to learning: eight virtual ranks learn to predict the next character.

Every method has the same initial weights and batches as synchronous training.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import weft
from benchmarks.harness import data_folder, require_files
from benchmarks.prediction.pages import METHODS
from weft.errors import Diverged

RANKS = 8
SAMPLES, CONTEXT, SIZE, HEADS = 16, 32, 32, 2
SHAKESPEARE = "text/tinyshakespeare.txt"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Micro-batches, learning rate and updates of a run."""

    microbatches: int
    rate: float
    updates: int

    def supports(self, method: str) -> bool:
        """2bw and wpipe need a micro-batch for each rank."""
        schedule, _ = METHODS[method]
        return self.microbatches >= RANKS or schedule not in ("2bw", "wpipe")


class Embedding(nn.Module):
    """Characters and positions."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, SIZE)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, SIZE))

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.characters(text) + self.positions
        return result


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.into(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Perceptron(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.out(nn.functional.gelu(self.into(self.norm(hidden))))
        return result


def language_model(characters: int, seed: int) -> nn.Sequential:
    """Seven transformer layers that can be cut in two: sixteen parts, with embedding and head."""
    torch.manual_seed(seed)
    embedding = Embedding(characters)
    layers = [layer() for _ in range(RANKS - 1) for layer in (Attention, Perceptron)]
    return nn.Sequential(embedding, *layers, nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, characters)))


def read_text(*, quick: bool) -> tuple[str, Tensor]:
    """The name of a text, and its characters as numbers from 0: tiny Shakespeare; quick: Python's own library."""
    if quick:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        name, text = "Python's library", b"".join(file.read_bytes() for file in files)
    else:
        require_files(data_folder(), [SHAKESPEARE])
        name, text = "tiny Shakespeare", (data_folder() / SHAKESPEARE).read_bytes()
    return name, torch.unique(torch.frombuffer(bytearray(text), dtype=torch.uint8), return_inverse=True)[1]


def _batches(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (SAMPLES,), generator=generator)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def stale_schedule(microbatches: int) -> weft.Schedule:
    """Asynchronous 1F1B at the newest weights in both passes, without stash and prediction."""
    order = weft.schedule("pipeoptim", stages=RANKS, microbatches=microbatches)
    return weft.Schedule(
        name="stale",
        stages=RANKS,
        microbatches=microbatches,
        streams=order.streams,
        weights=weft.Weights(delay=None, backward="newest"),
    )


def final_loss(text: Tensor, method: str, setting: Setting, seed: int) -> float | None:
    """The mean training loss of the last tenth of the updates; None if the run diverged."""
    name, predict = METHODS[method]
    pipe = weft.Pipeline(
        language_model(int(text.max()) + 1, seed),
        loss_fn=_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=setting.rate, fused=True),
        schedule=stale_schedule(setting.microbatches) if name == "stale" else name,
        microbatches=setting.microbatches,
        stages=RANKS,
        predict=predict,
    )
    losses: dict[int, float] = {}
    steps = range(setting.updates + RANKS // setting.microbatches + 1)  # until the last update is made on all ranks
    try:
        for _, batch in zip(steps, _batches(text, seed), strict=False):
            result = pipe.step(*batch)
            if result.loss is not None and result.minibatch is not None:
                losses[result.minibatch] = result.loss
    except Diverged:
        return None
    finally:
        pipe.close()
    last = range(setting.updates - max(1, setting.updates // 10), setting.updates)
    return statistics.mean(losses[number] for number in last)
