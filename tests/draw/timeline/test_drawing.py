from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from weft.draw.timeline import colour
from weft.draw.timeline.drawing import FIELDS, HATCHES, IDLE, NIGHT, TONES, Look, Style, mark, version
from weft.schedule import Op, Schedule, schedule
from weft.simulate import Cost, simulate, timeline


def look_of(name: str, stages: int, microbatches: int, minibatches: int = 2, **options: object) -> Look:
    return Look(timeline(schedule(name, stages=stages, microbatches=microbatches, **options), minibatches=minibatches))


def labels(look: Look, rank: int) -> list[str]:
    return [look.label(block.step) for block in look.rows[rank]]


def halved(chunks: int) -> Look:
    """One rank that holds many chunks and runs every kind of action in each."""
    order = [f"{k}F0" for k in range(chunks)] + [f"{k}{op}0" for k in reversed(range(chunks)) for op in "IW"]
    return Look(
        timeline(Schedule(name="all", stages=1, microbatches=1, streams=[order], placement=[0] * chunks), minibatches=1)
    )


def test_letters_of_each_op_and_chunk() -> None:
    assert " ".join(labels(look_of("wpipe", 2, 2, 1), 0)) == "1a 2a 1b 2b 1B 2B 1V 1A 2A 1U"
    assert " ".join(labels(halved(4), 0)) == "1a 1b 1c 1d 1l 1z 1X 1k 1y 1W 1j 1x 1V 1i 1w 1U"


@pytest.mark.parametrize("chunks", [1, 2, 4, 5, 9, 30])
def test_labels_are_unambiguous(chunks: int) -> None:
    look = halved(chunks)
    found = labels(look, 0)
    assert len(set(found)) == len(found) == 4 * chunks
    if chunks > 4:
        assert {"1a", "1Ai", "1Aw", "1Au", "1Ei"} <= set(found)


def test_fields_tell_all_of_a_block() -> None:
    look = look_of("xpipe", 4, 2, 3)
    block = next(one for one in look.rows[0] if str(one.step.action) == "0F3")
    told = dict(zip(FIELDS, look.fields(block), strict=True))
    assert told["action"] == "0F3"
    assert told["pass"] == "forward"
    assert told["micro-batch"] == "4 of the run, 2 of 2 in its mini-batch"
    assert told["mini-batch"] == "t = 1"
    assert told["chunk"] == "0 (0 to 3)"
    assert told["version"] == f"reads v0+{block.step.ahead}"
    assert told["delay"] == "1"
    assert told["prediction"] == f"{block.step.ahead} updates ahead, reused"
    assert (told["rank"], told["start"], told["end"]) == ("0", "3", "4")
    assert look.hover(block).splitlines()[3] == "mini-batch: t = 1"


def test_fields_of_an_update_leave_out_what_it_has_not() -> None:
    look = look_of("wpipe", 2, 2, 1)
    block = next(one for one in look.rows[1] if str(one.step.action) == "3U0")
    told = dict(zip(FIELDS, look.fields(block), strict=True))
    assert told["version"] == "makes v1"
    assert told["chunk"] == "3 (0 to 3), second on its rank"
    assert not told["delay"] + told["micro-batch"] + told["prediction"]
    assert (version(block.step), look.update(block.step), mark(block.step)) == ("→v1", "b→v1", 0)


def test_shares_add_up() -> None:
    shares = look_of("1f1b", 4, 4, 1).shares()
    assert [share.busy for share in shares] == [12.0] * 4
    assert [share.idle for share in shares] == pytest.approx([3 / 7] * 4)
    assert [share.blocks for share in shares] == [9] * 4
    assert [share.updates for share in shares] == [1] * 4


@pytest.mark.parametrize("name", ["wpipe", "2bw", "zb-h1", "gpipe", "interleaved"])
def test_micro_batches_in_flight_as_the_simulator_counts(name: str) -> None:
    look = look_of(name, 4, 8, 4)
    peaks = [max(value for _, value in look.in_flight(rank)) for rank in range(4)]
    assert peaks == pytest.approx(simulate(look.schedule).in_flight)
    assert all(look.in_flight(rank)[-1][1] == 0 for rank in range(4))


