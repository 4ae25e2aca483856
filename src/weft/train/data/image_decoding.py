"""Decodes and resizes a single image with Pillow."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.train.extras import need

SMALL = 32  # up to this size, augmentation crops with padding and does not resize
MARGIN = 8 / 7  # the centre crop of `size` is taken from an image resized to this multiple (256 for 224)


def decode(data: bytes, channels: int, where: str) -> np.ndarray:
    """uint8 [channels, height, width]; `channels=0` means 1 for grey images and 3 for others."""
    library = _pillow()
    try:
        with library.open(io.BytesIO(data)) as image:
            mode = {0: "L" if image.mode in ("1", "L") else "RGB", 1: "L", 3: "RGB"}[channels]
            return _array(image if image.mode == mode else image.convert(mode))
    except (OSError, ValueError, SyntaxError, library.DecompressionBombError) as problem:
        raise WeftError(f"{where} can't be decoded ({problem}); remove or replace it") from problem


def fit(image: np.ndarray, size: int) -> np.ndarray:
    """The centre of an image, resized; an image of this size is returned unchanged."""
    _, height, width = image.shape
    if height == width == size:
        return image
    shorter = min(height, width) / (MARGIN if size > 2 * SMALL else 1.0)
    left, top = (width - shorter) / 2, (height - shorter) / 2
    return _resize(image, size, (left, top, left + shorter, top + shorter))


def crop_and_resize(image: np.ndarray, size: int, chance: np.ndarray) -> np.ndarray:
    """A random crop with 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3, as far as it fits, resized.

    `chance`: four numbers from 0 to 1, for the position (down, right), area and shape.
    """
    _, height, width = image.shape
    down, right, area, shape = (float(number) for number in chance)
    wanted = (0.08 + 0.92 * area) * height * width
    ratio = math.exp(math.log(4 / 3) * (2 * shape - 1))
    box_width = min(width, math.sqrt(wanted * ratio))
    box_height = min(height, math.sqrt(wanted / ratio))
    left, top = right * (width - box_width), down * (height - box_height)
    return _resize(image, size, (left, top, left + box_width, top + box_height))


def _resize(image: np.ndarray, size: int, box: tuple[float, float, float, float]) -> np.ndarray:
    library = _pillow()
    source = library.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
    return _array(source.resize((size, size), library.Resampling.BILINEAR, box=box))


def _array(image: Any) -> np.ndarray:
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _pillow() -> Any:
    return need("PIL.Image", "data", purpose="images")
