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


def build_gpt(options: GPT, spec: DataSpec) -> nn.Sequential:
    """A model with random weights, initialized as in GPT-2."""
    vocabulary, positions = options.vocabulary or spec.vocabulary, options.positions or spec.context
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["embedding"] = Embedding(vocabulary, positions, options)
    for number in range(options.layers):
        layers[f"attention{number}"] = Attention(options)
        layers[f"feedforward{number}"] = FeedForward(options)
    layers["head"] = head = Head(vocabulary, options)
    model = nn.Sequential(layers)
    std = initial_std(options)
    for name, parameter in model.named_parameters():
        if name.endswith(("projection.weight", "down.weight")):  # they end the two residual branches of a block
            nn.init.normal_(parameter, std=std / math.sqrt(2 * options.layers))
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    if options.tied:
        head.output.weight = layers["embedding"].tokens.weight  # type: ignore[union-attr, assignment]
    return model


class Embedding(nn.Module):
    """The sum of token and position embeddings."""

    def __init__(self, vocabulary: int, positions: int, options: GPT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, options.width)
        self.positions = nn.Embedding(positions, options.width)
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
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.projection = nn.Linear(options.width, options.width)
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
        self.up = nn.Linear(options.width, options.inner)
        self.down = nn.Linear(options.inner, options.width)
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
        self.output = nn.Linear(options.width, vocabulary, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(hidden))
        return logits


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values as views, each [batch, heads, tokens, width of a head]."""
    batch, tokens, width = qkv.shape
    parts = qkv.view(batch, tokens, 3, heads, width // (3 * heads)).unbind(2)
    return tuple(part.transpose(1, 2) for part in parts)


def join_heads(mixed: Tensor) -> Tensor:
    """The reverse: [batch, heads, tokens, width of a head] to [batch, tokens, width]."""
    return mixed.transpose(1, 2).flatten(2)
