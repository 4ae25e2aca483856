"""GPT-2, two layers per block, in plain PyTorch: `embedding`, `attention0`, `feedforward0` …, `head`.

The weights are those of transformers' GPT2LMHeadModel (see `huggingface`). One linear layer makes queries, keys and
values; causal attention needs no mask tensor.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from weft.train.data_spec import DataSpec
from weft.train.models.options import GPT, initial_std
from weft.train.models.transformer_layers import Linear, Lookup, join_heads, split_heads


def build_gpt(options: GPT, spec: DataSpec) -> nn.Sequential:
    """A model whose layers are initialized as in GPT-2."""
    vocabulary, positions = options.vocabulary or spec.vocabulary, options.positions or spec.context
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["embedding"] = Embedding(vocabulary, positions, options)
    for number in range(options.layers):
        layers[f"attention{number}"] = Attention(options)
        layers[f"feedforward{number}"] = FeedForward(options)
    layers["head"] = head = Head(vocabulary, options)
    if options.tied:
        head.output.weight = layers["embedding"].tokens.weight  # type: ignore[union-attr, assignment]
    return nn.Sequential(layers)


def residual_std(options: GPT) -> float:
    """The standard deviation of the weights that end a residual branch: a block has two."""
    return initial_std(options) / math.sqrt(2 * options.layers)


class Embedding(nn.Module):
    """The sum of token and position embeddings."""

    def __init__(self, vocabulary: int, positions: int, options: GPT) -> None:
        super().__init__()
        std = initial_std(options)
        self.tokens = Lookup(vocabulary, options.width, std=std)
        self.positions = Lookup(positions, options.width, std=std)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return hidden


class Attention(nn.Module):
    """The first half of a block: residual causal multi-head attention with pre-norm."""

    def __init__(self, options: GPT) -> None:
        super().__init__()
        self.heads = options.heads
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)
        self.qkv = Linear(options.width, 3 * options.width, std=initial_std(options))
        self.projection = Linear(options.width, options.width, std=residual_std(options))
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = split_heads(self.qkv(self.norm(hidden)), self.heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout.p if self.training else 0.0, is_causal=True
        )
        return hidden + self.dropout(self.projection(join_heads(mixed)))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """The second half of a block: the residual feed-forward layers of each token with pre-norm."""

    def __init__(self, options: GPT) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)
        self.up = Linear(options.width, options.inner, std=initial_std(options))
        self.down = Linear(options.inner, options.width, std=residual_std(options))
        self.dropout = nn.Dropout(options.dropout)
        self.approximate = "none" if options.activation == "gelu" else "tanh"

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.up(self.norm(hidden)), approximate=self.approximate)
        return hidden + self.dropout(self.down(inner))  # type: ignore[no-any-return]


class Head(nn.Module):
    """The final norm and the logits over the vocabulary."""

    def __init__(self, vocabulary: int, options: GPT) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)
        self.output = Linear(options.width, vocabulary, std=initial_std(options), bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(hidden))
        return logits
