"""A schedule refuses what it can't be; titles and parts are as given."""

from typing import Any

import pytest

import weft
from weft import Schedule, WeftError, Weights
from weft.schedule import B, F, join


def one(**changes: Any) -> Schedule:
    arguments: dict[str, Any] = {"name": "one", "stages": 1, "microbatches": 1, "streams": ["0F0 0B0"]}
    return Schedule(**(arguments | changes))


def test_streams_are_rows_texts_or_actions() -> None:
    texts = one(streams=[["0F0", "0B0"]])
    assert (texts.streams[0] == one().streams[0]).all()
    assert (one(streams=weft.schedule("gpipe", stages=1, microbatches=1).streams).streams[0] == one().streams[0]).all()


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
def test_what_it_can_not_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        one(**changes)


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
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        Weights(**values)


def test_the_title_says_what_it_is() -> None:
    schedule = weft.schedule("interleaved", stages=1, microbatches=2, chunks=3)
    assert schedule.title == "interleaved, 1 stage, 2 micro-batches, chunks 3"
    assert schedule.chunks_of(0) == [0, 1, 2]


def test_a_schedule_owns_its_rows() -> None:
    rows = F(0, range(1))
    schedule = one(streams=[join(rows, B(0, 0))])
    rows["index"] = 5
    assert (schedule.streams[0] == one().streams[0]).all()
    with pytest.raises(ValueError, match="read-only"):
        schedule.streams[0]["index"] = 5


def test_rows_are_taken_one_by_one_as_well() -> None:
    assert (one(streams=[[*F(0, 0), *B(0, 0)]]).streams[0] == one().streams[0]).all()


def test_a_schedule_does_not_change() -> None:
    with pytest.raises(AttributeError):
        one().stages = 2  # type: ignore[misc]
