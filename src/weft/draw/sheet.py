"""The sheet that a plot is drawn on: an SVG file that stands alone on a Markdown page.

A page shows it as an image, so it gets no font and no script, only its own style. Texts are measured by an estimate
on the wide side, and broken into lines where they would not fit. Colours are those of `report.css`, light and dark by
the reader's own setting, written as plain rules, because not every viewer of SVG files knows variables.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TypeVar

from weft.draw.report.charts import DASHES, MARKS, SHAPES, TONES
from weft.draw.timeline import colour
from weft.draw.timeline.svg_picture import FONT, text_width

T = TypeVar("T")

WIDTH, EDGE = 900.0, 20.0
INNER = WIDTH - 2 * EDGE
SIZE, LINE = 13.0, 17.0  # of ordinary text: font and distance of lines
HEAD, HEAD_LINE = 18.0, 24.0
KEY, KEY_GAP = 40.0, 18.0  # width of a sample in the legend, and distance of its entries
PARTS = 7  # colours of parts, over and over; hatched the second time

_BOLD = 1.08  # how much wider bold text is
_PALE = 0.3  # share of paper in the colour of a bar, on which whiskers have to be seen


def clean(text: str) -> str:
    """Without line breaks and other signs that XML has no place for."""
    return "".join(sign if sign.isprintable() else " " for sign in text).strip()


def measure(text: str, size: float = SIZE, *, bold: bool = False) -> float:
    return text_width(text, size) * (_BOLD if bold else 1.0)


def wrap(text: str, width: float, size: float = SIZE, *, bold: bool = False) -> list[str]:
    """A text in lines no wider than that: broken between words, and inside a word that is wider by itself.

    No text is no line.
    """
    rows = [""]
    for word in clean(text).split():
        joined = f"{rows[-1]} {word}".strip()
        if measure(joined, size, bold=bold) <= width:
            rows[-1] = joined
            continue
        rest = word
        while rest:
            fits = next((end for end in range(len(rest), 1, -1) if measure(rest[:end], size, bold=bold) <= width), 1)
            rows.append(rest[:fits])
            rest = rest[fits:]
    return [row for row in rows if row]


def write(x: float, y: float, text: str, kind: str = "", *, anchor: str = "", more: str = "") -> str:
    """A text; `kind`: a class of the style, `anchor`: which part of it is at x, if not its start."""
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{named} x="{n(x)}" y="{n(y)}"{placed}{more}>{escape(clean(text))}</text>'


def stroke(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{kind}" d="M{n(x1)} {n(y1)}L{n(x2)} {n(y2)}"/>'


def n(value: float, digits: int = 2) -> str:
    """A place, as exact as anyone can see."""
    text = f"{value:.{digits}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def order(names: Iterable[Iterable[str]]) -> dict[str, int]:
    """The number of each name, by which it keeps its colour: in the order in which they first occur."""
    return {name: at for at, name in enumerate(dict.fromkeys(name for some in names for name in some))}


def columns(panels: int, most: int) -> int:
    """In how many columns, at most that many, panels fill their rows best."""
    return math.ceil(panels / math.ceil(panels / most))


def batches(items: Iterable[T], across: int) -> Iterator[list[T]]:
    """So many of them at a time."""
    rest = iter(items)
    while some := list(itertools.islice(rest, across)):
        yield some


def dash(tone: int) -> str:
    """Of two curves of one colour, the second has another dash."""
    pattern = DASHES[(tone + tone // TONES) % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def mark(tone: int, x: float, y: float) -> str:
    shape = MARKS[(tone + tone // TONES) % len(MARKS)]
    kind = f'class="mark f{tone % TONES}"'
    if shape == "circle":
        return f'<circle {kind} cx="{n(x)}" cy="{n(y)}" r="3.5"/>'
    return f'<path {kind} transform="translate({n(x)} {n(y)})" d="{SHAPES[shape]}"/>'


def block(kind: str, x: float, y: float, width: float, height: float, told: str, *, hatched: bool = False) -> str:
    """A bar, with what it tells under the mouse where the file is opened by itself."""
    box = f'x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}"'
    over = f'<rect {box} fill="url(#hatch)" pointer-events="none"/>' if hatched else ""
    return f'<rect class="{kind}" {box}><title>{escape(clean(told))}</title></rect>{over}'


def swatch(part: int) -> str:
    """A sample of a part's colour, on the left of a text that starts at (KEY, 0)."""
    box = f'x="0" y="-11" width="{n(KEY - 8)}" height="12"'
    over = f'<rect {box} fill="url(#hatch)"/>' if part >= PARTS else ""
    return f'<rect class="p{part % PARTS}" {box}/>{over}'


