"""Values as users read them."""

import math

import pytest

from weft.text import did_you_mean, format_bytes, format_clock, format_count, format_duration


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (5000 * 2**40, "5,000.0 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "duration", "clock"),
    [
        (0.0, "0 s", "0:00"),
        (1.25, "1.25 s", "0:01"),
        (125.0, "2 min 5 s", "2:05"),
        (11220.0, "3 h 7 min", "3:07:00"),
        (math.inf, "–", "–"),
        (math.nan, "–", "–"),
    ],
)
def test_seconds(seconds: float, duration: str, clock: str) -> None:
    assert (format_duration(seconds), format_clock(seconds)) == (duration, clock)


def test_counts() -> None:
    assert format_count(1, "stage") == "1 stage"
    assert format_count(2, "micro-batch") == "2 micro-batches"


def test_suggestions() -> None:
    assert did_you_mean("WPIPES", ["wpipe", "xpipe"]) == ", did you mean 'wpipe'?"
    assert did_you_mean("rate", ["rates"], prefix="train.") == ", did you mean 'train.rates'?"
    assert did_you_mean("nothing", ["wpipe"]) == ""


def test_a_name_with_another_prefix_is_the_closest() -> None:
    assert did_you_mean("h.0", ["h.0x", "transformer.h.0"]) == ", did you mean 'transformer.h.0'?"
    assert did_you_mean("a.very.long.prefix.of.H.0", ["h.1", "0", "h.0"]) == ", did you mean 'h.0'?"
    assert did_you_mean("0", ["transformer0"]) == ""
