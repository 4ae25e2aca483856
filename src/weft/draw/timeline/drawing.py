"""What every drawing of a timeline shares: rows of blocks, labels, colours, legend texts and hover fields.

The terminal grid, the SVG, the HTML viewer and the trace file show the same blocks. How a block is labelled and
coloured is decided here, once. A label is the number of a micro-batch, counted from 1 over the whole run, and a letter:

    1a  forward, first chunk of the rank     1b  second chunk     1c …
    1A  backward                             1B
    1i  backward, input gradient only        1j
    1w  backward, weight gradient only       1x
    1U  update of mini-batch 1               1V

With more than four chunks per rank these letters would overlap; the labels are then `1Ai`, `1Aw` and `1Au`.

Colours differ in lightness as well as in hue, and the two halves of a backward are hatched, so that the blocks can be
distinguished in greyscale and by colour-blind readers. Times are shown relative to the first start of the timeline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.draw.timeline import colour
from weft.errors import WeftError
from weft.schedule import RETIRING, Block, Op, Step, Timeline
from weft.text import format_count, format_figure, format_number

PASS_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.U: "update",
}
FIELDS = (
    "action",
    "pass",
    "micro-batch",
    "mini-batch",
    "chunk",
    "version",
    "delay",
    "prediction",
    "rank",
    "start",
    "end",
)

IDLE_COLOUR = "#f1f4f7"
PASS_COLOURS = {  # first and last chunk of a rank
    Op.F: ("#b3dcf9", "#45a3d5"),
    Op.B: ("#c64d1b", "#6b1a40"),
    Op.I: ("#8b5cab", "#43285e"),
    Op.W: ("#86d2ab", "#3a8f68"),
    Op.U: ("#151d27", "#151d27"),
}
DARK_MODE_COLOURS = {Op.U: "#e8edf2"}  # replace colours that are invisible on a dark page
HATCHES = {Op.I: "\\", Op.W: "/"}
VERSION_COLOURS = ("#f0e442", "#0072b2", "#e69f00", "#00614a", "#a6d4f5", "#8f3a6d")  # repeated

_FIRST_LETTERS = {Op.F: "a", Op.B: "A", Op.I: "i", Op.W: "w", Op.U: "U"}
_SUFFIXES = {Op.F: "", Op.B: "", Op.I: "i", Op.W: "w", Op.U: "u"}
_ONE_LETTER = 4  # up to this many chunks per rank, one letter identifies both op and chunk
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class Style:
    """The colour of a block and the direction of its hatching: `/`, `\\` or none."""

    fill: str
    hatch: str = ""

    @property
    def ink(self) -> str:
        """The colour of text on the block."""
        return colour.ink(self.fill)

    @property
    def edge(self) -> str:
        return colour.mix(self.fill, "#000000", 0.35)

    @property
    def line(self) -> str:
        """The colour of the hatching. It is mixed away from the ink, so that text keeps its contrast."""
        return colour.mix(self.fill, *(("#ffffff", 0.45) if self.ink == colour.DARK else ("#000000", 0.25)))


class LegendEntry(NamedTuple):
    style: Style
    sample: str
    text: str
    tick: bool = False  # drawn as a line across the rank: an update that takes no time


class VersionMark(NamedTuple):
    """A legend entry for the line under a version. `kind` is a value of `version_mark`."""

    sample: str
    text: str
    kind: int


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """How a rank spent the time of the window."""

    rank: int
    chunks: tuple[int, ...]
    blocks: int
    updates: int
    busy: float  # time
    idle: float  # share of the window


class Drawing:
    """A timeline, prepared for drawing. Raises `WeftError` for a timeline that can't be drawn."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self.timeline, self.schedule = timeline, schedule
        self.chunks_by_rank = [schedule.chunks_of(rank) for rank in range(schedule.stages)]
        self.local_index = {chunk: index for chunks in self.chunks_by_rank for index, chunk in enumerate(chunks)}
        self.max_chunks = max(map(len, self.chunks_by_rank))
        _check(timeline)
        self.start = min(block.start for block in timeline.blocks)
        self.span = max(block.end for block in timeline.blocks) - self.start
        if not self.span > 0:
            raise WeftError(
                f"a drawing needs a duration above 0 (duration: 0, blocks: {len(timeline.blocks)}); "
                "give the actions a cost"
            )

    @cached_property
    def rows(self) -> list[list[Block]]:
        """The blocks of each rank, sorted by start. Starts that differ only by rounding keep the given order."""
        rows: list[list[Block]] = [[] for _ in self.chunks_by_rank]
        for block in self.timeline.blocks:
            rows[block.rank].append(block)
        return [sorted(row, key=lambda block: self.rounded(block.start)) for row in rows]

    def rounded(self, time: float) -> int:
        """A time as an integer that is equal for times that differ only by rounding."""
        return round((time - self.start) / self.span * 1e9)

    @cached_property
    def forward_durations(self) -> list[float]:
        """Sorted durations of the forwards that take time; if none does, of all blocks that take time."""
        timed = [block for block in self.timeline.blocks if block.end > block.start]
        forwards = [block for block in timed if block.step.action.op == Op.F]
        return sorted(block.end - block.start for block in forwards or timed)

    @property
    def title(self) -> str:
        """Without line breaks and other characters that XML does not allow."""
        return "".join(character if character.isprintable() else " " for character in self.schedule.title)

    def subtitle(self, part: str = "") -> str:
        """The window, which `part` of it is shown, and the figures of the steady state."""
        idle = sum(usage.idle for usage in self.usage()) / len(self.chunks_by_rank)
        window = f"{format_count(self.timeline.minibatches, 'mini-batch')}, time {format_number(self.span)}"
        return "; ".join(filter(None, [f"{window}, {idle:.1%} idle in this window{part}", self.steady_figures]))

    @property
    def steady_figures(self) -> str:
        """What is known of the steady state."""
        timeline, figures = self.timeline, []
        if timeline.mean_delay is not None:
            figures.append(f"mean delay {format_figure(timeline.mean_delay)} updates")
        if timeline.slack is not None and math.isfinite(timeline.slack):
            figures.append(f"slack of messages {format_figure(timeline.slack)}")
        return ", ".join(figures)

    def letter(self, op: Op, local: int) -> str:
        if self.max_chunks <= _ONE_LETTER:
            return chr(ord(_FIRST_LETTERS[op]) + local)
        name = ""
        while local >= 0:
            name, local = chr(ord("a") + local % 26) + name, local // 26 - 1
        return (name if op == Op.F else name.upper()) + _SUFFIXES[op]

    def label(self, step: Step) -> str:
        op, chunk, index = step.action
        return f"{index + 1}{self.letter(op, self.local_index[chunk])}"

    def update_label(self, step: Step) -> str:
        """The label of an update that takes no time: the version it makes, and of which chunk."""
        chunk = self.letter(Op.F, self.local_index[step.action.chunk]) if self.max_chunks > 1 else ""
        return chunk + version(step)

    def style(self, op: Op, local: int) -> Style:
        first, last = PASS_COLOURS[op]
        return Style(colour.mix(first, last, local / max(self.max_chunks - 1, 2)), HATCHES.get(op, ""))

    def style_of(self, step: Step) -> Style:
        return self.style(step.action.op, self.local_index[step.action.chunk])

    def legend(self) -> list[LegendEntry]:
        """An entry for each kind of block that occurs. Updates of all chunks look the same."""
        kinds = {(block.step.action.op, self.local_index[block.step.action.chunk]) for block in self.timeline.blocks}
        entries = []
        for op, local in sorted(kind for kind in kinds if kind[0] != Op.U):
            text = PASS_NAMES[op] + (f", {ordinal(local)} chunk" if self.max_chunks > 1 else "")
            entries.append(LegendEntry(self.style(op, local), f"1{self.letter(op, local)}", text))
        durations = [block.end - block.start for block in self.timeline.blocks if block.step.action.op == Op.U]
        if any(durations):
            entries.append(LegendEntry(self.style(Op.U, 0), f"1{self.letter(Op.U, 0)}", "update"))
        if not all(durations):
            entries.append(LegendEntry(self.style(Op.U, 0), "→v1", "update, makes a version", tick=True))
        return entries

    def version_marks(self) -> list[VersionMark]:
        """A legend entry for each mark that occurs."""
        kinds = {version_mark(block.step) for block in self.timeline.blocks}
        marks = (
            VersionMark("v1", "version read, underlined if odd", 1),
            VersionMark("v1+2", "version 1, predicted 2 updates ahead", 2),
        )
        return [mark for mark in marks if mark.kind in kinds]

    def fields(self, block: Block) -> tuple[str, ...]:
        """The details of a block, one text for each of `FIELDS`; empty if a field does not apply."""
        step, m = block.step, self.schedule.microbatches
        op, chunk, index = step.action
        update = op == Op.U
        place = f", {ordinal(self.local_index[chunk])} on its rank" if self.max_chunks > 1 else ""
        prediction = f"{format_count(step.ahead, 'update')} ahead, {'made here' if step.predicts else 'reused'}"
        return (
            str(step.action),
            PASS_NAMES[op],
            "" if update else f"{index + 1} of the run, {index % m + 1} of {m} in its mini-batch",
            f"t = {step.minibatch}",
            f"{chunk} (0 to {self.schedule.chunks - 1}){place}",
            f"makes v{step.version}" if update else f"reads {version(step)}",
            "" if update else str(delay(step)),
            prediction if step.ahead and not update else "",
            str(block.rank),
            format_number(block.start - self.start),
            format_number(block.end - self.start),
        )

    def hover_text(self, block: Block) -> str:
        """The fields that apply, one per line."""
        fields = zip(FIELDS, self.fields(block), strict=True)
        return "\n".join(f"{name}: {value}" for name, value in fields if value)

    def usage(self) -> list[RankUsage]:
        usage = []
        for rank, row in enumerate(self.rows):
            busy = math.fsum(block.end - block.start for block in row)
            usage.append(
                RankUsage(
                    rank=rank,
                    chunks=tuple(self.chunks_by_rank[rank]),
                    blocks=len(row),
                    updates=sum(block.step.action.op == Op.U for block in row),
                    busy=busy,
                    idle=max(0.0, 1 - busy / self.span),
                )
            )
        return usage

    def in_flight(self, rank: int) -> list[tuple[float, float]]:
        """Each change of the micro-batches in flight: its time and the new number, in whole stages as in `simulate`."""
        total, changes = 0, {}
        for block in self.rows[rank]:
            op = block.step.action.op
            if op == Op.F or op in RETIRING:
                time = block.start if op == Op.F else block.end
                total += 1 if op == Op.F else -1
                changes[self.rounded(time)] = time, total / len(self.chunks_by_rank[rank])
        return [changes[time] for time in sorted(changes)]


