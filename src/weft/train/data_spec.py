"""What a model has to know about its training data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The form of inputs and targets; sizes that do not apply are 0.

    task    "language" (a target is the next token), "classification" (a class) or "regression" (numbers)
    form    "tokens" (whole numbers, [context]), "pairs" (a dict of input_ids, token_type_ids and
            attention_mask, each [context]), "images" ([channels, size, size]) or "values" ([features])
    """

    task: str
    form: str
    vocabulary: int = 0
    context: int = 0
    classes: int = 0  # of a classification; of a regression, numbers of a target
    channels: int = 0
    size: int = 0
    features: int = 0
