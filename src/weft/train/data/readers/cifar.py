"""CIFAR-10 and CIFAR-100 in their standard binary files: per sample, label bytes and 3,072 bytes of pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data
from weft.train.data.images import images_from_arrays
from weft.train.data.options import Cifar10, Cifar100
from weft.train.data_spec import DataSpec

PIXELS = (3, 32, 32)
CIFAR10_NORMALIZATION = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100_NORMALIZATION = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def read(options: Cifar10, *, seed: int, inputs: bool, targets: bool) -> Data:
    hundred = isinstance(options, Cifar100)
    fine = isinstance(options, Cifar100) and options.labels == "fine"
    label_bytes = 2 if hundred else 1
    classes = 100 if fine else 20 if hundred else 10
    images: list[np.ndarray | None] = []
    labels: list[np.ndarray] = []
    for names in (options.train_files, (options.validation_file,)):
        paths = [files.find_file(options.path, (name,), "data.path", inside=(options.inside,)) for name in names]
        records = [_records(path, label_bytes) for path in paths]
        labels.append(np.concatenate([part[:, 1 if fine else 0] for part in records]))
        if labels[-1].max() >= classes:
            raise WeftError(
                f"{paths[0]} must contain labels below {classes} (got {labels[-1].max()}); download it again"
            )
        pixels = [part[:, label_bytes:] for part in records]
        images.append(np.concatenate(pixels).reshape(-1, *PIXELS) if inputs else None)
    spec = DataSpec(task="classification", form="images", classes=classes, channels=3, size=options.size or PIXELS[1])
    normalization = CIFAR100_NORMALIZATION if hundred else CIFAR10_NORMALIZATION
    return images_from_arrays(images, labels, spec, options, normalization=normalization, targets=targets)


def _records(path: Path, label_bytes: int) -> np.ndarray:
    length = label_bytes + int(np.prod(PIXELS))
    size = path.stat().st_size
    if not size or size % length:
        raise WeftError(
            f"{path} needs samples of {length} bytes (it has {size} bytes); download the binary version again"
        )
    return np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, length)
