"""Tab-separated files with a header, in the form of GLUE's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data
from weft.train.data.options import Glue
from weft.train.data.sentences import sentences
from weft.train.data.tables import check_column, find_layout


class TsvSource:
    """The rows of one file. No cell is quoted: a quotation mark is a part of the text."""

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
            number = next((at for at, row in enumerate(rows, 2) if len(row) != len(self.names)), 1)
            raise WeftError(
                f"{path} must have {len(self.names)} cells a line, as its header has (see line {number}); "
                "up to a hundredth of the lines may be broken, and is left out"
            )

    def strings(self, column: str) -> list[str]:
        check_column(column, self)
        at = self.names.index(column)
        return [row[at] for row in self._rows]

    def labels(self, column: str) -> np.ndarray:
        """Whole numbers as they are, other numbers for a regression; words are numbered in the training file's order of
        the alphabet, and the same in all files."""
        cells = self.strings(column)
        for kind in (np.int64, np.float64):
            try:
                return np.array([kind(cell) for cell in cells])
            except ValueError:
                continue
        numbers = self._classes.setdefault(column, {word: at for at, word in enumerate(sorted(set(cells)))})
        strange = set(cells) - set(numbers)
        if strange:
            raise WeftError(f"{self.where} has labels that training has not: {', '.join(sorted(strange))}")
        return np.array([numbers[cell] for cell in cells])

    def blobs(self, column: str) -> Sequence[bytes]:
        raise WeftError(f"{self.where} holds text, no images")


def read(options: Glue, *, seed: int, inputs: bool, targets: bool) -> Data:
    classes: dict[str, dict[str, int]] = {}
    paths = [files.find_file(options.path, ("train.tsv",), "data.path")]
    names = [name for name in options.validation_names if (paths[0].parent / name).is_file()]
    paths += [paths[0].parent / name for name in names[:1]]
    sources = [TsvSource(path, classes) for path in paths]
    layout = find_layout(sources[0], columns=options.columns, label=options.label)
    return sentences(sources, layout, options, holdout=options.holdout, inputs=inputs, targets=targets)
