"""Runs for reports, and readers of the pages made from them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np

from weft.draw.report import Run

REFERENCE = ("entropy of single bytes", 3.2)
NAMES = ("1f1b", "2bw", "wpipe", "xpipe")


def make_run(name: str = "wpipe", seed: int = 0, *, updates: int = 120, ranks: int = 4, **changes: Any) -> Run:
    speed = 200 + 30 * len(name) + seed
    noise = np.random.default_rng(seed).standard_normal(updates).tolist()

    def line(update: int, loss: float) -> dict[str, Any]:
        return {"update": update, "samples": 32 * update, "seconds": 32 * update / speed, "loss": loss}

    losses = [1.5 + 4 * math.exp(-index / 30) + 0.1 * noise[index] for index in range(updates)]
    fields: dict[str, Any] = {
        "name": f"{name}, seed {seed}",
        "group": name,
        "figures": {"final loss": "1.57", "time": "1 min 2 s"},
        "training": [
            line(update, loss) | {"lr": 1e-3 / update, "samples_per_second": speed}
            for update, loss in enumerate(losses, start=1)
        ],
        "evaluations": [
            line(update, losses[update - 1] + 0.05) | {"accuracy": update / 2 / updates}
            for update in range(10, updates + 1, 10)
        ],
        "memory": [
            {"weights": 2**22, "activations": (ranks - rank) << 20, "total": (4 + ranks - rank) << 20}
            for rank in range(ranks)
        ],
        "bubbles": [0.01 * len(name) * (rank + 1) for rank in range(ranks)],
        "timeline": "",
        "configuration": f'[schedule]\nname = "{name}"\n',
        "sample": "def f(x):\n    return x < 1 & True\n",
        "speed": speed,
    }
    return Run(**(fields | changes))


def eight_runs() -> list[Run]:
    return [make_run(name, seed) for name in NAMES for seed in (0, 1)]


class Reader(HTMLParser):
    """Elements, their attributes, and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(text)

    @property
    def words(self) -> str:
        return " ".join(self.texts)

    def having(self, name: str) -> list[dict[str, str]]:
        return [attributes for _, attributes in self.tags if name in attributes]


def charts(text: str) -> dict[str, str]:
    """The figures of a page by their captions."""
    found = re.findall(
        r'<figure class="chart"><figcaption>([^<]*?) ?(?:<span.*?)?</figcaption>(.*?)</figure>', text, re.S
    )
    return dict(found)


def curves(figure: str) -> dict[str, list[tuple[float, float]]]:
    """The points of the curves by name, read back from the picture."""
    ranges = re.findall(r'data-[xy]="([^"]*)"', figure)
    (left, right), (low, high) = (tuple(map(float, ends.split())) for ends in ranges)
    found = {}
    for name, path in re.findall(r'data-name="([^"]*)"[^>]* d="M([^"]*)"', figure):
        places = [tuple(map(float, point.split(","))) for point in path.split("L")]
        found[name] = [(left + x / 1000 * (right - left), high - y / 1000 * (high - low)) for x, y in places]
    return found


def slowly_smoothed(values: Sequence[float], every: int = 1) -> list[float]:
    """The reference for `smoothed`: the mean of a thirtieth of all values, symmetric at the start."""
    radius, found = len(values) // 60, []
    for index in range(0, len(values), every):
        reach = min(radius, index)
        window = values[index - reach : index + reach + 1]
        found.append(sum(window) / len(window))
    return found
