"""Plain text: the user's files, or the sources of Python's standard library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data
from weft.train.data.language import language_data
from weft.train.data.options import PythonSources, TextFiles


def read(options: PythonSources | TextFiles, *, seed: int, inputs: bool, targets: bool) -> Data:
    if isinstance(options, PythonSources):
        train, validation = _join(files.python_files()), None
    else:
        train = _join(files.find_files(options.path, "data.path"))
        validation = _join(files.find_files(options.validation, "data.validation")) if options.validation else None
    return language_data(train, validation, options, holdout=options.holdout, inputs=inputs, targets=targets)


def _join(paths: Sequence[Path]) -> bytes:
    try:
        return b"\n".join(path.read_bytes() for path in paths)
    except OSError as problem:
        raise WeftError(f"text can't be read ({problem}); set data.path to readable files") from problem
