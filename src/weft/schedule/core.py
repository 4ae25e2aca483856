"""A schedule, as data.

Each rank has one *stream*: the rows that it runs per mini-batch. The rank repeats the stream; each repetition is
a *cycle*, and every index grows by one mini-batch per cycle. Rows of micro-batches that have not begun, or that lie
beyond the window, are skipped; this is how the pipeline fills and drains. The following line is the complete
asynchronous 1F1B schedule of the first of four ranks, `m = 4`:

    stream   0F0 0B-3 0F1 0B-2 0F2 0B-1 0U-1 0F3 0B0
    runs     0F0 0F1 0F2 0F3 0B0 | 0F4 0B1 0F5 0B2 0F6 0B3 0U0 0F7 0B4 | 0F8 …

All other code reads the lowered form (`lower.py`) of this description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.schedule.actions import Action, Rows, as_rows
from weft.schedule.weights import Weights
from weft.text import format_count

MAX_CHUNKS = np.iinfo(np.int16).max
MAX_WORK = 2**24  # chunks x micro-batches of one mini-batch; larger tables would not fit in memory


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Schedule:
    """An order of work times a weight policy.

    `placement` gives the rank of each chunk. `streams` has one stream per rank (see the module docstring): rows,
    strings such as "0F0 0B0", or sequences of actions. Updates are optional: a chunk without updates is updated
    right after its last backward of each mini-batch.
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    streams: tuple[Rows, ...]
    weights: Weights
    options: Mapping[str, Any]

    def __init__(
        self,
        *,
        name: str,
        stages: int,
        microbatches: int,
        streams: Iterable[Rows | str | Iterable[Action | str]],
        placement: Iterable[int] | None = None,
        weights: Weights | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_sizes(stages=stages, microbatches=microbatches)
        ranks = tuple(range(stages)) if placement is None else tuple(placement)
        if wrong := [rank for rank in ranks if not isinstance(rank, int | np.integer) or isinstance(rank, bool)]:
            raise WeftError(f"a placement holds ranks, whole numbers from 0 (got {wrong[0]!r})")
        ranks = tuple(int(rank) for rank in ranks)
        policy = weights or Weights()
        check_work(stages=stages, microbatches=microbatches, chunks=len(ranks))
        policy.check(len(ranks))
        set_field = object.__setattr__  # because the dataclass is frozen
        set_field(self, "name", name)
        set_field(self, "stages", int(stages))
        set_field(self, "microbatches", int(microbatches))
        set_field(self, "placement", ranks)
        set_field(self, "streams", tuple(_read_only_copy(as_rows(stream)) for stream in streams))
        set_field(self, "weights", policy)
        set_field(self, "options", dict(options or {}))
        if len(self.streams) != stages:
            raise WeftError(f"a schedule needs one stream per rank (streams: {len(self.streams)}, stages: {stages})")
        if outside := [rank for rank in ranks if not 0 <= rank < stages]:
            raise WeftError(f"chunks are placed on ranks 0 to {stages - 1} (got rank {outside[0]})")
        for rank, rows in enumerate(self.streams):
            unknown = rows["chunk"][(rows["chunk"] < 0) | (rows["chunk"] >= len(ranks))]
            if unknown.size:
                raise WeftError(
                    f"chunks are 0 to {len(ranks) - 1}, one per entry of placement "
                    f"(got chunk {unknown[0]} on rank {rank})"
                )

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @property
    def title(self) -> str:
        options = "".join(f", {_option_text(name.replace('_', ' '), value)}" for name, value in self.options.items())
        stages, microbatches = format_count(self.stages, "stage"), format_count(self.microbatches, "micro-batch")
        return f"{self.name}, {stages}, {microbatches}{options}"

    def __repr__(self) -> str:
        return f"<Schedule {self.title}>"

    def about(self) -> dict[str, Any]:
        """Name and sizes as plain JSON data."""
        return {
            "schedule": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "options": dict(self.options),
        }

    def chunks_of(self, rank: int) -> list[int]:
        held: list[int] = np.flatnonzero(np.array(self.placement) == rank).tolist()
        return held


def _option_text(name: str, value: Any) -> str:
    """`warmup 2`, `fresh`, `no split`."""
    return (name if value else f"no {name}") if isinstance(value, bool) else f"{name} {value}"


def _read_only_copy(rows: Rows) -> Rows:
    rows = rows.copy()
    rows.setflags(write=False)
    return rows


def check_sizes(**sizes: Any) -> None:
    """Reject everything except whole numbers of 1 or more."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise WeftError(f"{name} must be a whole number of 1 or more (got {value!r})")


def is_number(value: Any) -> bool:
    """Whether it is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_work(*, stages: int, microbatches: int, chunks: int) -> None:
    """Reject schedules that would not fit in memory, before anything is built."""
    if chunks > MAX_CHUNKS:
        raise WeftError(f"a schedule has at most {MAX_CHUNKS} chunks (got {chunks}); use fewer stages")
    if chunks * microbatches > MAX_WORK:
        raise WeftError(
            f"a schedule has at most {MAX_WORK} chunks x micro-batches in a mini-batch "
            f"(stages: {stages}, chunks: {chunks}, microbatches: {microbatches}); "
            f"use at most {max(1, MAX_WORK // chunks)} micro-batches"
        )
