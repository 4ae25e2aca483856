"""Tables of samples, whatever file they come from, and what their columns mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from weft.errors import WeftError
from weft.text import did_you_mean

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
    """A table whose columns are read only when they are asked for."""

    @property
    def where(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    def strings(self, column: str) -> Sequence[str]: ...
    def labels(self, column: str) -> np.ndarray: ...
    def blobs(self, column: str) -> Sequence[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a table holds ("images", "sentences" or "language"), and in which columns."""

    kind: str
    columns: tuple[str, ...]
    label: str = ""


def find_layout(
    source: TableSource, *, columns: Sequence[str] = (), label: str = "", images: Sequence[str] = ()
) -> Layout:
    """Found by the names of the columns, unless they are given; `images`: columns that hold images."""
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
    usual = ", ".join("/".join((*names, "label")) for names in (("img",), ("image",), *SENTENCES))
    raise WeftError(
        f"{source.where} has no known columns (it has: {', '.join(known)}; known: {usual}, text); "
        "set data.columns and data.label"
    )


def check_column(column: str, source: TableSource) -> None:
    if column not in source.names:
        known = ", ".join(source.names)
        raise WeftError(
            f"{source.where} has no column {column!r}{did_you_mean(column, source.names)}; its columns: {known}"
        )


class ArrowSource:
    """Columns of Arrow tables; `load(column)` reads one."""

    def __init__(self, where: str, schema: Any, load: Any) -> None:
        self.where = where
        self.names: list[str] = list(schema.names)
        self.images = [field.name for field in schema if _holds_bytes(str(field.type))]
        self._load = load

    def strings(self, column: str) -> list[str]:
        return [one or "" for one in self._read(column).to_pylist()]

    def labels(self, column: str) -> np.ndarray:
        values = self._read(column)
        if values.null_count:
            raise WeftError(
                f"column {column!r} of {self.where} must have a value in each row ({values.null_count} lack it)"
            )
        array: np.ndarray = values.to_numpy()
        if array.dtype.kind not in "iufb":
            raise WeftError(
                f"column {column!r} of {self.where} must hold numbers (it holds {values.type}); set data.label"
            )
        return array.astype(np.int64) if array.dtype.kind == "b" else array

    def blobs(self, column: str) -> Sequence[bytes]:
        return BytesColumn(self._read(column), self.where)

    def _read(self, column: str) -> Any:
        check_column(column, self)
        try:
            return self._load(column)
        except (OSError, ValueError) as problem:
            raise WeftError(f"column {column!r} of {self.where} can't be read ({problem})") from problem


class BytesColumn(Sequence[bytes]):
    """Bytes in an Arrow column, of each row when it is asked for; a struct's are in its field `bytes`."""

    def __init__(self, column: Any, where: str) -> None:
        nested = str(column.type).startswith("struct")
        self._chunks = [chunk.field("bytes") if nested else chunk for chunk in column.chunks]
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])
        self._where = where

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        data = self._chunks[chunk][int(index - self._starts[chunk])].as_py()
        if data is None:
            raise WeftError(f"image {index} of {self._where} has no bytes (it names a file, perhaps); embed the images")
        return data


def _holds_bytes(kind: str) -> bool:
    return kind.startswith(("binary", "large_binary")) or (kind.startswith("struct<") and "bytes: " in kind)
