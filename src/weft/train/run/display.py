"""What a run shows while it goes on: one display for all ranks, or plain lines where there is no terminal."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from weft.text import format_bytes, format_clock

PLAIN_EVERY = 5.0  # seconds between plain lines


@dataclass(kw_only=True)
class State:
    """What is known of a run; the display shows it, the metrics keep it."""

    updates: int
    update: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    lr: float = 0.0
    speed: float = 0.0  # samples a second
    left: float = math.nan  # seconds
    bubbles: tuple[float, ...] = ()  # of each rank
    memory: tuple[int, ...] = ()  # bytes held by each rank, at their peak
    judged: str = ""  # what the last evaluation said

    @property
    def bubble(self) -> float:
        """The mean of all ranks; not a number as long as it is not known."""
        return sum(self.bubbles) / len(self.bubbles) if self.bubbles else math.nan

    def figures(self) -> dict[str, Any]:
        """What a line of metrics holds."""
        shown = {"loss": self.loss, "lr": self.lr, "samples_per_second": self.speed, "bubble": self.bubble}
        return shown | {"bubbles": list(self.bubbles), "memory": list(self.memory)}

    def line(self) -> str:
        memory = f"  memory a rank {format_bytes(max(self.memory))}" if self.memory else ""
        return (
            f"update {self.update}/{self.updates}  loss {self.loss:.3f}  {self.speed:.0f} samples/s  "
            f"bubble {share(self.bubble)}{memory}  left {format_clock(self.left)}"
        )


class Display:
    """Shows a state: "live", "aside" (on stderr, for the output is a program's) or "none"."""

    def __init__(self, state: State, *, title: str, show: str = "live") -> None:
        self._state, self._title, self._quiet = state, title, show == "none"
        stream: TextIO = sys.stderr if show == "aside" else sys.stdout
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._shown = 0.0

    def __enter__(self) -> Display:
        if self._quiet:
            return self
        if self._console.is_terminal:
            self._bar = Progress(TextColumn("update"), BarColumn(None), MofNCompleteColumn(), expand=True)
            self._task = self._bar.add_task("", total=self._state.updates, completed=self._state.update)
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        else:
            self.say(self._title)
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            self._live.stop()
        elif not self._quiet and self._state.seconds:
            self.say(self._state.line())

    def show(self) -> None:
        """The state has changed."""
        if self._live is not None:
            self._bar.update(self._task, completed=self._state.update)
            self._live.update(self._picture())
        elif not self._quiet and time.monotonic() > self._shown + PLAIN_EVERY:
            self._shown = time.monotonic()
            self.say(self._state.line())

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(text, markup=False)

    def _picture(self) -> Any:
        state = self._state
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, expand=False)
        table.add_row("loss", f"{state.loss:.4f}", "samples/s", f"{state.speed:.0f}", "left", format_clock(state.left))
        table.add_row("bubble", share(state.bubble), "lr", f"{state.lr:.2e}", "held out", state.judged or "–")
        ranks = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("rank", "bubble", "memory"):
            ranks.add_column(name, justify="right")
        for rank, (bubble, memory) in enumerate(zip(state.bubbles, state.memory, strict=True)):
            ranks.add_row(str(rank), f"{bubble:.1%}", format_bytes(memory))
        return Group(self._title, self._bar, table, *([ranks] if state.bubbles else []))


def share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "–"
