"""Data of each form for the tests of all models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import weft
from weft.train.data_spec import DataSpec
from weft.train.models import Net, build_model

TEXT = DataSpec(task="language", form="tokens", vocabulary=50, context=12)
PAIRS = DataSpec(task="classification", form="pairs", vocabulary=50, context=12, classes=3)
IMAGES = DataSpec(task="classification", form="images", channels=3, size=32, classes=10)
VALUES = DataSpec(task="regression", form="values", features=5, classes=2)


def real_net(options: Any, spec: DataSpec, *, seed: int) -> Net:
    """A net whose model has its weights, as a pipeline would make them."""
    net = build_model(options, spec, seed=seed)
    weft.materialize(net.model, weights=net.weights, seed=seed)
    return net


def batch(spec: DataSpec, samples: int, *, seed: int = 0) -> tuple[Any, Tensor]:
    """Random inputs and targets; pairs have different lengths and are padded."""
    random = torch.Generator().manual_seed(seed)
    if spec.form == "images":
        inputs: Any = torch.randn(samples, spec.channels, spec.size, spec.size, generator=random)
    elif spec.form == "values":
        inputs = torch.randn(samples, spec.features, generator=random)
    else:
        inputs = torch.randint(spec.vocabulary, (samples, spec.context), generator=random)
    if spec.form == "pairs":
        places = torch.arange(spec.context).expand(samples, -1)
        lengths = torch.randint(2, spec.context + 1, (samples, 1), generator=random)
        inputs = {
            "input_ids": inputs,
            "token_type_ids": (places >= lengths // 2).long(),
            "attention_mask": (places < lengths).long(),
        }
    if spec.task == "language":
        return inputs, torch.randint(spec.vocabulary, (samples, spec.context), generator=random)
    if spec.task == "regression":
        return inputs, torch.randn(samples, spec.classes, generator=random)
    return inputs, torch.randint(spec.classes, (samples,), generator=random)
