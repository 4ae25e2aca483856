"""Which runs come next, given the results of those that have ended; nothing is planned twice.

First the settings of each profile and correction are searched, one axis after the other: the best value of an axis has
both neighbours tried. Then every method trains with them, seed by seed. Runs of fewer updates say what synchronous
training reaches in the time of a method without a bubble; runs beside the settings of a profile, whether its methods
share them. Further corrections are tried with one profile, at the rate that is best for each.
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
    Method,
)
from benchmarks.convergence.studies import Study, even_cut

TUNING_SEED = 100
SEEDS = (0, 1, 2, 3, 4)
LENGTHS = (0.55, 0.7, 0.8, 0.9)  # of synchronous training, in shares of the updates of a study
FIRST = (  # what the targets are about
    *((BASE, made) for made in CORRECTIONS),
    *(("wpipe fresh, m = 4p", made) for made in CORRECTIONS),
    *((f"{name}, m = 2p", OPTIMISTIC) for name in ("wpipe fresh", "weave")),
    ("weave, m = 4p", OPTIMISTIC),
)
CHECKED = (("weave, m = 2p", PLAIN), ("weave, m = 4p", OPTIMISTIC), ("paci, m = 2p", PLAIN))
TRIED_IN = "text"  # the study that candidates are tried in


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
            *method.settings(study.turns),
            *(CORRECTIONS | CANDIDATES)[self.correction].settings,
            f"schedule.layers={even_cut(study.layers, method.chunks)}",
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
    for name, study in studies.items():
        for stage in _stages(name, study, found, quick=quick):
            if left := [run for run in dict.fromkeys(stage) if run not in found]:
                return left
    return []


def _stages(name: str, study: Study, found: Found, *, quick: bool) -> Iterator[Sequence[Run]]:
    """Each is needed for those after it, or is more important."""
    methods = methods_of(study)
    places = list(dict.fromkeys((known.profile, made) for known in methods.values() for made in known.corrections))
    for axis in AXES:
        while wanted := [run for place in places for run in _search(name, study, place, axis, found, quick=quick)]:
            yield wanted
    settings = {place: best_settings(name, study, *place, found) for place in places}

    def run(method: str, correction: str, seed: int, updates: int = study.updates) -> Run:
        chosen = settings[EVERY[method].profile, correction]
        return Run(study=name, method=method, correction=correction, settings=chosen, updates=updates, seed=seed)

    def headline(seeds: Sequence[int], *, slow: bool) -> list[Run]:
        chosen = [(method, made) for method in methods for made in methods[method].corrections]
        return [run(*place, seed) for seed in seeds for place in chosen if (place[0] in SLOW) == slow]

    if quick:
        yield headline(SEEDS[:1], slow=False) + headline(SEEDS[:1], slow=True)
        return
    seeds = SEEDS[: min(3, study.seeds)]
    yield [run(*place, seed) for seed in seeds[:2] for place in FIRST if place[0] in methods]
    for seed in seeds:
        yield headline([seed], slow=False)
    if not study.methods:  # all methods
        yield [
            run(BASE, made, seed, round(share * study.updates))
            for seed in SEEDS[:3]
            for made in CORRECTIONS
            for share in LENGTHS
        ]
        yield [check for place in CHECKED if place[0] in methods for check in _checks(name, study, *place, settings)]
    if name == TRIED_IN:
        for axis in ("rate", "beta"):
            tried = [(METHODS[CANDIDATE].profile, candidate) for candidate in CANDIDATES]
            while wanted := [run for place in tried for run in _search(name, study, place, axis, found)]:
                yield wanted
        yield [run(method, PLAIN, seed) for seed in SEEDS[:2] for method in OTHERS]
    yield headline(SEEDS[3 : study.seeds], slow=False)
    yield headline(SEEDS[: study.seeds], slow=True)


def methods_of(study: Study) -> dict[str, Method]:
    """Those of a study, but for `OTHERS`."""
    if study.methods:
        return {method: METHODS[method] for method in study.methods}
    return {method: known for method, known in METHODS.items() if known.turns in (None, *study.sizes)}


def _checks(
    name: str, study: Study, method: str, correction: str, settings: Mapping[tuple[str, str], Settings]
) -> Iterator[Run]:
    """The settings of its profile, and the rates beside theirs."""
    chosen = settings[METHODS[method].profile, correction]
    for rate in (chosen.rate, *AXES["rate"](chosen.rate)):
        yield tuning_run(name, study, method, correction, replace(chosen, rate=rate))


def _search(
    name: str, study: Study, place: tuple[str, str], axis: str, found: Found, *, quick: bool = False
) -> Iterator[Run]:
    """The runs that an axis still needs: its best value and the neighbours of that."""
    best = best_settings(name, study, *place, found, axis=axis)
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
    begin = Settings(rate=study.rate)
    later = list(AXES)[list(AXES).index(axis) + 1 :] if axis else []
    ended = {
        settings: loss
        for settings, loss in tried_settings(name, profile, correction, found).items()
        if loss is not None and all(getattr(settings, other) == getattr(begin, other) for other in later)
    }
    return min(ended, key=lambda settings: ended[settings]) if ended else begin


def tried_settings(name: str, profile: str, correction: str, found: Found) -> dict[Settings, float | None]:
    """The settings that were tried for a profile, and their losses."""
    where = (name, PROFILES[profile], correction, TUNING_SEED)
    return {
        run.settings: loss for run, loss in found.items() if (run.study, run.method, run.correction, run.seed) == where
    }
