"""What tests see and steer of the pretend device. Importing this module registers the device: use `pretend.load()`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from tests.helpers.pretend import build, device_module

# `op`, index of the device, id of the stream -> milliseconds that the launch takes
Durations = Callable[[str, int, int], float]
MAX_DEVICES = 64


def _load_extension() -> Any:
    spec = importlib.util.spec_from_file_location(build.NAME, build.build())
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _stack() -> list[str]:
    """The frames of Python that called, innermost last, without PyTorch's and ours."""
    frames = traceback.extract_stack()
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in frames
        if "/torch/" not in frame.filename and not frame.filename.endswith("pretend/controls.py")
    ]


class Controls:
    """All processes of a test have their own."""

    def __init__(self, extension: Any) -> None:
        self.ext = extension
        self.Gate = extension.Gate
        self._traces: list[tuple[str, str, list[str]]] = []

    def device(self, index: int = 0) -> torch.device:
        return torch.device("pretend", index)

    def reset(self) -> None:
        """All controls as after `load()`."""
        self.ext.set_lag(0)
        self.ext.set_clock(None, None)
        self.ext.on_wait(None)
        self.ext.stack_of_launch(None)
        self.ext.set_gate_limit(30.0, False)
        self.ext.set_sanitizer("raise")
        self.ext.reset_errors()
        self.ext.set_device_count(device_module.default_count())
        self.reset_counts()

    @contextlib.contextmanager
    def visible_devices(self, count: int) -> Iterator[None]:
        """As many devices are there; with 0 there is no accelerator available."""
        if not 0 <= count <= MAX_DEVICES:
            raise ValueError(f"there are 0 to {MAX_DEVICES} pretend devices (count: {count})")
        before = self.ext.device_count()
        self.ext.set_device_count(count)
        try:
            yield
        finally:
            self.ext.set_device_count(before)

    # ---- what makes the host wait

    def counts(self) -> dict[str, int]:
        """How often the host would have waited, by kind, since the last reset; `poll`: a query that returned False.

        Kinds: `item`, `copy to host`, `copy to device`, `event synchronize`, `stream synchronize`,
        `device synchronize`, `poll`, and the names of operators whose shape depends on data, such as `nonzero` (for
        masks, too) and `equal`.
        """
        counts: dict[str, int] = self.ext.waits()
        return counts

    def reset_counts(self) -> None:
        self.ext.reset_waits()
        self._traces.clear()

    def waits(self) -> int:
        """The sum of `counts()` without polls."""
        return sum(count for kind, count in self.counts().items() if kind != "poll")

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Keep the stack of each wait for `traces`."""
        self.ext.on_wait(lambda kind, op: self._traces.append((kind, op, _stack())))
        try:
            yield
        finally:
            self.ext.on_wait(None)

    def traces(self, frames: int = 6) -> list[str]:
        """Each wait under `tracing` since `reset_counts`: its kind, and the innermost frames of Python around it."""
        return [
            f"{kind} {op}".strip() + "".join(f"\n    {line}" for line in stack[-frames:])
            for kind, op, stack in self._traces
        ]

    def launches(self, device: int = -1) -> int:
        """How many kernels were launched on a device, or on all of them, since the start."""
        count: int = self.ext.launches(device)
        return count

    # ---- when things are complete

    def set_lag(self, lag: int) -> None:
        """Events and copies with pinned memory complete only after `lag` more launches or queries on their device."""
        self.ext.set_lag(lag)

    def set_clock(self, clock: float | Durations | None) -> None:
        """Timing events read a fake clock: a launch takes that many milliseconds; None for the real clock.

        Every stream has its time, which starts at 0. Waiting for an event moves a stream on to the time of the event.
        """
        if clock is None or callable(clock):
            self.ext.set_clock(None, clock)
        else:
            self.ext.set_clock(float(clock), None)

    def advance(self, stream: torch.Stream, milliseconds: float) -> None:
        """Move the fake time of a stream."""
        self.ext.advance(stream, milliseconds)

    # ---- the order of streams

    def set_sanitizer(self, mode: Literal["raise", "collect", "off"], *, stacks: bool = False) -> None:
        """`raise` at once (an early free: at the next launch), or only `collect` for `errors`.

        With `stacks`, errors say where both uses were launched, which makes each launch slower.
        """
        if mode not in ("raise", "collect", "off"):
            raise ValueError(f"the sanitizer can raise, collect or be off (mode: {mode!r})")
        self.ext.set_sanitizer(mode)
        self.ext.stack_of_launch((lambda: " < ".join(reversed(_stack()[-3:]))) if stacks else None)

    def errors(self) -> list[str]:
        """What the sanitizer has found since the last reset."""
        errors: list[str] = self.ext.errors()
        return errors

    def reset_errors(self) -> None:
        self.ext.reset_errors()

    def block_stream(self, stream: torch.Stream, gate: Any) -> None:
        """Kernels launched later on the stream, or behind an event recorded later on it, wait until the gate opens."""
        self.ext.block_stream(stream, gate)

    def set_gate_limit(self, seconds: float, *, run_ahead: bool = False) -> None:
        """How long a launch or a synchronize waits for a gate before it raises an error with the gate's name.

        With `run_ahead`, a launch then goes on, on whatever its memory holds, and later ones wait no more. So the host
        gets past an operation that never completes, as with a real device. Events behind it stay incomplete.
        """
        self.ext.set_gate_limit(seconds, run_ahead)

    def host_alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as a CPU tensor. Unseen by counts and sanitizer."""
        alias: torch.Tensor = self.ext.host_alias(tensor)
        return alias


@functools.cache
def check_autograd() -> None:
    """That autograd has threads for the device. Starts them, so processes that were forked later have no autograd.

    They take the number of threads of kernels from the whole process, when they first need it, and keep it: one, so
    that sums have one order.
    """
    torch.set_num_threads(1)
    try:
        with CONTROLS.visible_devices(max(1, EXTENSION.device_count())):
            torch.ones((), device="pretend", requires_grad=True).sin().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError("load the pretend device before the first backward of a process") from error
    CONTROLS.reset()


def _let_autograd_end() -> None:
    """Its threads may need the GIL once more after a backward, and abort the process if Python ends meanwhile."""
    threading.Event().wait(0.05)


EXTENSION = _load_extension()
device_module.register(EXTENSION)
CONTROLS = Controls(EXTENSION)
CONTROLS.reset()
atexit.register(_let_autograd_end)
