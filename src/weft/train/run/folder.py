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
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft import faults
from weft.draw import svg, trace
from weft.errors import StorageError, WeftError, remedy_for
from weft.output import json_safe, replace_file, write_text
from weft.text import did_you_mean
from weft.train.run.events import Ended, Event, Saved
from weft.train.run.lock import LOCK

NAME = re.compile(r"update-(\d+)(?:-(\d+))?")
STATUS = "status"
OWN = (LOCK, STATUS)  # what a folder has before its run begins


class Folder:
    """A run's folder; only the first rank writes to it, except for the chunks of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"

    def __str__(self) -> str:
        return str(self.path)

    # Files

    def is_new(self) -> bool:
        """Whether no run has begun here; a folder with other files is refused."""
        if not self.path.exists():
            return True
        if (self.path / "job.toml").is_file():
            return False
        if not self.path.is_dir() or any(entry.name not in OWN for entry in self.path.iterdir()):
            raise WeftError(f"{self.path} is not a run (it has no job.toml), so it is left alone; use another name")
        return True

    def create(self) -> None:
        with _creating(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def write_job(self, text: str) -> None:
        """Write `job.toml`; creates the folder."""
        with _creating(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "job.toml", text)

    def begin(self, job: str, *, invocation: str, overwrite: bool = False) -> None:
        """A run starts or resumes: remove earlier results, or all of an earlier run; write its job.

        In this order, so that a killed process leaves neither results of another job nor a job without its files.
        """
        with _writing(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)
            faults.hit("folder")
            for entry in self.path.iterdir() if overwrite else ():
                if entry.name not in (*OWN, "job.toml"):
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            replace_file(self.path / "job.toml", job)
            replace_file(self.path / "invocation", invocation + "\n")

    def begun_by(self) -> str:
        """The invocation that has begun or resumed this run last."""
        return self.text("invocation").strip()

    def forget_status(self) -> None:
        """Delete the status of the ranks of an earlier start."""
        shutil.rmtree(self.path / STATUS, ignore_errors=True)

    def status_file(self, rank: int) -> Path:
        return self.path / STATUS / f"rank-{rank}.json"

    def remove_unused(self) -> None:
        """Delete the folder of a run that never began."""
        if not (self.path / "job.toml").exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(json_safe(summary), indent=2, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """The results, if the run has ended."""
        file = self.path / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise WeftError(f"{file} can't be read ({problem}); run the job again") from None
        return summary

    def text(self, name: str) -> str:
        """A file's text; empty if there is no such file."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text("utf-8")
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
            names = self.names()
            kept = {checkpoint.name, self._pointed("best"), *names[-keep:]}
            for name in names:
                if name not in kept:  # first renamed: a half-deleted checkpoint must not look complete
                    (self.checkpoints / name).rename(self.checkpoints / f".{name}.gone")
                    faults.hit("rotation")
        self.sweep()

    def sweep(self) -> None:
        """Delete what a killed run left behind, and checkpoints that are no longer kept."""
        for leftover in self.checkpoints.glob(".update-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in (*self.path.glob(".*.part"), *self.checkpoints.glob(".*.part")):
            leftover.unlink(missing_ok=True)

    def rewind(self, checkpoint: Path, *, best: int | None) -> None:
        """Resume from a checkpoint: rename newer ones to `aside-…`; `best` is the best update so far."""
        for name in self.names():
            if _age(name) > _age(checkpoint.name):
                aside, number = self.checkpoints / f"aside-{name}", 1
                while aside.exists():
                    number += 1
                    aside = self.checkpoints / f"aside-{name}-{number}"
                with _writing(aside):
                    (self.checkpoints / name).rename(aside)
        kept = [name for name in self.names() if _age(name)[0] == best]
        with _writing(self.checkpoints):
            if kept:
                replace_file(self.checkpoints / "best", kept[-1] + "\n")
            else:
                (self.checkpoints / "best").unlink(missing_ok=True)
            replace_file(self.checkpoints / "latest", checkpoint.name + "\n")

    def find(self, which: str) -> Path | None:
        """The checkpoint `latest`, `previous`, `best` or of a name; None if there is no latest one."""
        names, latest = self.names(), self._pointed("latest")
        if which == "latest":
            return None if latest is None else self.checkpoints / latest
        if which == "previous":
            before = [name for name in names if latest is not None and _age(name) < _age(latest)]
            which = before[-1] if before else which
        elif which == "best":
            which = self._pointed("best") or which
        if which not in names:
            known = ", ".join(names) or "none"
            raise WeftError(f"{self} has no checkpoint {which!r}{did_you_mean(which, names)}; there are: {known}")
        return self.checkpoints / which

    def newest(self) -> list[Path]:
        """All checkpoints by which a run can resume: what `latest` names, then the others, the newest first."""
        latest = self._pointed("latest")
        others = [name for name in reversed(self.names()) if name != latest]
        return [self.checkpoints / name for name in ([] if latest is None else [latest]) + others]

    def dangling(self) -> str | None:
        """What `latest` names, if that is no checkpoint of this run."""
        return None if self._pointed("latest") else self.text("checkpoints/latest").strip()[:60] or None

    def _pointed(self, pointer: str) -> str | None:
        """The checkpoint that a file names; None if there is no such checkpoint."""
        file = self.checkpoints / pointer
        try:
            name = file.read_text("utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        except OSError as problem:
            raise StorageError(f"{file} can't be read ({problem.strerror}); {remedy_for(problem)}") from None
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
                write_text(self._folder.path / "trace.json", trace(timeline, unit_us=1e6))
                write_text(self._folder.path / "timeline.svg", svg(timeline))


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
