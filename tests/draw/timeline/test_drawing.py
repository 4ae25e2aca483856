from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from weft.draw.timeline import colour
from weft.draw.timeline.drawing import (
    DARK_MODE_COLOURS,
    FIELDS,
    HATCHES,
    IDLE_COLOUR,
    VERSION_COLOURS,
    Drawing,
    Style,
    version,
    version_mark,
)
from weft.schedule import Op, Schedule, schedule
from weft.simulate import Cost, simulate, timeline


def drawing_of(name: str, stages: int, microbatches: int, minibatches: int = 2, **options: object) -> Drawing:
    return Drawing(
        timeline(schedule(name, stages=stages, microbatches=microbatches, **options), minibatches=minibatches)
    )


def labels(drawing: Drawing, rank: int) -> list[str]:
    return [drawing.label(block.step) for block in drawing.rows[rank]]


def every_op(chunks: int) -> Drawing:
    """One rank that holds many chunks and runs every op in each."""
    order = [f"{k}F0" for k in range(chunks)] + [f"{k}{op}0" for k in reversed(range(chunks)) for op in "IW"]
    return Drawing(
        timeline(Schedule(name="all", stages=1, microbatches=1, streams=[order], placement=[0] * chunks), minibatches=1)
    )


def test_letters_of_each_op_and_chunk() -> None:
    assert " ".join(labels(drawing_of("wpipe", 2, 2, 1), 0)) == "1a 2a 1b 2b 1B 2B 1V 1A 2A 1U"
    assert " ".join(labels(every_op(4), 0)) == "1a 1b 1c 1d 1l 1z 1X 1k 1y 1W 1j 1x 1V 1i 1w 1U"


@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 9, 30])
def test_labels_are_unambiguous(chunks: int) -> None:
    drawing = every_op(chunks)
    found = labels(drawing, 0)
    assert len(set(found)) == len(found) == 4 * chunks
    if chunks > 4:
        assert {"1a", "1Ai", "1Aw", "1Au", "1Ei"} <= set(found)


def test_fields_describe_a_block() -> None:
    drawing = drawing_of("xpipe", 4, 2, 3)
    block = next(block for block in drawing.rows[0] if str(block.step.action) == "0F3")
    fields = dict(zip(FIELDS, drawing.fields(block), strict=True))
    assert fields["action"] == "0F3"
    assert fields["pass"] == "forward"
    assert fields["micro-batch"] == "4 of the run, 2 of 2 in its mini-batch"
    assert fields["mini-batch"] == "t = 1"
    assert fields["chunk"] == "0 (0 to 3)"
    assert fields["version"] == f"reads v0+{block.step.ahead}"
    assert fields["delay"] == "1"
    assert fields["prediction"] == f"{block.step.ahead} updates ahead, reused"
    assert (fields["rank"], fields["start"], fields["end"]) == ("0", "3", "4")
    assert drawing.hover_text(block).splitlines()[3] == "mini-batch: t = 1"


def test_fields_that_do_not_apply_to_an_update_are_empty() -> None:
    drawing = drawing_of("wpipe", 2, 2, 1)
    block = next(block for block in drawing.rows[1] if str(block.step.action) == "3U0")
    fields = dict(zip(FIELDS, drawing.fields(block), strict=True))
    assert fields["version"] == "makes v1"
    assert fields["chunk"] == "3 (0 to 3), second on its rank"
    assert not fields["delay"] + fields["micro-batch"] + fields["prediction"]
    assert (version(block.step), drawing.update_label(block.step), version_mark(block.step)) == ("→v1", "b→v1", 0)


def test_usage_of_each_rank() -> None:
    usage = drawing_of("1f1b", 4, 4, 1).usage()
    assert [rank.busy for rank in usage] == [12.0] * 4
    assert [rank.idle for rank in usage] == pytest.approx([3 / 7] * 4)
    assert [rank.blocks for rank in usage] == [9] * 4
    assert [rank.updates for rank in usage] == [1] * 4


def test_figures_of_the_steady_state() -> None:
    """Also where the window is too short to show them."""
    drawing = drawing_of("wpipe", 2, 8, 1, warmup=2, fresh=True)
    assert drawing.subtitle(", a part").endswith(
        " idle in this window, a part; mean delay 0.25 updates, slack of messages 0.75"
    )
    alone = drawing_of("2bw", 1, 2)
    assert alone.subtitle().endswith("; mean delay 1 updates")  # a single rank sends nothing
    unknown = Drawing(replace(alone.timeline, mean_delay=None, slack=None))
    assert unknown.subtitle().endswith(" idle in this window")


@pytest.mark.parametrize("name", ["wpipe", "2bw", "zb-h1", "gpipe", "interleaved"])
def test_micro_batches_in_flight_as_the_simulator_counts(name: str) -> None:
    drawing = drawing_of(name, 4, 8, 4)
    peaks = [max(value for _, value in drawing.in_flight(rank)) for rank in range(4)]
    assert peaks == pytest.approx(simulate(drawing.schedule).in_flight)
    assert all(drawing.in_flight(rank)[-1][1] == 0 for rank in range(4))


