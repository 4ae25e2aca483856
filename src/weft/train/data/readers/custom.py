"""Data of a user's own function."""

from __future__ import annotations

import inspect
from typing import Any

from weft.errors import WeftError
from weft.train.data.base import Data
from weft.train.data.options import CustomData
from weft.user_code import load

PARTS = ("spec", "fingerprint", "inputs", "targets", "__len__")


def read(options: CustomData, *, seed: int, inputs: bool, targets: bool) -> Data:
    """Call the function with its options; it is also given seed, inputs and targets where it takes them by name."""
    function = load(options.name)
    known = inspect.signature(function).parameters
    offered = {"seed": seed, "inputs": inputs, "targets": targets}
    made: Any = function(**{key: value for key, value in offered.items() if key in known} | options.options)
    data = made if isinstance(made, Data) else None
    if data is None:
        if not isinstance(made, tuple) or len(made) != 2:
            raise WeftError(
                f"{options.name} must return a weft.train.data.Data, or a training and a validation data set "
                f"(got {type(made).__name__})"
            )
        data = Data(train=made[0], validation=made[1])
    for part in ("train", "validation"):
        missing = [name for name in PARTS if not hasattr(getattr(data, part), name)]
        if missing:
            raise WeftError(
                f"{part} data of {options.name} must have {', '.join(PARTS)} (it lacks {', '.join(missing)}); "
                "see weft.train.data.Dataset"
            )
    return data
