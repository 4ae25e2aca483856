"""Data that comes from a user's function, or from the hub (here: from what stands in for its library)."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.train.data.conftest import pa

from weft.errors import WeftError
from weft.train.data import CustomData, Data, open_data
from weft.train.data.options import Hub, Parquet

OWN = """
from weft.train.data import open_data
from weft.train.data.options import Synthetic

given = {}

def whole(*, seed, inputs, samples=8):
    given.update(seed=seed, inputs=inputs)
    return open_data(Synthetic(samples=samples), seed=seed)

def two(samples):
    data = whole(seed=0, inputs=True, samples=samples)
    return data.train, data.validation

def three():
    return 1, 2, 3

def bare():
    return [], []
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_a_function_is_given_its_options_and_what_else_it_takes(own: str) -> None:
    data = open_data(CustomData(name=f"{own}:whole", options={"samples": 5}), seed=3, inputs=False)
    assert isinstance(data, Data)
    assert len(data.train) == 5
    assert sys.modules["weft_user_mine"].given == {"seed": 3, "inputs": False}
    assert len(open_data(CustomData(name=f"{own}:two", options={"samples": 6}), seed=3).train) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three", "must return a weft.train.data.Data, or a training and a validation data set .got tuple"),
        ("bare", "train data of .* must have spec, .*it lacks spec, fingerprint, inputs, targets"),
        ("none", "has no 'none'"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(own: str, name: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        open_data(CustomData(name=f"{own}:{name}"), seed=0)


class Split:
    """As much of a `datasets.Dataset` as is used."""

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
    asked: list[Any] = []

    def load(path: str, subset: str | None) -> dict[str, Split]:
        asked.append((path, subset))
        return {"train": split(6), "test": split(4)}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    data = open_data(Hub(path="someone/some", subset="small", context=8), seed=0)
    assert asked == [("someone/some", "small")]
    assert (len(data.train), len(data.validation)) == (6, 4)
    assert bytes(data.train.inputs(np.array([5]), None)["input_ids"][0].tolist()) == b"\x02s5\x03\0\0\0\0"
    with pytest.raises(WeftError, match="has no split 'tset', did you mean 'test'"):
        open_data(Hub(path="someone/some", validation="tset"), seed=0)


def test_a_hub_that_is_out_of_reach_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_no_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("no table")
    with pytest.raises(WeftError, match=r"train.parquet is not a Parquet file"):
        open_data(Parquet(train=str(tmp_path)), seed=0)
