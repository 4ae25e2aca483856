"""How it is trained: methods at their sizes, corrections, and where the settings of the optimizer come from.

What matters to learning is how late each chunk is, not the order of work. So rate, momentum and decay are searched once
for each profile of delays. Methods whose delays lie between two profiles use the settings of the more stale one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from weft.schedule import Schedule, lower, mean_delay
from weft.train.job import job_of, schedule_of

RANKS = 4
TURNS_OF_BATCH_NORMS = 2  # all methods have micro-batches of one size
PLAIN, OPTIMISTIC = "plain", "optimistic"


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What is done against delays; `corrections.py` has cures and optimizers that are not settings of a job."""

    settings: tuple[str, ...] = ()  # of its job
    source: str = ""
    synchronous: str = PLAIN  # what is left of it in synchronous training


STEP = "schedule.cure=optimistic"
CORRECTIONS = {
    PLAIN: Correction(),
    OPTIMISTIC: Correction(settings=(STEP,), source="Zmushko et al. 2026", synchronous=OPTIMISTIC),
}
NADAMW, EXACT = "train.optimizer=nadamw", "schedule.predict=exact"
AJANTHAN, GUAN, JUNG = "Ajanthan et al. 2025", "Guan et al. 2019", "Jung et al. 2026"
CANDIDATES = {  # tried for one method, `CANDIDATE`
    "nadamw": Correction(settings=(NADAMW,), source=AJANTHAN, synchronous="nadamw"),
    "nadamw, predicted": Correction(settings=(NADAMW, EXACT), source=f"{AJANTHAN}; {GUAN}", synchronous="nadamw"),
    "nesterov": Correction(source=f"{AJANTHAN}, with a constant μ", synchronous="nesterov"),
    "nesterov, predicted": Correction(
        settings=(EXACT,), source=f"{AJANTHAN}, with a constant μ; {GUAN}", synchronous="nesterov"
    ),
    "predicted": Correction(settings=(EXACT,), source=GUAN),
    "predicted, decayed": Correction(settings=(EXACT, "schedule.extrapolation=decayed"), source=GUAN),
    "delay compensation": Correction(source="Zheng et al. 2017"),
    "spike compensation": Correction(source="Kosson et al. 2020, adapted to AdamW"),
    "gapaware": Correction(settings=("schedule.cure=gapaware",), source="Barkai et al. 2020"),
    "basis rotation": Correction(source=JUNG, synchronous="basis rotation"),
    "basis rotation, optimistic": Correction(settings=(STEP,), source=JUNG, synchronous="basis rotation, optimistic"),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A schedule with some turns of `ranks` micro-batches; None if it learns the same with any number of them.

    `by_turns`: on one rank, with `turns` micro-batches, the same samples read the same versions. So it is trained like
    that, which takes less time, unless batch norms tell large micro-batches from small ones.
    """

    options: tuple[str, ...]  # keys of `schedule` in a job
    ranks: int = RANKS
    turns: int | None = None
    by_turns: bool = False
    profile: str
    corrections: tuple[str, ...] = tuple(CORRECTIONS)

    def settings(self, *, batch_norm: bool = False) -> tuple[str, ...]:
        """Those of its job; with batch norms, the others have `TURNS_OF_BATCH_NORMS`."""
        ranks = 1 if self.by_turns and not batch_norm else self.ranks
        turns = self.turns or (TURNS_OF_BATCH_NORMS if batch_norm else 1)
        sizes = (f"ranks={ranks}", f"microbatches={turns * ranks}")
        return tuple(f"schedule.{option}" for option in (*self.options, *sizes))

    def chunks(self, *, batch_norm: bool = False) -> int:
        """How many parts the model is cut into."""
        return _schedule(self.settings(batch_norm=batch_norm)).chunks

    @property
    def delay(self) -> float:
        """The mean delay of its chunks, as if they were equally large."""
        return _delay(self.settings())


def _schedule(settings: tuple[str, ...]) -> Schedule:
    return schedule_of(job_of(None, [*settings, "train.batch=32"]))


@cache
def _delay(settings: tuple[str, ...]) -> float:
    schedule = _schedule(settings)
    program = lower(schedule)
    return statistics.mean(mean_delay(program, chunk) for chunk in range(schedule.chunks))


def _sizes(name: str, *options: str, **fields: Any) -> Iterator[tuple[str, Method]]:
    """A method whose delays depend on the number of micro-batches."""
    for turns, profile in ((2, FEW), (4, FEWER), (8, FEWER)):
        yield f"{name}, m = {turns}p", Method(options=options, turns=turns, profile=profile, **fields)


SYNCHRONOUS, FEWER, FEW, HALF, ALL = "none late", "1/8 late", "1/4 late", "1/2 late", "all late"
PREDICTED = "all late, predicted"
PREDICTS = ("name=xpipe", "predict=exact")
METHODS = {
    "1f1b": Method(options=("name=1f1b",), by_turns=True, profile=SYNCHRONOUS),
    **dict(_sizes("wpipe fresh", "name=wpipe", "fresh=true", by_turns=True)),
    "wpipe": Method(options=("name=wpipe", "fresh=false"), by_turns=True, profile=HALF),
    "2bw": Method(options=("name=2bw",), by_turns=True, profile=ALL),
    "xpipe": Method(options=PREDICTS, profile=PREDICTED, corrections=(PLAIN,)),
    **dict(_sizes("weave", "name=weave")),
    **dict(_sizes("paci", "name=paci", corrections=(PLAIN,))),
}
OTHERS = {  # in one study only
    "pipedream, m = p": Method(options=("name=pipedream",), turns=1, profile=HALF),
    "spectrain, m = p": Method(options=("name=spectrain",), turns=1, profile=PREDICTED, corrections=(PLAIN,)),
    "xpipe, published": Method(
        options=("name=xpipe", "predict=published"), turns=1, profile=PREDICTED, corrections=(PLAIN,)
    ),
    "weave, p = 2, m = 2p": Method(options=("name=weave",), ranks=2, turns=2, profile=FEW, corrections=(PLAIN,)),
    "xpipe, p = 2": Method(options=PREDICTS, ranks=2, turns=1, profile=PREDICTED, corrections=(PLAIN,)),
    "xpipe, p = 8": Method(options=PREDICTS, ranks=8, turns=1, profile=PREDICTED, corrections=(PLAIN,)),
}
EVERY = METHODS | OTHERS
CANDIDATE = "wpipe"  # half of the model is one update late
BASE = "1f1b"  # what all others are compared with
PROFILES = {
    SYNCHRONOUS: BASE,
    FEW: "wpipe fresh, m = 2p",
    HALF: "wpipe",
    ALL: "2bw",
    PREDICTED: "xpipe",
    FEWER: "wpipe fresh, m = 4p",
}
SLOW = ("weave, m = 8p", "paci, m = 8p")  # small micro-batches in many chunks: they run when the others have
