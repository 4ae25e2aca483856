"""A model and data of one's own under `weft train`: which arm of a spiral is a point on?

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
    """A layer that hands on its input, with something added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.outer(functional.gelu(self.inner(self.norm(values))))
        return values + added


def residual(spec: DataSpec, width: int = 64, depth: int = 8) -> Net:
    """A list of layers, a loss and metrics; `spec` is what the data says of itself."""
    layers = [nn.Linear(spec.features, width), *(Residual(width) for _ in range(depth))]
    model = nn.Sequential(*layers, nn.Linear(width, spec.classes))
    return Net(model=model, loss_fn=smoothed, metrics={"accuracy": accuracy})


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, label_smoothing=0.1)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).float().mean()


class Points:
    """What weft asks of a data set: a spec, a fingerprint, a length, and batches by the numbers of their samples."""

    def __init__(self, samples: int, arms: int, seed: int) -> None:
        chance = np.random.default_rng(seed)
        self._arm = chance.integers(arms, size=samples)
        along = chance.uniform(0.2, 1.0, size=samples)
        turn = 2 * np.pi * (along + self._arm / arms)
        self._place = np.stack([along * np.cos(turn), along * np.sin(turn)], axis=1).astype(np.float32)
        self.spec = DataSpec(task="classification", form="values", features=2, classes=arms)
        self.fingerprint = hashlib.sha256(self._arm.tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._arm)

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> Tensor:
        """Of the same numbers and draw, the same batch: chance comes from these alone."""
        place = self._place[indices]
        if draw is not None:  # in training, a little noise
            place = place + np.random.default_rng((draw.seed, draw.epoch, int(indices[0]))).normal(0, 0.01, place.shape)
        return torch.from_numpy(place.astype(np.float32))

    def targets(self, indices: np.ndarray, draw: Draw | None) -> Tensor:
        return torch.from_numpy(self._arm[indices])


def spirals(arms: int = 3, samples: int = 6000) -> tuple[Points, Points]:
    """Training and validation data."""
    return Points(samples, arms, seed=1), Points(samples // 10, arms, seed=2)
