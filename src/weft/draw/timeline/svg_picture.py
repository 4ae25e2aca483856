"""The SVG: a picture of a timeline that stands alone, for a README as well as for a paper.

It brings its own background, so that light and dark pages show it alike, and no font, so that text is fitted by
an estimate that is on the wide side: what might not fit is left out, the hover text has it all. Equal timelines
give equal bytes, which keeps the file quiet in version control.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from weft.draw.timeline.drawing import IDLE, Look, Style, at_most, mark, version
from weft.errors import WeftError
from weft.schedule import Block, Op, Step, Timeline
from weft.text import format_number

LIMIT = 20_000  # blocks; beyond it the file takes browsers seconds to show

FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
PAPER, FRAME, TEXT, MUTED, RULE = "#ffffff", "#d5dce3", "#1b2530", "#5a6673", "#e2e7ec"

EDGE = 24  # around everything
HEAD = 66  # title and subtitle
UNIT = (24, 44)  # width of a forward: what its texts need, within these bounds
NARROW, WIDE = 640, 2400  # of the part that shows time
BLOCK, GAP = 36, 18  # height of a block, and between the ranks, where updates are written
LABEL, SMALL = 12.0, 9.0  # font sizes in blocks
MARGIN = 1.5  # that a text keeps from the sides of its block
LEGEND = 26  # height of a line of the legend

_NARROW, _BROAD = frozenset("fijlrt.,:;|!'() "), frozenset("mwMW→%…")


def text_width(text: str, size: float) -> float:
    """How wide a text is at the most, in the fonts that are likely."""

    def one(sign: str) -> float:
        if sign in _NARROW:
            return 0.42
        return 0.98 if sign in _BROAD else 0.74 if sign.isupper() else 0.64

    return size * sum(map(one, text))


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Where things are."""

    look: Look
    span: float  # time that is shown
    left: float
    plot: float  # width of the part that shows it

    def x(self, time: float) -> float:
        return self.left + min(1.0, (time - self.look.begin) / self.span) * self.plot

    def shown(self, rank: int) -> list[Block]:
        end = self.look.begin + self.span
        return [block for block in self.look.rows[rank] if block.start < end or block.end <= end]

    @property
    def subtitle(self) -> str:
        part = f", the first {format_number(self.span)} shown" if self.span < self.look.span else ""
        return self.look.subtitle + part

    def y(self, rank: int) -> float:
        return EDGE + HEAD + rank * (BLOCK + GAP)

    @property
    def bottom(self) -> float:
        return self.y(len(self.look.rows) - 1) + BLOCK

    @property
    def width(self) -> float:
        return self.left + self.plot + EDGE


def svg(timeline: Timeline, *, until: float | None = None) -> str:
    """A standalone SVG of all blocks, or of those that start before `until`."""
    if until is not None and not until > 0:
        raise WeftError(f"until, the time to draw, must be above 0 (got {until}); leave it out to draw all")
    at_most(timeline, LIMIT, "an SVG")
    look = Look(timeline)
    span = min(look.span, until or math.inf)
    left = EDGE + math.ceil(text_width(f"rank {len(look.rows) - 1}", 13)) + 12
    frame = _Frame(look=look, span=span, left=left, plot=_wanted(look, span))
    styles = {style: f"s{at}" for at, style in enumerate(dict.fromkeys(entry.style for entry in look.legend()))}
    body = [*_axis(frame), *_tracks(frame)]
    for rank in range(len(look.rows)):
        body.extend(_row(frame, frame.shown(rank), styles))
    legend, height = _legend(frame, styles)
    return "\n".join([*_opening(frame, height, styles), *body, *legend, "</svg>", ""])


