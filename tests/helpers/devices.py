"""The device of all pipelines in tests: `pytest --device NAME`.

The option sets WEFT_DEVICE, which pipelines take for the default of `device=`, and which ranks, scripts and commands
inherit. So tests need no change to run there: inputs are moved by weft, and a `state_dict` is on the CPU again.
A test that leaves the choice of a device to weft has to delete the variable.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import weft

PRETEND = "pretend"  # a device in host memory, with the CPU's kernels; see `tests/helpers/pretend`
PLUGIN = Path(__file__).with_name("plugin")  # tells `import torch` to load it, as it loads installed devices
ROOT = Path(__file__).parents[2]


def choose(name: str) -> None:
    """Let all pipelines of this process, and of those that it starts, compute on a device."""
    os.environ["WEFT_DEVICE"] = name
    if name != "cpu":
        os.environ["WEFT_SHARE_DEVICES"] = "1"  # tests may have more ranks than the machine has devices
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # its rounding is no error of weft
    if _kind(name) == PRETEND:
        importlib.import_module("tests.helpers.pretend").load()  # builds it, if need be


def check() -> None:
    """WeftError if there is no such device."""
    if device() != "cpu":
        from weft.runtime.device import choose_device, gather_facts  # imports torch

        choose_device(gather_facts(is_launched=False))


def device() -> str:
    return os.environ.get("WEFT_DEVICE", "cpu")


def python_path() -> list[str]:
    """What a new interpreter needs on its path to have the device."""
    return [str(PLUGIN), str(ROOT)] if is_pretend() else []


def tolerance(within: float) -> float:
    """How far a result may be from the CPU's, relative to its size: kernels of accelerators add in another order."""
    return within if _kind(device()) in ("cpu", PRETEND) else max(within, 1e-4)


def losses_behind() -> int:
    """How many updates later than on the CPU the host reads a loss."""
    return 0 if device() == "cpu" else 1


def place_of_loss(minibatch: int, microbatch: int) -> str:
    """A pattern of the place that an error names where a loss is not finite; on a device, the mini-batch has it."""
    return (
        rf"mini-batch {minibatch}, update"
        if losses_behind()
        else rf"mini-batch {minibatch}, micro-batch {microbatch} .*"
    )


def step_until_read(pipe: weft.Pipeline, inputs: Any, targets: Any) -> weft.Result:
    """A step whose loss the host has read."""
    result = pipe.step(inputs, targets)
    return pipe.flush() if losses_behind() else result


def without_choice(err: str) -> str:
    """What ranks wrote to stderr, without the lines that say which device was chosen."""
    return re.sub(r"^weft: computing on .*\n", "", err, flags=re.MULTILINE)


def is_pretend() -> bool:
    return _kind(device()) == PRETEND


def not_on_pretend(reason: str) -> pytest.MarkDecorator:
    """For a test of what the pretend device does not have."""
    return pytest.mark.skipif(is_pretend(), reason=f"not on the pretend device: {reason}")


def only_on_cpu(reason: str) -> pytest.MarkDecorator:
    """For a test of what depends on the kernels of a device."""
    return pytest.mark.skipif(device() != "cpu", reason=f"only on the CPU: {reason}")


def only_on_accelerators(reason: str) -> pytest.MarkDecorator:
    """For a test of what is different there."""
    return pytest.mark.skipif(device() == "cpu", reason=f"only on accelerators: {reason}")


def _kind(name: str) -> str:
    return name.partition(":")[0]
