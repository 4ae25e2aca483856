"""Actions: their text can be parsed again, and rows are built and joined correctly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import WeftError
from weft.schedule import Action, B, F, I, Op, U, W, alternate, as_rows, join, pair_up
from weft.schedule.actions import actions


def text(rows: np.ndarray) -> str:
    return " ".join(str(action) for action in actions(rows))


@given(st.sampled_from(list(Op)), st.integers(0, 32767), st.integers(-(2**31) + 1, 2**31 - 1))
def test_the_text_of_an_action_can_be_parsed(op: Op, chunk: int, index: int) -> None:
    action = Action(op, chunk, index)
    assert Action.parse(str(action)) == action
    assert actions(as_rows([action])) == [action]


@pytest.mark.parametrize(
    "bad", ["", "F", "0F", "F0", "0X0", "0F0 1", "-1F0", "0SEND_F1", "40000F0", "0F99999999999", "0f0"]
)
def test_wrong_actions_are_refused(bad: str) -> None:
    with pytest.raises(WeftError, match=r"action"):
        Action.parse(bad)


def test_rows_take_numbers_ranges_lists_and_arrays() -> None:
    assert text(F(2, range(3))) == "2F0 2F1 2F2"
    assert text(B([0, 2], 1)) == "0B1 2B1"
    assert text(join(I(0, 0), W(0, np.array([0])), U(0, 0))) == "0I0 0W0 0U0"
    for chunk, index in ((40_000, 0), (65_536, 0), (-1, 0), (0, 2**31), (0, -(2**31))):
        with pytest.raises(WeftError, match="an action's"):
            F(chunk, index)
    with pytest.raises(WeftError, match="whole numbers"):
        F(0, [0.5])  # type: ignore[list-item]


def test_alternate_needs_equal_lengths() -> None:
    assert text(alternate(F(0, range(2)), B(0, range(2)))) == "0F0 0B0 0F1 0B1"
    with pytest.raises(WeftError, match="lengths: 2, 1"):
        alternate(F(0, range(2)), B(0, 0))


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        (0, "0F0 0B0 0F1 0B1 0F2 0B2"),
        (1, "0F0 0F1 0B0 0F2 0B1 0B2"),
        (3, "0F0 0F1 0F2 0B0 0B1 0B2"),
        (9, "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_pair_up_warms_up_alternates_and_drains(warmup: int, expected: str) -> None:
    assert text(pair_up(F(0, range(3)), B(0, range(3)), warmup)) == expected
