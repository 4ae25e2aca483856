"""Data from a function of the user."""

from __future__ import annotations

import inspect
from typing import Any

from weft.errors import WeftError
from weft.train.data.base import Data
from weft.train.data.options import CustomData
from weft.user_code import load

MEMBERS = ("spec", "fingerprint", "inputs", "targets", "__len__")


def read(options: CustomData, *, seed: int, inputs: bool, targets: bool) -> Data:
    """Call the function with its options, and with seed, inputs and targets if it has such parameters."""
    function = load(options.name)
    parameters = inspect.signature(function).parameters
    offered = {"seed": seed, "inputs": inputs, "targets": targets}
    returned: Any = function(**{key: value for key, value in offered.items() if key in parameters} | options.options)
    data = returned if isinstance(returned, Data) else None
    if data is None:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise WeftError(
                f"{options.name} must return a weft.train.data.Data, or a training and a validation data set "
                f"(got {type(returned).__name__})"
            )
        data = Data(train=returned[0], validation=returned[1])
    for part in ("train", "validation"):
        missing = [name for name in MEMBERS if not hasattr(getattr(data, part), name)]
        if missing:
            raise WeftError(
                f"{part} data of {options.name} must have {', '.join(MEMBERS)} (it lacks {', '.join(missing)}); "
                "see weft.train.data.Dataset"
            )
    return data
