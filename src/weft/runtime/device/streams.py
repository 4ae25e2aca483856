"""Streams and events of any accelerator.

A rank computes on the stream that is current when its pipeline is built. What waits for other ranks, or for the
host's memory, runs on a side stream, so that nothing behind it is held up. A *mark* is an event in a stream: all work
before it is done when it is reached. On the CPU, and on a device without streams, there are no side streams and no
marks (None).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether a device has streams and events."""
    if device.type in ("cpu", "meta"):
        return False
    try:
        torch.Event(device=device).record(torch.Stream(device=device))
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def new_stream(device: torch.device) -> torch.Stream | None:
    """A side stream of a device."""
    return torch.Stream(device=device) if has_streams(device) else None


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that kernels of this thread are launched on."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Launch kernels on a stream; for None, wherever they were."""
    return contextlib.nullcontext() if stream is None else stream


@contextlib.contextmanager
def within_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Launch kernels on a stream, after those that the current one was given before and before those that it is given
    later: as if they were on the current one, but all memory belongs to one stream, whichever is current.
    """
    current = None if stream is None else current_stream(stream.device)
    if stream is None or current is None or stream == current:
        yield
        return
    stream.wait_stream(current)
    try:
        with stream:
            yield
    finally:
        current.wait_stream(stream)


def device_index(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one of this thread, which starts with the first device."""
    if device.type in ("cpu", "meta") or device.index is None:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def mark(device: torch.device) -> torch.Event | None:
    """A mark at the end of what the current stream has been given so far."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def wait_for_mark(event: torch.Event | None, device: torch.device) -> None:
    """Let the current stream wait until a mark is reached; the host goes on."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


def record_use(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Keep the memory of tensors that another stream has allocated, when they are freed, until this one is done."""
    stream = current_stream(device)
    if stream is not None:
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)
