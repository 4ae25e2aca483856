"""Parquet files in the layout of the Hugging Face hub. Only the columns that a rank needs are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import WeftError
from weft.train.data import files
from weft.train.data.base import Data
from weft.train.data.options import Parquet, TableOptions
from weft.train.data.tables import ArrowSource, find_layout
from weft.train.extras import need


def read(options: Parquet, *, seed: int, inputs: bool, targets: bool) -> Data:
    sources = [open_parquet(options.train, "data.train")]
    if options.validation:
        sources.append(open_parquet(options.validation, "data.validation"))
    return data_from_tables(sources, options, inputs=inputs, targets=targets)


def open_parquet(path: str, key: str) -> ArrowSource:
    library = need("pyarrow.parquet", "data", purpose="data.name=parquet")
    paths = files.find_files(path, key, suffix=".parquet")
    try:
        schema = library.read_schema(paths[0])
    except (OSError, ValueError) as problem:
        raise WeftError(f"{key}: {paths[0]} is not a Parquet file ({problem}); set {key}") from problem

    def load(column: str) -> Any:
        tables = [library.read_table(file, columns=[column], memory_map=True, partitioning=None) for file in paths]
        return need("pyarrow", "data", purpose="data.name=parquet").concat_tables(tables).column(column)

    return ArrowSource(f"{key}={path}", schema, load)


def data_from_tables(sources: Sequence[ArrowSource], options: TableOptions, *, inputs: bool, targets: bool) -> Data:
    """Images, sentences or text for a language model, depending on the columns of the training table."""
    layout = find_layout(sources[0], columns=options.columns, label=options.label, images=sources[0].images)
    wanted: dict[str, Any] = {"inputs": inputs, "targets": targets, "holdout": options.holdout}
    if layout.kind == "images":
        from weft.train.data.images import images_from_tables

        return images_from_tables(sources, layout, options, **wanted)
    if layout.kind == "sentences":
        from weft.train.data.sentences import sentences_from_tables

        return sentences_from_tables(sources, layout, options, **wanted)
    from weft.train.data.language import language_data

    texts = ["\n".join(source.strings(layout.columns[0])).encode() for source in sources]
    return language_data(texts[0], texts[1] if len(texts) > 1 else None, options, **wanted)
