"""A small language model on the source code of Python's standard library, trained by two ranks with WPipe.

    python examples/train.py [schedule [mini-batches]]

It takes about half a minute on two cores. Under torchrun it joins the existing ranks:

    torchrun --nproc-per-node 2 examples/train.py
"""

import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import weft

WIDTH, CONTEXT, LAYERS = 96, 64, 6
BATCH, MICROBATCHES = 32, 4


class Embed(nn.Module):
    """Embeddings of bytes and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return result


class Layer(nn.TransformerEncoderLayer):
    """Causal self-attention, then a perceptron."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)

    def forward(self, value: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(value.shape[1], device=value.device)
        return super().forward(value, src_mask=mask, is_causal=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)  # the same model on every rank
    layers = (Layer() for _ in range(LAYERS))
    return nn.Sequential(Embed(), *layers, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Random pieces of the text, the same on every rank; the target is the next byte."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
        yield pieces[:, :-1], pieces[:, 1:]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(schedule: str = "wpipe", minibatches: str = "120") -> None:
    pipe = weft.Pipeline(
        model(),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        schedule=schedule,
        microbatches=MICROBATCHES,
        cure=weft.cures.Optimistic(),  # corrects for late weights, and helps synchronous schedules, too
    )
    first = int(os.environ["RANK"]) == 0
    losses: dict[int, float] = {}
    for number, (inputs, targets) in zip(range(1, int(minibatches) + 1), batches(), strict=False):
        result = pipe.step(inputs, targets)
        if result.loss is not None and result.minibatch is not None:
            losses[result.minibatch] = result.loss
        if first and number % 20 == 0:
            recent = statistics.mean(list(losses.values())[-20:])
            print(f"mini-batch {number:4}  loss {recent:.3f}  ({recent / math.log(2):.2f} bits per byte)", flush=True)
    report = pipe.report()
    if first:
        print(report)


if __name__ == "__main__":
    weft.launch(train, *sys.argv[1:], ranks=int(os.environ.get("WORLD_SIZE", "2")))
