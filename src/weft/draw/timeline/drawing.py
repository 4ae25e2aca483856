"""How work looks: labels, letters, colours, words and hover fields, for every kind of drawing.

The terminal grid, the SVG, the page and the trace show the same blocks; what a block is called and which colour
it has is decided here, once. A label is a micro-batch's number, counted from 1 over the whole run, and a letter:

    1a  forward, rank's first chunk       1b  in its second       1c …
    1A  backward                          1B
    1i  backward, input gradient only     1j
    1w  backward, weight gradient only    1x
    1U  update of mini-batch 1            1V

Beyond four chunks a rank the letters would meet; then it is `1Ai`, `1Aw` and `1Au` instead.

Colours differ in lightness as well as in hue, and the two halves of a backward are hatched, so that grey prints
and colour-blind eyes can tell them apart. Times are shown from the timeline's first start, whatever its clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.draw.timeline import colour
from weft.errors import WeftError
from weft.schedule import RETIRING, Block, Op, Step, Timeline
from weft.text import format_count, format_number

PASSES = {
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

IDLE = "#f1f4f7"
SHADES = {  # of a rank's first chunk and of its last
    Op.F: ("#b3dcf9", "#45a3d5"),
    Op.B: ("#c64d1b", "#6b1a40"),
    Op.I: ("#8b5cab", "#43285e"),
    Op.W: ("#86d2ab", "#3a8f68"),
    Op.U: ("#151d27", "#151d27"),
}
NIGHT = {Op.U: "#e8edf2"}  # what would be lost on a dark page
HATCHES = {Op.I: "\\", Op.W: "/"}
TONES = ("#f0e442", "#0072b2", "#e69f00", "#00614a", "#a6d4f5", "#8f3a6d")  # of versions, over and over

_FIRST = {Op.F: "a", Op.B: "A", Op.I: "i", Op.W: "w", Op.U: "U"}
_SUFFIX = {Op.F: "", Op.B: "", Op.I: "i", Op.W: "w", Op.U: "u"}
_FEW = 4  # chunks a rank for which one letter tells op and chunk
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class Style:
    """The ground of a block, what is written on it, and which way it is hatched (`/`, `\\` or not at all)."""

    fill: str
    hatch: str = ""

    @property
    def ink(self) -> str:
        return colour.ink(self.fill)

    @property
    def edge(self) -> str:
        return colour.mix(self.fill, "#000000", 0.35)

    @property
    def line(self) -> str:
        """The colour of the hatching: away from the ink, so that it never costs contrast."""
        return colour.mix(self.fill, *(("#ffffff", 0.45) if self.ink == colour.DARK else ("#000000", 0.25)))


class Entry(NamedTuple):
    """A line of a legend."""

    style: Style
    sample: str
    words: str
    tick: bool = False  # drawn as a line across the rank: an update that takes no time


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank did with its time."""

    rank: int
    chunks: tuple[int, ...]
    blocks: int
    updates: int
    busy: float  # time
    idle: float  # part of the window


