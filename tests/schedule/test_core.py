"""Schedules and weight policies check their arguments and are immutable."""

from typing import Any

import pytest

import weft
from weft import Schedule, WeftError, Weights
from weft.schedule import B, F, join


def single_stage(**changes: Any) -> Schedule:
    arguments: dict[str, Any] = {"name": "single", "stages": 1, "microbatches": 1, "streams": ["0F0 0B0"]}
    return Schedule(**(arguments | changes))


def test_streams_are_rows_strings_or_actions() -> None:
    expected = single_stage().streams[0]
    assert (single_stage(streams=[["0F0", "0B0"]]).streams[0] == expected).all()
    rows = weft.schedule("gpipe", stages=1, microbatches=1).streams
    assert (single_stage(streams=rows).streams[0] == expected).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": 0}, "stages must be a whole number of 1 or more"),
        ({"microbatches": 1.5}, "microbatches must be a whole number of 1 or more"),
        ({"streams": []}, "one stream per rank"),
        ({"streams": ["1F0"]}, "chunks are 0 to 0"),
        ({"placement": [1]}, "ranks 0 to 0"),
        ({"placement": [0.7]}, "whole numbers from 0"),
        ({"placement": ["0"]}, "whole numbers from 0"),
        ({"placement": range(40_000)}, "at most 32767 chunks"),
        ({"microbatches": 2**26}, "at most 16777216"),
        ({"weights": Weights(delay=(1, 1))}, "one value per chunk"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        single_stage(**changes)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"delay": -1}, "delay is a whole number from 0"),
        ({"ahead": (1, "x")}, "ahead is a whole number from 0"),
        ({"backward": "later"}, "forward"),
        ({"ahead_backward": 1}, "backward=.newest."),
        ({"bellwether": 1}, "true or false"),
    ],
)
def test_wrong_policies_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        Weights(**values)


def test_the_title_has_name_sizes_and_options() -> None:
    schedule = weft.schedule("interleaved", stages=1, microbatches=2, chunks=3)
    assert schedule.title == "interleaved, 1 stage, 2 micro-batches, chunks 3"
    assert schedule.chunks_of(0) == [0, 1, 2]
    weave = weft.schedule("weave", stages=2, microbatches=4, split=False, predict="exact")
    assert repr(weave) == "<Schedule weave, 2 stages, 4 micro-batches, no split, predict exact>"
    assert repr(weft.schedule("wpipe", stages=1, microbatches=2, fresh=True)).endswith("micro-batches, fresh>")


def test_a_schedule_copies_its_rows() -> None:
    rows = F(0, range(1))
    schedule = single_stage(streams=[join(rows, B(0, 0))])
    rows["index"] = 5
    assert (schedule.streams[0] == single_stage().streams[0]).all()
    with pytest.raises(ValueError, match="read-only"):
        schedule.streams[0]["index"] = 5


def test_a_stream_may_be_a_list_of_single_rows() -> None:
    assert (single_stage(streams=[[*F(0, 0), *B(0, 0)]]).streams[0] == single_stage().streams[0]).all()


def test_a_schedule_is_immutable() -> None:
    with pytest.raises(AttributeError):
        single_stage().stages = 2  # type: ignore[misc]
