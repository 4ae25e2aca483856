"""MNIST and Fashion-MNIST in idx files: a magic number with the number of axes, the axis lengths, then bytes."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data
from weft.train.data.images import images_from_arrays
from weft.train.data.options import FashionMnist, Mnist, idx_names
from weft.train.data_spec import DataSpec

MNIST_NORMALIZATION = ((0.1307,), (0.3081,))
FASHION_NORMALIZATION = ((0.2860,), (0.3530,))
CLASSES = 10


def read(options: Mnist, *, seed: int, inputs: bool, targets: bool) -> Data:
    images: list[np.ndarray | None] = []
    labels: list[np.ndarray] = []
    for part in ("train", "t10k"):
        path = files.find_file(options.path, idx_names(part, "labels-idx1"), "data.path", gz=True)
        labels.append(parse(path, axes=1))
        if not len(labels[-1]) or labels[-1].max() >= CLASSES:
            raise WeftError(f"{path} must have labels below {CLASSES}; download it again")
        path = files.find_file(options.path, idx_names(part, "images-idx3"), "data.path", gz=True)
        pixels = parse(path, axes=3)[:, None] if inputs else None
        images.append(pixels)
        if pixels is not None and len(pixels) != len(labels[-1]):
            raise WeftError(f"{path} must have an image for each of {len(labels[-1])} labels; download both again")
    size = options.size or 28
    spec = DataSpec(task="classification", form="images", classes=CLASSES, channels=1, size=size)
    normalization = FASHION_NORMALIZATION if isinstance(options, FashionMnist) else MNIST_NORMALIZATION
    return images_from_arrays(images, labels, spec, options, normalization=normalization, targets=targets)


def parse(path: Path, *, axes: int) -> np.ndarray:
    """The array in an idx file of bytes, which may be gzipped."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as problem:
        raise WeftError(f"{path} can't be unpacked ({problem}); download it again") from problem
    head = 4 * (1 + axes)
    if len(data) < head or data[:4] != bytes([0, 0, 8, axes]):
        raise WeftError(f"{path} must be an idx file of bytes with {axes} axes (it begins with {data[:4].hex()!r})")
    shape = tuple(int(length) for length in np.frombuffer(data[4:head], dtype=">u4"))
    if len(data) - head != np.prod(shape):
        raise WeftError(f"{path} must contain {shape} bytes (it contains {len(data) - head}); download it again")
    return np.frombuffer(data, dtype=np.uint8, offset=head).reshape(shape)
