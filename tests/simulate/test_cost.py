"""Costs: division among chunks, cost files, and wrong values."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from weft.errors import WeftError
from weft.schedule import schedule
from weft.simulate import ChunkCost, Cost, Link, simulate

PIPE = schedule("wpipe", stages=2, microbatches=2)
TIMES_AND_BYTES = (
    "forward", "backward_input", "backward_weight", "update", "activation_bytes", "input_bytes", "weight_bytes",
    "gradient_bytes", "optimizer_bytes",
)  # fmt: skip
BAD = [-1, -0.5, math.nan, math.inf, -math.inf, True, False, "1", None, [1], 10**400, 1e308]


@pytest.mark.parametrize("field", TIMES_AND_BYTES)
@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:8])
def test_a_cost_is_a_number_from_0(field: str, value: Any) -> None:
    with pytest.raises(WeftError, match=rf"^{field} must be"):
        ChunkCost(**{field: value})


@pytest.mark.parametrize("field", ["forward", "backward", "update", "activation_bytes", "input_bytes", "weight_bytes"])
@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:8])
def test_a_cost_of_equal_stages_is_a_number_too(field: str, value: Any) -> None:
    """Checked before it is divided among chunks, which would turn True into 0.5 and a string into a TypeError."""
    with pytest.raises(WeftError, match="must be"):
        Cost.uniform(PIPE, **{field: value})


@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "fast", None])
def test_bandwidth_is_above_0(value: Any) -> None:
    with pytest.raises(WeftError, match=r"^bandwidth must be"):
        Link(bandwidth=value)


def test_bandwidth_may_be_infinite() -> None:
    assert Link(bandwidth=math.inf) == Link()


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True, "1"])
def test_latency_is_a_number_from_0(value: Any) -> None:
    with pytest.raises(WeftError, match=r"^latency must be"):
        Link(latency=value)


@pytest.mark.parametrize("value", [0, 1, "no", None])
def test_switches_are_true_or_false(value: Any) -> None:
    with pytest.raises(WeftError, match=r"^overlap must be true or false"):
        Link(overlap=value)
    with pytest.raises(WeftError, match=r'^recompute must be true, false or "layer"'):
        ChunkCost(recompute=value)


def test_recompute_needs_the_input_among_the_activations() -> None:
    with pytest.raises(WeftError, match="raise activation_bytes"):
        ChunkCost(recompute=True, activation_bytes=1, input_bytes=2)
    with pytest.raises(WeftError, match=r"of a layer \(layers: 4, activation_bytes: 7\).*or give rebuilt_bytes"):
        ChunkCost(recompute="layer", layers=4, activation_bytes=7, input_bytes=2)
    ChunkCost(recompute="layer", layers=4, activation_bytes=7, input_bytes=2, rebuilt_bytes=1)


def test_what_a_recompute_holds() -> None:
    """The input, then the rest; by layer all inputs, then the rest of one layer; or what is given."""
    sizes: dict[str, Any] = {"activation_bytes": 24, "input_bytes": 2, "layers": 4}
    assert ChunkCost(**sizes).held_bytes == (24, 0)
    assert ChunkCost(**sizes, recompute=True).held_bytes == (2, 22)
    assert ChunkCost(**sizes, recompute="layer").held_bytes == (8, 4)
    assert ChunkCost(**sizes, recompute="layer", kept_bytes=9, rebuilt_bytes=7).held_bytes == (9, 7)


@pytest.mark.parametrize("value", [0, 0.5, -1, "2", None])
def test_layers_are_a_number_from_1(value: Any) -> None:
    with pytest.raises(WeftError, match=r"^layers must be"):
        ChunkCost(layers=value)


def test_layers_are_divided_and_choices_are_per_chunk() -> None:
    cost = Cost.uniform(PIPE, activation_bytes=8, layers=6, recompute=["layer", True, False, "layer"])
    assert [chunk.recompute for chunk in cost.chunks] == ["layer", True, False, "layer"]
    assert {chunk.layers for chunk in cost.chunks} == {3}
    with pytest.raises(WeftError, match=r"one of them a chunk \(got \['layer'\], chunks: 4\)"):
        Cost.uniform(PIPE, recompute=["layer"])


def test_split_backwards_are_not_recomputed_by_layer() -> None:
    split = schedule("zb-h1", stages=2, microbatches=4)
    with pytest.raises(WeftError, match=r"zb-h1 splits backwards.*recompute whole chunks"):
        simulate(split, Cost(chunks=(ChunkCost(), ChunkCost(recompute="layer"))))
    simulate(split, Cost(chunks=(ChunkCost(), ChunkCost(recompute=True))))


def test_units_do_not_matter() -> None:
    """In seconds or femtoseconds, the bubble is the same."""
    for unit in (1e-15, 1e-3, 1.0, 1e15):
        assert simulate(PIPE, Cost.uniform(PIPE, forward=unit, backward=2 * unit)).bubble == 0


def test_costs_of_0_are_refused() -> None:
    with pytest.raises(WeftError, match="all times are 0"):
        simulate(PIPE, Cost.uniform(PIPE, forward=0, backward=0))


def test_a_stage_is_divided_among_its_chunks() -> None:
    cost = Cost.uniform(PIPE, forward=4, backward=6, update=2, activation_bytes=8, input_bytes=3, weight_bytes=10)
    assert len(cost.chunks) == 4
    assert set(cost.chunks) == {
        ChunkCost(
            forward=2, backward_input=1.5, backward_weight=1.5, update=1, activation_bytes=4, input_bytes=3,
            weight_bytes=5, gradient_bytes=0.5, optimizer_bytes=1,
        )
    }  # fmt: skip


def test_one_entry_per_chunk() -> None:
    with pytest.raises(
        WeftError, match=r"one entry per chunk \(entries: 3; wpipe on 2 stages has 4 chunks\); give 4 entries"
    ):
        simulate(PIPE, Cost(chunks=(ChunkCost(),) * 3))


@pytest.mark.parametrize("edge", [(0, 2), (-1, 0), (5, 5)])
def test_links_join_existing_ranks(edge: tuple[int, int]) -> None:
    with pytest.raises(WeftError, match="links join ranks 0 to 1"):
        simulate(PIPE, Cost(chunks=(ChunkCost(),) * 4, links={edge: Link()}))


def test_a_cost_file() -> None:
    text = json.dumps(
        {
            "chunks": [{"forward": 2, "recompute": True}, {"recompute": "layer", "layers": 3, "kept_bytes": None}],
            "link": {"bandwidth": 8, "overlap": False},
            "links": {"0-1": {"latency": 0.5}},
        }
    )
    assert Cost.from_json(text) == Cost(
        chunks=(ChunkCost(forward=2, recompute=True), ChunkCost(recompute="layer", layers=3)),
        link=Link(bandwidth=8, overlap=False),
        links={(0, 1): Link(latency=0.5)},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a cost file must be JSON"),
        ("{", "a cost file must be JSON"),
        ("[" * 100_000, "a cost file must be JSON"),
        ('{"chunks": [{"forward": ' + "9" * 5000 + "}]}", "a cost file must be JSON"),
        ("[]", 'an object with a list "chunks"'),
        ("3", 'an object with a list "chunks"'),
        ("{}", 'an object with a list "chunks"'),
        ('{"chunks": {}}', 'an object with a list "chunks"'),
        ('{"chunks": [], "speed": 1}', "chunks, link and links only .*speed"),
        ('{"chunks": [1]}', "chunk 0 must be an object"),
        ('{"chunks": [{"forwards": 1}]}', "chunk 0 has no .forwards., did you mean .forward."),
        ('{"chunks": [{"forward": -1}]}', "chunk 0: forward must be 0 or a number from"),
        ('{"chunks": [{"forward": NaN}]}', "chunk 0: forward must be 0 or a number from"),
        ('{"chunks": [{"forward": 1e999}]}', "must be"),
        ('{"chunks": [{"forward": ' + "9" * 400 + "}]}", "must be"),
        ('{"chunks": [{"forward": true}]}', "chunk 0: forward must be 0 or a number from"),
        ('{"chunks": [{"forward": "1"}]}', "chunk 0: forward must be 0 or a number from"),
        ('{"chunks": [], "link": null}', "link must be an object"),
        ('{"chunks": [], "link": {"speed": 1}}', "link has no .speed."),
        ('{"chunks": [], "links": []}', "links"),
        ('{"chunks": [], "links": null}', "links"),
        ('{"chunks": [], "links": {"0>1": {}}}', "named by its ranks"),
        ('{"chunks": [], "links": {"0-1-2": {}}}', "named by its ranks"),
        ('{"chunks": [], "links": {"-1-0": {}}}', "named by its ranks"),
        ('{"chunks": [], "links": {"²-1": {}}}', "named by its ranks"),
        ('{"chunks": [], "links": {"0-1": 3}}', "link 0-1 must be an object"),
    ],
    ids=lambda text: text[:40],
)
def test_a_cost_file_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        Cost.from_json(text)
