"""The folder of a run, `runs/<name>/`, and its checkpoints.

job.toml         the configuration, complete
metrics.jsonl    one object a line
checkpoints/     update-00000150, update-00000300, …, each whole or not there; `latest` and `best` hold a name
summary.json     what came out
trace.json       the last mini-batches, for Perfetto;  timeline.svg: the same as a picture
sample.txt       what a language model wrote at the end
report.html      all of it on one page
events/          for TensorBoard, if wanted
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.environment import is_rank
from weft.errors import WeftError
from weft.output import write_text
from weft.text import did_you_mean
from weft.train.config import to_toml
from weft.train.job import Job, job_of
from weft.train.run.metrics import plain

NAME = re.compile(r"update-(\d+)(?:-(\d+))?")


class Folder:
    """A run's folder; only the first rank writes to it, beside the chunks of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.report = self.path / "report.html"

    def __str__(self) -> str:
        return str(self.path)

    # What is in it

    def job(self, sets: list[str]) -> Job:
        """The run's own configuration, with other settings on top; torchrun decides how many ranks there are."""
        file = self.path / "job.toml"
        if not file.is_file():
            raise WeftError(f"{self} is no run: it has no job.toml; name a folder such as runs/gpt-wpipe")
        return job_of(str(file), [*(["schedule.ranks=0"] if is_rank() else []), *sets])

    def write_job(self, job: Job) -> None:
        with _writing(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_text(self.path / "job.toml", to_toml(job))

    def remove_unused(self) -> None:
        """Away with the folder of a run that never began."""
        if not (self.path / "metrics.jsonl").exists() and not self.names():
            shutil.rmtree(self.path, ignore_errors=True)

    def begin(self, job: Job) -> None:
        """A run begins, or goes on: what came out is not known any more."""
        self.write_job(job)
        (self.path / "summary.json").unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(plain(summary), indent=2, allow_nan=False) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """What came out, if the run has come to an end."""
        file = self.path / "summary.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise WeftError(f"{file} can't be read ({problem}); run the job again") from None
        return found

    def text(self, name: str) -> str:
        """A file's text, or nothing where it is not there."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text("utf-8")
        return ""

    # Checkpoints

    def names(self) -> list[str]:
        """The checkpoints that there are, oldest first."""
        found = [one.name for one in self.checkpoints.glob("update-*") if NAME.fullmatch(one.name)]
        return sorted(found, key=_age)

    def next(self, update: int) -> Path:
        """Where a checkpoint is to be saved: always a new place."""
        name, again = f"update-{update:08}", 1
        while (self.checkpoints / name).exists():
            again += 1
            name = f"update-{update:08}-{again}"
        return self.checkpoints / name

    def publish(self, checkpoint: Path, *, best: bool, keep: int) -> None:
        """A checkpoint is whole: point to it, then let go of old ones."""
        if best:
            write_text(self.checkpoints / "best", checkpoint.name + "\n")
        write_text(self.checkpoints / "latest", checkpoint.name + "\n")
        names = self.names()
        kept = {checkpoint.name, self._pointed("best"), *names[-keep:]}
        for name in names:
            if name not in kept:
                gone = self.checkpoints / f".{name}.gone"  # so that half of one never looks like a whole one
                with _writing(gone):
                    (self.checkpoints / name).rename(gone)
        self.sweep()

    def sweep(self) -> None:
        """Remove what a killed run, or an old checkpoint, has left."""
        for left in self.checkpoints.glob(".update-*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in (*self.path.glob(".*.part"), *self.checkpoints.glob(".*.part")):
            left.unlink(missing_ok=True)

    def rewind(self, checkpoint: Path, *, best: int | None) -> None:
        """A run goes on from here: newer checkpoints, of a way that is not gone, are set aside under another name."""
        for name in self.names():
            if _age(name) > _age(checkpoint.name):
                aside, number = self.checkpoints / f"aside-{name}", 1
                while aside.exists():
                    number += 1
                    aside = self.checkpoints / f"aside-{name}-{number}"
                with _writing(aside):
                    (self.checkpoints / name).rename(aside)
        kept = [name for name in self.names() if _age(name)[0] == best]
        if kept:
            write_text(self.checkpoints / "best", kept[-1] + "\n")
        else:
            (self.checkpoints / "best").unlink(missing_ok=True)
        write_text(self.checkpoints / "latest", checkpoint.name + "\n")

    def find(self, which: str) -> Path | None:
        """The checkpoint `latest`, `previous`, `best` or of a name; None where there is no latest one yet."""
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

    def _pointed(self, pointer: str) -> str | None:
        file = self.checkpoints / pointer
        try:
            name = file.read_text("utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as problem:
            raise WeftError(f"{file} can't be read ({problem}); write the name of a checkpoint into it") from None
        if not NAME.fullmatch(name) or not (self.checkpoints / name).is_dir():
            raise WeftError(
                f"{file} names {name[:60]!r}, which is no checkpoint of {self} (there are: "
                f"{', '.join(self.names()) or 'none'}); choose one with --checkpoint NAME"
            )
        return name


def new_folder(job: Job, *, overwrite: bool) -> Folder:
    """A folder for a new run: of the job's name, or of the first free number."""
    home = Path(job.log.folder)
    if job.name:
        path = home / job.name
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            if not overwrite:
                raise WeftError(
                    f"{path} is there already; go on with it (--resume {shlex.quote(str(path))}), replace it "
                    "(--overwrite), or give another name (--set name=...)"
                )
            if not (path / "job.toml").is_file():
                raise WeftError(f"{path} is no run (it has no job.toml), so it is not overwritten; use another name")
            shutil.rmtree(path)
        return Folder(path)
    stem = f"{slug(job.model.name)}-{slug(job.schedule.name)}"
    number = 1
    while (path := home / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return Folder(path)


def slug(name: str) -> str:
    """A name that can be a folder's."""
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def run_folder(given: str, home: str = "runs") -> Folder:
    """A run that is there, by its path or by its name."""
    for path in (Path(given), Path(home) / given):
        if (path / "job.toml").is_file():
            return Folder(path)
    runs = sorted(one.parent.name for one in Path(home).glob("*/job.toml"))
    known = ", ".join(runs) or "none"
    raise WeftError(f"{given} is no run: it has no job.toml{did_you_mean(given, runs)} (runs in {home}: {known})")


def _age(name: str) -> tuple[int, int]:
    found = NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise WeftError(f"{path} can't be written: {problem.strerror}; set log.folder to a place that can") from None