def version(step: Step) -> str:
    """The version as text. `v1`: read; `v1+2`: read, predicted 2 updates ahead; `→v2`: made by an update."""
    if step.action.op == Op.U:
        return f"→v{step.version}"
    return f"v{step.version}" + (f"+{step.ahead}" if step.ahead else "")


def version_mark(step: Step) -> int:
    """The line under the version: 2 (dashed) for a predicted version, 1 (solid) for an odd one, otherwise 0 (none)."""
    if step.action.op == Op.U:
        return 0
    return 2 if step.ahead else step.version % 2


def delay(step: Step) -> int:
    return step.minibatch - step.version


def ordinal(index: int) -> str:
    return _ORDINALS[index] if index < len(_ORDINALS) else f"{index + 1}th"


def check_block_count(timeline: Timeline, limit: int, kind: str) -> None:
    """Raise for more blocks than a kind of drawing can show."""
    if len(timeline.blocks) > limit:
        raise WeftError(
            f"{kind} shows at most {limit} blocks (blocks: {len(timeline.blocks)}, "
            f"mini-batches: {timeline.minibatches}); draw fewer mini-batches, or a .json trace, which has no limit"
        )


def _check(timeline: Timeline) -> None:
    schedule = timeline.schedule
    if not timeline.blocks:
        raise WeftError("a drawing needs at least one block (blocks: 0); run at least one mini-batch")
    for block in timeline.blocks:
        if not -math.inf < block.start <= block.end < math.inf:
            raise WeftError(
                f"a block needs a finite start and a finite end that is not before it ({block.step.action} on rank "
                f"{block.rank}, start: {block.start}, end: {block.end}); check the clocks that measured it"
            )
        chunk = block.step.action.chunk
        if not 0 <= chunk < schedule.chunks or schedule.placement[chunk] != block.rank:
            raise WeftError(
                f"a block is drawn on the rank that holds its chunk ({block.step.action} on rank {block.rank}); "
                f"draw it with the schedule that it ran with ({schedule.title})"
            )
