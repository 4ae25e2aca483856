"""BERT with a classifier, two layers per block, in plain PyTorch: `embedding`, `attention0`, `feedforward0` … `head`.

The weights are those of transformers' BertForSequenceClassification (see `huggingface`). Layers pass on a pair: the
hidden states, and a mask of the tokens that are not padding.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from weft.train.data_spec import DataSpec
from weft.train.models.options import BERT, initial_std
from weft.train.models.transformer_layers import Linear, Lookup, join_heads, split_heads

Carry: TypeAlias = "tuple[Tensor, Tensor]"


def positions_of(options: BERT, spec: DataSpec) -> int:
    """At least 512, as in published models, so that their weights fit for every context of the data."""
    return options.positions or max(512, spec.context)


def build_bert(options: BERT, spec: DataSpec) -> nn.Sequential:
    """A model whose layers are initialized as in BERT."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["embedding"] = Embedding(options.vocabulary or spec.vocabulary, positions_of(options, spec), options)
    for number in range(options.layers):
        layers[f"attention{number}"] = Attention(options)
        layers[f"feedforward{number}"] = FeedForward(options)
    layers["head"] = Head(spec.classes, options)
    return nn.Sequential(layers)


class Embedding(nn.Module):
    """The normalized sum of token, position and segment embeddings. Takes the dict of the data."""

    def __init__(self, vocabulary: int, positions: int, options: BERT) -> None:
        super().__init__()
        std = initial_std(options)
        self.tokens = Lookup(vocabulary, options.width, std=std)
        self.positions = Lookup(positions, options.width, std=std)
        self.segments = Lookup(2, options.width, std=std)
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, pairs: dict[str, Tensor]) -> Carry:
        tokens = pairs["input_ids"]
        hidden = self.tokens(tokens) + self.segments(pairs["token_type_ids"])
        hidden = hidden + self.positions.weight[: tokens.shape[1]]
        return self.dropout(self.norm(hidden)), pairs["attention_mask"].bool()


class Attention(nn.Module):
    """The first half of a block: residual multi-head attention to all tokens except padding."""

    def __init__(self, options: BERT) -> None:
        super().__init__()
        self.heads = options.heads
        std = initial_std(options)
        self.qkv = Linear(options.width, 3 * options.width, std=std)
        self.projection = Linear(options.width, options.width, std=std)
        self.dropout = nn.Dropout(options.dropout)
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)

    def forward(self, carry: Carry) -> Carry:
        hidden, real = carry
        query, key, value = split_heads(self.qkv(hidden), self.heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=real[:, None, None, :], dropout_p=self.dropout.p if self.training else 0.0
        )
        return self.norm(hidden + self.dropout(self.projection(join_heads(mixed)))), real


class FeedForward(nn.Module):
    """The second half of a block: the residual feed-forward layers of each token."""

    def __init__(self, options: BERT) -> None:
        super().__init__()
        std = initial_std(options)
        self.up = Linear(options.width, options.inner, std=std)
        self.down = Linear(options.inner, options.width, std=std)
        self.dropout = nn.Dropout(options.dropout)
        self.norm = nn.LayerNorm(options.width, eps=options.epsilon)

    def forward(self, carry: Carry) -> Carry:
        hidden, real = carry
        inner = functional.gelu(self.up(hidden))
        return self.norm(hidden + self.dropout(self.down(inner))), real


class Head(nn.Module):
    """The pooler and the classifier of the first token."""

    def __init__(self, classes: int, options: BERT) -> None:
        super().__init__()
        std = initial_std(options)
        self.pooler = Linear(options.width, options.width, std=std)
        self.dropout = nn.Dropout(options.dropout)
        self.classifier = Linear(options.width, classes, std=std)

    def forward(self, carry: Carry) -> Tensor:
        first = self.pooler(carry[0][:, 0]).tanh()
        logits: Tensor = self.classifier(self.dropout(first))
        return logits
