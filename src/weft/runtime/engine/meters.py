"""What a rank does with its time and memory, counted while it runs; cheap enough to be always on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from weft.schedule import Op, Step
from weft.simulate import CATEGORIES

WINDOW = 64  # cycles whose blocks are kept for a timeline


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
    at_peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))  # when their sum is largest
    cycles: deque[list[tuple[Step, int, int]]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _begun: int = 0

    def begin_cycle(self, *, first: bool) -> None:
        """`first`: after a flush, where mini-batches and versions count anew."""
        if first:
            self.cycles.clear()
        self.cycles.append([])
        self._begun = monotonic_ns()

    def start(self) -> int:
        """An action has what it needs; all since the end of the last one was waiting."""
        now = monotonic_ns()
        self.waiting += now - self._begun
        self._begun = now
        return now

    def end(self, step: Step, start: int) -> None:
        now = monotonic_ns()
        if step.action.op == Op.U:
            self.updating += now - start
        else:
            self.busy += now - start
        self.actions += 1
        self._begun = now
        self.cycles[-1].append((step, start, now))

    def updated(self, start: int) -> None:
        """An update that was put off is made."""
        self._begun = monotonic_ns()
        self.updating += self._begun - start

    def resume(self) -> None:
        """Time that passed outside of the engine is nobody's."""
        self._begun = monotonic_ns()

    def wait_over(self) -> None:
        """Waiting that no action came after."""
        now = monotonic_ns()
        self.waiting += now - self._begun
        self._begun = now

    def hold(self, **bytes_held: int) -> None:
        """Note how many bytes of some categories are held."""
        for category, amount in bytes_held.items():
            self.held[category] = amount
            if amount > self.peak[category]:
                self.peak[category] = amount
        if sum(self.held.values()) > self.peak_total:
            self.at_peak = dict(self.held)

    @property
    def peak_total(self) -> int:
        return sum(self.at_peak.values())

    def reset(self) -> None:
        """Count times and messages from here; bytes held stay what they are."""
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
