"""Which runs come next, given the results of those that have ended; nothing is planned twice.

The plan has parts, the most important first: the methods that the targets are about on all seeds, then other data sets,
methods and questions. A part first searches the settings that it needs, for each profile and correction, one axis after
the other: the best value of an axis has both neighbours tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.convergence.methods import (
    BASE,
    CANDIDATE,
    CANDIDATES,
    CORRECTIONS,
    EVERY,
    METHODS,
    OPTIMISTIC,
    OTHERS,
    PLAIN,
    PROFILES,
    SLOW,
    SYNCHRONOUS,
    TURNS_OF_BATCH_NORMS,
)
from benchmarks.convergence.studies import STUDIES, Study, even_cut

Place = tuple[str, str]  # a method, or a profile, and a correction
TUNING_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
MANY_SEEDS = tuple(range(15))  # where five differ by more than what they are to tell apart
LENGTHS = (0.55, 0.7, 0.8, 0.9)  # in shares of the updates of a study
LONGER = 1.1  # of synchronous training, whose best schedules may be faster than an asynchronous one
KEY: tuple[Place, ...] = (  # what the targets are about
    *((BASE, correction) for correction in CORRECTIONS),
    *(("wpipe fresh, m = 4p", correction) for correction in CORRECTIONS),
    *((f"{name}, m = 2p", OPTIMISTIC) for name in ("wpipe fresh", "weave")),
    ("weave, m = 4p", OPTIMISTIC),
)
FEWEST: tuple[Place, ...] = tuple((method, OPTIMISTIC) for method in (BASE, "wpipe fresh, m = 4p", "2bw"))
OF_LENGTHS: tuple[Place, ...] = ((BASE, OPTIMISTIC), ("wpipe fresh, m = 4p", OPTIMISTIC))
TRIED_IN = "text"  # the study that candidates are tried in
CHECKED: tuple[Place, ...] = (("weave, m = 2p", PLAIN), ("weave, m = 4p", OPTIMISTIC), ("paci, m = 2p", PLAIN))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Runs of one study that are planned together."""

    study: str
    runs: str  # of which methods: a key in `_stages`
    seeds: tuple[int, ...] = ()


