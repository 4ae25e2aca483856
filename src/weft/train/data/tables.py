"""Tables of samples, independent of the file format, and the meaning of their columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from weft.errors import WeftError
from weft.text import did_you_mean
from weft.train.data.fingerprints import sampled
from weft.train.extras import need

IMAGES = ("img", "image")
SENTENCES = (
    ("question1", "question2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("#1 String", "#2 String"),
    ("sentence",),
    ("text",),
)
LABELS = ("label", "labels", "fine_label", "is_duplicate", "gold_label", "Quality", "score")


class TableSource(Protocol):
    """A table whose columns are read on demand."""

    @property
    def where(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    def strings(self, column: str) -> Sequence[str]: ...
    def labels(self, column: str) -> np.ndarray: ...
    def blobs(self, column: str) -> BytesColumn: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a table contains ("images", "sentences" or "language"), and in which columns."""

    kind: str
    columns: tuple[str, ...]
    label: str = ""


def find_layout(
    source: TableSource, *, columns: Sequence[str] = (), label: str = "", images: Sequence[str] = ()
) -> Layout:
    """Infer the layout from the names of the columns, unless they are given; `images`: columns that contain images."""
    known = list(source.names)
    for name in (*columns, *([label] if label else ())):
        check_column(name, source)
    label = label or next((name for name in LABELS if name in known), "")
    image_columns = [name for name in (columns or IMAGES) if name in images]
    if image_columns and label:
        return Layout(kind="images", columns=(image_columns[0],), label=label)
    texts = tuple(columns) or next((names for names in SENTENCES if set(names) <= set(known)), ())
    if texts and label:
        return Layout(kind="sentences", columns=texts, label=label)
    if texts == ("text",) or (columns and len(texts) == 1):
        return Layout(kind="language", columns=texts)
    accepted = ", ".join("/".join((*names, "label")) for names in (("img",), ("image",), *SENTENCES))
    raise WeftError(
        f"{source.where} has no known columns (it has: {', '.join(known)}; known: {accepted}, text); "
        "set data.columns and data.label"
    )


def check_column(column: str, source: TableSource) -> None:
    if column not in source.names:
        known = ", ".join(source.names)
        raise WeftError(
            f"{source.where} has no column {column!r}{did_you_mean(column, source.names)}; its columns: {known}"
        )


class ArrowSource:
    """Columns of Arrow tables; `load(column)` reads a column."""

    def __init__(self, where: str, schema: Any, load: Any) -> None:
        self.where = where
        self.names: list[str] = list(schema.names)
        self.images = [field.name for field in schema if _holds_bytes(str(field.type))]
        self._load = load

    def strings(self, column: str) -> list[str]:
        return [text or "" for text in self._read(column).to_pylist()]

    def labels(self, column: str) -> np.ndarray:
        values = self._read(column)
        if values.null_count:
            raise WeftError(
                f"column {column!r} of {self.where} must have a value in each row ({values.null_count} rows have none)"
            )
        array: np.ndarray = values.to_numpy()
        if array.dtype.kind not in "iufb":
            raise WeftError(
                f"column {column!r} of {self.where} must contain numbers (it contains {values.type}); set data.label"
            )
        return array.astype(np.int64) if array.dtype.kind == "b" else array

    def blobs(self, column: str) -> BytesColumn:
        return BytesColumn(self._read(column), self.where)

    def _read(self, column: str) -> Any:
        check_column(column, self)
        try:
            return self._load(column)
        except (OSError, ValueError) as problem:
            raise WeftError(f"column {column!r} of {self.where} can't be read ({problem})") from problem


class BytesColumn:
    """The bytes of each row of an Arrow column, read on demand; in a struct, they are in its field `bytes`."""

    def __init__(self, column: Any, where: str) -> None:
        nested = str(column.type).startswith("struct")
        self._arrays = [array.field("bytes") if nested else array for array in column.chunks]
        self._starts = np.cumsum([0, *(len(array) for array in self._arrays)])
        self._where = where

    def __getitem__(self, index: int) -> bytes:
        data = self._find(index)
        if data is None:
            raise WeftError(f"image {index} of {self._where} has no bytes (it may name a file); embed the images")
        return data

    @property
    def fingerprint(self) -> str:
        """Of all lengths, and of the content of some rows; how the column is divided does not matter."""
        compute = need("pyarrow.compute", "data", purpose="images in tables")
        lengths = [compute.fill_null(compute.binary_length(array), -1).to_numpy() for array in self._arrays]
        return sampled(np.concatenate(lengths), lambda index: self._find(index) or b"")

    def _find(self, index: int) -> bytes | None:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        data: bytes | None = self._arrays[number][int(index - self._starts[number])].as_py()
        return data


def _holds_bytes(kind: str) -> bool:
    return kind.startswith(("binary", "large_binary")) or (kind.startswith("struct<") and "bytes: " in kind)
