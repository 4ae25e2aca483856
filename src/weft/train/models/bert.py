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
from weft.train.models.gpt import join_heads, split_heads
from weft.train.models.options import BERT, initial_std

Carry: TypeAlias = "tuple[Tensor, Tensor]"


def positions_of(options: BERT, spec: DataSpec) -> int:
    """At least 512, as in published models, so that their weights fit for every context of the data."""
    return options.positions or max(512, spec.context)


def build_bert(options: BERT, spec: DataSpec) -> nn.Sequential:
    """A model with random weights, initialized as in BERT."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["embedding"] = Embedding(options.vocabulary or spec.vocabulary, positions_of(options, spec), options)
    for number in range(options.layers):
        layers[f"attention{number}"] = Attention(options)
        layers[f"feedforward{number}"] = FeedForward(options)
    layers["head"] = Head(spec.classes, options)
    model = nn.Sequential(layers)
    std = initial_std(options)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


class Embedding(nn.Module):
    """The normalized sum of token, position and segment embeddings. Takes the dict of the data."""

    def __init__(self, vocabulary: int, positions: int, options: BERT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, options.width)
        self.positions = nn.Embedding(positions, options.width)
        self.segments = nn.Embedding(2, options.width)
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
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.projection = nn.Linear(options.width, options.width)
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
        self.up = nn.Linear(options.width, options.inner)
        self.down = nn.Linear(options.inner, options.width)
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
        self.pooler = nn.Linear(options.width, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.classifier = nn.Linear(options.width, classes)

    def forward(self, carry: Carry) -> Tensor:
        first = self.pooler(carry[0][:, 0]).tanh()
        logits: Tensor = self.classifier(self.dropout(first))
        return logits
