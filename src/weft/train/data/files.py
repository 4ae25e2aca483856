"""Finds the files of a data set, both for the check before a job starts and for its readers."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from weft.errors import WeftError


def python_files() -> list[Path]:
    """The single-file modules of Python's standard library."""
    folder = Path(os.__file__).parent
    return _found(
        sorted(folder.glob("*.py")), "data.name", str(folder), "Python's sources (*.py)", "use data.name=text"
    )


def find_files(path: str, key: str, *, suffix: str = "") -> list[Path]:
    """A file, all files in a folder (with this suffix, without hidden files), or the matches of a pattern; sorted."""
    wanted = f"a file, a folder of {suffix or 'files'} or a pattern"
    if not path:
        raise WeftError(f"{key} must be {wanted} (it is empty); set {key}")
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = (file for file in place.rglob(f"*{suffix}") if not _hidden(file.relative_to(place)))
    else:
        files = (Path(file) for file in glob.glob(str(place), recursive=True))
    return _found(sorted(file for file in files if file.is_file()), key, path, wanted, f"set {key}")


def find_file(path: str, names: Sequence[str], key: str, *, inside: Sequence[str] = (), gz: bool = False) -> Path:
    """The first of these files in the folder or in one of its subfolders `inside`; with `gz`, also as name.gz."""
    folder = find_folder(path, key)
    for home in (folder, *(folder / subfolder for subfolder in inside)):
        for name in names:
            for full in (name, name + ".gz")[: 1 + gz]:
                if (home / full).is_file():
                    return home / full
    raise WeftError(
        f"{key}: no {' or '.join(names)} in {path!r}; set {key} to the folder with the data set's standard files"
    )


def find_folder(path: str, key: str) -> Path:
    if not path:
        raise WeftError(f"{key} must be a folder (it is empty); set {key}")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise WeftError(f"{key} must be a folder (no folder at {path!r}); set {key}")
    return folder


def require_file(path: str, key: str, what: str) -> Path:
    file = Path(path).expanduser()
    if not path or not file.is_file():
        raise WeftError(f"{key} must be {what} (no file at {path!r}); set {key}")
    return file


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _found(files: list[Path], key: str, path: str, wanted: str, remedy: str) -> list[Path]:
    if not files:
        raise WeftError(f"{key}: nothing at {path!r}; looked for {wanted}; {remedy}")
    return files
