"""The time of a rank on its device, by events in its compute stream.

The host only launches kernels, so its clock says nothing of a device. Each action has an event before and after it.
They are read later, when the device has passed them: the figures lag behind, and nobody waits for them.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import Any, NamedTuple

import torch

from weft.errors import RunError
from weft.runtime.device import Pauses, allocator_peaks, has_streams, pop_range, push_range
from weft.runtime.engine.meters import Meter
from weft.schedule import Action, Op, Step

BUSY, UPDATING, WAITING, OUTSIDE = "busy", "updating", "waiting", "outside"


class _Span(NamedTuple):
    """A part of a rank's time. What lies between two spans is waiting."""

    kind: str  # WAITING has no length and ends some waiting; OUTSIDE ends what is not counted
    start: torch.Event
    end: torch.Event
    step: Step | None = None
    cycle: list[tuple[Step, int, int]] | None = None  # that it is drawn in


class DeviceMeter(Meter):
    """A meter whose times are those of a device."""

    def __init__(self, device: torch.device, deadline: float) -> None:
        super().__init__()
        self._device = device
        self._unread: deque[_Span] = deque()
        self._latest = self._event()  # the last event that was read
        pauses = Pauses(deadline)
        while not self._latest.query():  # once, to know the device's clock by the host's
            if pauses.are_over():
                raise RunError(f"{device} did nothing for {deadline:g} s, when it was to connect to other ranks")
        self._time = monotonic_ns()  # of that event, on the host's clock

    def begin_cycle(self, *, first: bool) -> None:
        self.read()
        if first:
            self.cycles.clear()
        self.cycles.append([])
        event = self._event()
        self._unread.append(_Span(OUTSIDE, event, event))

    def start(self, action: Action | None = None) -> torch.Event:
        if action is not None:
            push_range(self._device, str(action))
        return self._event()

    def end(self, step: Step, start: Any) -> None:
        kind = UPDATING if step.action.op == Op.U else BUSY
        self.actions += 1
        self._unread.append(_Span(kind, start, self._event(), step, self.cycles[-1]))
        pop_range(self._device)

    def end_delayed_update(self, start: Any) -> None:
        self._unread.append(_Span(UPDATING, start, self._event()))

    def resume(self) -> None:
        event = self._event()
        self._unread.append(_Span(OUTSIDE, event, event))

    def end_wait(self) -> None:
        event = self._event()
        self._unread.append(_Span(WAITING, event, event))

    def read(self) -> None:
        while self._unread and self._unread[0].end.query():
            kind, start, end, step, cycle = self._unread.popleft()
            begun, ended = self._moment(start), self._moment(end)
            if kind != OUTSIDE:
                self.waiting += begun - self._last
            if kind == BUSY:
                self.busy += ended - begun
            elif kind == UPDATING:
                self.updating += ended - begun
            if cycle is not None and step is not None:
                cycle.append((step, begun, ended))
            self._last = ended

    def reset(self) -> None:
        """What the device has not passed yet is still drawn, but no longer counted."""
        self.read()
        self._unread = deque(span._replace(kind=OUTSIDE) for span in self._unread)
        super().reset()

    def as_dict(self) -> dict[str, Any]:
        self.read()
        return super().as_dict() | {"allocator": allocator_peaks(self._device)}

    def _event(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _moment(self, event: torch.Event) -> int:
        """The time of an event, from that of the one before it: differences of seconds have few digits."""
        self._time += round(self._latest.elapsed_time(event) * 1e6)
        self._latest = event
        return self._time


def meter_for(device: torch.device, deadline: float) -> Meter:
    return DeviceMeter(device, deadline) if has_streams(device) else Meter()
