"""The page: one HTML file with everything in it, to zoom into a timeline and ask each block what it is.

Python decides what is shown (texts, colours, the order of blocks) and hands it over as data; `viewer.js` only
draws it, so that nothing is derived twice. What a reader needs without a pointer is in the page as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from weft.draw.html_page import page
from weft.draw.timeline.drawing import FIELDS, NIGHT, TONES, Entry, Look, Style, at_most, mark, version
from weft.schedule import Op, Timeline
from weft.text import format_number

LIMIT = 200_000  # blocks; beyond it the file has tens of megabytes

_HELP = (
    "Wheel or pinch to zoom, drag to move, hover or tap for details. With the chart focused: arrow keys go from "
    "block to block, + and − zoom, Shift with an arrow moves, 0 shows all."
)


def html(timeline: Timeline, figures: Mapping[str, object] | None = None) -> str:
    """A self-contained page; `figures` (label -> value) are listed above the chart."""
    at_most(timeline, LIMIT, "a page")
    look = Look(timeline)
    title = escape(look.title)
    parts = [
        f"<header><h1>{title}</h1><p>{escape(look.subtitle)}</p></header>",
        _figures(figures or {}),
        _toolbar(),
        f'<div id="chart"><canvas id="canvas" tabindex="0" role="application" aria-label="Timeline of {title}" '
        'aria-describedby="help"></canvas><div id="tip" role="status" hidden></div></div>',
        _legends(look),
        f'<p id="help">{_HELP}</p>',
        _ranks(look),
    ]
    data = f'<script type="application/json" id="data">{_embed(_data(look))}</script>\n'
    return page(
        title=look.title, style="timeline/viewer.css", script="timeline/viewer.js", main="\n".join(parts), data=data
    )


def _embed(data: object) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _data(look: Look) -> dict[str, Any]:
    """What the script draws: a table of blocks by column, texts by their number in `strings`."""
    strings: dict[str, int] = {}
    styles: dict[Style, int] = {}
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("rank", "start", "end", "style", "tone", "mark", "label", "version", "microbatch", "fields")
    }
    for row in look.rows:
        for block in row:
            step, update = block.step, block.step.action.op == Op.U
            instant = update and block.end == block.start
            values = {
                "rank": block.rank,
                "start": block.start - look.begin,
                "end": block.end - look.begin,
                "style": styles.setdefault(look.style_of(step), len(styles)),
                "tone": step.version % len(TONES),
                "mark": mark(step),
                "label": _known(strings, look.update(step) if instant else look.label(step)),
                "version": _known(strings, version(step)),
                "microbatch": -1 if update else step.action.index,
                "fields": [_known(strings, text) for text in look.fields(block)],
            }
            for name, value in values.items():
                columns[name].append(value)
    nights = _nights(look)
    return {
        "span": look.span,
        "ranks": len(look.rows),
        "names": FIELDS,
        "styles": [_style(style) | {"night": _style(nights.get(style, style))} for style in styles],
        "tones": [_style(Style(tone)) for tone in TONES],
        "strings": list(strings),
        "blocks": columns,
    }


def _known(strings: dict[str, int], text: str) -> int:
    return strings.setdefault(text, len(strings))


def _style(style: Style) -> dict[str, Any]:
    return {"fill": style.fill, "ink": style.ink, "edge": style.edge, "line": style.line, "hatch": style.hatch}


def _figures(figures: Mapping[str, object]) -> str:
    if not figures:
        return ""
    cards = [
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(_value(value))}</dd></div>" for name, value in figures.items()
    ]
    return f'<dl id="figures">{"".join(cards)}</dl>'


def _value(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _toolbar() -> str:
    buttons = (("out", "−", "Zoom out"), ("in", "+", "Zoom in"), ("reset", "Show all", "Show all"))
    shown = "".join(f'<button type="button" id="{name}" title="{told}">{text}</button>' for name, text, told in buttons)
    choices = "".join(
        f'<label><input type="radio" name="colour" value="{value}"{" checked" * (value == "pass")}>{value}</label>'
        for value in ("pass", "version")
    )
    return f'<div id="toolbar"><div>{shown}</div><fieldset><legend>colour by</legend>{choices}</fieldset></div>'


def _legends(look: Look) -> str:
    """What the colours mean: one list for each way to colour, of which the script shows one."""
    passes = [_entry(look, entry) for entry in look.legend()]
    passes.append('<li><span class="swatch idle">.</span>idle</li>')
    for text, words, one in look.marks():
        passes.append(f'<li><span class="mark{" dashed" * (one == 2)}">{text}</span>{words}</li>')
    last = max(block.step.version for block in look.timeline.blocks)
    tones = [_swatch(Style(tone), f"v{at}", f"version {at}") for at, tone in enumerate(TONES) if at <= last]
    if last >= len(TONES):
        tones.append("<li>and so on, from the first colour again</li>")
    return (
        f'<ul class="legend" id="by-pass">{"".join(passes)}</ul>'
        f'<ul class="legend" id="by-version" hidden>{"".join(tones)}</ul>'
    )


def _entry(look: Look, entry: Entry) -> str:
    if entry.tick:
        return f'<li><span class="tick">{entry.sample}</span>{entry.words}</li>'
    return _swatch(entry.style, entry.sample, entry.words, night=_nights(look).get(entry.style))


def _nights(look: Look) -> dict[Style, Style]:
    """What replaces a style on a dark page."""
    return {look.style(op, 0): Style(fill) for op, fill in NIGHT.items()}


def _swatch(style: Style, sample: str, words: str, *, night: Style | None = None) -> str:
    ground = style.fill
    if style.hatch:
        turn = -45 if style.hatch == "/" else 45
        ground = f"repeating-linear-gradient({turn}deg,{style.line} 0 2px,{style.fill} 2px 6px)"
    colours = f"--ground:{ground};--ink:{style.ink};--edge:{style.edge}"
    if night:
        colours += f";--night-ground:{night.fill};--night-ink:{night.ink}"
    return f'<li><span class="swatch" style="{colours}">{sample}</span>{words}</li>'


def _ranks(look: Look) -> str:
    lines = []
    for share in look.shares():
        cells = (
            str(share.rank),
            ", ".join(map(str, share.chunks)),
            str(share.blocks),
            str(share.updates),
            format_number(share.busy),
            f"{share.idle:.1%}",
        )
        bar = f'<td class="bar" aria-hidden="true"><div><span style="width:{share.idle:.1%}"></span></div></td>'
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + bar + "</tr>")
    names = ("rank", "chunks", "actions", "updates", "busy", "idle")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(lines)
    table = f'<table id="ranks"><thead><tr>{head}<td></td></tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
