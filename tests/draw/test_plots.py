"""The plots are read back from their text: bars by their lengths, curves by the numbers along their axes."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from weft.draw.axes import Scale
from weft.draw.plots import Value, bars, lines, stacks
from weft.draw.sheet import WIDTH, batches, measure, wrap
from weft.draw.values import writer
from weft.errors import WeftError

LABELS = [
    "weft wpipe",
    "weft xpipe",
    "torch.distributed.pipelining, Interleaved1F1B & friends",
    "data parallelism <DDP>",
    *(f"contender {at}" for at in range(16)),
]
RATIOS: dict[str, dict[str, Value]] = {
    f"m = {m}": {label: (0.9 * (at + m) / 25, (at + m) / 25, 1.05 * (at + m) / 25) for at, label in enumerate(LABELS)}
    for m in (2, 4, 8)
}
MEMORY = {
    panel: {method: {f"part {at}": float(at * size) for at in range(5)} for size, method in enumerate(LABELS, 1)}
    for panel in ("transformer", "convolutions")
}
LOSSES = {
    f"task {task}": {
        f"method {at}": [
            (100.0 * step, (value - 0.1, value, value + 0.2))
            for step in range(30)
            for value in (2.5 * math.exp(-step / (5 + at)) + 0.2,)
        ]
        for at in range(10)
    }
    for task in range(9)
}
POWERS = {"a": {"one": [(10.0**at, 3.0 * 10 ** (-2 * at)) for at in range(6)], "two": [(1.0, 5.0), (1e5, 7.0)]}}

PLOTS: dict[str, Callable[[], str]] = {
    "ratios": lambda: bars("Throughput", RATIOS, unit="share of the limit", reference=0.95),
    "six panels": lambda: bars(
        "Six", {f"panel {at}": {str(one): one / 7 for one in range(25)} for at in range(6)}, unit="s", reference=2
    ),
    "other labels": lambda: bars(
        "Differences", {p: {f"{label} {p}": at - 9.0 for at, label in enumerate(LABELS)} for p in "abc"}, unit="%"
    ),
    "memory": lambda: stacks("Memory", MEMORY, unit="MiB"),
    "losses": lambda: lines("Loss", LOSSES, x="mini-batches", y="loss, the mean of five seeds"),
    "powers": lambda: lines("Powers", POWERS, x="bytes", y="seconds", log_x=True, log_y=True),
    "one point": lambda: lines("Point", {"": {"a": [(3, 0.0)]}}, x="x", y="y"),
    "zeros": lambda: bars("Zeros", {"": {"a": 0.0, "b": 0.0}}, unit="s"),
}


def read(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(one.itertext()) for one in root.iter("text")]


def boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Each text with its left, right, top and bottom; those that are turned with what is left after turning."""
    sizes = {"head": 18.0, "tick": 12.0}
    found = []
    for one in root.iter("text"):
        words, kind = "".join(one.itertext()), one.get("class", "")
        size = sizes.get(kind, 13.0)
        width = measure(words, size, bold=kind in ("head", "name"))
        x, y = float(one.attrib["x"]), float(one.attrib["y"])
        shift = {"middle": width / 2, "end": width}.get(one.get("text-anchor", ""), 0.0)
        if one.get("transform"):
            found.append((words, x - 0.8 * size, x + 0.2 * size, y - width / 2, y + width / 2))
        else:
            found.append((words, x - shift, x - shift + width, y - 0.8 * size, y + 0.2 * size))
    return found


@pytest.mark.parametrize("name", PLOTS)
def test_texts_neither_overlap_nor_leave_the_sheet(name: str) -> None:
    root = read(PLOTS[name]())
    height = float(root.attrib["viewBox"].split()[3])
    found = boxes(root)
    for words, left, right, top, bottom in found:
        assert 0 <= left <= right <= WIDTH, words
        assert 0 <= top <= bottom <= height, words
    for one, other in itertools.combinations(found, 2):
        apart = one[2] <= other[1] or other[2] <= one[1] or one[4] <= other[3] or other[4] <= one[3]
        assert apart, (one, other)


@pytest.mark.parametrize("name", PLOTS)
def test_equal_numbers_give_equal_bytes_for_light_and_dark(name: str) -> None:
    text = PLOTS[name]()
    assert text == PLOTS[name]()
    assert "prefers-color-scheme:dark" in text
    root = read(text)
    assert root.findtext("title")
    assert root.findtext("desc")
    assert root.attrib["viewBox"].startswith("0 0 900 ")
    assert all(float(size) >= 12 for size in re.findall(r"font(?:-size)?:(\d+)px", text))