class Look:
    """How the blocks of one timeline look. Refuses a timeline that can't be drawn."""

    def __init__(self, timeline: Timeline) -> None:
        schedule = timeline.schedule
        self.timeline, self.schedule = timeline, schedule
        self.held = [schedule.chunks_of(rank) for rank in range(schedule.stages)]
        self.local = {chunk: at for chunks in self.held for at, chunk in enumerate(chunks)}
        self.most = max(map(len, self.held))
        _check(timeline)
        self.begin = min(block.start for block in timeline.blocks)
        self.span = max(block.end for block in timeline.blocks) - self.begin
        if not self.span > 0:
            raise WeftError(
                f"a drawing needs time to pass (blocks: {len(timeline.blocks)}, time: 0); give the actions a cost"
            )

    @cached_property
    def rows(self) -> list[list[Block]]:
        """The blocks of each rank, in order of time; of times that differ by rounding, in the order given."""
        rows: list[list[Block]] = [[] for _ in self.held]
        for block in self.timeline.blocks:
            rows[block.rank].append(block)
        return [sorted(row, key=lambda block: self.instant(block.start)) for row in rows]

    def instant(self, time: float) -> int:
        """A time as a number that is equal for times that differ by rounding only."""
        return round((time - self.begin) / self.span * 1e9)

    @cached_property
    def forwards(self) -> list[float]:
        """Durations of the forwards that take any time, in order of size; failing that, of whatever does."""
        timed = [block for block in self.timeline.blocks if block.end > block.start]
        some = [block for block in timed if block.step.action.op == Op.F] or timed
        return sorted(block.end - block.start for block in some)

    @property
    def title(self) -> str:
        """Without line breaks and other signs that XML has no place for."""
        return "".join(sign if sign.isprintable() else " " for sign in self.schedule.title)

    @property
    def subtitle(self) -> str:
        idle = sum(share.idle for share in self.shares()) / len(self.held)
        window = f"{format_count(self.timeline.minibatches, 'mini-batch')}, time {format_number(self.span)}"
        return f"{window}, {idle:.1%} idle in this window"

    def letter(self, op: Op, local: int) -> str:
        if self.most <= _FEW:
            return chr(ord(_FIRST[op]) + local)
        name = ""
        while local >= 0:
            name, local = chr(ord("a") + local % 26) + name, local // 26 - 1
        return (name if op == Op.F else name.upper()) + _SUFFIX[op]

    def label(self, step: Step) -> str:
        op, chunk, index = step.action
        return f"{index + 1}{self.letter(op, self.local[chunk])}"

    def update(self, step: Step) -> str:
        """What an update that takes no time says: the version it makes, and of which chunk."""
        return (self.letter(Op.F, self.local[step.action.chunk]) if self.most > 1 else "") + version(step)

    def style(self, op: Op, local: int) -> Style:
        light, dark = SHADES[op]
        return Style(colour.mix(light, dark, local / max(self.most - 1, 2)), HATCHES.get(op, ""))

    def style_of(self, step: Step) -> Style:
        return self.style(step.action.op, self.local[step.action.chunk])

    def legend(self) -> list[Entry]:
        """Each kind of block that occurs. Updates of all chunks look the same."""
        kinds = {(block.step.action.op, self.local[block.step.action.chunk]) for block in self.timeline.blocks}
        entries = []
        for op, local in sorted(kind for kind in kinds if kind[0] != Op.U):
            words = PASSES[op] + (f", {ordinal(local)} chunk" if self.most > 1 else "")
            entries.append(Entry(self.style(op, local), f"1{self.letter(op, local)}", words))
        durations = [block.end - block.start for block in self.timeline.blocks if block.step.action.op == Op.U]
        if any(durations):
            entries.append(Entry(self.style(Op.U, 0), f"1{self.letter(Op.U, 0)}", "update"))
        if not all(durations):
            entries.append(Entry(self.style(Op.U, 0), "→v1", "update, makes a version", tick=True))
        return entries

    def marks(self) -> list[tuple[str, str, int]]:
        """A sample of each mark that occurs, words and the mark itself."""
        found = {mark(block.step) for block in self.timeline.blocks}
        known = (("v1", "version read, underlined if odd", 1), ("v1+2", "version 1, predicted 2 updates ahead", 2))
        return [one for one in known if one[2] in found]

    def fields(self, block: Block) -> tuple[str, ...]:
        """What a reader wants to know of a block, one text for each of `FIELDS`; empty: it does not apply."""
        step, m = block.step, self.schedule.microbatches
        op, chunk, index = step.action
        update = op == Op.U
        place = f", {ordinal(self.local[chunk])} on its rank" if self.most > 1 else ""
        prediction = f"{format_count(step.ahead, 'update')} ahead, {'made here' if step.predicts else 'reused'}"
        return (
            str(step.action),
            PASSES[op],
            "" if update else f"{index + 1} of the run, {index % m + 1} of {m} in its mini-batch",
            f"t = {step.minibatch}",
            f"{chunk} (0 to {self.schedule.chunks - 1}){place}",
            f"makes v{step.version}" if update else f"reads {version(step)}",
            "" if update else str(delay(step)),
            prediction if step.ahead and not update else "",
            str(block.rank),
            format_number(block.start - self.begin),
            format_number(block.end - self.begin),
        )

    def hover(self, block: Block) -> str:
        """The fields as one text of several lines."""
        filled = zip(FIELDS, self.fields(block), strict=True)
        return "\n".join(f"{name}: {value}" for name, value in filled if value)

    def shares(self) -> list[Share]:
        shares = []
        for rank, row in enumerate(self.rows):
            busy = math.fsum(block.end - block.start for block in row)
            shares.append(
                Share(
                    rank=rank,
                    chunks=tuple(self.held[rank]),
                    blocks=len(row),
                    updates=sum(block.step.action.op == Op.U for block in row),
                    busy=busy,
                    idle=max(0.0, 1 - busy / self.span),
                )
            )
        return shares

    def in_flight(self, rank: int) -> list[tuple[float, float]]:
        """When the micro-batches in flight change, and to how many, in whole stages as the simulator counts."""
        total, course = 0, {}
        for block in self.rows[rank]:
            op = block.step.action.op
            if op == Op.F or op in RETIRING:
                time = block.start if op == Op.F else block.end
                total += 1 if op == Op.F else -1
                course[self.instant(time)] = time, total / len(self.held[rank])
        return [course[instant] for instant in sorted(course)]


def version(step: Step) -> str:
    """`v1`; `v1+2`: predicted two updates beyond; `→v2`: an update makes it."""
    if step.action.op == Op.U:
        return f"→v{step.version}"
    return f"v{step.version}" + (f"+{step.ahead}" if step.ahead else "")


def mark(step: Step) -> int:
    """How the version read is marked, besides its text: 2 if it is predicted, else 1 if it is odd, else 0."""
    if step.action.op == Op.U:
        return 0
    return 2 if step.ahead else step.version % 2


def delay(step: Step) -> int:
    return step.minibatch - step.version


def ordinal(at: int) -> str:
    return _ORDINALS[at] if at < len(_ORDINALS) else f"{at + 1}th"


def at_most(timeline: Timeline, limit: int, kind: str) -> None:
    """Refuse more blocks than a kind of drawing can show."""
    if len(timeline.blocks) > limit:
        raise WeftError(
            f"{kind} shows at most {limit} blocks (blocks: {len(timeline.blocks)}, "
            f"mini-batches: {timeline.minibatches}); draw fewer mini-batches, or a .json trace, which has no limit"
        )


def _check(timeline: Timeline) -> None:
    schedule = timeline.schedule
    if not timeline.blocks:
        raise WeftError("a drawing needs at least one block (blocks: 0); run one mini-batch or more")
    for block in timeline.blocks:
        if not -math.inf < block.start <= block.end < math.inf:
            raise WeftError(
                f"a block ends after it starts, both finite ({block.step.action} on rank {block.rank}, "
                f"start: {block.start}, end: {block.end}); check the clocks it was measured with"
            )
        chunk = block.step.action.chunk
        if not 0 <= chunk < schedule.chunks or schedule.placement[chunk] != block.rank:
            raise WeftError(
                f"a block is drawn on the rank that holds its chunk ({block.step.action} on rank {block.rank}); "
                f"draw it with the schedule it ran under ({schedule.title})"
            )
