"""Trees: unflatten is the inverse of flatten, also after a skeleton has been through JSON."""

import json
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import WeftError
from weft.runtime.tree import TENSOR, batch_size, flatten, from_json, map_tensors, pieces, unflatten

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
LEAVES = PLAIN | st.integers(0, 3).map(lambda size: torch.full((size,), float(size)))
KEYS = st.text(max_size=3) | st.integers(-2, 2)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    """Equal in type too: 1 is not True, and a list is not a tuple; a tensor is equal only to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left is right
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))  # in the same order
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)  # -0.0 is not 0.0


@given(NESTS)
def test_unflatten_is_the_inverse_of_flatten(tree: Any) -> None:
    tensors, skeleton = flatten(tree)
    assert same(unflatten(skeleton, tensors), tree)


@given(NESTS)
def test_a_skeleton_survives_json(tree: Any) -> None:
    """As links send it; the tensors travel separately."""
    tensors, skeleton = flatten(tree)
    again = from_json(json.loads(json.dumps(skeleton)))
    assert again == skeleton
    assert hash(again) == hash(skeleton)
    assert same(unflatten(again, tensors), tree)


@pytest.mark.parametrize(("left", "right"), [*combinations([1, True, 1.0], 2), (0.0, -0.0)])
def test_plain_values_that_compare_equal_in_python(left: Any, right: Any) -> None:
    """1, True and 1.0 differ for a layer, but are one key in a dict; so are 0.0 and -0.0. A link sends a skeleton
    once and then refers to it by number, so equal skeletons have to be identical."""
    assert flatten((left,))[1] != flatten((right,))[1]


def test_tensors_are_in_the_order_of_the_tree() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    tensors, skeleton = flatten({"z": a, "a": [b, (None, c)], "n": 3, "last": d})
    assert [id(tensor) for tensor in tensors] == [id(a), id(b), id(c), id(d)]
    assert skeleton != flatten({"a": a, "z": [b, (None, c)], "n": 3, "last": d})[1]


def test_a_single_tensor() -> None:
    tensor = torch.zeros(2)
    assert flatten(tensor) == ([tensor], TENSOR)
    assert unflatten(TENSOR, [tensor]) is tensor


class Strange:
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Strange(), "Strange"),
        ({"x": [{1, 2}]}, "builtins.set"),
        ({(0, 1): torch.zeros(1)}, "builtins.dict"),
        ({True: torch.zeros(1)}, "builtins.dict"),  # JSON would make it a string
        (b"raw", "builtins.bytes"),
        (1j, "builtins.complex"),
    ],
)
def test_what_no_message_can_carry(value: Any, name: str) -> None:
    with pytest.raises(WeftError, match=f"pass on tensors, numbers, strings and None.*{name}.*let the layer"):
        flatten((torch.zeros(1), value))


def test_map_tensors_changes_only_tensors() -> None:
    x = torch.ones(2)
    tree = {"x": x, "rest": [None, 2.5, ("text", torch.full((), 3))]}
    doubled = map_tensors(lambda tensor: tensor * 2, tree)
    assert doubled["x"].tolist() == [2, 2]
    assert doubled["rest"][2][1].item() == 6
    assert doubled["rest"][:2] == [None, 2.5]
    assert x.tolist() == [1, 1]


def test_batch_size_is_the_first_dimension_that_all_share() -> None:
    assert batch_size(torch.zeros(3, 2), what="inputs") == 3
    assert batch_size({"x": torch.zeros(4, 2), "y": [torch.zeros(4), torch.zeros(()), 7, None]}, what="inputs") == 4
    assert batch_size(torch.zeros(0, 2), what="inputs") == 0


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ((torch.zeros(3), torch.zeros(4, 2)), "sizes: 3, 4"),
        (torch.zeros(()), "no tensor has a dimension"),
        ({"n": 5}, "no tensor has a dimension"),
    ],
)
def test_batches_without_one_size(tree: Any, found: str) -> None:
    with pytest.raises(WeftError, match=rf"the targets must have the same first dimension, the samples \({found}\)"):
        batch_size(tree, what="the targets")


@given(st.integers(0, 9), st.integers(1, 5))
def test_pieces_are_the_batch_in_order(samples: int, parts: int) -> None:
    """Their sizes differ by at most one, larger ones first; values without samples are in every piece."""
    rows = torch.arange(samples)
    cut = pieces({"rows": rows, "same": (torch.tensor(7), "text")}, parts)
    sizes = [len(piece["rows"]) for piece in cut]
    assert len(cut) == parts
    assert torch.equal(torch.cat([piece["rows"] for piece in cut]), rows)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert all(piece["same"][0].item() == 7 and piece["same"][1] == "text" for piece in cut)
