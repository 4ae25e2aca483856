"""Folders of image files, one folder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data, generator
from weft.train.data.fingerprints import START, sampled
from weft.train.data.images import images_from_files
from weft.train.data.options import ImageFolder

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class FileContents:
    """The bytes of files below `home`, read on demand."""

    def __init__(self, paths: Sequence[Path], home: Path) -> None:
        self._paths, self._home = paths, home

    def __getitem__(self, index: int) -> bytes:
        return self._paths[index].read_bytes()

    @property
    def fingerprint(self) -> str:
        """Of the names and sizes of all files, and of the content of some."""
        try:
            sizes = np.array([os.stat(path).st_size for path in self._paths])
            return sampled(sizes, self._start, *(str(path)[len(str(self._home)) :] for path in self._paths))
        except OSError as problem:
            raise WeftError(f"{problem.filename} can't be read: {problem.strerror}; remove or replace it") from problem

    def _start(self, index: int) -> bytes:
        with self._paths[index].open("rb") as file:
            return file.read(START)


def read(options: ImageFolder, *, seed: int, inputs: bool, targets: bool) -> Data:
    root = files.find_folder(options.path, "data.path")
    validation = next((root / name for name in ("validation", "val", "test") if (root / name).is_dir()), None)
    divided = (root / "train").is_dir()
    homes = [root / "train" if divided else root, *([validation] if divided and validation else [])]
    classes = [folder.name for folder in _folders(homes[0])]
    paths, labels = zip(*(_listing(home, classes) for home in homes), strict=True)
    blobs = [FileContents(part, home) if inputs else None for part, home in zip(paths, homes, strict=True)]
    where = [str(home) for home in homes]
    return images_from_files(
        blobs, labels, where, options, holdout=options.holdout, inputs=inputs, targets=targets, channels=3
    )


def _listing(home: Path, classes: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    """All images and their classes, in a fixed shuffled order, so that the first samples contain every class."""
    unknown = sorted({folder.name for folder in _folders(home)} - set(classes))
    if unknown:
        raise WeftError(f"{home} has classes that the training data lacks: {', '.join(unknown[:5])}")
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        inside = (home / name).rglob("*") if (home / name).is_dir() else ()
        found += [(path, label) for path in sorted(inside) if path.suffix.lower() in ENDINGS]
    if not found:
        raise WeftError(f"data.path: no images in {home}; looked for CLASS/*{{{','.join(ENDINGS)}}}; set data.path")
    order = generator("folder", len(found)).permutation(len(found))
    return [found[number][0] for number in order], np.array([found[number][1] for number in order])


def _folders(home: Path) -> list[Path]:
    return sorted(path for path in home.iterdir() if path.is_dir() and not path.name.startswith("."))
