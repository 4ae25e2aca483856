"""Data from a function of the user."""

import sys
from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.train.data import CustomData, Data, open_data

USER_CODE = """
from weft.train.data import open_data
from weft.train.data.options import Synthetic

received = {}

def whole(*, seed, inputs, samples=8):
    received.update(seed=seed, inputs=inputs)
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
def user_file(tmp_path: Path) -> str:
    (tmp_path / "user_file.py").write_text(USER_CODE)
    return str(tmp_path / "user_file.py")


def test_a_function_gets_its_options_and_the_arguments_it_takes(user_file: str) -> None:
    data = open_data(CustomData(name=f"{user_file}:whole", options={"samples": 5}), seed=3, inputs=False)
    assert isinstance(data, Data)
    assert len(data.train) == 5
    assert sys.modules["weft_user_user_file"].received == {"seed": 3, "inputs": False}
    assert len(open_data(CustomData(name=f"{user_file}:two", options={"samples": 6}), seed=3).train) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("three", "must return a weft.train.data.Data, or a training and a validation data set .got tuple"),
        ("bare", "train data of .* must have spec, .*it lacks spec, fingerprint, inputs, targets"),
        ("none", "has no 'none'"),
    ],
)
def test_a_wrong_return_value_is_refused(user_file: str, name: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        open_data(CustomData(name=f"{user_file}:{name}"), seed=0)