def test_times_that_differ_only_by_rounding_are_equal() -> None:
    """A forward that starts a rounding error before the preceding update still comes after it."""
    shown = timeline(schedule("1f1b", stages=1, microbatches=1), minibatches=2)
    blocks = [
        replace(block, start=block.start - 1e-12) if block.start == 3 < block.end else block for block in shown.blocks
    ]
    drawing = Drawing(replace(shown, blocks=tuple(blocks)))
    assert labels(drawing, 0) == ["1a", "1A", "1U", "2a", "2A", "2U"]
    assert [value for _, value in drawing.in_flight(0)] == [1, 1, 0]  # one leaves as the next arrives


def test_the_legend_lists_what_occurs() -> None:
    assert [entry.text for entry in drawing_of("1f1b", 2, 2).legend()] == [
        "forward",
        "backward",
        "update, makes a version",
    ]
    assert [entry.sample for entry in drawing_of("interleaved", 2, 2, chunks=3).legend()][:4] == [
        "1a",
        "1b",
        "1c",
        "1A",
    ]
    zb_h1 = schedule("zb-h1", stages=2, microbatches=2)
    last = Drawing(timeline(zb_h1, Cost.uniform(zb_h1, update=1.0), minibatches=1)).legend()[-1]
    assert (last.sample, last.text, last.tick) == ("1U", "update", False)


def test_the_legend_lists_the_version_marks_that_occur() -> None:
    assert [mark.sample for mark in drawing_of("gpipe", 2, 2, 1).version_marks()] == []
    assert [mark.sample for mark in drawing_of("gpipe", 2, 2, 2).version_marks()] == ["v1"]
    assert [mark.sample for mark in drawing_of("pipeoptim", 2, 2, 2).version_marks()] == ["v1", "v1+2"]


def styles(chunks: int) -> dict[tuple[Op, int], Style]:
    drawing = every_op(chunks)
    kinds = {(op, local): drawing.style(op, local) for op in (Op.F, Op.B, Op.I, Op.W) for local in range(chunks)}
    return kinds | {(Op.U, 0): drawing.style(Op.U, 0)}


@pytest.mark.parametrize(("chunks", "least"), [(1, 12.0), (2, 8.0), (3, 8.0), (4, 6.0)])
def test_styles_differ_in_greyscale(chunks: int, least: float) -> None:
    """By lightness, unless the hatching differs."""
    for (kind, style), (other_kind, other) in combinations(styles(chunks).items(), 2):
        if style.hatch == other.hatch:
            difference = abs(colour.lightness(style.fill) - colour.lightness(other.fill))
            assert difference >= least, (kind, other_kind, difference)
    assert all(
        abs(colour.lightness(IDLE_COLOUR) - colour.lightness(style.fill)) > 8 for style in styles(chunks).values()
    )
    assert set(HATCHES) == {Op.I, Op.W}
    assert len(set(HATCHES.values())) == 2


def test_consecutive_versions_differ_in_greyscale() -> None:
    for fill, following in zip(VERSION_COLOURS, (*VERSION_COLOURS[1:], VERSION_COLOURS[0]), strict=True):
        assert abs(colour.lightness(fill) - colour.lightness(following)) > 15


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_text_has_contrast(chunks: int) -> None:
    for style in [*styles(chunks).values(), *map(Style, VERSION_COLOURS), *map(Style, DARK_MODE_COLOURS.values())]:
        assert colour.contrast(style.ink, style.fill) >= 4.5
        if style.hatch:
            assert colour.contrast(style.ink, style.line) >= 4.5


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_text_has_contrast_in_the_terminal(chunks: int) -> None:
    drawing = every_op(chunks)
    for op in (Op.F, Op.B, Op.I, Op.W):
        for local in range(chunks):
            background = colour.terminal(drawing.style(op, local).fill)
            ink = colour.terminal_ink(background)
            assert colour.contrast(terminal_hex(ink), terminal_hex(background)) >= 4.5


def terminal_hex(code: int) -> str:
    """The palette of the xterm manual."""
    if code >= 232:
        return "#" + f"{8 + 10 * (code - 232):02x}" * 3
    parts = ((code - 16) // 36, (code - 16) // 6 % 6, (code - 16) % 6)
    return "#" + "".join(f"{55 + 40 * part if part else 0:02x}" for part in parts)


def test_colour_arithmetic_follows_the_standards() -> None:
    assert colour.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert colour.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert colour.lightness("#777777") == pytest.approx(50.0, abs=0.1)
    assert colour.mix("#000000", "#ffffff", 0.5) == "#808080"
    assert [colour.terminal(text) for text in ("#ff0000", "#000000", "#5f87af", "#080808")] == [196, 16, 67, 232]
