"""Data of each form, for the tests of all models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.train.facts import Facts

TEXT = Facts(task="language", form="tokens", vocabulary=50, context=12)
PAIRS = Facts(task="classification", form="pairs", vocabulary=50, context=12, classes=3)
IMAGES = Facts(task="classification", form="images", channels=3, size=32, classes=10)
VALUES = Facts(task="regression", form="values", features=5, classes=2)


def batch(facts: Facts, samples: int, *, seed: int = 0) -> tuple[Any, Tensor]:
    """Random inputs and targets; pairs are padded, each to another length."""
    made = torch.Generator().manual_seed(seed)
    if facts.form == "images":
        inputs: Any = torch.randn(samples, facts.channels, facts.size, facts.size, generator=made)
    elif facts.form == "values":
        inputs = torch.randn(samples, facts.features, generator=made)
    else:
        inputs = torch.randint(facts.vocabulary, (samples, facts.context), generator=made)
    if facts.form == "pairs":
        places = torch.arange(facts.context).expand(samples, -1)
        lengths = torch.randint(2, facts.context + 1, (samples, 1), generator=made)
        inputs = {
            "input_ids": inputs,
            "token_type_ids": (places >= lengths // 2).long(),
            "attention_mask": (places < lengths).long(),
        }
    if facts.task == "language":
        return inputs, torch.randint(facts.vocabulary, (samples, facts.context), generator=made)
    if facts.task == "regression":
        return inputs, torch.randn(samples, facts.classes, generator=made)
    return inputs, torch.randint(facts.classes, (samples,), generator=made)
