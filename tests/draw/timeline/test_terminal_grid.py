from __future__ import annotations

import re
from dataclasses import replace

import pytest

from weft.draw import grid
from weft.errors import WeftError
from weft.schedule import Timeline, schedule
from weft.simulate import ChunkCost, Cost, timeline

WPIPE = """\
rank 0  1a 2a 3a 4a 1b 2b 3b 4b .  .  .  .  .  .  1B 1B 5a 2B 2B 6a 3B 3B 7a 4B 4B 8a 1A 1A 5b 2A 2A 6b 3A 3A 7b 4A 4A
rank 1  .  1a 2a 3a 4a 1b 2b 3b .  .  .  .  1B 1B 4b 2B 2B 5a 3B 3B 6a 4B 4B 7a 1A 1A 8a 2A 2A 5b 3A 3A 6b 4A 4A 7b 5B
rank 2  .  .  1a 2a 3a 4a 1b 2b .  .  1B 1B 3b 2B 2B 4b 3B 3B 5a 4B 4B 6a 1A 1A 7a 2A 2A 8a 3A 3A 5b 4A 4A 6b 5B 5B 7b
rank 3  .  .  .  1a 2a 3a 4a 1b 1B 1B 2b 2B 2B 3b 3B 3B 4b 4B 4B 5a 1A 1A 6a 2A 2A 7a 3A 3A 8a 4A 4A 5b 5B 5B 6b 6B 6B
time 0 to 18.5 of 40.5 shown; a file (-o) shows all
mean delay 0.5 updates, slack of messages 0
1a forward of micro-batch 1 in the rank's first chunk (b: second), 1A backward, . idle; one column = 0.5"""


def timeline_of(name: str, stages: int, microbatches: int, minibatches: int, **cost: float) -> Timeline:
    pipe = schedule(name, stages=stages, microbatches=microbatches)
    return timeline(pipe, Cost.uniform(pipe, **cost), minibatches=minibatches)  # type: ignore[arg-type]


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_the_grid_of_the_design() -> None:
    assert grid(timeline_of("wpipe", 4, 4, 3)) == WPIPE


def test_halves_of_a_backward_and_an_update_that_takes_time() -> None:
    text = grid(timeline_of("zb-h1", 2, 2, 1, update=1.0))
    assert text.splitlines()[:2] == ["rank 0  1a 2a .  1i 1w 2i 2w 1U", "rank 1  .  1a 1i 2a 2i 1w 2w 1U"]
    assert text.endswith(
        "1a forward of micro-batch 1 in the rank's first chunk, 1i input gradient, 1w weight gradient, "
        "1U update of mini-batch 1,\n. idle; one column = 1"
    )


def test_actions_without_duration_are_not_shown() -> None:
    assert "U" not in grid(timeline_of("1f1b", 2, 2, 1))


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("pipedream", ["        v0 v0       v0 v0 v1 v0 v0    v1 v1", "           v0 v0 v0 v1 v1 v1 v2 v2 v2"]),
        (
            "pipeoptim",
            [
                "        0+1 0+1         v0  v0  1+1 v1  v1      v2  v2",
                "            v0  v0  v0  v1  v1  v1  v2  v2  v2",
            ],
        ),
    ],
)
def test_versions_under_each_rank(name: str, versions: list[str]) -> None:
    text = grid(timeline_of(name, 2, 1, 3), versions=True)
    shown = text.splitlines()
    for under, wanted in zip(shown[1:4:2], versions, strict=True):
        assert under == wanted
    assert "v1 weight version read" in text
    assert ("predicted" in text) == (name == "pipeoptim")


@pytest.mark.parametrize("width", [11, 12, 40, 80, 120, 121, 500])
@pytest.mark.parametrize("versions", [False, True])
def test_no_line_is_longer_than_the_width(width: int, versions: bool) -> None:
    shown = timeline_of("xpipe", 4, 4, 3) if width > 11 else timeline_of("wpipe", 2, 2, 3)
    for text in grid(shown, width=width, versions=versions, colour=True).splitlines():
        assert len(plain(text)) <= width
        assert plain(text) == plain(text).rstrip()


def test_cells_are_as_wide_as_what_is_shown() -> None:
    shown = timeline_of("1f1b", 1, 12, 1)
    assert grid(shown, width=32).splitlines()[0] == "rank 0  1a 1A 1A 2a 2A 2A 3a 3A"
    assert grid(shown, width=300).splitlines()[0].endswith("11A 12a 12A 12A")
    assert grid(shown, width=32).splitlines()[1] == "time 0 to 8 of 36 shown; a file"
    assert "shown" not in grid(shown, width=300)


def test_too_small_a_width_raises() -> None:
    with pytest.raises(WeftError, match=r"width: 9, needed: 10\); use a width of 10 or more"):
        grid(timeline_of("wpipe", 4, 4, 1), width=9)
    assert grid(timeline_of("wpipe", 4, 4, 1), width=10).startswith("rank 0  1a\nrank 1  .\n")


