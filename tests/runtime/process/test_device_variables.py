"""Variables of CUDA and NCCL that ranks start with, unless the user has set them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weft.runtime.process.device_variables import DEFAULTS, set_device_variables


def test_what_the_user_has_set_stays() -> None:
    environment = {"CUDA_MODULE_LOADING": "LAZY", "HOME": "/"}
    set_device_variables(environment)
    assert environment == DEFAULTS | {"CUDA_MODULE_LOADING": "LAZY", "HOME": "/"}


def variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in DEFAULTS}


def test_ranks_start_with_them(launch: Callable[..., list[Any]]) -> None:
    expected = DEFAULTS | {name: value for name, value in os.environ.items() if name in DEFAULTS}
    assert launch(variables, ranks=2) == [expected] * 2
