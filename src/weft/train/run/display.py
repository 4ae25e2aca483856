"""What a run shows: one display for all ranks, or plain lines if there is no terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from weft.metrics import RESIDENT_PARTS, SHARED_PROCESS
from weft.output import warn
from weft.text import format_bytes, format_clock
from weft.train.run.events import Ended, Evaluated, Event, SaveFailed, Stepped
from weft.train.run.progress import Progress

PLAIN_EVERY = 5.0  # seconds between plain lines
UNCOUNTED = {name: title for name, title in RESIDENT_PARTS.items() if name != "counted"}  # `memory` shows the rest


class Display:
    """Shows the events of a run: "live", "aside" (on stderr, if stdout is for a program) or "none"."""

    def __init__(self, progress: Progress, *, title: str, show: str = "live") -> None:
        self._progress, self._title, self._quiet = progress, title, show == "none"
        stream: TextIO = sys.stderr if show == "aside" else sys.stdout
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._evaluation = ""  # the metrics of the last one
        self._shown = 0.0

    def __enter__(self) -> Display:
        if self._quiet:
            return self
        if self._console.is_terminal:
            self._bar = Bar(TextColumn("update"), BarColumn(None), MofNCompleteColumn(), expand=True)
            self._task = self._bar.add_task("", total=self._progress.updates, completed=self._progress.update)
            self._live = Live(self._picture(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        else:
            self.say(self._title)
        return self

    def __exit__(self, *problem: object) -> None:
        if self._live is not None:
            self._live.update(self._picture())
            self._live.stop()
        elif not self._quiet and self._progress.seconds:
            self.say(progress_line(self._progress))

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped(progress=progress):
                self._progress = progress
                self._show()
            case Evaluated(progress=progress, metrics=metrics, best=best):
                self._evaluation = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                words = f"held out: {self._evaluation}{', the best so far' if best else ''}"
                self.say(f"update {progress.update}: {words}")
            case SaveFailed(progress=progress, problem=problem):
                warn(f"update {progress.update}: no checkpoint was saved: {problem}")
            case Ended(progress=progress):
                self._progress = progress

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._console.print(text, markup=False)

    def _show(self) -> None:
        if self._live is not None:
            self._bar.update(self._task, completed=self._progress.update)
            self._live.update(self._picture())
            return
        is_last = self._progress.update == self._progress.updates  # whose line comes at the end
        if not self._quiet and not is_last and time.monotonic() > self._shown + PLAIN_EVERY:
            self._shown = time.monotonic()
            self.say(progress_line(self._progress))

    def _picture(self) -> Any:
        now = self._progress
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False, expand=False)
        speed, left = f"{now.samples_per_second:.0f}", format_clock(now.seconds_left)
        table.add_row("loss", f"{now.loss:.4f}", "samples/s", speed, "left", left)
        table.add_row("bubble", _percent(now.bubble), "lr", f"{now.lr:.2e}", "held out", self._evaluation or "–")
        return Group(self._title, self._bar, table, *_ranks(now))


def _ranks(progress: Progress) -> list[Any]:
    """The figures of each rank, with the resident set of its process, or that of the process of all."""
    own_process = len(progress.resident) == len(progress.bubbles)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rank", "bubble", "memory", *(["resident", "peak", *UNCOUNTED.values()] if own_process else [])):
        table.add_column(name, justify="right")
    for rank, (bubble, memory) in enumerate(zip(progress.bubbles, progress.memory, strict=True)):
        figures = progress.resident[rank] if own_process else {}
        cells = [format_bytes(max(0, figures[name])) for name in ("now", "peak", *UNCOUNTED) if figures]
        table.add_row(str(rank), f"{bubble:.1%}", format_bytes(memory), *cells)
    shared = [] if own_process else [_shared_set(figures) for figures in progress.resident]
    return [table, *shared] if progress.bubbles else []


def _shared_set(figures: Mapping[str, int]) -> str:
    parts = ", ".join(f"{title} {format_bytes(max(0, figures[name]))}" for name, title in RESIDENT_PARTS.items())
    now, peak = format_bytes(figures["now"]), format_bytes(figures["peak"])
    return f"resident {now}, peak {peak}: {parts} ({SHARED_PROCESS})"


def progress_line(progress: Progress) -> str:
    memory = f"  memory a rank {format_bytes(max(progress.memory))}" if progress.memory else ""
    if progress.resident:
        memory += f", resident {format_bytes(max(figures['now'] for figures in progress.resident))}"
    return (
        f"update {progress.update}/{progress.updates}  loss {progress.loss:.3f}  "
        f"{progress.samples_per_second:.0f} samples/s  bubble {_percent(progress.bubble)}{memory}  "
        f"left {format_clock(progress.seconds_left)}"
    )


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "–"
