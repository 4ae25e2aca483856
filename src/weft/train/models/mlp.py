"""A multi-layer perceptron: `layer0` …, `head`."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from weft.train.data_spec import DataSpec
from weft.train.models.options import MLP


def build_mlp(options: MLP, spec: DataSpec) -> nn.Sequential:
    """A model with PyTorch's default initialization."""
    features = spec.features if spec.form == "values" else spec.channels * spec.size**2
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(options.layers):
        layers[f"layer{number}"] = Layer(options.width if number else features, options)
    layers["head"] = nn.Linear(options.width, spec.classes)
    return nn.Sequential(layers)


class Layer(nn.Module):
    """A linear layer and ReLU; an image is flattened first."""

    def __init__(self, features: int, options: MLP) -> None:
        super().__init__()
        self.linear = nn.Linear(features, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear(values.flatten(1)).relu())
        return out
