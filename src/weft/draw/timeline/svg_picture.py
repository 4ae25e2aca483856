"""The SVG: a self-contained picture of a timeline, for a README or a paper.

It draws its own background, so that it looks the same on light and dark pages. It embeds no font, so text widths are
estimated on the wide side: text that might not fit is omitted, and the hover text shows everything. Equal timelines
give equal bytes, which avoids noise in version control.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from weft.draw.timeline.drawing import IDLE_COLOUR, Drawing, Style, check_block_count, version, version_mark
from weft.errors import WeftError
from weft.schedule import Block, Op, Step, Timeline
from weft.text import format_number

LIMIT = 20_000  # blocks; browsers take seconds to show more

FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
PAPER, FRAME, TEXT, MUTED, RULE = "#ffffff", "#d5dce3", "#1b2530", "#5a6673", "#e2e7ec"

EDGE = 24  # margin of the picture
HEAD = 66  # title and subtitle
FORWARD = (24, 44)  # bounds for the width of a forward
PLOT = (640, 2400)  # bounds for the width of the time axis
BLOCK, GAP = 36, 18  # height of a block, and of the gap between ranks, which holds the labels of updates
LABEL, SMALL = 12.0, 9.0  # font sizes in blocks
MARGIN = 1.5  # between text and the sides of its block
LEGEND = 26  # height of a legend line

_NARROW, _WIDE = frozenset("fijlrt.,:;|!'() "), frozenset("mwMW→%…")


def text_width(text: str, size: float) -> float:
    """An upper bound for the width of a text in common fonts."""

    def width(character: str) -> float:
        if character in _NARROW:
            return 0.42
        return 0.98 if character in _WIDE else 0.74 if character.isupper() else 0.64

    return size * sum(map(width, text))


@dataclass(frozen=True, kw_only=True)
class _Geometry:
    """The positions of ranks and times in the picture."""

    drawing: Drawing
    span: float  # time shown
    left: float
    plot: float  # width of the time axis

    def x(self, time: float) -> float:
        return self.left + min(1.0, (time - self.drawing.start) / self.span) * self.plot

    def shown(self, rank: int) -> list[Block]:
        end = self.drawing.start + self.span
        return [block for block in self.drawing.rows[rank] if block.start < end or block.end <= end]

    @property
    def subtitle(self) -> str:
        part = f", the first {format_number(self.span)} shown" if self.span < self.drawing.span else ""
        return self.drawing.subtitle(part)

    def y(self, rank: int) -> float:
        return EDGE + HEAD + rank * (BLOCK + GAP)

    @property
    def bottom(self) -> float:
        return self.y(len(self.drawing.rows) - 1) + BLOCK

    @property
    def width(self) -> float:
        return self.left + self.plot + EDGE


def svg(timeline: Timeline, *, until: float | None = None) -> str:
    """A standalone SVG of all blocks, or of those that start before `until`."""
    if until is not None and not until > 0:
        raise WeftError(f"until, the time to draw, must be above 0 (got {until}); omit it to draw everything")
    check_block_count(timeline, LIMIT, "an SVG")
    drawing = Drawing(timeline)
    span = min(drawing.span, until or math.inf)
    left = EDGE + math.ceil(text_width(f"rank {len(drawing.rows) - 1}", 13)) + 12
    geometry = _Geometry(drawing=drawing, span=span, left=left, plot=_plot_width(drawing, span))
    distinct = dict.fromkeys(entry.style for entry in drawing.legend())
    styles = {style: f"s{index}" for index, style in enumerate(distinct)}
    body = [*_axis(geometry), *_rank_backgrounds(geometry)]
    for rank in range(len(drawing.rows)):
        body.extend(_row(geometry, geometry.shown(rank), styles))
    legend, height = _legend(geometry, styles)
    return "\n".join([*_header(geometry, height, styles), *body, *legend, "</svg>", ""])


def _plot_width(drawing: Drawing, span: float) -> int:
    """The width of the time axis at which all text fits in three of four forwards, within bounds."""
    steps = [block.step for block in drawing.timeline.blocks if block.step.action.op != Op.U]
    texts = max((max(_widths(drawing, step)) for step in steps), default=0.0)
    forward = min(FORWARD[1], max(FORWARD[0], math.ceil(texts + 2 * MARGIN)))
    duration = drawing.forward_durations[len(drawing.forward_durations) // 4]
    return math.ceil(min(PLOT[1], max(PLOT[0], span / duration * forward)))


def _widths(drawing: Drawing, step: Step) -> tuple[float, float]:
    """The widths of a block's label and version."""
    return text_width(drawing.label(step), LABEL), text_width(version(step), SMALL)


