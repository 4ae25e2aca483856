"""Writes tiny files in the formats that the readers read."""

import gzip
import importlib
import io
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

pa: Any = importlib.import_module("pyarrow")  # untyped
pq: Any = importlib.import_module("pyarrow.parquet")

WORDS = ("[PAD]", "[unused]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "cat", "##s", "is", "?", "bird", "fish")


def png(pixels: np.ndarray) -> bytes:
    """An image [height, width] or [height, width, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def noise(samples: int, size: int) -> np.ndarray:
    return np.random.default_rng(samples).integers(0, 256, (samples, size, size, 3), dtype=np.uint8)


def write_images(path: Path, images: Iterable[np.ndarray], labels: Sequence[int], *, column: str = "img") -> str:
    cells = [{"bytes": png(image), "path": None} for image in images]
    pq.write_table(pa.table({column: cells, "label": list(labels)}), path, row_group_size=4)
    return str(path)


def write_pairs(path: Path, samples: int) -> str:
    """Both questions of pair i contain i, and its label is i mod 2."""
    columns = {
        "question1": [f"is {number} a dog?" for number in range(samples)],
        "question2": [f"cats {number}" for number in range(samples)],
        "label": [number % 2 for number in range(samples)],
        "idx": list(range(samples)),
    }
    pq.write_table(pa.table(columns), path)
    return str(path)


def write_cifar(folder: Path, *, hundred: bool = False, samples: int = 3) -> dict[str, np.ndarray]:
    """Write the standard files; returns the label bytes and pixels of each file by name."""
    written = {}
    names = ["train.bin", "test.bin"] if hundred else [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for seed, name in enumerate(names):
        records = np.random.default_rng(seed).integers(0, 256, (samples, 3072 + 1 + hundred), dtype=np.uint8)
        records[:, 0] = np.arange(samples) + seed
        if hundred:
            records[:, 1] = 10 * np.arange(samples) + seed
        records.tofile(folder / name)
        written[name] = records
    return written


def write_idx(path: Path, array: np.ndarray) -> None:
    data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
