"""Tables, plots and targets of convergence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.convergence.equal_time import OPPONENTS, TORCH, races
from benchmarks.convergence.methods import (
    BASE,
    CANDIDATE,
    CANDIDATES,
    CORRECTIONS,
    METHODS,
    OPTIMISTIC,
    PLAIN,
    PROFILES,
    SYNCHRONOUS,
)
from benchmarks.convergence.plan import (
    AXES,
    CHECKED,
    TRIED_IN,
    TUNING_SEED,
    Settings,
    best_settings,
    tried_settings,
)
from benchmarks.convergence.verdicts import Cell, Gap, cells, found_in, study_of
from benchmarks.harness import Results
from benchmarks.rendering import lines, table

TARGETS = ("wpipe fresh", "weave")  # the methods that are to lose nothing
MOST, MOST_POINTS, SHARE = 0.02, 0.003, 0.1  # nats; share of accurate answers; of the gap of 2bw
AHEAD = {"1f1b": 4, "zb-h1": 2}  # at equal time, with at most so many turns of p micro-batches
CURVES = ("wpipe fresh, m = 4p", "weave, m = 4p", "wpipe", "2bw", "xpipe", BASE)


def tables(results: Results) -> dict[str, str]:
    """The settings, a table for each study that has results, the checks, candidates, and equal time."""
    found = list(cells(results))
    names = [name for name in results["studies"] if any(cell.study == name for cell in found)]
    return {
        "settings": _settings(results),
        **{name: _study([cell for cell in found if cell.study == name]) for name in names},
        "checks": _checks(results),
        "candidates": _candidates(results),
        "time": _time(results, found),
    }


def missed(results: Results) -> list[str]:
    """Studies that are not complete, and targets that are not met."""
    found = list(cells(results))
    lines = [] if results["complete"] else ["the plan is not complete: repeat the command"]
    for cell in found:
        name, _, turns = cell.method.partition(", m = ")
        if name not in TARGETS:
            continue
        where = f"{cell.study}, {cell.label}"
        if cell.diverged:
            lines.append(f"{where}: {cell.diverged} of {cell.diverged + len(cell.losses)} seeds diverged")
        if cell.gap is None or cell.lost is None:
            continue
        if not cell.judged_by_loss:
            if cell.lost.mean > MOST_POINTS:
                lines.append(f"{where}: {_gap(cell.lost, 1, 100)} points lost, at most {100 * MOST_POINTS:g}")
        elif (turns in ("4p", "8p") or cell.correction == OPTIMISTIC) and not cell.gap.upper <= MOST:
            lines.append(f"{where}: {_gap(cell.gap, 4)}, at most {MOST:g} nats")
        if turns == "8p" and (share := _share(cell, found)) is not None and share > SHARE:
            lines.append(f"{where}: {share:.2f} of the gap of 2bw, at most {SHARE:g}")
    return lines + [
        f"equal time, {race.where}, {race.cell.label}: {_gap(gap)} to {opponent}"
        for race in races(results, found)
        for opponent, gap in race.gaps.items()
        if gap.mean > 0 and race.turns <= AHEAD.get(opponent, 0)
    ]


def plots(results: Results) -> dict[str, str]:
    """Gaps over the mean delay, and curves over updates."""
    found = list(cells(results))
    title = "Held-out loss, less that of synchronous training with the same correction and seed"
    drawn = {}
    if panels := _by_delay(found):
        drawn["delay.svg"] = lines(title, panels, x="mean delay, in updates", y="nats", pairs=True)
    if panels := _curves(results, found):
        drawn["curves.svg"] = lines("Training loss, mean of the seeds", panels, x="updates", y="loss")
    return drawn


# Tables


def _settings(results: Results) -> str:
    rows = []
    found = found_in(results)
    for name in results["studies"]:
        for profile, method in PROFILES.items():
            for correction in METHODS[method].corrections:
                study = study_of(results, name)
                if study.searched and (tried := tried_settings(name, profile, correction, found)):
                    best = best_settings(name, study, profile, correction, found)
                    axes = [_axis(tried, best, axis) for axis in AXES]
                    rows.append((name, profile, correction, *axes))
    head = ("study", "profile", "correction", "rate: loss", "β1: loss", "decay: loss")
    return f"{table(head, rows, left=6)}\n\n{results['environment']}."


def _axis(tried: dict[Settings, float | None], best: Settings, axis: str) -> str:
    """The losses at the values of one axis that were tried with the best of the others; the best is bold."""
    row = {
        getattr(settings, axis): loss
        for settings, loss in tried.items()
        if replace(settings, **{axis: getattr(best, axis)}) == best
    }
    shown = {value: f"{value:g}: {_loss(loss)}" for value, loss in sorted(row.items())}
    return "; ".join(f"**{text}**" if value == getattr(best, axis) else text for value, text in shown.items())


def _loss(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.3f}"


def _study(found: Sequence[Cell]) -> str:
    head = (
        "method",
        "correction",
        "mean delay",
        "seeds",
        "held-out loss",
        "accuracy, %",
        "gap (upper bound)",
        "of 2bw's",
        "points lost (upper bound)",
    )
    rows = []
    for cell in found:
        share = _share(cell, found)
        diverged = f", {cell.diverged} diverged" if cell.diverged else ""
        rows.append(
            (
                f"`{cell.method}`",
                cell.correction,
                f"{cell.delay:.3g}",
                f"{len(cell.losses)}{'' if cell.tuned else ' *'}{diverged}",
                _mean(cell.losses, 3),
                _mean(cell.metrics, 1, 100),
                "–" if cell.gap is None else _gap(cell.gap),
                "–" if share is None else f"{share:.2f}",
                "–" if cell.lost is None else _gap(cell.lost, 1, 100),
            )
        )
    return table(head, rows, left=2)


def _share(cell: Cell, found: Sequence[Cell]) -> float | None:
    """Of the gap of plain 2bw, in what the study is judged by."""
    whole = next((other.judged for other in found if (other.study, other.label) == (cell.study, "2bw")), None)
    return None if cell.judged is None or whole is None or not whole.mean else cell.judged.mean / whole.mean


def _checks(results: Results) -> str:
    """Whether the rate of a profile is the best for other methods that use it."""
    rows = []
    found = found_in(results)
    for name in results["studies"]:
        for method, correction in CHECKED:
            best = best_settings(name, study_of(results, name), METHODS[method].profile, correction, found)
            places = {
                run.settings.rate: loss
                for run, loss in found.items()
                if (run.study, run.method, run.correction, run.seed) == (name, method, correction, TUNING_SEED)
            }
            if places:
                shown = "; ".join(f"{rate:g}: {_loss(loss)}" for rate, loss in sorted(places.items()))
                rows.append((name, f"`{method}`", correction, f"{best.rate:g}", shown))
    return table(("study", "method", "correction", "rate of the profile", "rate: loss"), rows, left=5)


def _candidates(results: Results) -> str:
    """Each at its best rate and β1, beside synchronous training with the same; runs of one seed."""
    head = ("correction", "source", "best rate, β1", "held-out loss", "minus plain", "synchronous", "gap")
    rows: list[tuple[str, ...]] = []
    if TRIED_IN not in results["studies"]:
        return table(head, rows, left=2)
    found, study, profile = found_in(results), study_of(results, TRIED_IN), METHODS[CANDIDATE].profile

    def best(profile: str, correction: str) -> tuple[Settings, float | None]:
        chosen = best_settings(TRIED_IN, study, profile, correction, found)
        return chosen, tried_settings(TRIED_IN, profile, correction, found).get(chosen)

    plain = best(profile, PLAIN)[1]
    for name, correction in (CORRECTIONS | CANDIDATES).items():
        if tried_settings(TRIED_IN, profile, name, found):
            chosen, loss = best(profile, name)
            base = best(SYNCHRONOUS, correction.synchronous)[1]
            settings = f"{chosen.rate:g}, {chosen.beta:g}"
            gaps = [_less(loss, plain), "–" if base is None else _loss(base), _less(loss, base)]
            rows.append((name, correction.source, settings, _loss(loss), *gaps))
    return table(head, rows, left=2)


def _less(loss: float | None, other: float | None) -> str:
    return "–" if loss is None or other is None else f"{loss - other:+.3f}"


def _time(results: Results, found: Sequence[Cell]) -> str:
    rows = []
    for race in races(results, found):
        gaps = [_gap(race.gaps[name]) if name in race.gaps else "–" for name in OPPONENTS]
        rows.append((race.where, f"`{race.cell.label}`", *gaps, _share_of_time(race.time)))
    titles = [name if name == TORCH else f"`{name}`" for name in OPPONENTS]
    heads = [f"gap to {title} (upper bound)" for title in titles]
    return table(("study", "method", *heads, "time to the loss of `1f1b`"), rows, left=2)


def _share_of_time(values: Sequence[float]) -> str:
    """Seed by seed."""
    return ", ".join(f"{value:.2f} x" if math.isfinite(value) else "not reached" for value in values) or "–"


def _mean(values: dict[int, float], digits: int, scale: float = 1.0) -> str:
    if not values:
        return "–"
    deviation = f" ± {scale * statistics.stdev(values.values()):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values.values()):.{digits}f}{deviation}"


def _gap(gap: Gap, digits: int = 3, scale: float = 1.0) -> str:
    mean, upper = (round(scale * value, digits) + 0.0 for value in (gap.mean, gap.upper))  # no minus before a zero
    return f"{mean:+.{digits}f} ({f'{upper:+.{digits}f}' if math.isfinite(upper) else '–'})"


# Plots


def _by_delay(found: Sequence[Cell]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Study and correction -> method -> its points; methods of several sizes have several."""
    shown = [cell for cell in found if cell.gap is not None and (cell.method in METHODS or cell.method.endswith("= p"))]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for study in dict.fromkeys(cell.study for cell in shown):
        for correction in CORRECTIONS:
            panel = panels.setdefault(f"{study}, {correction}", {})
            for cell in shown:
                if cell.gap is not None and (cell.study, cell.correction) == (study, correction):
                    panel.setdefault(cell.method.partition(",")[0], []).append((cell.delay, cell.gap.mean))
    return {place: {name: sorted(points) for name, points in panel.items()} for place, panel in panels.items()}


def _curves(results: Results, found: Sequence[Cell]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """A point is in the middle of its part; what is above 1.5 times the end of synchronous training is left out."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for method in CURVES:
        for cell in found:
            if cell.label != method:
                continue
            updates = results["studies"][cell.study]["updates"]
            size = updates / len(cell.curve)
            last = [other.curve[-1] for other in found if (other.study, other.label) == (cell.study, BASE)]
            highest = 1.5 * (last[0] if last and last[0] is not None else math.inf)
            points = [
                ((part + 0.5) * size, loss)
                for part, loss in enumerate(cell.curve)
                if loss is not None and loss <= highest
            ]
            if points:
                panels.setdefault(cell.study, {})[method] = points
    return panels