def test_every_label_and_value_is_there() -> None:
    found = " ".join(texts(read(PLOTS["ratios"]())))
    assert all(label in found for label in LABELS if len(label) < 30)
    assert "torch.distributed.pipelining" in found
    assert all(panel in found for panel in RATIOS)
    assert {"Throughput", "share of the limit", "0.95"} <= set(texts(read(PLOTS["ratios"]())))
    assert found.count("0.16") >= 1
    found = " ".join(texts(read(PLOTS["memory"]())))
    assert all(part in found for part in ("part 0", "part 4", "MiB", "transformer", "convolutions"))
    found = " ".join(texts(read(PLOTS["losses"]())))
    assert all(name in found for some in LOSSES.values() for name in some)
    assert all(task in found for task in LOSSES)
    assert "mini-batches" in found
    assert "loss, the mean of five seeds" in found


def test_bars_are_as_long_as_their_values() -> None:
    root = read(PLOTS["ratios"]())
    rects = [rect for rect in root.iter("rect") if rect.find("title") is not None]
    values = [middle for some in RATIOS.values() for _, middle, _ in some.values()]  # type: ignore[misc]
    scale = float(rects[0].attrib["width"]) / values[0]
    assert [float(rect.attrib["width"]) for rect in rects] == pytest.approx([scale * one for one in values], abs=0.1)
    whiskers = [path.attrib["d"] for path in root.iter("path") if path.get("class") == "whisker"]
    for rect, d, value in zip(rects, whiskers, values, strict=True):
        low, high = map(float, re.match(r"M(\S+) \S+?H([\d.]+)M", d).groups())  # type: ignore[union-attr]
        zero = float(rect.attrib["x"])
        assert (low - zero, high - zero) == pytest.approx((0.9 * value * scale, 1.05 * value * scale), abs=0.1)
    for panel, reference in enumerate(path for path in root.iter("path") if path.get("class") == "reference"):
        x = float(re.match(r"M(\S+) ", reference.attrib["d"])[1])  # type: ignore[index]
        assert x == pytest.approx(float(rects[20 * panel].attrib["x"]) + 0.95 * scale, abs=0.1)


def test_bars_below_zero_grow_to_the_left() -> None:
    root = read(bars("Differences", {"": {"less": -2.0, "more": 4.0}}, unit="%"))
    less, more = (rect for rect in root.iter("rect") if rect.find("title") is not None)
    assert 2 * float(less.attrib["width"]) == pytest.approx(float(more.attrib["width"]), abs=0.1)
    assert float(less.attrib["x"]) + float(less.attrib["width"]) == pytest.approx(float(more.attrib["x"]), abs=0.1)
    assert "−2.00" in texts(root)