PARTS = (
    Part(study="text", runs="key", seeds=SEEDS),
    Part(study="text", runs="synchronous lengths", seeds=SEEDS),
    Part(study="python", runs="key", seeds=SEEDS),
    Part(study="text", runs="lengths", seeds=SEEDS[:2]),
    Part(study="text", runs="all", seeds=SEEDS[:1]),
    *(Part(study=name, runs="key", seeds=SEEDS) for name in ("qqp", "cifar10")),
    Part(study="qqp", runs="all", seeds=SEEDS[:2]),
    Part(study=TRIED_IN, runs="candidates"),
    Part(study="text", runs="others", seeds=SEEDS[:1]),
    Part(study="text", runs="checks"),
    Part(study="larger", runs="fewest", seeds=SEEDS[:2]),
    Part(study="cifar10", runs="key", seeds=MANY_SEEDS),
    *(Part(study="text", runs=runs, seeds=SEEDS[:2]) for runs in ("all", "others")),
    Part(study="larger-muon", runs="fewest", seeds=SEEDS[:2]),
    *(Part(study=name, runs="all", seeds=SEEDS[:1]) for name in ("python", "cifar10")),
    Part(study="text", runs="slow", seeds=SEEDS[:2]),
    Part(study="cifar10", runs="all", seeds=SEEDS[:2]),
    Part(study="python", runs="checks"),
    Part(study="python", runs="all", seeds=SEEDS[:2]),
    *(Part(study=name, runs="all", seeds=SEEDS[:3]) for name in ("text", "qqp")),
    *(Part(study=name, runs="slow", seeds=SEEDS[:2]) for name in ("qqp", "python")),
)
QUICK_PARTS = (Part(study="text", runs="all", seeds=SEEDS[:1]), Part(study="text", runs="slow", seeds=SEEDS[:1]))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Those of AdamW that are searched."""

    rate: float
    beta: float = 0.9
    decay: float = 0.1

    def __str__(self) -> str:
        return f"rate {self.rate:g}, β1 {self.beta:g}, decay {self.decay:g}"


AXES: dict[str, Callable[[float], tuple[float, ...]]] = {  # a value -> its neighbours
    "rate": lambda rate: (_rounded(rate / 2), _rounded(rate * 2)),
    "beta": lambda beta: (*((max(0.0, _rounded(1 - 2 * (1 - beta))),) if beta > 0 else ()), _rounded((1 + beta) / 2)),
    "decay": lambda decay: (*((_rounded(decay / 10),) if decay > 0.01 else ()), _rounded(decay * 10)),
}  # less decay than 0.01 is no decay: it would change weights by less than a hundredth in a whole run


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    study: str
    method: str
    correction: str
    settings: Settings
    updates: int
    seed: int

    def __str__(self) -> str:
        where = f"{self.study}, {self.method}, {self.correction}"
        return f"{where}, {self.settings}, {self.updates} updates, seed {self.seed}"

    def sets(self, study: Study, folder: Path) -> list[str]:
        """The settings of its job."""
        method = EVERY[self.method]
        return [
            *study.sets(folder),
            f"train.optimizer={study.optimizer}",
            f"train.lr={self.settings.rate}",
            f"train.betas=[{self.settings.beta}, 0.999]",
            f"train.weight_decay={self.settings.decay}",
            f"train.updates={self.updates}",
            f"train.warmup={self.updates // 20}",
            f"train.seed={self.seed}",
            *method.settings(batch_norm=study.batch_norm),
            *(CORRECTIONS | CANDIDATES)[self.correction].settings,
            f"schedule.layers={even_cut(study.layers, method.chunks(batch_norm=study.batch_norm))}",
        ]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def run_of(plain: Mapping[str, Any]) -> Run:
    """The run of a result."""
    fields = {name: plain[name] for name in Run.__dataclass_fields__}
    return Run(**fields | {"settings": Settings(**plain["settings"])})


Found = Mapping[Run, float | None]  # run -> its held-out loss; None if it diverged


def next_runs(studies: Mapping[str, Study], found: Found, *, quick: bool = False) -> list[Run]:
    """The next runs that do not depend on each other; empty when all studies are complete."""
    for part in QUICK_PARTS if quick else PARTS:
        if part.study in studies:
            for stage in _stages(part, studies[part.study], found, quick=quick):
                if left := [run for run in dict.fromkeys(stage) if run not in found]:
                    return left
    return []


def _stages(part: Part, study: Study, found: Found, *, quick: bool) -> Iterator[Sequence[Run]]:
    """Each is needed for those after it."""
    if part.runs == "candidates":
        places = [(METHODS[CANDIDATE].profile, name) for name in CANDIDATES]
        bases = dict.fromkeys(candidate.synchronous for candidate in CANDIDATES.values())
        places += [(SYNCHRONOUS, name) for name in bases if name in CANDIDATES]
        yield from _searches(part.study, study, places, found, axes=("rate", "beta"))
        return
    methods = methods_of(study)
    chosen = [(name, correction) for name in methods for correction in METHODS[name].corrections]
    places = {
        "key": [place for place in KEY if place[0] in methods],
        "fewest": list(FEWEST),
        "all": [place for place in chosen if place[0] not in SLOW],
        "slow": [place for place in chosen if place[0] in SLOW],
        "lengths": list(OF_LENGTHS),
        "synchronous lengths": list(OF_LENGTHS[:1]),
        "checks": list(CHECKED),
        "others": [(name, correction) for name, method in OTHERS.items() for correction in method.corrections],
    }[part.runs]
    profiles = list(dict.fromkeys((EVERY[method].profile, correction) for method, correction in places))
    yield from _searches(part.study, study, profiles, found, axes=study.searched, quick=quick)
    settings = {place: best_settings(part.study, study, *place, found) for place in profiles}
    shares = {"lengths": LENGTHS, "synchronous lengths": (*LENGTHS, LONGER)}.get(part.runs, (1.0,))
    if part.runs == "checks":
        yield [run for place in places for run in _checks(part.study, study, *place, settings)]
    yield [
        Run(
            study=part.study,
            method=method,
            correction=correction,
            settings=settings[EVERY[method].profile, correction],
            updates=round(share * study.updates),
            seed=seed,
        )
        for seed in part.seeds
        for method, correction in places
        for share in shares
    ]


def methods_of(study: Study) -> list[str]:
    """Those of a study, but for `OTHERS`; with batch norms only micro-batches of one size can be compared."""
    known = (None, TURNS_OF_BATCH_NORMS)
    return [name for name, method in METHODS.items() if not study.batch_norm or method.turns in known]


def _checks(name: str, study: Study, method: str, correction: str, settings: Mapping[Place, Settings]) -> Iterator[Run]:
    """The settings of its profile, and the rates beside theirs."""
    chosen = settings[METHODS[method].profile, correction]
    for rate in (chosen.rate, *AXES["rate"](chosen.rate)):
        yield tuning_run(name, study, method, correction, replace(chosen, rate=rate))


def _searches(
    name: str, study: Study, profiles: Sequence[Place], found: Found, *, axes: Sequence[str], quick: bool = False
) -> Iterator[list[Run]]:
    """One axis after the other, then all of them until both neighbours of the best value on every axis are worse."""
    rounds: list[tuple[Sequence[str], str | None]] = [*(((axis,), axis) for axis in axes), (axes, None)]
    for chosen, up_to in rounds:
        while wanted := [
            run
            for place in profiles
            for axis in chosen
            for run in _search(name, study, place, axis, found, up_to=up_to, quick=quick)
        ]:
            yield wanted


def _search(
    name: str, study: Study, place: Place, axis: str, found: Found, *, up_to: str | None, quick: bool
) -> Iterator[Run]:
    """The runs that an axis still needs: its best value and its neighbours, with what is best `up_to` an axis."""
    best = best_settings(name, study, *place, found, axis=up_to)
    values = (getattr(best, axis), *(() if quick else AXES[axis](getattr(best, axis))))
    for value in values:
        run = tuning_run(name, study, PROFILES[place[0]], place[1], replace(best, **{axis: value}))
        if run not in found:
            yield run


def tuning_run(name: str, study: Study, method: str, correction: str, settings: Settings) -> Run:
    return Run(
        study=name,
        method=method,
        correction=correction,
        settings=settings,
        updates=study.tuning,
        seed=TUNING_SEED,
    )


def best_settings(
    name: str, study: Study, profile: str, correction: str, found: Found, *, axis: str | None = None
) -> Settings:
    """Those with the least held-out loss so far; given an axis, before the axes after it were searched."""
    begin = first_settings(study, profile, correction, found)
    if not study.searched:
        return begin
    later = list(AXES)[list(AXES).index(axis) + 1 :] if axis else []
    ended = {
        settings: loss
        for settings, loss in tried_settings(name, profile, correction, found).items()
        if loss is not None and all(getattr(settings, other) == getattr(begin, other) for other in later)
    }
    return min(ended, key=lambda settings: ended[settings]) if ended else begin


def first_settings(study: Study, profile: str, correction: str, found: Found) -> Settings:
    """Where a search begins."""
    if correction in CANDIDATES:
        return Settings(rate=study.rate, beta=0.8)
    if not study.like:
        return Settings(rate=study.rate)
    best = best_settings(study.like, STUDIES[study.like], profile, correction, found)
    return replace(best, rate=study.rate) if study.searched else best


def tried_settings(name: str, profile: str, correction: str, found: Found) -> dict[Settings, float | None]:
    """The settings that were tried for a profile, and their losses."""
    where = (name, PROFILES[profile], correction, TUNING_SEED)
    return {
        run.settings: loss for run, loss in found.items() if (run.study, run.method, run.correction, run.seed) == where
    }
