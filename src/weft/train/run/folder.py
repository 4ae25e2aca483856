"""The folder of a run, `runs/<name>/`, and its checkpoints.

job.toml         the complete configuration
invocation       which command has begun or resumed the run last: its restarts know it by that
lock             held by the process that runs it
status/          where each rank is, rewritten every second
metrics.jsonl    one object a line
checkpoints/     update-00000150, update-00000300, …, each complete or absent; `latest` and `best` hold a name
summary.json     the results
trace.json       the last mini-batches, for Perfetto;  timeline.svg: the same as a picture
sample.txt       what a language model generated at the end
report.html      all of it on one page
events/          for TensorBoard, on request
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft import faults
from weft.draw import svg, trace
from weft.errors import RunError, StorageError, WeftError, one_line, remedy_for
from weft.output import json_safe, replace_file, warn
from weft.text import did_you_mean
from weft.train.run.events import Ended, Event, Saved
from weft.train.run.lock import LOCK

NAME = re.compile(r"update-(\d+)(?:-(\d+))?")
STATUS = "status"
INVOCATION = "invocation"
LEFTOVER = re.compile(r"\..*\.part")  # of a file that a killed process was writing


class Folder:
    """A run's folder; only the first rank writes to it, except for the chunks of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"
        self.lock: tuple[int, int] | None = None  # what identifies the lock, for those who work for its owner

    def __str__(self) -> str:
        return str(self.path)

    # Files

    def is_new(self) -> bool:
        """Whether no run has begun here; a folder with other files is refused."""
        if not self.path.exists():
            return True
        if (self.path / "job.toml").is_file():
            return False
        if not self._has_only_own():
            raise WeftError(f"{self.path} is not a run (it has no job.toml), so it is left alone; use another name")
        return True

    def _has_only_own(self) -> bool:
        """Whether nothing is here but what weft writes before a run has begun."""
        if not self.path.is_dir() or any(self.checkpoints.glob("*")):
            return False
        names = {entry.name for entry in self.path.iterdir() if not LEFTOVER.fullmatch(entry.name)}
        return names <= {LOCK, STATUS, INVOCATION, self.checkpoints.name}

    def create(self) -> None:
        with _creating(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def begin(
        self,
        job: str,
        *,
        invocation: str,
        overwrite: bool = False,
        checkpoint: Path | None = None,
        best: int | None = None,
    ) -> None:
        """A run starts, or resumes from a checkpoint with this best update: remove earlier results; write its job.

        In this order, so that a process that is killed on the way leaves no results of another job, and its restart
        knows what is done: before the invocation is written, it begins once more; afterwards it resumes, at first from
        the checkpoint that is named beside the invocation.
        """
        self.check_owned()
        with _writing(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)
            for entry in self.path.iterdir() if overwrite else ():
                if entry.name not in (LOCK, STATUS, "job.toml"):
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            faults.hit("folder")
            self._write_invocation(invocation, checkpoint)
            faults.hit("folder")
            if checkpoint is not None:
                self._rewind(checkpoint, best)
            faults.hit("folder")
            self.checkpoints.mkdir(exist_ok=True)
            replace_file(self.path / "job.toml", job)
            self._write_invocation(invocation)

    def _write_invocation(self, invocation: str, checkpoint: Path | None = None) -> None:
        name = "" if checkpoint is None else f"{checkpoint.name}\n"
        replace_file(self.path / INVOCATION, f"{invocation}\n{name}")

    def check_owned(self) -> None:
        """Raise if the folder was moved or deleted meanwhile: another run may have its place."""
        file, found = self.path / LOCK, None
        with _writing(file), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(file)
            found = status.st_dev, status.st_ino
        if self.lock is not None and found != self.lock:
            raise RunError(
                f"{self.path} was moved or deleted while its run was going on; nothing more is written there, because "
                "it may belong to another run by now"
            )

    def begun_by(self) -> str:
        """The invocation that has begun or resumed this run last."""
        return (self.text(INVOCATION).splitlines() or [""])[0]

    def chosen(self) -> str:
        """The checkpoint that this invocation has chosen, until it has begun; empty afterwards."""
        return "".join(self.text(INVOCATION).splitlines()[1:])

    def results_of(self, invocation: str) -> dict[str, Any] | None:
        """The results, if this invocation has reached the end of the run."""
        summary = self.summary()
        return summary if summary is not None and summary.get("invocation") == invocation else None

    def forget_status(self) -> None:
        """Delete the status of the ranks of an earlier start."""
        shutil.rmtree(self.path / STATUS, ignore_errors=True)

    def status_file(self, rank: int) -> Path:
        return self.path / STATUS / f"rank-{rank}.json"

    def remove_unused(self) -> None:
        """Delete the folder of a run that never began, if it has nothing but what weft put there."""
        with contextlib.suppress(OSError):
            if self._has_only_own():
                shutil.rmtree(self.path, ignore_errors=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        file = self.path / "summary.json"
        with _writing(file):
            replace_file(file, json.dumps(json_safe(summary), indent=2, allow_nan=False) + "\n")

    def write_extra(self, name: str, text: str) -> None:
        """Write a file without which a run is complete all the same."""
        try:
            replace_file(self.path / name, text)
        except OSError as problem:
            warn(f"{self.path / name} can't be written: {problem.strerror}; the run is complete without it")

    def summary(self) -> dict[str, Any] | None:
        """The results, if the run has ended."""
        file = self.path / "summary.json"
        try:
            summary = json.loads(file.read_text("utf-8"))
            if not isinstance(summary, dict) or "how" not in summary:
                raise ValueError("it is no summary of a run")
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise StorageError(f"{file} can't be read: {problem.strerror}; {remedy_for(problem)}") from problem
        except ValueError as problem:
            warn(f"{file} can't be read ({one_line(problem)}), so it does not count")
            return None
        return summary

    def text(self, name: str) -> str:
        """A file's text; empty if it can't be read."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text("utf-8", errors="replace")
        return ""

    # Checkpoints

    def names(self) -> list[str]:
        """The checkpoints, oldest first."""
        names = [path.name for path in self.checkpoints.glob("update-*") if NAME.fullmatch(path.name)]
        return sorted(names, key=_age)

    def next(self, update: int) -> Path:
        """A new path for a checkpoint."""
        name, number = f"update-{update:08}", 1
        while (self.checkpoints / name).exists():
            number += 1
            name = f"update-{update:08}-{number}"
        return self.checkpoints / name

    def publish(self, checkpoint: Path, *, best: bool, keep: int) -> None:
        """Point `latest` (and `best`) to a complete checkpoint, then delete old ones."""
        with _writing(self.checkpoints):
            faults.hit("before-latest")
            if best:
                replace_file(self.checkpoints / "best", checkpoint.name + "\n")
            replace_file(self.checkpoints / "latest", checkpoint.name + "\n")
        try:
            names = self.names()
            kept = {checkpoint.name, self._pointed("best"), *names[-keep:]}
            for name in names:
                if name not in kept:  # first renamed: a half-deleted checkpoint must not look complete
                    gone = (self.checkpoints / name).rename(self.checkpoints / f".{name}.gone")
                    faults.hit("rotation")
                    shutil.rmtree(gone, ignore_errors=True)
        except OSError as problem:  # the new checkpoint is complete
            warn(f"old checkpoints in {self.checkpoints} can't be deleted ({one_line(problem)}); they stay")

    def sweep(self) -> None:
        """Delete what a killed run left behind, as far as that works. Only at a start: a run that goes on may have
        lost its place to another one, whose files these are."""
        for leftover in self.checkpoints.glob(".update-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in (*self.path.glob(".*.part"), *self.checkpoints.glob(".*.part")):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)

    def _rewind(self, checkpoint: Path, best: int | None) -> None:
        """Resume from a checkpoint: rename newer ones to `aside-…`; `best` is the best update so far."""
        for name in self.names():
            if _age(name) > _age(checkpoint.name):
                aside, number = self.checkpoints / f"aside-{name}", 1
                while aside.exists():
                    number += 1
                    aside = self.checkpoints / f"aside-{name}-{number}"
                (self.checkpoints / name).rename(aside)
        kept = [name for name in self.names() if _age(name)[0] == best]
        if kept:
            replace_file(self.checkpoints / "best", kept[-1] + "\n")
        elif self._pointed("best") is None:  # else the best one could not be saved, and this is the best before it
            (self.checkpoints / "best").unlink(missing_ok=True)
        replace_file(self.checkpoints / "latest", checkpoint.name + "\n")

    def find(self, which: str) -> Path | None:
        """The checkpoint `latest`, `previous`, `best` or of a name; None if there is no latest one."""
        names = self.names()
        if which in names:
            return self.checkpoints / which
        latest = self._pointed("latest")
        if which == "latest":
            return None if latest is None else self.checkpoints / latest
        if which == "previous":
            newest = latest or (names[-1] if names else None)
            before = [name for name in names if newest is not None and _age(name) < _age(newest)]
            which = before[-1] if before else which
        elif which == "best":
            which = self._pointed("best") or which
        if which not in names:
            known = ", ".join(names) or "none"
            raise WeftError(f"{self} has no checkpoint {which!r} (there are: {known}); name one of them")
        return self.checkpoints / which

    def newest(self) -> list[Path]:
        """All checkpoints by which a run can resume: what `latest` names, then the others, the newest first."""
        latest = self._pointed("latest")
        others = [name for name in reversed(self.names()) if name != latest]
        return [self.checkpoints / name for name in ([] if latest is None else [latest]) + others]

    def dangling(self) -> str | None:
        """What `latest` names, if that is no checkpoint of this run; None if there is no such file."""
        if self._pointed("latest") is not None or not os.path.lexists(self.checkpoints / "latest"):
            return None
        return self.text("checkpoints/latest").strip()[:60]

    def _pointed(self, pointer: str) -> str | None:
        """The checkpoint that a file names; None if there is no such checkpoint."""
        name = self.text(f"{self.checkpoints.name}/{pointer}").strip()
        return name if NAME.fullmatch(name) and (self.checkpoints / name).is_dir() else None


class FolderWriter:
    """Writes the events of a run to its folder: publishes checkpoints, and draws the timeline at the end."""

    def __init__(self, folder: Folder, *, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def __call__(self, event: Event) -> None:
        match event:
            case Saved(path=path, best=best):
                self._folder.publish(path, best=best, keep=self._keep)
            case Ended(timeline=timeline) if timeline is not None:
                self._folder.write_extra("trace.json", trace(timeline, unit_us=1e6))
                self._folder.write_extra("timeline.svg", svg(timeline))


def new_folder(home: str, default: str) -> Folder:
    """A new folder with the default name, or with the first number that is free."""
    number = 1
    while True:
        folder = Folder(Path(home) / (default if number == 1 else f"{default}-{number}"))
        with _creating(folder.path):
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.path.mkdir()  # which one of two commands can do
                return folder
        number += 1


def find_run(given: str, home: str = "runs") -> Folder:
    """An existing run, by its path or by its name."""
    for path in (Path(given), Path(home) / given):
        if (path / "job.toml").is_file():
            return Folder(path)
    runs = sorted(job.parent.name for job in Path(home).glob("*/job.toml"))
    known = ", ".join(runs) or "none"
    raise WeftError(f"{given} is not a run: it has no job.toml{did_you_mean(given, runs)} (runs in {home}: {known})")


def slug(name: str) -> str:
    """A name that can be a folder's."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def _age(name: str) -> tuple[int, int]:
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


@contextlib.contextmanager
def _writing(path: Path, error: type[Exception] = StorageError, remedy: str = "") -> Iterator[None]:
    """While a run trains, a file that can't be written is an error of storage: training could go on."""
    try:
        yield
    except OSError as problem:
        raise error(f"{path} can't be written: {problem.strerror}; {remedy or remedy_for(problem)}") from problem


def _creating(path: Path) -> contextlib.AbstractContextManager[None]:
    """Before a run begins, the place that the job names is at fault."""
    return _writing(path, WeftError, "set log.folder to a writable place")
