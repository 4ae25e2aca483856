"""Images with a class: decoded on first use, cached as bytes, augmented and normalized per batch.

The random numbers of a sample's augmentation are one row of a table for all samples, drawn from (seed, epoch), so a
sample is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from weft.errors import WeftError
from weft.train.data.base import Data, Draw, generator
from weft.train.data.fingerprints import checksum
from weft.train.data.image_decoding import SMALL, crop_and_resize, decode, fit
from weft.train.data.labelled import LabelledDataset, check_opened_with, count_classes, infer_task, split_holdout
from weft.train.data.options import ImageOptions
from weft.train.data.tables import Layout, TableSource
from weft.train.data_spec import DataSpec

CACHE_BYTES = 2**30  # decoded images are cached up to this size, and decoded again in each epoch beyond it
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of each channel
GREY = ((0.5,), (0.25,))


class EncodedImages(Protocol):
    """The bytes of image files, read on demand."""

    @property
    def fingerprint(self) -> str: ...
    def __getitem__(self, index: int) -> bytes: ...


class ImageDataset(LabelledDataset):
    """`load(i)` returns image i, uint8 [channels, height, width]; None on ranks that read no inputs.

    `normalization` is the default mean and standard deviation; `images` are decoded images of the right size.
    """

    def __init__(
        self,
        spec: DataSpec,
        load: Callable[[int], np.ndarray] | None,
        labels: np.ndarray,
        *,
        options: ImageOptions,
        normalization: tuple[Sequence[float], Sequence[float]] | None = None,
        images: np.ndarray | None = None,
        targets: bool,
        input_fingerprint: str = "",
    ) -> None:
        super().__init__(spec, labels, targets=targets, input_fingerprint=input_fingerprint)
        self._load = load
        self._augment = options.augment
        if load is None:
            return
        shape = (len(labels), spec.channels, spec.size, spec.size)
        self._cache = images
        self._cached = np.full(len(labels), images is not None)
        if images is None and np.prod(shape) <= CACHE_BYTES:
            self._cache = np.empty(shape, dtype=np.uint8)
        mean, std = _normalization(options, normalization, spec.channels)
        self._scale = (1 / (255 * std)).reshape(-1, 1, 1)
        self._shift = (-mean / std).reshape(-1, 1, 1)

    def inputs(self, indices: np.ndarray, draw: Draw | None) -> torch.Tensor:
        check_opened_with(self._load is not None, "inputs")
        indices = np.asarray(indices, dtype=np.int64)
        if draw is None or self._augment == "none":
            batch = self._plain(indices)
        else:
            chance = _chance(len(self), draw.seed, draw.epoch)[indices]
            if self.spec.size <= SMALL:
                batch = padded_crop(self._plain(indices), chance)
            else:
                batch = np.stack(
                    [self._resized_crop(int(index), row) for index, row in zip(indices, chance, strict=True)]
                )
            if self._augment == "standard":
                flipped = chance[:, 0] < 0.5
                batch[flipped] = batch[flipped][..., ::-1]
        return torch.from_numpy(batch * self._scale + self._shift)

    def _plain(self, indices: np.ndarray) -> np.ndarray:
        """Without augmentation: the whole image, or its centre, [batch, channels, size, size]; a copy."""
        assert self._load is not None
        if self._cache is None:
            return np.stack([fit(self._load(int(index)), self.spec.size) for index in indices])
        for index in np.unique(indices[~self._cached[indices]]):
            self._cache[index] = fit(self._load(int(index)), self.spec.size)
            self._cached[index] = True  # only now: another thread may read it
        batch: np.ndarray = self._cache[indices]
        return batch

    def _resized_crop(self, index: int, chance: np.ndarray) -> np.ndarray:
        assert self._load is not None
        return crop_and_resize(self._load(index), self.spec.size, chance[1:])


def padded_crop(batch: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Each image shifted by up to an eighth of its size, with black borders."""
    size = batch.shape[-1]
    edge = size // 8
    padded = np.pad(batch, ((0, 0), (0, 0), (edge, edge), (edge, edge)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))
    down, right = (chance[:, 1:3] * (2 * edge + 1)).astype(np.int64).T
    return np.ascontiguousarray(windows[np.arange(len(batch)), :, down, right])


