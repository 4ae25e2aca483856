from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.draw.browser import dump_dom, needs_browser

from weft.draw import html
from weft.draw.timeline import html_viewer
from weft.draw.timeline.drawing import FIELDS, Drawing
from weft.errors import WeftError
from weft.schedule import Schedule, Timeline, schedule
from weft.simulate import Cost, timeline

LOADING = {"src", "href", "srcset", "action", "data", "poster", "background"}


def timeline_of(name: str, minibatches: int = 3, **cost: float) -> Timeline:
    pipe = schedule(name, stages=4, microbatches=4)
    return timeline(pipe, Cost.uniform(pipe, **cost), minibatches=minibatches)  # type: ignore[arg-type]


class Reader(HTMLParser):
    """The elements of a page, with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.tags.append((tag, named))
        if tag not in ("meta", "input"):
            self.open.append((tag, named.get("id", "")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, text: str) -> None:
        if self.open:
            self.texts.append((*self.open[-1], text))

    def data(self) -> dict[str, Any]:
        found = json.loads(next(text for tag, name, text in self.texts if name == "data"))
        assert isinstance(found, dict)
        return found

    def words(self) -> str:
        return " ".join(text for tag, _, text in self.texts if tag not in ("script", "style"))


def test_the_page_loads_nothing() -> None:
    text = html(timeline_of("wpipe"), {"bubble": 0.1})
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp|import\(", text)
    for tag, attributes in Reader(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not LOADING & set(attributes)
    assert "default-src 'none'" in text


def test_names_and_figures_are_only_text() -> None:
    bad = "</script><b>bold</b><!--<script>"
    pipe = Schedule(name=bad, stages=1, microbatches=1, streams=["0F0 0B0"])
    text = html(timeline(pipe, minibatches=1), {bad: bad, "& <i>": 1.0})
    reader = Reader(text)
    assert not {"b", "i"} & {tag for tag, _ in reader.tags}
    assert sum(tag == "script" for tag, _ in reader.tags) == 2
    assert reader.open == []
    assert reader.words().count(bad) == 4  # title, heading, figure and its value
    assert reader.data()["ranks"] == 1


def test_embedded_data_can_not_close_its_element() -> None:
    data = {"</script><!--": ["&lt;", "\u2028"]}
    text = html_viewer._embed(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == data


@pytest.mark.parametrize("name", ["wpipe", "xpipe", "zb-h1"])
def test_the_data_are_the_blocks(name: str) -> None:
    shown = timeline_of(name, update=0.3)
    drawing, data = Drawing(shown), Reader(html(shown)).data()
    strings, columns = data["strings"], data["blocks"]
    assert {len(column) for column in columns.values()} == {len(shown.blocks)}
    assert data["names"] == list(FIELDS)
    assert data["span"] == shown.makespan
    at = 0
    for row in drawing.rows:
        for block in row:
            assert (columns["rank"][at], columns["start"][at], columns["end"][at]) == (
                block.rank,
                block.start,
                block.end,
            )
            assert strings[columns["label"][at]] == drawing.label(block.step)
            assert tuple(strings[field] for field in columns["fields"][at]) == drawing.fields(block)
            style = drawing.style_of(block.step)
            drawn = data["styles"][columns["style"][at]]
            assert (drawn["fill"], drawn["ink"], drawn["hatch"]) == (style.fill, style.ink, style.hatch)
            assert columns["tone"][at] == block.step.version % len(data["tones"])
            at += 1


def test_the_page_is_readable_without_its_script() -> None:
    words = Reader(html(timeline_of("1f1b", 1), {"steady bubble": 3 / 7, "versions": 1})).words()
    assert "1f1b, 4 stages, 4 micro-batches" in words
    assert "1 mini-batch, time 21, 42.9% idle" in words
    assert "steady bubble 0.428571" in words
    assert "versions 1" in words
    for wanted in ("forward", "backward", "update, makes a version", "idle", "version 1"):
        assert wanted in words
    assert words.count("42.9%") == 1 + 4
    assert 'id="figures"' not in html(timeline_of("1f1b", 1))


def test_too_many_blocks_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_viewer, "LIMIT", 100)
    with pytest.raises(WeftError, match="a page shows at most 100 blocks"):
        html(timeline_of("1f1b"))


WATCH = """<script>
window.onerror = (text) => { document.documentElement.dataset.error = text; };
window.requestAnimationFrame = (draw) => setTimeout(draw, 0);  // a headless browser may never show a frame
</script>"""
USE = """<script>
const canvas = document.getElementById("canvas"), found = document.documentElement.dataset;
const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
found.whole = canvas.dataset.drawn;
key("ArrowRight"); found.first = document.getElementById("tip").innerText;
key("ArrowRight"); key("ArrowDown"); found.then = document.getElementById("tip").innerText;
const box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 20, clientY: box.top + 60 }));
found.hover = document.getElementById("tip").innerText;
canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -700, clientX: box.right - 16, cancelable: true }));
document.querySelector("[value=version]").click();
const wait = () => {  // until the frame after the zoom, which draws fewer blocks
  if (canvas.dataset.drawn === found.whole) { setTimeout(wait, 20); return; }
  found.view = canvas.dataset.view; found.part = canvas.dataset.drawn;
};
wait();
</script>"""


@needs_browser
def test_in_a_browser(tmp_path: Path) -> None:
    shown = timeline_of("wpipe", 2)
    text = html(shown, {"bubble": 0.125}).replace("<head>", "<head>" + WATCH).replace("</body>", USE + "</body>")
    page = tmp_path / "page.html"
    page.write_text(text, "utf-8")
    reader = Reader(dump_dom(page, "--window-size=1200,800", "--virtual-time-budget=20000"))
    found = next(attributes for tag, attributes in reader.tags if tag == "html")
    assert "data-error" not in found
    timed = sum(block.end > block.start for block in shown.blocks)
    assert int(found["data-whole"]) == timed
    assert found["data-first"].split()[:2] == ["action", "0F0"]
    assert found["data-then"].split()[:2] == ["action", "1F0"]  # rank 1 at the time of rank 0's second forward
    assert found["data-hover"].split()[:2] in (["action", "0B7"], ["action", "0U1"])
    start, span = map(float, found["data-view"].split())
    assert span < shown.makespan / 3
    assert start + span == pytest.approx(shown.makespan)  # zoomed in around the pointer, at the right end
    assert 0 < int(found["data-part"]) < timed / 2
    hidden = {attributes["id"]: "hidden" in attributes for tag, attributes in reader.tags if "id" in attributes}
    assert hidden["by-pass"]
    assert not hidden["by-version"]
    assert "wpipe, 4 stages, 4 micro-batches" in reader.words()
    assert "0.125" in reader.words()
