"""The models whose memory is measured: BERTs for pairs of texts, cut so that every chunk has as many half blocks.

Their inputs are random: bytes do not depend on the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from weft.train.models import Net

MIB = 2**20
SAMPLES = (2, 4)  # of micro-batches that run alone: bytes are linear in them (a single sample has other strides)
RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, the batch whose bytes are measured, and the limit of a rank in the search of the largest batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    limit: int
    limits: tuple[int, ...]  # whose largest batch is simulated
    tried: bool  # whether the largest batch is searched


METHODS = ("1f1b", "2bw", "wpipe")
SIMULATED = ("2bw", "paci", "wpipe", "wpipe fresh True", "weave slack 0", "weave")  # with twice the micro-batches
FORMS: dict[str, dict[str, Any]] = {  # arguments of the pipeline
    "": {},
    "recompute": {"recompute": True},
    "recompute by layer": {"recompute": "layer"},
    "bf16, recompute by layer": {"precision": "bf16", "recompute": "layer"},
}
SMALL = Size(
    layers=8,
    width=256,
    heads=4,
    vocabulary=8192,
    context=128,
    batch=32,
    limit=200 * MIB,
    limits=(200 * MIB, 280 * MIB, 400 * MIB),
    tried=False,
)
BASE = Size(
    layers=12,
    width=768,
    heads=12,
    vocabulary=30522,
    context=128,
    batch=4,
    limit=1300 * MIB,
    limits=(1200 * MIB, 1300 * MIB, 1600 * MIB),
    tried=False,
)
TINY = Size(
    layers=4, width=64, heads=2, vocabulary=512, context=32, batch=16, limit=24 * MIB, limits=(24 * MIB,), tried=False
)


def build(size: Size) -> Net:
    """The model, on the meta device, and its loss."""
    from weft.train.data_spec import DataSpec
    from weft.train.models import BERT, build_model

    options = BERT(name="bert", layers=size.layers, width=size.width, heads=size.heads)
    spec = DataSpec(task="classification", form="pairs", vocabulary=size.vocabulary, context=size.context, classes=2)
    return build_model(options, spec, seed=0)


def balance(size: Size, chunks: int) -> list[int]:
    """Layers of each chunk: equal numbers of half blocks, plus the embedding in the first, the head in the last."""
    halves = 2 * size.layers
    counts = [halves * (chunk + 1) // chunks - halves * chunk // chunks for chunk in range(chunks)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def linear(values: list[float], samples: float) -> float:
    """The value for a number of samples, from those for `SAMPLES`."""
    (first, second), (low, high) = SAMPLES, values
    return low + (high - low) * (samples - first) / (second - first)


def make_batch(size: Size, samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """Pairs and their classes."""
    import torch

    generator = torch.Generator().manual_seed(samples)
    shape = (samples, size.context)
    pairs = {
        "input_ids": torch.randint(size.vocabulary, shape, generator=generator),
        "token_type_ids": torch.randint(2, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }
    return pairs, torch.randint(2, (samples,), generator=generator)


def make_optimizer(params: list[nn.Parameter]) -> Any:
    """Fused AdamW: the other forms need temporary tensors as large as the largest parameter."""
    import torch

    return torch.optim.AdamW(params, lr=RATE, fused=True)