def images_from_tables(
    sources: Sequence[TableSource],
    layout: Layout,
    options: ImageOptions,
    *,
    holdout: float,
    inputs: bool,
    targets: bool,
) -> Data:
    """Images in tables: a training source and optionally a validation source."""
    labels = [source.labels(layout.label) for source in sources]
    blobs = [source.blobs(layout.columns[0]) if inputs else None for source in sources]
    return images_from_files(
        blobs, labels, [source.where for source in sources], options, holdout=holdout, inputs=inputs, targets=targets
    )


def images_from_files(
    files: Sequence[EncodedImages | None],
    labels: Sequence[np.ndarray],
    where: Sequence[str],
    options: ImageOptions,
    *,
    holdout: float,
    inputs: bool,
    targets: bool,
    channels: int = 0,
) -> Data:
    """Data from encoded images (None if they are not read), for training and optionally for validation."""
    tasks = [infer_task(values, place) for values, place in zip(labels, where, strict=True)]
    classes = count_classes(tasks[0][1], tasks[-1][1], tasks[0][0], where[-1])
    size = options.size
    if files[0] is not None and not (channels and size):
        sample = decode(files[0][0], channels, where[0])
        channels, size = sample.shape[0], size or min(sample.shape[1:])
    spec = DataSpec(task=tasks[0][0], form="images", classes=classes, channels=channels, size=size)

    def part(blobs: EncodedImages | None, values: np.ndarray, place: str) -> ImageDataset:
        load = None if blobs is None else lambda index: decode(blobs[index], channels, f"image {index} of {place}")
        known = "" if blobs is None else blobs.fingerprint
        return ImageDataset(spec, load, values, options=options, targets=targets, input_fingerprint=known)

    parts = [part(blobs, values, place) for blobs, (_, values), place in zip(files, tasks, where, strict=True)]
    if len(parts) == 1:
        return split_holdout(parts[0], holdout)
    return Data(train=parts[0], validation=parts[1])


def images_from_arrays(
    images: Sequence[np.ndarray | None],
    labels: Sequence[np.ndarray],
    spec: DataSpec,
    options: ImageOptions,
    *,
    normalization: tuple[Sequence[float], Sequence[float]],
    targets: bool,
) -> Data:
    """Data from decoded images, uint8 [samples, channels, height, width]."""
    parts = []
    for array, values in zip(images, labels, strict=True):
        right_size = array is not None and array.shape[1:] == (spec.channels, spec.size, spec.size)
        parts.append(
            ImageDataset(
                spec,
                None if array is None else array.__getitem__,
                values.astype(np.int64),
                options=options,
                normalization=normalization,
                images=array if right_size else None,
                targets=targets,
                input_fingerprint="" if array is None else checksum(array),
            )
        )
    return Data(train=parts[0], validation=parts[1])


def _normalization(
    options: ImageOptions, default: tuple[Sequence[float], Sequence[float]] | None, channels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel; a single number applies to all channels."""
    default = default or (IMAGENET if channels == 3 else GREY)
    found = []
    for key, given, other in (("mean", options.mean, default[0]), ("std", options.std, default[1])):
        numbers = np.asarray(given or other, dtype=np.float32)
        if len(numbers) not in (1, channels):
            raise WeftError(f"data.{key} must have one number per channel (channels: {channels}, got {list(given)})")
        found.append(np.broadcast_to(numbers, (channels,)))
    return found[0], found[1]


@lru_cache(maxsize=4)
def _chance(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Five uniform numbers per sample: flip, down, right, area, shape."""
    table = generator("augment", seed, epoch).random((samples, 5), dtype=np.float32)
    table.setflags(write=False)
    return table
