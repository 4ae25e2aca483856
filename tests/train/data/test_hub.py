"""Data from the hub, with a stand-in for its library; missing libraries and broken Parquet files."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.train.data.data_files import pa

from weft.errors import WeftError
from weft.train.data import open_data
from weft.train.data.options import Hub, Parquet


class Split:
    """The part of `datasets.Dataset` that weft uses."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.features = SimpleNamespace(arrow_schema=table.schema)

    def with_format(self, kind: str) -> "Split":
        assert kind == "arrow"
        return self

    def select_columns(self, names: list[str]) -> "Split":
        return Split(self.table.select(names))

    def __getitem__(self, part: slice) -> Any:
        return self.table[part]


def split(samples: int) -> Split:
    return Split(pa.table({"sentence": [f"s{number}" for number in range(samples)], "label": [0, 1] * (samples // 2)}))


def test_a_data_set_of_the_hub_is_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(path: str, subset: str | None) -> dict[str, Split]:
        calls.append((path, subset))
        return {"train": split(6), "test": split(4)}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    data = open_data(Hub(path="user/dataset", subset="small", context=8), seed=0)
    assert calls == [("user/dataset", "small")]
    assert (len(data.train), len(data.validation)) == (6, 4)
    assert bytes(data.train.inputs(np.array([5]), None)["input_ids"][0].tolist()) == b"\x02s5\x03\0\0\0\0"
    with pytest.raises(WeftError, match="has no split 'tset', did you mean 'test'"):
        open_data(Hub(path="user/dataset", validation="tset"), seed=0)


def test_an_unreachable_hub_fails_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, subset: str | None) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    with pytest.raises(WeftError, match=r"glue/qqp can't be loaded .*no route to the hub.*use data.name=parquet"):
        open_data(Hub(path="glue", subset="qqp"), seed=0)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("")
    for options, module, extra in (
        (Hub(path="glue"), "datasets", "hub"),
        (Parquet(train=str(tmp_path)), "pyarrow.parquet", "data"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(WeftError, match=rf"needs {module} .*pip install 'weft\[{extra}\]'"):
            open_data(options, seed=0)


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("no table")
    with pytest.raises(WeftError, match=r"train.parquet is not a Parquet file"):
        open_data(Parquet(train=str(tmp_path)), seed=0)
