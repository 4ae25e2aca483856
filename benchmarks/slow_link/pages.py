"""Tables, plots and targets of slow-link."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.harness import Results, schedule_named
from benchmarks.rendering import bars, median_and_quartiles, quartiles, rounded_quartiles, table, unsteady
from benchmarks.slow_link.hosts import Link
from weft.simulate import Cost, simulate
from weft.simulate import Link as SimulatedLink

CARRIED = 0.85  # of its rate, which a link must carry
SLOWED = ("weft 2bw", "weft 2bw warmup 2", "weft wpipe warmup 2")
SLOWDOWN = 1.25  # of these, on the slowest link
HIDING = ("weft 2bw warmup 2", "weft wpipe warmup 2")
HIDDEN = 0.8  # of the time that their bytes take
SIGNIFICANT = 0.05  # of a mini-batch's time: if its bytes take less, the hidden share is noise
SLOWDOWN_SPREAD = 0.2  # widest interquartile range of a slowdown, over its median
HIDDEN_SPREAD = 0.5  # and of a hidden share
DDP = "DDP"
WARM = " warmup 2"

Panels = dict[str, dict[str, tuple[float, float, float]]]  # low, median, high by panel and label


class Runs:
    """What was measured, by micro-batches, contender and link; lists are by round."""

    def __init__(self, results: Results) -> None:
        self.links = [Link(**link) for link in results["links"]]
        self.free, *self.shaped = self.links
        self.keys = [(contender["m"], contender["name"]) for contender in results["contenders"]]
        self._at = {key: place for place, key in enumerate(self.keys)}
        self._rounds, self._message = results["rounds"], results["model"]["message bytes"]

    def seconds(self, m: int, name: str, link: Link) -> list[float]:
        """Of a mini-batch."""
        return [measured[self._at[m, name]][link.name]["seconds"] for measured in self._rounds]

    def sent(self, m: int, name: str, link: Link) -> float:
        """Bytes of a mini-batch in the direction that carries more: both are carried at once."""
        at = self._at[m, name]
        return float(statistics.median(max(measured[at][link.name]["sent"]) for measured in self._rounds))

    def slowdown(self, m: int, name: str, link: Link) -> list[float]:
        """Over its own time on the unshaped link, in the same round."""
        pairs = zip(self.seconds(m, name, link), self.seconds(m, name, self.free), strict=True)
        return [shaped / free for shaped, free in pairs]

    def on_link(self, m: int, name: str, link: Link) -> float:
        """Seconds that the bytes of a mini-batch take."""
        return link.seconds(self.sent(m, name, link))

    def hidden(self, m: int, name: str, link: Link) -> list[float] | None:
        """The share of that time which a mini-batch does not take longer; None if it is too short to measure."""
        taken = self.on_link(m, name, link)
        free = self.seconds(m, name, self.free)
        if taken < SIGNIFICANT * statistics.median(free):
            return None
        return [1 - (slow - fast) / taken for slow, fast in zip(self.seconds(m, name, link), free, strict=True)]

    def simulated(self, m: int, name: str, link: Link) -> float | None:
        """The slowdown that the simulator predicts of a weft schedule, from its time on the unshaped link."""
        library, _, method = name.partition(" ")
        if library != "weft" or link.rate is None:
            return None
        schedule = schedule_named(method, 2, m)
        free = simulate(schedule, Cost.uniform(schedule)).period
        unit = statistics.median(self.seconds(m, name, self.free)) / free  # seconds of a stage's forward
        slow = SimulatedLink(bandwidth=link.rate * 1e6 / 8 * unit)
        return simulate(schedule, Cost.uniform(schedule, input_bytes=self._message, link=slow)).period / free

    def warm_up(self, m: int, name: str, link: Link) -> list[float]:
        """The time with more warm-up over the time without, in the same round."""
        pairs = zip(self.seconds(m, name + WARM, link), self.seconds(m, name, link), strict=True)
        return [more / less for more, less in pairs]


def tables(results: Results) -> dict[str, str]:
    """The links, the slowdowns, what is hidden, and where more warm-up pays off."""
    runs = Runs(results)
    return {
        "model": _model(results),
        "links": _links(results, runs),
        "slowdown": _slowdowns(results, runs),
        "hidden": _hidden(runs),
        "warm-up": _warm_up(runs),
    }


def _model(results: Results) -> str:
    model = results["model"]
    messages = model["message bytes"] / 1e3
    head = ("layers", "width", "tokens a micro-batch", "forward of a layer, ms", "backward, ms", "gradients, kB")
    sizes = (model["layers"], model["width"], model["tokens"])
    times = (f"{1e3 * model[way]:.0f}" for way in ("forward", "backward"))
    row = (*sizes, *times, f"{model['gradient bytes'] / 1e3:,.0f}", f"{messages:.1f}")
    return table((*head, "activations of a micro-batch at a cut, kB"), [row], left=0)


def _links(results: Results, runs: Runs) -> str:
    size = results["model"]["message bytes"]
    head = ["link", "bucket, kB", "one way, Mbit/s", "both ways at once, each, Mbit/s"]
    head += ["a message alone, ms", "at its rate, ms"]
    rows = []
    for link in runs.links:
        found = results["carried"][link.name]
        ways = (f"{statistics.median(carried(found, way)):,.0f}" for way in ("one way", "both ways"))
        ideal = "" if link.rate is None else f"{link.seconds(size) * 1e3:.2f}"
        bucket = "" if link.rate is None else f"{link.bucket / 1e3:.1f}"
        rows.append((link.name, bucket, *ways, f"{found['message'] * 1e3:.2f}", ideal))
    notes = [
        f"At {link.name} the bucket holds {link.bucket / 1e3:.1f} kB, no less than a message of {size / 1e3:.1f} kB:\n"
        "messages that are apart pass as if the link were not shaped, and only what follows at once is."
        for link in runs.shaped
        if link.bucket >= size
    ]
    return "\n\n".join([table(head, rows), *notes])


def carried(found: dict[str, Any], way: str) -> list[float]:
    """Mbit/s of payload in each test, without headers."""
    return [found["bytes"] * 8 / seconds / 1e6 for seconds in found[way]]


def _slowdowns(results: Results, runs: Runs) -> str:
    head = ["contender", "m", f"{runs.free.name}, ms"]
    for link in runs.shaped:
        head += [f"{link.name}, ms", "slowdown", "simulated"]
    rows = []
    for m, name in runs.keys:
        row = [name, m, _ms(runs.seconds(m, name, runs.free))]
        for link in runs.shaped:
            simulated = runs.simulated(m, name, link)
            row += [_ms(runs.seconds(m, name, link)), median_and_quartiles(runs.slowdown(m, name, link))]
            row += ["" if simulated is None else f"{simulated:.2f}"]
        rows.append(row)
    notes = [f"Left out: {what}: {why}." for what, why in results["left out"].items()]
    about = f"{len(results['rounds'])} interleaved rounds; the median (the quartiles). {results.get('environment', '')}"
    return "\n\n".join([table(head, rows), *notes, about.strip()])


def _hidden(runs: Runs) -> str:
    head = ("link", "contender", "m", "sent a mini-batch, kB", "time on the link, ms", "time added, ms", "hidden")
    rows = []
    for link in runs.shaped:
        for m, name in runs.keys:
            share = runs.hidden(m, name, link)
            taken = runs.on_link(m, name, link)
            pairs = zip(runs.seconds(m, name, link), runs.seconds(m, name, runs.free), strict=True)
            added = statistics.median(shaped - free for shaped, free in pairs)
            hidden = "" if share is None else median_and_quartiles(share)
            sent = f"{runs.sent(m, name, link) / 1e3:,.0f}"
            rows.append((link.name, name, m, sent, f"{taken * 1e3:,.1f}", f"{added * 1e3:,.1f}", hidden))
    return table(head, rows, left=2)


def _warmed(runs: Runs) -> list[tuple[int, str]]:
    return [(m, name) for m, name in runs.keys if (m, name + WARM) in runs.keys]


def _warm_up(runs: Runs) -> str:
    rows = [
        (f"{name}{WARM}", m, *(median_and_quartiles(runs.warm_up(m, name, link)) for link in runs.links))
        for m, name in _warmed(runs)
    ]
    return table(("time over the same without", "m", *(link.name for link in runs.links)), rows)


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:,.0f}"


def plots(results: Results) -> dict[str, str]:
    """Slowdowns of the pipelines and, apart, the much larger ones of DDP; what is hidden on the slowest link."""
    runs = Runs(results)
    slowest = runs.shaped[-1]
    slowdowns: Panels = {}
    ddp: Panels = {}
    hidden: Panels = {}
    for link in runs.shaped:
        for m, name in runs.keys:
            panel, slowdown = f"{link.name}, m = {m}", rounded_quartiles(runs.slowdown(m, name, link))
            if name == DDP:
                ddp.setdefault(f"m = {m}", {})[link.name] = slowdown
            else:
                slowdowns.setdefault(panel, {})[name] = slowdown
            if link == slowest and (share := runs.hidden(m, name, link)) is not None:
                hidden.setdefault(panel, {})[name] = rounded_quartiles(share)
    unit, share_unit = "x its own time without shaping", "of the time that the bytes take"
    return {
        "slowdown.svg": bars("A mini-batch on a slow link: pipelines", slowdowns, unit=unit, reference=1),
        "slowdown-ddp.svg": bars("A mini-batch on a slow link: DDP", ddp, unit=unit, reference=1),
        "hidden.svg": bars(f"Communication hidden at {slowest.name}", hidden, unit=share_unit, reference=HIDDEN),
    }


def missed(results: Results) -> list[str]:
    """Links below their rate, missed targets of weft's schedules, spreads too wide."""
    runs = Runs(results)
    slowest = runs.shaped[-1]
    found = []
    for link in runs.shaped:
        for way in ("one way", "both ways"):
            rate = statistics.median(carried(results["carried"][link.name], way))
            if rate < CARRIED * link.rate:  # type: ignore[operator]
                found.append(f"{link.name} carries {rate:.0f} Mbit/s {way}, below {CARRIED} of its rate")
        if count := results["carried"][link.name].get("dropped", 0):
            found.append(f"{link.name} dropped {count} packets in its test: its queue is too short")
    for m, name in runs.keys:
        slowdown = statistics.median(runs.slowdown(m, name, slowest))
        if name in SLOWED and slowdown > SLOWDOWN:
            found.append(f"{name}, m = {m}: {slowdown:.2f} x its time at {slowest.name}, above {SLOWDOWN}")
        if name in HIDING and (share := runs.hidden(m, name, slowest)) is not None:
            low, middle, high = quartiles(share)
            if high - low > HIDDEN_SPREAD:
                spread = median_and_quartiles(share)
                found.append(f"{name}, m = {m}: what it hides at {slowest.name} is unsteady, {spread}")
            elif middle < HIDDEN:
                found.append(f"{name}, m = {m}: hides {middle:.2f} at {slowest.name}, below {HIDDEN}")
        for link in runs.shaped:
            if unsteady(values := runs.slowdown(m, name, link), SLOWDOWN_SPREAD):
                spread = median_and_quartiles(values)
                found.append(f"{name}, m = {m}: its slowdown at {link.name} is unsteady, {spread}")
    return found
