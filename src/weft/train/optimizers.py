"""Optimizers by name, and the course of the learning rate over a run."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from weft import user_code
from weft.runtime import cures, optimizers
from weft.runtime.update import takes_names
from weft.train.job import Training

CLASSES: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "nadam": torch.optim.NAdam,
    "nadamw": cures.NAdamW,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "muon": optimizers.MuonAdamW,
}


def optimizer_of(train: Training) -> Callable[[list[Any]], Optimizer]:
    """A function from parameters to the optimizer of a job, with those of its settings that the optimizer takes.

    It is one of named parameters if the optimizer knows names.
    """
    if ":" in train.optimizer:
        function = user_code.load(train.optimizer)
        if takes_names(function):
            return lambda named_parameters: function(named_parameters=named_parameters, lr=train.lr)
        return lambda parameters: function(params=parameters, lr=train.lr)
    make = CLASSES[train.optimizer]
    known = inspect.signature(make).parameters
    given = {"momentum": train.momentum, "betas": tuple(train.betas), "weight_decay": train.weight_decay}
    settings = {name: value for name, value in given.items() if name in known}
    return functools.partial(make, lr=train.lr, **settings)


def scheduler_of(train: Training, updates: int) -> Callable[[Optimizer], LRScheduler]:
    """A function from an optimizer to a scheduler of its learning rate over that many updates."""
    return lambda optimizer: LambdaLR(optimizer, lambda update: rate_factor(train, update, updates))


def rate_factor(train: Training, update: int, updates: int) -> float:
    """The learning rate of an update, as a share of `train.lr`."""
    if update < train.warmup:
        return (update + 1) / (train.warmup + 1)
    done = min(1.0, (update - train.warmup) / max(1, updates - train.warmup))
    fallen = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}[train.decay]
    return 1 - (1 - train.floor) * fallen
