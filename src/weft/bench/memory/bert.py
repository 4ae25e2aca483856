"""The models whose memory is measured: BERTs for pairs of texts, cut so that every chunk has as many half blocks.

What is fed to them is made up: bytes do not depend on the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from weft.train.models import Net

MIB = 2**20
RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, the batch whose bytes are told, and the bytes that a rank may take in search of the largest one."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    limit: int
    tried: tuple[bool, ...]  # the largest batch is searched for without recompute, and with it


SMALL = Size(layers=8, width=256, heads=4, vocabulary=8192, context=128, batch=32, limit=200 * MIB, tried=(False, True))
BASE = Size(layers=12, width=768, heads=12, vocabulary=30522, context=128, batch=8, limit=1300 * MIB, tried=(False,))
TINY = Size(layers=4, width=64, heads=2, vocabulary=512, context=32, batch=16, limit=24 * MIB, tried=())


def build(size: Size) -> Net:
    """The model with random weights, and its loss."""
    from weft.train.facts import Facts
    from weft.train.models import build_model
    from weft.train.models.options import BERT

    options = BERT(name="bert", layers=size.layers, width=size.width, heads=size.heads)
    facts = Facts(task="classification", form="pairs", vocabulary=size.vocabulary, context=size.context, classes=2)
    return build_model(options, facts, seed=0)


def balance(size: Size, chunks: int) -> list[int]:
    """Layers of each chunk: equal parts of the blocks' halves, the embedding in the first, the head in the last."""
    halves = 2 * size.layers
    counts = [halves * (chunk + 1) // chunks - halves * chunk // chunks for chunk in range(chunks)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def batch(size: Size, samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """Pairs and their classes."""
    import torch

    made = torch.Generator().manual_seed(samples)
    shape = (samples, size.context)
    pairs = {
        "input_ids": torch.randint(size.vocabulary, shape, generator=made),
        "token_type_ids": torch.randint(2, shape, generator=made),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
    return pairs, torch.randint(2, (samples,), generator=made)


def optimizer(params: list[nn.Parameter]) -> Any:
    """AdamW in one kernel: the others take temporary tensors as large as the largest parameter."""
    import torch

    return torch.optim.AdamW(params, lr=RATE, fused=True)
