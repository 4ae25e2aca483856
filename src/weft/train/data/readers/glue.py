"""Tab-separated files with a header, in the format of the GLUE tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data
from weft.train.data.options import Glue
from weft.train.data.sentences import sentences_from_tables
from weft.train.data.tables import BytesColumn, check_column, find_layout


class TsvSource:
    """The rows of one file. Cells are never quoted: a quotation mark is part of the text."""

    def __init__(self, path: Path, classes: dict[str, dict[str, int]]) -> None:
        self.where = str(path)
        try:
            lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as problem:
            raise WeftError(f"{path} can't be read as text ({problem})") from problem
        self.names = lines[0].rstrip("\r").split("\t")
        rows = [line.rstrip("\r").split("\t") for line in lines[1:]]
        self._rows = [row for row in rows if len(row) == len(self.names)]
        self._classes = classes
        if len(rows) - len(self._rows) > len(rows) // 100 or not self._rows:
            number = next((line for line, row in enumerate(rows, 2) if len(row) != len(self.names)), 1)
            raise WeftError(
                f"{path} must have {len(self.names)} cells per line, as in its header (see line {number}); "
                "at most 1 % of the lines may be malformed, which are skipped"
            )

    def strings(self, column: str) -> list[str]:
        check_column(column, self)
        position = self.names.index(column)
        return [row[position] for row in self._rows]

    def labels(self, column: str) -> np.ndarray:
        """Whole numbers unchanged, other numbers for a regression; words are numbered in alphabetical order, by the
        training file for all files."""
        cells = self.strings(column)
        for kind in (np.int64, np.float64):
            try:
                return np.array([kind(cell) for cell in cells])
            except ValueError:
                continue
        numbers = self._classes.setdefault(column, {word: number for number, word in enumerate(sorted(set(cells)))})
        unknown = set(cells) - set(numbers)
        if unknown:
            raise WeftError(f"{self.where} has labels that the training data lacks: {', '.join(sorted(unknown))}")
        return np.array([numbers[cell] for cell in cells])

    def blobs(self, column: str) -> BytesColumn:
        raise WeftError(f"{self.where} contains text, not images")


def read(options: Glue, *, seed: int, inputs: bool, targets: bool) -> Data:
    classes: dict[str, dict[str, int]] = {}
    paths = [files.find_file(options.path, ("train.tsv",), "data.path")]
    names = [name for name in options.validation_names if (paths[0].parent / name).is_file()]
    paths += [paths[0].parent / name for name in names[:1]]
    sources = [TsvSource(path, classes) for path in paths]
    layout = find_layout(sources[0], columns=options.columns, label=options.label)
    return sentences_from_tables(sources, layout, options, holdout=options.holdout, inputs=inputs, targets=targets)