def test_times_that_differ_by_rounding_are_one() -> None:
    """A forward that starts a rounding error before the update in front of it stays behind it."""
    shown = timeline(schedule("1f1b", stages=1, microbatches=1), minibatches=2)
    blocks = [
        replace(block, start=block.start - 1e-12) if block.start == 3 < block.end else block for block in shown.blocks
    ]
    look = Look(replace(shown, blocks=tuple(blocks)))
    assert labels(look, 0) == ["1a", "1A", "1U", "2a", "2A", "2U"]
    assert [value for _, value in look.in_flight(0)] == [1, 1, 0]  # one goes as the next one comes


def test_the_legend_has_what_occurs() -> None:
    assert [entry.words for entry in look_of("1f1b", 2, 2).legend()] == [
        "forward",
        "backward",
        "update, makes a version",
    ]
    assert [entry.sample for entry in look_of("interleaved", 2, 2, chunks=3).legend()][:4] == ["1a", "1b", "1c", "1A"]
    one = schedule("zb-h1", stages=2, microbatches=2)
    last = Look(timeline(one, Cost.uniform(one, update=1.0), minibatches=1)).legend()[-1]
    assert (last.sample, last.words, last.tick) == ("1U", "update", False)


def test_marks_that_occur() -> None:
    assert [one[0] for one in look_of("gpipe", 2, 2, 1).marks()] == []
    assert [one[0] for one in look_of("gpipe", 2, 2, 2).marks()] == ["v1"]
    assert [one[0] for one in look_of("pipeoptim", 2, 2, 2).marks()] == ["v1", "v1+2"]


def grounds(chunks: int) -> dict[tuple[Op, int], Style]:
    look = halved(chunks)
    kinds = {(op, local): look.style(op, local) for op in (Op.F, Op.B, Op.I, Op.W) for local in range(chunks)}
    return kinds | {(Op.U, 0): look.style(Op.U, 0)}


@pytest.mark.parametrize(("chunks", "least"), [(1, 12.0), (2, 8.0), (3, 8.0), (4, 6.0)])
def test_a_grey_print_tells_them_apart(chunks: int, least: float) -> None:
    """By lightness; those with different hatching need no difference in it."""
    for (one, style), (other, against) in combinations(grounds(chunks).items(), 2):
        if style.hatch == against.hatch:
            difference = abs(colour.lightness(style.fill) - colour.lightness(against.fill))
            assert difference >= least, (one, other, difference)
    assert all(abs(colour.lightness(IDLE) - colour.lightness(style.fill)) > 8 for style in grounds(chunks).values())
    assert set(HATCHES) == {Op.I, Op.W}
    assert len(set(HATCHES.values())) == 2


def test_neighbouring_versions_differ_in_a_grey_print() -> None:
    for one, other in zip(TONES, (*TONES[1:], TONES[0]), strict=True):
        assert abs(colour.lightness(one) - colour.lightness(other)) > 15


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_text_has_contrast(chunks: int) -> None:
    styles = [*grounds(chunks).values(), *map(Style, TONES), *map(Style, NIGHT.values())]
    for style in styles:
        assert colour.contrast(style.ink, style.fill) >= 4.5
        if style.hatch:
            assert colour.contrast(style.ink, style.line) >= 4.5


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_text_has_contrast_in_the_terminal(chunks: int) -> None:
    look = halved(chunks)
    for op in (Op.F, Op.B, Op.I, Op.W):
        for local in range(chunks):
            ground = colour.terminal(look.style(op, local).fill)
            assert colour.contrast(terminal_hex(colour.terminal_ink(ground)), terminal_hex(ground)) >= 4.5


def terminal_hex(code: int) -> str:
    """As the xterm manual has it."""
    if code >= 232:
        return "#" + f"{8 + 10 * (code - 232):02x}" * 3
    parts = ((code - 16) // 36, (code - 16) // 6 % 6, (code - 16) % 6)
    return "#" + "".join(f"{55 + 40 * part if part else 0:02x}" for part in parts)


def test_colours_are_computed_as_the_standards_say() -> None:
    assert colour.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert colour.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert colour.lightness("#777777") == pytest.approx(50.0, abs=0.1)
    assert colour.mix("#000000", "#ffffff", 0.5) == "#808080"
    assert [colour.terminal(one) for one in ("#ff0000", "#000000", "#5f87af", "#080808")] == [196, 16, 67, 232]
