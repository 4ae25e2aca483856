"""Your own model and data under `weft train`: a classifier of points on the arms of a spiral.

weft train --set model.name=examples/own_model.py:residual --set data.name=examples/own_model.py:spirals
"""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.train.data import Draw
from weft.train.data_spec import DataSpec
from weft.train.models import Net


class Residual(nn.Module):
    """A residual layer: its input plus a small perceptron of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.outer(functional.gelu(self.inner(self.norm(values))))
        return values + added


def residual(spec: DataSpec, width: int = 64, depth: int = 8) -> Net:
    """Layers, a loss and metrics; `spec` describes the data."""
    layers = [nn.Linear(spec.features, width), *(Residual(width) for _ in range(depth))]
    model = nn.Sequential(*layers, nn.Linear(width, spec.classes))
    return Net(model=model, loss_fn=smoothed, metrics={"accuracy": accuracy})


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, label_smoothing=0.1)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


class Points:
    """The interface of a data set: spec, fingerprint, length, and batches by the indices of their samples."""

    def __init__(self, samples: int, arms: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._arm = generator.integers(arms, size=samples)
        radius = generator.uniform(0.2, 1.0, size=samples)
        angle = 2 * np.pi * (radius + self._arm / arms)
        self._points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
        self.spec = DataSpec(task="classification", form="values", features=2, classes=arms)
        self.fingerprint = hashlib.sha256(self._arm.tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._arm)

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> Tensor:
        """A function of its arguments alone: all randomness is seeded from `draw` and `indices`."""
        points = self._points[indices]
        if draw is not None:  # training: add a little noise
            generator = np.random.default_rng((draw.seed, draw.epoch, int(indices[0])))
            points = points + generator.normal(0, 0.01, points.shape)
        return torch.from_numpy(points.astype(np.float32))

    def targets(self, indices: np.ndarray, draw: Draw | None) -> Tensor:
        return torch.from_numpy(self._arm[indices])


def spirals(arms: int = 3, samples: int = 6000) -> tuple[Points, Points]:
    """Training and validation data."""
    return Points(samples, arms, seed=1), Points(samples // 10, arms, seed=2)