def _header(geometry: _Geometry, height: float, styles: dict[Style, str]) -> list[str]:
    drawing = geometry.drawing
    title, width = escape(drawing.title), geometry.width
    room = width - 2 * EDGE
    rules = [
        f"text{{font-family:{FONT};fill:{TEXT}}}",
        ".l{font-size:12px;font-weight:600;text-anchor:middle}",
        ".v{font-size:9px;text-anchor:middle}",
        f".u{{font-size:9px;font-weight:600;text-anchor:middle;fill:{TEXT}}}",
        f".m{{font-size:11px;fill:{MUTED}}}",
    ]
    definitions = []
    for style, name in styles.items():
        fill = style.fill
        if style.hatch:
            fill = f"url(#{name}h)"
            definitions.append(_pattern(style, f"{name}h"))
        rules.append(f".{name} rect{{fill:{fill};stroke:{style.edge}}}.{name} text{{fill:{style.ink}}}")
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_px(width)} {_px(height)}" width="{_px(width)}" '
        f'height="{_px(height)}" role="img" aria-labelledby="title about">',
        f'<title id="title">{title}</title>',
        f'<desc id="about">{escape(geometry.subtitle)}; rows are ranks, time runs to the right</desc>',
        f"<style>{''.join(rules)}</style>",
        f"<defs>{''.join(definitions)}</defs>" if definitions else "<defs/>",
        f'<rect x="0.5" y="0.5" width="{_px(width - 1)}" height="{_px(height - 1)}" rx="10" fill="{PAPER}" '
        f'stroke="{FRAME}"/>',
        f'<text x="{EDGE}" y="{EDGE + 16}" font-size="18" font-weight="650">'
        f"{escape(_truncated(drawing.title, 18, room))}</text>",
        f'<text x="{EDGE}" y="{EDGE + 37}" class="m">{escape(_truncated(geometry.subtitle, 11, room))}</text>',
    ]