def test_parts_of_a_bar_follow_each_other() -> None:
    root = read(stacks("Memory", {"": {"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0}}}, unit="MiB"))
    one, two, three = (rect for rect in root.iter("rect") if rect.find("title") is not None)
    assert float(two.attrib["x"]) == pytest.approx(float(one.attrib["x"]) + float(one.attrib["width"]), abs=0.02)
    assert float(two.attrib["width"]) == pytest.approx(3 * float(one.attrib["width"]), abs=0.1)
    assert two.attrib["class"] == three.attrib["class"] != one.attrib["class"]
    assert "4.00" in texts(root)


@pytest.mark.parametrize("log", [False, True])
def test_a_curve_passes_through_its_points(log: bool) -> None:
    points = [(1.0, 2.0), (10.0, 30.0), (500.0, 4.0), (1000.0, 900.0)]
    root = read(lines("Curve", {"": {"one": points}}, x="x", y="y", log_x=log, log_y=log))
    ticks = [one for one in root.iter("text") if one.get("class") == "tick"]

    def axis(anchor: str, place: str) -> Callable[[float], float]:
        """From numbers to places, by the first and the last that are written along it."""
        shown = [(float("".join(one.itertext())), float(one.attrib[place])) for one in ticks]
        shown = [pair for pair, one in zip(shown, ticks, strict=True) if one.get("text-anchor") == anchor]
        grow = math.log if log else float
        (a, start), (b, end) = shown[0], shown[-1]
        return lambda value: start + (end - start) * (grow(value) - grow(a)) / (grow(b) - grow(a))

    x, y = axis("middle", "x"), axis("end", "y")
    curve = next(
        path for path in root.iter("path") if path.get("class") == "curve t0" and path.find("title") is not None
    )
    drawn = [tuple(map(float, pair.split())) for pair in curve.attrib["d"][1:].split("L")]
    wanted = [(x(one), y(other) - 4) for one, other in points]
    for place, expected in zip(drawn, wanted, strict=True):
        assert place == pytest.approx(expected, abs=0.2)


def test_a_name_keeps_its_colour_and_each_curve_is_its_own() -> None:
    panels = {"a": {"one": [(0, 1.0)], "two": [(0, 2.0)]}, "b": {"two": [(0, 1.0)], "three": [(0, 2.0)]}}
    curves = [path for path in read(lines("", panels, x="", y="")).iter("path") if path.find("title") is not None]
    kinds = [(path.findtext("title"), path.attrib["class"], path.get("stroke-dasharray")) for path in curves]
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == 3
    curves = [path for path in read(PLOTS["losses"]()).iter("path") if path.find("title") is not None]
    looks = {(path.attrib["class"], path.get("stroke-dasharray")) for path in curves}
    assert len(looks) == 10
    few = read(bars("", {"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0, "x": 1.0}}, unit=""))
    kinds = [(one.findtext("title", "")[0], one.get("class"), None) for one in few.iter("rect") if len(one)]  # type: ignore[misc]
    assert len(kinds) == 4
    assert len(set(kinds)) == 2


def test_panels_share_a_scale_unless_one_would_be_flat() -> None:
    def shown(*tops: float) -> list[list[str]]:
        panels = {str(top): {"a": [(0.0, 0.0), (1.0, top)]} for top in tops}
        root = read(lines("", panels, x="", y=""))
        ticks = [one for one in root.iter("text") if one.get("class") == "tick" and one.get("text-anchor") == "end"]
        by_panel = itertools.groupby(ticks, key=lambda one: one.attrib["x"])
        return [["".join(tick.itertext()) for tick in some] for _, some in by_panel]

    one, other = shown(10, 5)
    assert one == other
    one, other = shown(10, 500)
    assert one != other


@pytest.mark.parametrize(
    ("low", "high", "length", "wanted"),
    [
        (1, 1e6, 600, ["1", "10", "100", "1000", "10k", "100k", "1M"]),
        (1, 128, 600, ["1", "2", "5", "10", "20", "50", "100"]),
        (1e-9, 1e6, 300, ["1e−9", "1e−6", "0.001", "1", "1000", "1M"]),
        (3.1, 4.4, 300, ["3.5", "4"]),
    ],
)
def test_numbers_along_a_logarithmic_axis(low: float, high: float, length: float, wanted: list[str]) -> None:
    assert [text for _, text in Scale(low, high, log=True).across(length)] == wanted


def test_values_are_written_alike_and_none_is_passed_off_as_the_reference() -> None:
    assert [writer([0.5, 12.345])(value) for value in (0.5, 12.345)] == ["0.5", "12.3"]
    assert [writer([0.9496, 1.2], 0.95)(value) for value in (0.9496, 1.2)] == ["0.9496", "1.2000"]
    assert writer([12_345.6])(12_345.6) == "12,346"
    assert writer([0.0])(0.0) == "0"


def test_long_texts_are_broken_and_lose_nothing() -> None:
    text = "a few words and " + "x" * 200
    rows = wrap(text, 150)
    assert "".join(rows).replace(" ", "") == text.replace(" ", "")
    assert all(measure(row) <= 150 for row in rows)
    assert wrap("", 100) == []
    assert list(batches("abcde", 2)) == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: bars("T", {}, unit="s"), "at least one panel"),
        (lambda: bars("T", {"a": {}}, unit="s"), "at least one value"),
        (lambda: bars("T", {"a": {"x": math.nan}}, unit="s"), "finite"),
        (lambda: bars("T", {"a": {"x": 1.0}}, unit="s", reference=math.inf), "finite"),
        (lambda: bars("T", {"a": {"x": (3.0, 2.0, 4.0)}}, unit="s"), "go upward"),
        (lambda: bars("T", {"a": {"x": (3.0, 4.0)}}, unit="s"), "three numbers"),  # type: ignore[dict-item]
        (lambda: stacks("T", {"a": {}}, unit="s"), "at least one value"),
        (lambda: stacks("T", {"a": {"x": {}}}, unit="s"), "at least one value"),
        (lambda: stacks("T", {"a": {"x": {"p": -1.0}}}, unit="s"), "0 or more"),
        (lambda: stacks("T", {"a": {"x": {str(at): 1.0 for at in range(15)}}}, unit="s"), "at most 14"),
        (lambda: lines("T", {"a": {"x": []}}, x="x", y="y"), "at least one value"),
        (lambda: lines("T", {"a": {"x": [(0, math.inf)]}}, x="x", y="y"), "finite"),
        (lambda: lines("T", {"a": {"x": [(0, 1.0)]}}, x="x", y="y", log_x=True), "above 0"),
        (lambda: lines("T", {"a": {"x": [(1, (0.0, 1.0, 2.0))]}}, x="x", y="y", log_y=True), "above 0"),
    ],
)
def test_refusals(make: Callable[[], str], wanted: str) -> None:
    with pytest.raises(WeftError, match=wanted):
        make()


def test_plots_need_no_torch() -> None:
    code = "import sys, weft.draw.plots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
