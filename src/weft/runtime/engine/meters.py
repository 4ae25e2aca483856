"""The time and memory of a rank, counted while it runs; cheap enough to be always on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from weft.schedule import Action, Op, Step
from weft.simulate import CATEGORIES

WINDOW = 64  # the last cycles, kept for a timeline


@dataclass(kw_only=True)
class Meter:
    """The counters of one rank; times in nanoseconds."""

    busy: int = 0
    waiting: int = 0
    updating: int = 0
    actions: int = 0
    updates: int = 0  # of parameter sets
    messages: int = 0
    message_bytes: int = 0
    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    at_peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))  # when their sum was largest
    cycles: deque[list[tuple[Step, int, int]]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _last: int = 0

    def begin_cycle(self, *, first: bool) -> None:
        """`first`: after a flush, when mini-batches and versions start from 0 again."""
        if first:
            self.cycles.clear()
        self.cycles.append([])
        self._last = monotonic_ns()

    def start(self, action: Action | None = None) -> Any:
        """An action starts, or a delayed update; the time since the end of the previous one was waiting.

        Returns its moment, for the call at its end.
        """
        now = monotonic_ns()
        self.waiting += now - self._last
        self._last = now
        return now

    def end(self, step: Step, start: Any) -> None:
        now = monotonic_ns()
        if step.action.op == Op.U:
            self.updating += now - start
        else:
            self.busy += now - start
        self.actions += 1
        self._last = now
        self.cycles[-1].append((step, start, now))

    def end_delayed_update(self, start: Any) -> None:
        """An update that was postponed is done."""
        self._last = monotonic_ns()
        self.updating += self._last - start

    def resume(self) -> None:
        """Don't count the time that passed outside the engine."""
        self._last = monotonic_ns()

    def end_wait(self) -> None:
        """Count waiting that no action follows."""
        now = monotonic_ns()
        self.waiting += now - self._last
        self._last = now

    def read(self) -> None:
        """Bring the figures up to date, without waiting for what is not known yet."""

    def set_bytes(self, **bytes_held: int) -> None:
        """The bytes that are held now, by category."""
        grows = False
        for category, amount in bytes_held.items():
            grows = grows or amount > self.held[category]
            self.held[category] = amount
            if amount > self.peak[category]:
                self.peak[category] = amount
        if grows and sum(self.held.values()) > self.peak_total:
            self.at_peak = dict(self.held)

    @property
    def peak_total(self) -> int:
        return sum(self.at_peak.values())

    def reset(self) -> None:
        """Restart the counters; bytes held stay."""
        self.busy = self.waiting = self.updating = self.actions = self.messages = self.message_bytes = 0
        self.peak, self.at_peak = dict(self.held), dict(self.held)

    def as_dict(self) -> dict[str, Any]:
        total = self.busy + self.waiting + self.updating
        return {
            "busy": self.busy / 1e9,
            "waiting": self.waiting / 1e9,
            "updating": self.updating / 1e9,
            "bubble": self.waiting / total if total else 0.0,
            "actions": self.actions,
            "messages": self.messages,
            "message_bytes": self.message_bytes,
            "bytes": dict(self.held),
            "peak_bytes": self.peak | {"total": self.peak_total},
            "bytes_at_peak": dict(self.at_peak),
        }
