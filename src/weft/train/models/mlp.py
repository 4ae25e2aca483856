"""Linear layers one after the other: `layer0` …, `head`."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from weft.train.facts import Facts
from weft.train.models.options import MLP


def build_mlp(options: MLP, facts: Facts) -> nn.Sequential:
    """A model with PyTorch's usual random weights."""
    given = facts.features if facts.form == "values" else facts.channels * facts.size**2
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(options.layers):
        layers[f"layer{number}"] = Layer(options.width if number else given, options)
    layers["head"] = nn.Linear(options.width, facts.classes)
    return nn.Sequential(layers)


class Layer(nn.Module):
    """A linear layer and ReLU; an image is flattened first."""

    def __init__(self, given: int, options: MLP) -> None:
        super().__init__()
        self.linear = nn.Linear(given, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear(values.flatten(1)).relu())
        return out
