"""`metrics.jsonl`: one object a line, for people, plots and other programs; and TensorBoard events on request.

{"kind": "train", "update": 10, "samples": 480, "seconds": 1.9, "loss": 4.1, "norm": 0.7, "lr": 0.0005, …}
{"kind": "evaluation", "update": 150, …, "loss": 2.2, "perplexity": 9.1}
{"kind": "save failed", "update": 300, …, "problem": "can't write …"}
{"kind": "staleness", "update": 50, "chunk": 0, "predicted": 0.11, "stale": 0.15}
{"kind": "output", "update": 50, "stream": "stdout", "problem": "closed"}

Training does not depend on these files: lines that can't be written, on a full disk for example, are kept for later.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from weft.errors import StorageError, WeftError, remedy_for
from weft.output import json_safe, replace_file, warn
from weft.streams import output_problems
from weft.text import format_count
from weft.train.extras import need
from weft.train.run.events import Ended, Evaluated, Event, SaveFailed, StalenessSampled, Stepped

KEPT = 10_000  # lines that wait for a disk that can be written; older ones are dropped


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; an incomplete last line, which a killed run leaves, is skipped."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    read = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            read.append(json.loads(line))
        except json.JSONDecodeError:
            raise WeftError(f"{path}, line {number} is not JSON; fix or remove it") from None
    return read


class Metrics:
    """Records the events of a run; a resumed run drops the lines beyond its checkpoint."""

    def __init__(self, folder: Path, *, update: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["update"] <= update]
        try:
            replace_file(self.path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = _Lines(self.path)
        except OSError as problem:
            reason = f"{problem.strerror}; {remedy_for(problem)}"
            raise StorageError(f"{self.path} can't be written: {reason}") from problem
        self._update = update
        self._output: dict[str, str] = {}  # problems that were written
        self._tensorboard: Any = None
        if tensorboard:
            need("tensorboard", "tensorboard", purpose="log.tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "events"), purge_step=update + 1)

    def __call__(self, event: Event) -> None:
        match event:
            case Stepped(progress=progress):
                self._update = progress.update
                self.write("train", progress.place | progress.figures)
            case Evaluated(progress=progress, metrics=metrics):
                self._update = progress.update
                self.write("evaluation", progress.place | metrics)
            case SaveFailed(progress=progress, problem=problem):
                self.write("save failed", progress.place | {"problem": problem})
            case StalenessSampled(samples=samples):
                for sample in samples:
                    self.write("staleness", sample)
            case Ended(progress=progress):
                self._update = progress.update
        self._write_problems_of_output()

    def write(self, kind: str, figures: dict[str, Any]) -> None:
        """Add a line; a number that is not finite becomes null."""
        line: dict[str, Any] = {"kind": kind} | json_safe(figures)
        self._file.add(json.dumps(line, allow_nan=False))
        if self._tensorboard is not None:
            tag = kind if "chunk" not in figures else f"{kind}/chunk {figures['chunk']}"
            try:
                for name, value in line.items():
                    if isinstance(value, int | float) and name not in ("update", "chunk"):
                        self._tensorboard.add_scalar(f"{tag}/{name}", value, figures["update"])
                self._tensorboard.flush()
            except OSError as problem:
                self._tensorboard = None  # it can't continue after an error
                warn(f"TensorBoard events can't be written: {problem.strerror}; training goes on without them")

    def _write_problems_of_output(self) -> None:
        """Say here what can't be said there."""
        for stream, problem in output_problems().items():
            if self._output.get(stream) != problem:
                self._output[stream] = problem
                self.write("output", {"update": self._update, "stream": stream, "problem": problem})

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *problem: object) -> None:
        self._file.close()
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):
                self._tensorboard.close()


class _Lines:
    """Appends lines to a file; those that can't be written wait, and no line follows half a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._size = os.fstat(self._descriptor).st_size  # of whole lines
        self._waiting: deque[bytes] = deque(maxlen=KEPT)
        self._failed = self._warned = False

    def add(self, line: str) -> None:
        self._waiting.append(f"{line}\n".encode())
        self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        if self._waiting:
            warn(f"{format_count(len(self._waiting), 'line')} of {self._path} could not be written")
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _write_waiting(self) -> None:
        try:
            if self._failed:
                self._reopen()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
            self._failed = False
        except OSError as problem:
            self._failed = True
            if not self._warned:
                self._warned = True
                warn(f"{self._path} can't be written: {problem.strerror}; training goes on; lines are kept for later")

    def _write(self, line: bytes) -> None:
        left = line
        while left:
            left = left[os.write(self._descriptor, left) :]
        self._size += len(line)

    def _reopen(self) -> None:
        """A stale handle never works again; and what was written of a line has to go."""
        before, self._descriptor = self._descriptor, os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with contextlib.suppress(OSError):
            os.close(before)
        self._size = min(self._size, os.fstat(self._descriptor).st_size)
        os.ftruncate(self._descriptor, self._size)