@pytest.mark.parametrize("unit", [0, -1, float("nan"), float("inf")])
def test_a_column_needs_a_duration(unit: float) -> None:
    with pytest.raises(WeftError, match="time of a column"):
        grid(timeline_of("wpipe", 4, 4, 1), unit=unit)


def test_a_given_unit_is_used() -> None:
    assert grid(timeline_of("1f1b", 1, 2, 1), unit=0.5).startswith("rank 0  1a 1a 1A 1A 1A 1A 2a 2a")
    assert grid(timeline_of("1f1b", 1, 2, 1), unit=3).startswith("rank 0  1A 2A\n")


@pytest.mark.parametrize("name", ["wpipe", "weave", "zb-h1", "xpipe", "interleaved", "pipedream"])
@pytest.mark.parametrize("versions", [False, True])
def test_colour_adds_codes_and_one_line(name: str, versions: bool) -> None:
    shown = timeline_of(name, 4, 4, 3, update=1.0)
    coloured = grid(shown, colour=True, versions=versions)
    assert "\x1b[" in coloured
    text, _, last = plain(coloured).rpartition("\n")
    assert text == grid(shown, versions=versions)
    assert last == "underlined: odd weight version"


def test_colour_shows_the_version_that_is_read() -> None:
    row = grid(timeline_of("1f1b", 1, 1, 2), colour=True).splitlines()[0]
    even, odd = re.findall(r"((?:\x1b\[[\d;]+m)+)[12]a", row)
    assert odd == even + "\x1b[4m"


def test_the_columns_of_a_block_are_one_bar() -> None:
    row = grid(timeline_of("1f1b", 1, 1, 1), colour=True).splitlines()[0]
    assert "m1A 1A\x1b[0m" in row


def test_arbitrary_times_and_a_shifted_clock() -> None:
    pipe = schedule("1f1b", stages=2, microbatches=2)
    cost = Cost(chunks=(ChunkCost(forward=0.31), ChunkCost(forward=0.47)))
    shown = timeline(pipe, cost, minibatches=1)
    moved = tuple(replace(block, start=block.start + 1e4, end=block.end + 1e4) for block in shown.blocks)
    first = grid(shown).splitlines()
    assert first[0].startswith("rank 0  1a 2a . ")
    assert first[1].startswith("rank 1  .  1a")
    assert grid(replace(shown, blocks=moved)).splitlines()[:2] == first[:2]


def test_many_ranks_are_aligned() -> None:
    lines = grid(timeline_of("1f1b", 12, 2, 1), width=200).splitlines()
    assert lines[0].startswith("rank  0  1a 2a")
    assert lines[11].startswith("rank 11  .  . ")


def test_an_empty_timeline_raises() -> None:
    pipe = schedule("1f1b", stages=2, microbatches=2)
    with pytest.raises(WeftError, match="at least one block"):
        grid(Timeline(schedule=pipe, minibatches=1, blocks=(), makespan=0.0))
    free = ChunkCost(forward=0, backward_input=0, backward_weight=0)
    with pytest.raises(WeftError, match="needs a duration above 0"):
        grid(timeline(pipe, Cost(chunks=(free, free)), minibatches=1))


def test_impossible_blocks_raise() -> None:
    shown = timeline_of("1f1b", 2, 2, 1)
    first = shown.blocks[0]
    for wrong in (replace(first, end=-1.0), replace(first, end=float("nan")), replace(first, end=float("inf"))):
        with pytest.raises(WeftError, match="needs a finite start and a finite end"):
            grid(replace(shown, blocks=(wrong,)))
    with pytest.raises(WeftError, match=r"0F0 on rank 1.*the schedule that it ran with"):
        grid(replace(shown, blocks=(replace(first, rank=1),)))


def test_a_column_is_a_fraction_of_a_forward_that_divides_all_times() -> None:
    """An update of half a forward is never lost between columns."""
    pipe = schedule("1f1b", stages=2, microbatches=2)
    lines = grid(timeline(pipe, Cost.uniform(pipe, update=0.5), minibatches=2), width=200).splitlines()
    assert lines[0].split().count("1U") == lines[0].split().count("2U") == 1
    assert lines[-1].endswith("one column = 0.5")
    assert not any("rounded" in line for line in lines)


def test_the_legend_mentions_rounded_times() -> None:
    pipe = schedule("1f1b", stages=2, microbatches=2)
    odd = grid(timeline(pipe, Cost.uniform(pipe, backward=2.37), minibatches=1))
    assert "times are rounded to columns of 1; a file (-o) is exact" in odd
    tiny = grid(timeline(pipe, Cost.uniform(pipe, forward=0.001, backward=100.0003), minibatches=1), width=100)
    assert "rounded to columns of 2.5" in tiny
    assert tiny.split().count("1A") > 10
