from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.draw.report.charts import TONES, Bar, Curve, bar_chart, labels, line_chart, short, ticks
from weft.draw.report.page import PARTS
from weft.draw.timeline import colour

SIZES = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 38_400, [0, 10_000, 20_000, 30_000]),
        (1.35, 5.6, [2, 3, 4, 5]),
        (0, 0.001, [0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001]),
        (-3, 4, [-2, 0, 2, 4]),
        (7, 7, [7]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == wanted


@given(SIZES, SIZES)
def test_ticks_lie_within_and_are_few(first: float, second: float) -> None:
    low, high = sorted((first, second))
    if high - low > 1e-6 * max(abs(low), abs(high)):
        found = ticks(low, high)
        slack = 1e-6 * (high - low)
        assert 2 <= len(found) <= 6
        assert low - slack <= found[0] < found[-1] <= high + slack
        assert {round((b - a) / (found[1] - found[0]), 3) for a, b in itertools.pairwise(found)} == {1}


def test_texts_of_numbers() -> None:
    assert labels([0, 10_000, 20_000]) == ["0", "10k", "20k"]
    assert labels([0, 500_000, 1_000_000]) == ["0", "0.5M", "1M"]
    assert labels([0, 500, 1000]) == ["0", "500", "1000"]
    assert labels([-2, 0, 2]) == ["−2", "0", "2"]
    assert [short(value) for value in (0, 1.48249, 3e-5, 12_345.6)] == ["0", "1.482", "3e−5", "12,346"]


def chart(*curves: Curve, **more: object) -> str:
    return line_chart("Loss", curves, x_label="samples", y_label="loss", **more)  # type: ignore[arg-type]


def drawn(text: str) -> list[list[tuple[float, float]]]:
    """The points of the curves, read back from the picture."""
    box = [list(map(float, re.search(rf'data-{name}="(\S+) (\S+)"', text).groups())) for name in "xy"]  # type: ignore[union-attr]
    (left, right), (low, high) = box
    found = []
    for path in re.findall(r'data-name="[^"]*"[^>]* d="M([^"]*)"', text):
        places = [tuple(map(float, point.split(","))) for point in path.split("L")]
        found.append([(left + x / 1000 * (right - left), high - y / 1000 * (high - low)) for x, y in places])
    return found


def test_curves_show_the_given_points() -> None:
    many = [(float(x), 5 - x**0.5) for x in range(12)]
    two = [(0.0, 2.0), (6.0, 7.25)]
    text = chart(
        Curve(name="a", points=many, tone=0), Curve(name="b", points=two, tone=1, markers=True), reference=("r", 6.5)
    )
    for found, wanted in zip(drawn(text), (many, two), strict=True):
        assert [pytest.approx(point, abs=1e-3) for point in wanted] == found
    assert text.count('class="mark"') == 2 + 1  # and one in the legend
    assert re.findall(r'class="tick y"[^>]*>([^<]*)', text) == ["0", "2", "4", "6", "8"]
    assert re.findall(r'class="tick x"[^>]*>([^<]*)', text) == ["0", "2.5", "5", "7.5", "10"]
    (height,) = re.findall(r'<line class="reference"[^>]* y1="([\d.]+)%"', text)
    assert float(height) == pytest.approx(100 * (8 - 6.5) / 8, abs=0.01)
    assert "<desc" in text
    assert "a: 5 at the start" in text
    assert text.count("<tr>") == 1 + len(many) + len(two)


def test_a_single_point_is_a_marker_and_no_points_give_no_chart() -> None:
    text = chart(Curve(name="a", points=[(32.0, 5.5)], tone=0))
    assert text.count('class="mark"') == 1
    assert drawn(text)[0][0] == pytest.approx((32, 5.5))
    assert drawn(chart(Curve(name="a", points=[(0.0, 0.0)], tone=0))) == [[(0, 0)]]
    assert chart(Curve(name="a", points=[], tone=0)) == ""
    assert bar_chart("Memory", [("", [])], parts=["weights"], x_label="MiB") == ""


def test_an_axis_that_is_cut_says_so() -> None:
    calm = [(float(x), 2 + x % 3) for x in range(40)]
    wild = [*calm, (41.0, 9e5)]
    text = chart(Curve(name="a", points=wild, tone=0))
    assert "The axis is cut: values go up to 900,000." in text
    assert [y for _, y in drawn(text)[0][:-1]] == pytest.approx([y for _, y in calm], abs=0.01)
    assert 4 < drawn(text)[0][-1][1] < 20  # just beyond the axis
    assert "The axis is cut" not in chart(Curve(name="a", points=calm, tone=0))


def test_zero_is_on_the_axis_where_it_matters() -> None:
    level = [(0.0, 300.0), (1.0, 310.0)]
    assert 'data-y="0 ' in chart(Curve(name="a", points=level, tone=0), from_zero=True)
    assert 'data-y="0 ' not in chart(Curve(name="a", points=level, tone=0))


def test_bars_of_all_panels_have_one_scale() -> None:
    panels = [
        ("1f1b", [Bar(label="rank 0", values=[10, 30], text="40 MiB")]),
        (
            "<wpipe>",
            [Bar(label="rank 0", values=[20, 60], text="80 MiB"), Bar(label="rank 1", values=[5, 0], text="5")],
        ),
    ]
    text = bar_chart("Memory", panels, parts=["weights", "activations"], x_label="MiB")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)%"', text)]
    assert widths == [12.5, 37.5, 25, 75, 6.25]
    assert [float(x) for x in re.findall(r'<rect x="([\d.]+)%"', text)] == [0, 12.5, 0, 25, 0]
    assert text.count('role="img"') == 2
    assert "&lt;wpipe&gt;" in text
    assert "<wpipe>" not in text
    assert "rank 0, activations: 60" in text


def test_colours_are_legible_and_differ_in_greyscale() -> None:
    style = files("weft.draw.report").joinpath("report.css").read_text("utf-8")
    for part in style.split("@media screen", 1):
        found = dict(re.findall(r"--([\w-]+): (#\w{6})", part))
        tones = [found[f"tone-{at}"] for at in range(TONES)]
        assert all(colour.contrast(tone, found["paper"]) > 3 for tone in tones)
        assert all(colour.contrast(found[name], found["paper"]) > 4.5 for name in ("text", "muted"))
        greys = sorted(map(colour.lightness, tones[:4]))
        assert all(b - a > 3 for a, b in itertools.pairwise(greys))
        parts = [colour.lightness(found[f"part-{at}"]) for at in range(len(PARTS))]
        assert all(abs(a - b) > 2 for a, b in itertools.pairwise(parts))