def _truncated(text: str, size: float, room: float) -> str:
    if text_width(text, size) <= room:
        return text
    while text and text_width(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def _pattern(style: Style, name: str) -> str:
    turn = 45 if style.hatch == "/" else -45
    return (
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate({turn})">'
        f'<rect width="6" height="6" style="fill:{style.fill};stroke:none"/>'
        f'<rect width="2" height="6" style="fill:{style.line};stroke:none"/></pattern>'
    )


def _axis(geometry: _Geometry) -> list[str]:
    """Grid lines and numbers of the time axis, at round steps with readable spacing."""
    drawing, parts = geometry.drawing, []
    step = round_step(geometry.span * 64 / geometry.plot)
    top, bottom = EDGE + HEAD - 6, geometry.bottom + 8
    for tick in range(math.floor(geometry.span / step + 1e-9) + 1):
        x = _px(geometry.x(drawing.start + tick * step))
        parts.append(f'<path d="M{x} {_px(top)}V{_px(bottom)}" stroke="{RULE}"/>')
        text = format_number(tick * step)
        parts.append(f'<text x="{x}" y="{_px(bottom + 14)}" class="m" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{EDGE}" y="{_px(bottom + 14)}" class="m">time</text>')
    return parts


def _rank_backgrounds(geometry: _Geometry) -> list[str]:
    """The name and background of each rank; the background shows where the rank is idle."""
    parts = []
    for rank in range(len(geometry.drawing.rows)):
        y = geometry.y(rank)
        parts.append(
            f'<rect x="{_px(geometry.left)}" y="{_px(y)}" width="{_px(geometry.plot)}" height="{BLOCK}" rx="2" '
            f'fill="{IDLE_COLOUR}"/>'
        )
        parts.append(f'<text x="{EDGE}" y="{_px(y + BLOCK / 2 + 4.5)}" font-size="13">rank {rank}</text>')
    return parts


def _row(geometry: _Geometry, row: list[Block], styles: dict[Style, str]) -> list[str]:
    """The blocks of a rank. Updates without duration are drawn last, on top."""
    parts, free = [], -math.inf
    for block in sorted(row, key=lambda block: block.end == block.start):
        title = f"<title>{escape(geometry.drawing.hover_text(block))}</title>"
        if block.end > block.start:
            parts.append(
                f'<g class="block {styles[geometry.drawing.style_of(block.step)]}">{title}{_block(geometry, block)}</g>'
            )
        else:
            drawn, free = _update_tick(geometry, block, free)
            parts.append(f'<g class="block">{title}{drawn}</g>')
    return parts


def _block(geometry: _Geometry, block: Block) -> str:
    drawing, step = geometry.drawing, block.step
    x, y = geometry.x(block.start), geometry.y(block.rank)
    width = geometry.x(block.end) - x
    inset = min(0.5, width / 4)  # keeps the outlines of neighbours apart
    outline = f' stroke-width="{_px(width / 8)}"' if width <= 4 else ""
    drawn = (
        f'<rect x="{_px(x + inset)}" y="{_px(y + 0.5)}" width="{_px(width - 2 * inset)}" height="{BLOCK - 1}" '
        f'rx="{_px(min(2.5, width / 6))}"{outline}/>'
    )
    middle = _px(x + width / 2)
    label_width, version_width = _widths(drawing, step)
    room = width - 2 * MARGIN
    if label_width <= room:
        drawn += f'<text x="{middle}" y="{_px(y + 16)}" class="l">{drawing.label(step)}</text>'
    if max(label_width, version_width) <= room:  # a version without a label could be mistaken for one
        drawn += f'<text x="{middle}" y="{_px(y + 27)}" class="v">{version(step)}</text>'
    return drawn + _underline(drawing, step, x + width / 2, y + 31, min(version_width, width * 0.8))


def _underline(drawing: Drawing, step: Step, middle: float, y: float, width: float) -> str:
    """The line under the version: solid if odd, dashed if predicted. Drawn even where the text does not fit."""
    if not version_mark(step):
        return ""
    return _line(middle - width / 2, y, width, drawing.style_of(step).ink, version_mark(step))


def _line(x: float, y: float, width: float, ink: str, mark: int) -> str:
    dash = ' stroke-dasharray="2 2"' if mark == 2 else ""
    return f'<path d="M{_px(x)} {_px(y)}h{_px(width)}" stroke="{ink}" stroke-width="2"{dash}/>'


def _update_tick(geometry: _Geometry, block: Block, free: float) -> tuple[str, float]:
    """An update without duration: a line across the rank and, if there is room, the version it makes."""
    x, y = geometry.x(block.end), geometry.y(block.rank)
    drawn = f'<path d="M{_px(x)} {_px(y - 5)}V{_px(y + BLOCK + 1)}" stroke="{TEXT}" stroke-width="2"/>'
    text = geometry.drawing.update_label(block.step)
    half = text_width(text, SMALL) / 2
    centre = min(max(x, free + half), geometry.width - 6 - half)  # beside the label of an update just before
    if centre - half < free or centre - x > 2 * half:
        return drawn, free
    return f'{drawn}<text x="{_px(centre)}" y="{_px(y - 7.5)}" class="u">{text}</text>', centre + half + 2


def _legend(geometry: _Geometry, styles: dict[Style, str]) -> tuple[list[str], float]:
    """The legend, in as many lines as it needs, and the height of the whole picture."""
    parts, x, y = [], float(EDGE), geometry.bottom + 44
    right = geometry.width - EDGE
    for sample, text in _samples(geometry.drawing, styles):
        width = 34 + 8 + 0.88 * text_width(text, 12)
        if x > EDGE and x + width > right:
            x, y = float(EDGE), y + LEGEND
        parts.append(f'<g transform="translate({_px(x)} {_px(y)})">{sample}')
        parts.append(f'<text x="42" y="14" font-size="12">{escape(text)}</text></g>')
        x += width + 16
    return parts, y + LEGEND + EDGE - 8


def _samples(drawing: Drawing, styles: dict[Style, str]) -> list[tuple[str, str]]:
    """The sample and the text of each legend entry; a sample is 34 wide and 20 high."""
    samples = []
    track = f'<rect width="34" height="20" rx="2.5" fill="{IDLE_COLOUR}"/>'
    for entry in drawing.legend():
        box = '<rect x="0.5" y="0.5" width="33" height="19" rx="2.5"/>'
        shape = f'<g class="{styles[entry.style]}">{box}<text x="17" y="14.5" class="l">{entry.sample}</text></g>'
        if entry.tick:
            shape = f'{track}<path d="M17 -2V22" stroke="{TEXT}" stroke-width="2"/>'
        samples.append((shape, entry.text))
    samples.append((track, "idle"))
    for mark in drawing.version_marks():
        width = text_width(mark.sample, SMALL)
        line = _line(17 - width / 2, 16, width, TEXT, mark.kind)
        samples.append((f'<text x="17" y="12" class="v">{mark.sample}</text>{line}', mark.text))
    return samples


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _px(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
