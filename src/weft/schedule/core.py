"""A schedule, as data.

Each rank has one *stream*: the rows that it runs in the time of one mini-batch, over and over, every index
raised by one mini-batch each time round (a *cycle*). Rows that speak of a micro-batch which has not begun, or
which lies beyond the window, are left out; that is all there is to filling and draining. So this one line is
the whole of asynchronous 1F1B on the first of four ranks, `m = 4`:

    stream   0F0 0B-3 0F1 0B-2 0F2 0B-1 0U-1 0F3 0B0
    runs     0F0 0F1 0F2 0F3 0B0 | 0F4 0B1 0F5 0B2 0F6 0B3 0U0 0F7 0B4 | 0F8 …

Everything that comes after reads the lowered form (`lower.py`) of this description.
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
MAX_WORK = 2**24  # chunks x micro-batches of one mini-batch; beyond it tables outgrow a machine's memory


@dataclass(frozen=True, eq=False, init=False)
class Schedule:
    """An order of work times a weight policy.

    `placement` names the rank of each chunk, `streams` holds one stream a rank (see the module's text): rows,
    texts such as "0F0 0B0", or sequences of actions. Updates may be left to weft: a chunk without any is
    updated as soon as a mini-batch's last backward in it is done.
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
        chosen = tuple(range(stages)) if placement is None else tuple(placement)
        if strange := [rank for rank in chosen if not isinstance(rank, int | np.integer) or isinstance(rank, bool)]:
            raise WeftError(f"a placement holds ranks, whole numbers from 0 (got {strange[0]!r})")
        chosen = tuple(int(rank) for rank in chosen)
        policy = weights or Weights()
        check_work(stages=stages, microbatches=microbatches, chunks=len(chosen))
        policy.check(len(chosen))
        set_field = object.__setattr__  # the way to fill a frozen dataclass
        set_field(self, "name", name)
        set_field(self, "stages", int(stages))
        set_field(self, "microbatches", int(microbatches))
        set_field(self, "placement", chosen)
        set_field(self, "streams", tuple(_own(as_rows(stream)) for stream in streams))
        set_field(self, "weights", policy)
        set_field(self, "options", dict(options or {}))
        if len(self.streams) != stages:
            raise WeftError(f"a schedule needs one stream a rank (streams: {len(self.streams)}, stages: {stages})")
        if strangers := [rank for rank in chosen if not 0 <= rank < stages]:
            raise WeftError(f"chunks are placed on ranks 0 to {stages - 1} (got rank {strangers[0]})")
        for rank, rows in enumerate(self.streams):
            wrong = rows["chunk"][(rows["chunk"] < 0) | (rows["chunk"] >= len(chosen))]
            if wrong.size:
                raise WeftError(
                    f"chunks are 0 to {len(chosen) - 1}, as many as placement has entries "
                    f"(got chunk {wrong[0]} on rank {rank})"
                )

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @property
    def title(self) -> str:
        options = "".join(f", {name.replace('_', ' ')} {value}" for name, value in self.options.items())
        stages, microbatches = format_count(self.stages, "stage"), format_count(self.microbatches, "micro-batch")
        return f"{self.name}, {stages}, {microbatches}{options}"

    def about(self) -> dict[str, Any]:
        """Name and sizes as plain JSON data, which all that is said of a schedule begins with."""
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


def _own(rows: Rows) -> Rows:
    """A copy that nobody can write to."""
    rows = rows.copy()
    rows.setflags(write=False)
    return rows


def check_sizes(**sizes: Any) -> None:
    """Refuse anything but whole numbers from 1 up."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise WeftError(f"{name} must be a whole number of 1 or more (got {value!r})")


def check_work(*, stages: int, microbatches: int, chunks: int) -> None:
    """Refuse what no machine could hold, before anything is built."""
    if chunks > MAX_CHUNKS:
        raise WeftError(f"a schedule has at most {MAX_CHUNKS} chunks (got {chunks}); use fewer stages")
    if chunks * microbatches > MAX_WORK:
        raise WeftError(
            f"a schedule has at most {MAX_WORK} chunks x micro-batches in a mini-batch "
            f"(stages: {stages}, chunks: {chunks}, microbatches: {microbatches}); "
            f"use at most {max(1, MAX_WORK // chunks)} micro-batches"
        )