def sample(tone: int, *, marked: bool) -> str:
    """A piece of a curve, in the same place."""
    piece = f'<path class="curve t{tone % TONES}"{dash(tone)} d="M0-4.5h{n(KEY - 8)}"/>'
    return piece + (mark(tone, (KEY - 8) / 2, -4.5) if marked else "")


class Sheet:
    """What has been drawn so far, from the top down: the title, what is below it, legend and panels."""

    def __init__(self, title: str, below: str = "") -> None:
        self.title = clean(title)
        self.drawn: list[str] = []
        self.told: list[str] = []
        self.y = EDGE
        for row in wrap(title, INNER, HEAD, bold=True):
            self.drawn.append(write(EDGE, self.y + HEAD, row, "head"))
            self.y += HEAD_LINE
        for row in wrap(below, INNER):
            self.drawn.append(write(EDGE, self.y + SIZE, row, "muted"))
            self.y += LINE
        self.y += 12

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Samples, drawn at (0, 0), with their names: as many in a line as fit, one below the other in columns."""
        widest = max(KEY + measure(name) + KEY_GAP for _, name in entries)
        across = max(1, min(len(entries), int((INNER + KEY_GAP) / widest)))
        across = columns(len(entries), across)
        for some in batches(entries, across):
            deep = 1
            for at, (drawn, name) in enumerate(some):
                x = EDGE + at * widest
                self.drawn.append(f'<g transform="translate({n(x)} {n(self.y + SIZE)})">{drawn}</g>')
                rows = wrap(name, INNER - KEY)
                deep = max(deep, len(rows))
                for down, row in enumerate(rows):
                    self.drawn.append(write(x + KEY, self.y + SIZE + down * LINE, row))
            self.y += deep * LINE + 3
        self.y += 12

    def text(self) -> str:
        """The whole file."""
        height = math.ceil(self.y + EDGE)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {n(WIDTH)} {height}" width="{n(WIDTH)}" '
                f'height="{height}" role="img" aria-labelledby="title about">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="about">{escape(clean(" ".join(self.told)))}</desc>',
                f"<style>{_style()}</style>",
                '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><path class="hatch" d="M0 3H6"/></pattern></defs>',
                f'<rect class="sheet" width="{n(WIDTH)}" height="{height}" rx="6"/>',
                *self.drawn,
                "</svg>",
                "",
            ]
        )


@cache
def _style() -> str:
    light, dark = _palettes()
    fixed = [
        f"text{{font:{n(SIZE)}px {FONT};paint-order:stroke;stroke-width:3px;stroke-linejoin:round}}",
        f".head{{font-size:{n(HEAD)}px;font-weight:600}}.name{{font-weight:600}}.tick{{font-size:12px}}",
        ".tick,.value{font-variant-numeric:tabular-nums}",
        "path{fill:none}.rule,.axis{stroke-width:1}.reference{stroke-width:1.5;stroke-dasharray:5 4}",
        ".whisker{stroke-width:1.5}.part{stroke-width:.7}.curve{stroke-width:2;stroke-linejoin:round}.mark{stroke-width:1}",
        ".band{fill-opacity:.16}.hatch{stroke-width:2}",
    ]
    return "\n".join([*fixed, *_colours(light), "@media (prefers-color-scheme:dark){", *_colours(dark), "}"])


def _colours(palette: dict[str, str]) -> list[str]:
    """The rules that differ between light and dark."""
    paper, text, muted, rule = (palette[name] for name in ("paper", "text", "muted", "rule"))
    tones = "".join(
        f".t{at}{{stroke:{palette[f'tone-{at}']}}}.f{at}{{fill:{palette[f'tone-{at}']}}}" for at in range(TONES)
    )
    return [
        f".sheet{{fill:{paper}}}text{{fill:{text};stroke:{paper}}}.muted,.tick{{fill:{muted}}}",
        f".rule{{stroke:{rule}}}.axis{{stroke:{muted}}}.whisker,.reference{{stroke:{text}}}",
        f".mark,.hatch,.part{{stroke:{paper}}}",
        tones,
        "".join(f".b{at}{{fill:{colour.mix(palette[f'tone-{at}'], paper, _PALE)}}}" for at in range(TONES)),
        "".join(f".p{at}{{fill:{palette[f'part-{at}']}}}" for at in range(PARTS)),
    ]


@cache
def _palettes() -> tuple[dict[str, str], dict[str, str]]:
    """The colours of the report, light and dark."""
    style = files("weft.draw").joinpath("report/report.css").read_text("utf-8")
    light, dark = style.split("@media screen", 1)
    return dict(re.findall(r"--([\w-]+): (#\w{6})", light)), dict(re.findall(r"--([\w-]+): (#\w{6})", dark))
