from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from weft.draw import svg
from weft.draw.timeline.svg_picture import LABEL, LIMIT, SMALL, round_step, text_width
from weft.errors import WeftError
from weft.schedule import Op, Schedule, Timeline, schedule
from weft.simulate import ChunkCost, Cost, Link, timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, stages: int, microbatches: int, minibatches: int = 2, **cost: float | Link) -> Timeline:
    pipe = schedule(name, stages=stages, microbatches=microbatches)
    return timeline(pipe, Cost.uniform(pipe, **cost), minibatches=minibatches)  # type: ignore[arg-type]


def uneven() -> Timeline:
    pipe = schedule("wpipe", stages=2, microbatches=4)
    costs = tuple(ChunkCost(forward=0.1 + 0.37 * k, backward_input=0.9 - 0.2 * k, update=0.003) for k in range(4))
    return timeline(pipe, Cost(chunks=costs, link=Link(latency=0.13)), minibatches=2)


TIMELINES = {
    "wpipe": timeline_of("wpipe", 4, 4),
    "xpipe": timeline_of("xpipe", 4, 4, 3),
    "zb-h1": timeline_of("zb-h1", 4, 6),
    "update": timeline_of("wpipe", 4, 4, update=1.0),
    "large": timeline_of("1f1b", 8, 32),
    "uneven": uneven(),
}
all_timelines = pytest.mark.parametrize("shown", TIMELINES.values(), ids=TIMELINES)


def blocks(text: str) -> list[ElementTree.Element]:
    groups = ElementTree.fromstring(text).iter(f"{SVG}g")
    return [group for group in groups if group.get("class", "").startswith("block")]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


@all_timelines
def test_one_block_for_each_action(shown: Timeline) -> None:
    titles = [block.findtext(f"{SVG}title", "") for block in blocks(svg(shown))]
    matches = [re.match(r"action: (\S+)\n", title) for title in titles]
    assert sorted(match[1] for match in matches if match) == sorted(str(block.step.action) for block in shown.blocks)


@all_timelines
def test_texts_stay_within_their_blocks(shown: Timeline) -> None:
    sizes = {"l": LABEL, "v": SMALL}
    written = 0
    for block in blocks(svg(shown)):
        rect = block.find(f"{SVG}rect")
        if rect is None:
            continue
        start, end = number(rect, "x"), number(rect, "x") + number(rect, "width")
        for text in block.iter(f"{SVG}text"):
            half = text_width(text.text or "", sizes[text.get("class", "")]) / 2
            assert start <= number(text, "x") - half
            assert number(text, "x") + half <= end
            written += 1
    assert written


@all_timelines
def test_blocks_stay_in_the_picture_and_do_not_overlap(shown: Timeline) -> None:
    text = svg(shown)
    root = ElementTree.fromstring(text)
    width, height = map(float, root.get("viewBox", "").split()[2:])
    spans: dict[float, list[tuple[float, float]]] = {}
    for block in blocks(text):
        rect = block.find(f"{SVG}rect")
        if rect is not None:
            start = number(rect, "x")
            spans.setdefault(number(rect, "y"), []).append((start, start + number(rect, "width")))
    assert len(spans) == shown.schedule.stages
    assert max(spans) < height
    for row in spans.values():
        row.sort()
        assert row[0][0] > 0
        assert row[-1][1] < width
        assert all(before[1] <= after[0] + 0.011 for before, after in pairwise(row))


def test_labels_and_versions_are_written() -> None:
    text = svg(TIMELINES["wpipe"])
    for wanted in (">8B<", ">1a<", ">v1<", ">a→v2<", ">b→v1<", ">rank 3<", ">forward, second chunk<", ">idle<"):
        assert wanted in text
    assert "version read, underlined if odd" in text
    assert ">v1+2<" in svg(TIMELINES["xpipe"])
    assert ">1V<" in svg(TIMELINES["update"])


def test_updates_without_duration_are_ticks() -> None:
    shown = TIMELINES["wpipe"]
    ticks = [block for block in blocks(svg(shown)) if block.find(f"{SVG}rect") is None]
    assert len(ticks) == sum(block.step.action.op == Op.U for block in shown.blocks) == 16


def test_equal_timelines_give_equal_bytes() -> None:
    script = (
        "from weft.draw import svg; from weft.schedule import schedule; from weft.simulate import timeline\n"
        "import sys; sys.stdout.reconfigure(encoding='utf-8')\n"
        "print(svg(timeline(schedule('wpipe', stages=4, microbatches=4), minibatches=2)), end='')"
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        assert run.stdout.decode() == svg(TIMELINES["wpipe"])


def test_part_of_the_time() -> None:
    shown = TIMELINES["wpipe"]
    text = svg(shown, until=10)
    actions = {re.match(r"action: (\S+)", block.findtext(f"{SVG}title", ""))[1] for block in blocks(text)}  # type: ignore[index]
    assert actions == {str(b.step.action) for b in shown.blocks if b.start < 10 or b.end <= 10}
    assert "the first 10 shown" in text
    assert svg(shown, until=1e9) == svg(shown)
    with pytest.raises(WeftError, match="until"):
        svg(shown, until=0)


def test_a_name_is_only_text() -> None:
    name = "</title><script>alert(1)</script>&\x01" + "x" * 500
    pipe = Schedule(name=name, stages=1, microbatches=1, streams=["0F0 0B0"])
    root = ElementTree.fromstring(svg(timeline(pipe, minibatches=1)))
    assert (root.findtext(f"{SVG}title") or "").startswith("</title><script>alert(1)</script>& x")
    assert root.find(f".//{SVG}script") is None
    heading = next(text for text in root.iter(f"{SVG}text") if text.get("font-size") == "18")
    assert text_width(heading.text or "", 18) < float(root.get("viewBox", "").split()[2])


def test_too_many_blocks_raise() -> None:
    with pytest.raises(WeftError, match=rf"at most {LIMIT} blocks \(blocks: 25\d+, .*fewer mini-batches, or a .json"):
        svg(timeline_of("1f1b", 16, 80, 10))


def test_steps_of_the_axis() -> None:
    assert [round_step(least) for least in (0.7, 1, 1.2, 3, 51, 0.0004)] == pytest.approx([1, 1, 2, 5, 100, 0.0005])


def test_updates_that_are_close_have_their_labels_side_by_side() -> None:
    shown = timeline_of("weave", 4, 8, 3)
    labels = re.findall('class="u">([^<]+)<', svg(shown))
    assert len(labels) == sum(block.step.action.op == Op.U for block in shown.blocks) == 24


def test_update_labels_never_overlap() -> None:
    root = ElementTree.fromstring(svg(timeline_of("pipedream", 2, 1, 300)))
    labels = [text for text in root.iter(f"{SVG}text") if text.get("class") == "u"]
    assert 20 < len(labels) < 600
    for label, following in pairwise(labels):
        if label.get("y") == following.get("y"):
            halves = text_width(label.text or "", SMALL) / 2 + text_width(following.text or "", SMALL) / 2
            assert number(following, "x") - number(label, "x") >= halves
