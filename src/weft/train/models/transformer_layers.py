"""Layers that the transformers share: initial weights are normal, initial biases are zero."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer whose initial weights have a given standard deviation."""

    def __init__(self, inputs: int, outputs: int, *, std: float, bias: bool = True) -> None:
        self.std = std  # first, because the constructor calls `reset_parameters`
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Lookup(nn.Embedding):
    """A table of embeddings whose initial weights have a given standard deviation."""

    def __init__(self, count: int, width: int, *, std: float) -> None:
        self.std = std
        super().__init__(count, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values as views, each [batch, heads, tokens, width of a head]."""
    batch, tokens, width = qkv.shape
    parts = qkv.view(batch, tokens, 3, heads, width // (3 * heads)).unbind(2)
    return tuple(part.transpose(1, 2) for part in parts)


def join_heads(mixed: Tensor) -> Tensor:
    """The reverse: [batch, heads, tokens, width of a head] to [batch, tokens, width]."""
    return mixed.transpose(1, 2).flatten(2)