def _wanted(look: Look, span: float) -> int:
    """A width at which every text would fit three forwards in four, within reason."""
    steps = [block.step for block in look.timeline.blocks if block.step.action.op != Op.U]
    texts = max((max(_widths(look, step)) for step in steps), default=0.0)
    unit = min(UNIT[1], max(UNIT[0], math.ceil(texts + 2 * MARGIN)))
    return math.ceil(min(WIDE, max(NARROW, span / look.forwards[len(look.forwards) // 4] * unit)))


def _widths(look: Look, step: Step) -> tuple[float, float]:
    """Of a block's label, and of its version."""
    return text_width(look.label(step), LABEL), text_width(version(step), SMALL)


def _opening(frame: _Frame, height: float, styles: dict[Style, str]) -> list[str]:
    look = frame.look
    title, width = escape(look.title), frame.width
    rules = [
        f"text{{font-family:{FONT};fill:{TEXT}}}",
        ".l{font-size:12px;font-weight:600;text-anchor:middle}",
        ".v{font-size:9px;text-anchor:middle}",
        f".u{{font-size:9px;font-weight:600;text-anchor:middle;fill:{TEXT}}}",
        f".m{{font-size:11px;fill:{MUTED}}}",
    ]
    definitions = []
    for style, name in styles.items():
        ground = style.fill
        if style.hatch:
            ground = f"url(#{name}h)"
            definitions.append(_pattern(style, f"{name}h"))
        rules.append(f".{name} rect{{fill:{ground};stroke:{style.edge}}}.{name} text{{fill:{style.ink}}}")
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" role="img" aria-labelledby="title about">',
        f'<title id="title">{title}</title>',
        f'<desc id="about">{escape(frame.subtitle)}; rows are ranks, time runs to the right</desc>',
        f"<style>{''.join(rules)}</style>",
        f"<defs>{''.join(definitions)}</defs>" if definitions else "<defs/>",
        f'<rect x="0.5" y="0.5" width="{_n(width - 1)}" height="{_n(height - 1)}" rx="10" fill="{PAPER}" '
        f'stroke="{FRAME}"/>',
        f'<text x="{EDGE}" y="{EDGE + 16}" font-size="18" font-weight="650">'
        f"{escape(_cut(look.title, 18, width - 2 * EDGE))}</text>",
        f'<text x="{EDGE}" y="{EDGE + 37}" class="m">{escape(_cut(frame.subtitle, 11, width - 2 * EDGE))}</text>',
    ]


def _cut(text: str, size: float, room: float) -> str:
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


def _axis(frame: _Frame) -> list[str]:
    """Lines and numbers of time, at round distances that leave room to read."""
    look, parts = frame.look, []
    step = round_step(frame.span * 64 / frame.plot)
    top, bottom = EDGE + HEAD - 6, frame.bottom + 8
    for at in range(math.floor(frame.span / step + 1e-9) + 1):
        x = _n(frame.x(look.begin + at * step))
        parts.append(f'<path d="M{x} {_n(top)}V{_n(bottom)}" stroke="{RULE}"/>')
        text = format_number(at * step)
        parts.append(f'<text x="{x}" y="{_n(bottom + 14)}" class="m" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{EDGE}" y="{_n(bottom + 14)}" class="m">time</text>')
    return parts


def _tracks(frame: _Frame) -> list[str]:
    """The ground of each rank, seen where it idles."""
    parts = []
    for rank in range(len(frame.look.rows)):
        y = frame.y(rank)
        parts.append(
            f'<rect x="{_n(frame.left)}" y="{_n(y)}" width="{_n(frame.plot)}" height="{BLOCK}" rx="2" fill="{IDLE}"/>'
        )
        parts.append(f'<text x="{EDGE}" y="{_n(y + BLOCK / 2 + 4.5)}" font-size="13">rank {rank}</text>')
    return parts


def _row(frame: _Frame, row: list[Block], styles: dict[Style, str]) -> list[str]:
    """The blocks of a rank. Updates without duration come last, so that nothing covers them."""
    parts, free = [], -math.inf
    for block in sorted(row, key=lambda block: block.end == block.start):
        title = f"<title>{escape(frame.look.hover(block))}</title>"
        if block.end > block.start:
            parts.append(
                f'<g class="block {styles[frame.look.style_of(block.step)]}">{title}{_block(frame, block)}</g>'
            )
        else:
            drawn, free = _tick(frame, block, free)
            parts.append(f'<g class="block">{title}{drawn}</g>')
    return parts


def _block(frame: _Frame, block: Block) -> str:
    look, step = frame.look, block.step
    x, y = frame.x(block.start), frame.y(block.rank)
    width = frame.x(block.end) - x
    inset = min(0.5, width / 4)  # neighbours keep their own outlines
    drawn = (
        f'<rect x="{_n(x + inset)}" y="{_n(y + 0.5)}" width="{_n(width - 2 * inset)}" height="{BLOCK - 1}" '
        f'rx="{_n(min(2.5, width / 6))}"{"" if width > 4 else " stroke-width=" + _quoted(width / 8)}/>'
    )
    middle = _n(x + width / 2)
    label, weights = _widths(look, step)
    room = width - 2 * MARGIN
    if label <= room:
        drawn += f'<text x="{middle}" y="{_n(y + 16)}" class="l">{look.label(step)}</text>'
    if max(label, weights) <= room:  # a version alone would be taken for the label
        drawn += f'<text x="{middle}" y="{_n(y + 27)}" class="v">{version(step)}</text>'
    return drawn + _underline(look, step, x + width / 2, y + 31, min(weights, width * 0.8))


def _underline(look: Look, step: Step, middle: float, y: float, width: float) -> str:
    """Under the version: a line where it is odd, dashed where it is predicted. It is there without the text, too."""
    if not mark(step):
        return ""
    return _line(middle - width / 2, y, width, look.style_of(step).ink, mark(step))


def _line(x: float, y: float, width: float, ink: str, mark: int) -> str:
    dash = ' stroke-dasharray="2 2"' if mark == 2 else ""
    return f'<path d="M{_n(x)} {_n(y)}h{_n(width)}" stroke="{ink}" stroke-width="2"{dash}/>'


def _tick(frame: _Frame, block: Block, free: float) -> tuple[str, float]:
    """An update without duration: a line through the rank and, where there is room, the version it makes."""
    x, y = frame.x(block.end), frame.y(block.rank)
    drawn = f'<path d="M{_n(x)} {_n(y - 5)}V{_n(y + BLOCK + 1)}" stroke="{TEXT}" stroke-width="2"/>'
    text = frame.look.update(block.step)
    half = text_width(text, SMALL) / 2
    centre = min(x, frame.width - 6 - half)
    if centre - half < free:
        return drawn, free
    return f'{drawn}<text x="{_n(centre)}" y="{_n(y - 7.5)}" class="u">{text}</text>', centre + half + 2


def _legend(frame: _Frame, styles: dict[Style, str]) -> tuple[list[str], float]:
    """Samples with words, in as many lines as they take, and the height of the whole picture."""
    parts, x, y = [], float(EDGE), frame.bottom + 44
    right = frame.width - EDGE
    for sample, words in _samples(frame.look, styles):
        width = 34 + 8 + 0.88 * text_width(words, 12)
        if x > EDGE and x + width > right:
            x, y = float(EDGE), y + LEGEND
        parts.append(f'<g transform="translate({_n(x)} {_n(y)})">{sample}')
        parts.append(f'<text x="42" y="14" font-size="12">{escape(words)}</text></g>')
        x += width + 16
    return parts, y + LEGEND + EDGE - 8


def _samples(look: Look, styles: dict[Style, str]) -> list[tuple[str, str]]:
    """Drawing and words of each entry; a drawing is 34 wide and 20 high."""
    samples = []
    track = f'<rect width="34" height="20" rx="2.5" fill="{IDLE}"/>'
    for entry in look.legend():
        box = '<rect x="0.5" y="0.5" width="33" height="19" rx="2.5"/>'
        shape = f'<g class="{styles[entry.style]}">{box}<text x="17" y="14.5" class="l">{entry.sample}</text></g>'
        if entry.tick:
            shape = f'{track}<path d="M17 -2V22" stroke="{TEXT}" stroke-width="2"/>'
        samples.append((shape, entry.words))
    samples.append((track, "idle"))
    for text, words, one in look.marks():
        wide = text_width(text, SMALL)
        line = _line(17 - wide / 2, 16, wide, TEXT, one)
        samples.append((f'<text x="17" y="12" class="v">{text}</text>{line}', words))
    return samples


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _n(value: float) -> str:
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _quoted(value: float) -> str:
    return f'"{_n(value)}"'
