"""A data set of the Hugging Face hub, loaded and cached by the `datasets` library."""

from __future__ import annotations

from typing import Any

from weft.errors import WeftError
from weft.text import did_you_mean
from weft.train.data.base import Data
from weft.train.data.options import Hub
from weft.train.data.readers.parquet import data_from_tables
from weft.train.data.tables import ArrowSource
from weft.train.extras import need


def read(options: Hub, *, seed: int, inputs: bool, targets: bool) -> Data:
    library = need("datasets", "hub", purpose="data.name=hub")
    name = options.path + (f"/{options.subset}" if options.subset else "")
    try:
        splits = library.load_dataset(options.path, options.subset or None)
    except Exception as problem:  # of the network, the hub, the library or the data
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
        raise WeftError(
            f"{name} can't be loaded from the hub ({reason}); check data.path, data.subset and the network, or "
            "download its Parquet files and use data.name=parquet"
        ) from problem
    validation = options.validation or next((split for split in ("validation", "test") if split in splits), "")
    wanted = [options.train, *([validation] if validation else [])]
    for split in wanted:
        if split not in splits:
            raise WeftError(
                f"{name} has no split {split!r}{did_you_mean(split, splits)}; its splits: {', '.join(splits)}"
            )
    return data_from_tables(
        [_source(splits[split], f"{name}, {split}") for split in wanted], options, inputs=inputs, targets=targets
    )


def _source(split: Any, where: str) -> ArrowSource:
    arrow = split.with_format("arrow")

    def load(column: str) -> Any:
        return arrow.select_columns([column])[:].column(column)

    return ArrowSource(where, split.features.arrow_schema, load)
