"""The HTML viewer: one self-contained file, to zoom into a timeline and inspect its blocks.

Python decides what is shown (texts, colours, the order of blocks) and embeds it as data; `viewer.js` only draws it, so
that nothing is derived twice. Summaries are in the page as text, readable without the script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from weft.draw.html_page import page
from weft.draw.timeline.drawing import (
    DARK_MODE_COLOURS,
    FIELDS,
    VERSION_COLOURS,
    Drawing,
    LegendEntry,
    Style,
    check_block_count,
    version,
    version_mark,
)
from weft.schedule import Op, Timeline
from weft.text import format_number

LIMIT = 200_000  # blocks; more would give a file of tens of megabytes

_HELP = (
    "Wheel or pinch to zoom, drag to move, hover or tap for details. With the chart focused: arrow keys select "
    "blocks, + and − zoom, Shift with an arrow key moves, 0 shows everything."
)


def html(timeline: Timeline, figures: Mapping[str, object] | None = None) -> str:
    """A self-contained page; `figures` (label -> value) are listed above the chart."""
    check_block_count(timeline, LIMIT, "a page")
    drawing = Drawing(timeline)
    title = escape(drawing.title)
    parts = [
        f"<header><h1>{title}</h1><p>{escape(drawing.subtitle())}</p></header>",
        _figures(figures or {}),
        _toolbar(),
        f'<div id="chart"><canvas id="canvas" tabindex="0" role="application" aria-label="Timeline of {title}" '
        'aria-describedby="help"></canvas><div id="tip" role="status" hidden></div></div>',
        _legends(drawing),
        f'<p id="help">{_HELP}</p>',
        _ranks(drawing),
    ]
    data = f'<script type="application/json" id="data">{_embed(_data(drawing))}</script>\n'
    main = "\n".join(parts)
    return page(title=drawing.title, style="timeline/viewer.css", script="timeline/viewer.js", main=main, data=data)


def _embed(data: object) -> str:
    """JSON that can't close the script element that contains it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(drawing: Drawing) -> dict[str, Any]:
    """The data for the script: the blocks as a table by column, with texts as indices into `strings`."""
    strings: dict[str, int] = {}
    styles: dict[Style, int] = {}
    columns: dict[str, list[Any]] = {
        name: []
        for name in ("rank", "start", "end", "style", "tone", "mark", "label", "version", "microbatch", "fields")
    }
    for row in drawing.rows:
        for block in row:
            step, update = block.step, block.step.action.op == Op.U
            instant = update and block.end == block.start
            values = {
                "rank": block.rank,
                "start": block.start - drawing.start,
                "end": block.end - drawing.start,
                "style": styles.setdefault(drawing.style_of(step), len(styles)),
                "tone": step.version % len(VERSION_COLOURS),
                "mark": version_mark(step),
                "label": _index(strings, drawing.update_label(step) if instant else drawing.label(step)),
                "version": _index(strings, version(step)),
                "microbatch": -1 if update else step.action.index,
                "fields": [_index(strings, text) for text in drawing.fields(block)],
            }
            for name, value in values.items():
                columns[name].append(value)
    dark_styles = _dark_styles(drawing)
    return {
        "span": drawing.span,
        "ranks": len(drawing.rows),
        "names": FIELDS,
        "styles": [_style(style) | {"night": _style(dark_styles.get(style, style))} for style in styles],
        "tones": [_style(Style(fill)) for fill in VERSION_COLOURS],
        "strings": list(strings),
        "blocks": columns,
    }


def _index(strings: dict[str, int], text: str) -> int:
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
    shown = "".join(
        f'<button type="button" id="{name}" title="{title}">{text}</button>' for name, text, title in buttons
    )
    choices = "".join(
        f'<label><input type="radio" name="colour" value="{value}"{" checked" * (value == "pass")}>{value}</label>'
        for value in ("pass", "version")
    )
    return f'<div id="toolbar"><div>{shown}</div><fieldset><legend>colour by</legend>{choices}</fieldset></div>'


def _legends(drawing: Drawing) -> str:
    """One legend for each way to colour; the script shows one of them."""
    passes = [_entry(drawing, entry) for entry in drawing.legend()]
    passes.append('<li><span class="swatch idle">.</span>idle</li>')
    for mark in drawing.version_marks():
        dashed = " dashed" if mark.kind == 2 else ""
        passes.append(f'<li><span class="mark{dashed}">{mark.sample}</span>{mark.text}</li>')
    last = max(block.step.version for block in drawing.timeline.blocks)
    colours = enumerate(VERSION_COLOURS[: last + 1])
    versions = [_swatch(Style(fill), f"v{index}", f"version {index}") for index, fill in colours]
    if last >= len(VERSION_COLOURS):
        versions.append("<li>later versions repeat these colours</li>")
    return (
        f'<ul class="legend" id="by-pass">{"".join(passes)}</ul>'
        f'<ul class="legend" id="by-version" hidden>{"".join(versions)}</ul>'
    )


def _entry(drawing: Drawing, entry: LegendEntry) -> str:
    if entry.tick:
        return f'<li><span class="tick">{entry.sample}</span>{entry.text}</li>'
    return _swatch(entry.style, entry.sample, entry.text, dark=_dark_styles(drawing).get(entry.style))


def _dark_styles(drawing: Drawing) -> dict[Style, Style]:
    """The styles that are replaced on a dark page, with their replacements."""
    return {drawing.style(op, 0): Style(fill) for op, fill in DARK_MODE_COLOURS.items()}


def _swatch(style: Style, sample: str, text: str, *, dark: Style | None = None) -> str:
    background = style.fill
    if style.hatch:
        turn = -45 if style.hatch == "/" else 45
        background = f"repeating-linear-gradient({turn}deg,{style.line} 0 2px,{style.fill} 2px 6px)"
    colours = f"--ground:{background};--ink:{style.ink};--edge:{style.edge}"
    if dark:
        colours += f";--night-ground:{dark.fill};--night-ink:{dark.ink}"
    return f'<li><span class="swatch" style="{colours}">{sample}</span>{text}</li>'


def _ranks(drawing: Drawing) -> str:
    lines = []
    for usage in drawing.usage():
        cells = (
            str(usage.rank),
            ", ".join(map(str, usage.chunks)),
            str(usage.blocks),
            str(usage.updates),
            format_number(usage.busy),
            f"{usage.idle:.1%}",
        )
        bar = f'<td class="bar" aria-hidden="true"><div><span style="width:{usage.idle:.1%}"></span></div></td>'
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + bar + "</tr>")
    names = ("rank", "chunks", "actions", "updates", "busy", "idle")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(lines)
    table = f'<table id="ranks"><thead><tr>{head}<td></td></tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
