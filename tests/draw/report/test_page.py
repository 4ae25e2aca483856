from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.draw import svg
from weft.draw.report import Run, report
from weft.draw.report.summary_text import VALUE, course, mean, smoothed, thinned
from weft.errors import WeftError
from weft.schedule import schedule
from weft.simulate import timeline

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
REFERENCE = ("entropy of single bytes", 3.2)
NAMES = ("1f1b", "2bw", "wpipe", "xpipe")


def run(name: str = "wpipe", seed: int = 0, *, updates: int = 120, ranks: int = 4, **more: Any) -> Run:
    speed = 200 + 30 * len(name) + seed
    noise = np.random.default_rng(seed).standard_normal(updates).tolist()

    def line(update: int, loss: float) -> dict[str, Any]:
        return {"update": update, "samples": 32 * update, "seconds": 32 * update / speed, "loss": loss}

    losses = [1.5 + 4 * math.exp(-at / 30) + 0.1 * noise[at] for at in range(updates)]
    known = {
        "name": f"{name}, seed {seed}",
        "group": name,
        "figures": {"final loss": "1.57", "time": "1 min 2 s"},
        "training": [
            line(at + 1, loss) | {"lr": 1e-3 / (at + 1), "samples_per_second": speed} for at, loss in enumerate(losses)
        ],
        "evaluations": [
            line(at, losses[at - 1] + 0.05) | {"accuracy": at / 2 / updates} for at in range(10, updates + 1, 10)
        ],
        "memory": [
            {"weights": 2**22, "activations": (ranks - at) << 20, "total": (4 + ranks - at) << 20}
            for at in range(ranks)
        ],
        "bubbles": [0.01 * len(name) * (at + 1) for at in range(ranks)],
        "timeline": "",
        "configuration": f'[schedule]\nname = "{name}"\n',
        "sample": "def f(x):\n    return x < 1 & True\n",
    }
    return Run(**(known | more))


def eight() -> list[Run]:
    return [run(name, seed) for name in NAMES for seed in (0, 1)]


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
    (left, right), (low, high) = (tuple(map(float, one.split())) for one in re.findall(r'data-[xy]="([^"]*)"', figure))
    found = {}
    for name, path in re.findall(r'data-name="([^"]*)"[^>]* d="M([^"]*)"', figure):
        places = [tuple(map(float, one.split(","))) for one in path.split("L")]
        found[name] = [(left + x / 1000 * (right - left), high - y / 1000 * (high - low)) for x, y in places]
    return found


def smooth(values: Sequence[float], every: int = 1) -> list[float]:
    """Slowly: a thirtieth of all, around each; at the start as many before as after."""
    half, found = len(values) // 60, []
    for at in range(0, len(values), every):
        reach = min(half, at)
        around = values[at - reach : at + reach + 1]
        found.append(sum(around) / len(around))
    return found


def test_the_charts_of_one_run_show_its_lines() -> None:
    one = run()
    found = charts(report([one], title="t", metric="loss", reference=REFERENCE))
    assert list(found) == [
        "Loss over samples",
        "Loss over time",
        "Learning rate",
        "Throughput",
        "Peak memory of each rank",
        "Bubble of each rank",
    ]
    losses = [line["loss"] for line in one.training]
    for title, key in (("Loss over samples", "samples"), ("Loss over time", "seconds")):
        shown = curves(found[title])
        assert list(shown) == ["training", "training, smoothed", "validation"]
        assert [x for x, _ in shown["training"]] == pytest.approx([line[key] for line in one.training], abs=0.3)
        assert [y for _, y in shown["training"]] == pytest.approx(losses, abs=1e-3)
        assert [y for _, y in shown["training, smoothed"]] == pytest.approx(smooth(losses), abs=1e-3)
        wanted = [line["loss"] for line in one.evaluations]
        assert [y for _, y in shown["validation"]] == pytest.approx(wanted, abs=1e-3)
        assert "entropy of single bytes</text>" in found[title]
    assert "time (s)" in found["Loss over time"]
    assert found["Peak memory of each rank"].count("<rect") == 8
    assert found["Bubble of each rank"].count("<rect") == 4


def test_several_runs_share_the_colour_of_their_group() -> None:
    runs = eight()
    text = report(
        runs, title="t", metric="accuracy", table=(["schedule", "samples/s"], [["1f1b", "9"], ["wpipe", "12 *"]])
    )
    found = charts(text)
    assert "Validation accuracy over samples" in found
    assert "Validation accuracy over time" in found
    shown = curves(found["Validation accuracy over samples"])
    assert list(shown) == [one.name for one in runs] + [f"{name}, mean of 2" for name in NAMES]
    for name, tone, figure in zip(NAMES, range(4), [found["Training loss over time"]] * 4, strict=True):
        strokes = re.findall(rf'class="(\w+)" data-name="{name},[^"]*" stroke="([^"]*)"', figure)
        assert strokes == [(weight, f"var(--tone-{tone})") for weight in ("thin", "thin", "main")]
    pair = [[line["accuracy"] * 100 for line in one.evaluations] for one in runs[:2]]
    middle = [sum(both) / 2 for both in zip(*pair, strict=True)]
    assert [y for _, y in shown["1f1b, mean of 2"]] == pytest.approx(middle, abs=0.02)
    assert list(curves(found["Learning rate"])) == ["all runs"]
    assert found["Peak memory of each rank"].count('role="img"') == 4
    assert '<td class="best">12</td>' in text


def test_curves_leave_out_what_is_no_number() -> None:
    lines = [{"update": at, "samples": at, "seconds": at, "loss": float(at)} for at in range(1, 9)]
    lines[2]["loss"], lines[4]["loss"], lines[5]["loss"] = None, math.nan, math.inf  # type: ignore[assignment]
    lines.append({"update": 2, "samples": 2, "seconds": 9, "loss": 22.0})  # repeated after a restart
    assert course(lines, "loss")[:, [0, 2, 3]].tolist() == [[1, 1, 1], [2, 9, 22], [4, 4, 4], [7, 7, 7], [8, 8, 8]]
    assert len(course(lines, "accuracy")) == len(course([], "loss")) == 0
    text = report([run(training=lines, evaluations=[])], title="t", metric="loss")
    assert "3 of 8 training lines have no finite loss" in text
    assert "not evaluated" in text
    assert not re.search(r"\b(nan|inf|None)\b", Reader(text).words)


def test_long_runs_are_thinned_by_means() -> None:
    long = run(updates=50_000)
    rows = course(long.training, "loss")
    few = thinned(rows)
    assert len(few) == 400
    assert few.mean(axis=0) == pytest.approx(rows.mean(axis=0))
    assert smoothed(rows)[::5000, VALUE].tolist() == pytest.approx(smooth(rows[:, VALUE].tolist(), 5000))
    text = report([long], title="t", metric="loss")
    assert len(text) < 1_000_000
    assert "training, means of about 125 lines" in text


def test_the_mean_is_of_updates_that_all_have() -> None:
    one, other = (course(run(seed=seed, updates=10 + seed).training, "loss") for seed in (0, 3))
    middle = mean([one, other[1:]])
    assert middle[:, 0].tolist() == list(range(2, 11))
    assert middle[:, VALUE] == pytest.approx((one[1:, VALUE] + other[1:10, VALUE]) / 2)


def test_the_reading_of_one_run() -> None:
    one = run()
    words = Reader(report([one], title="t", metric="loss", reference=REFERENCE)).words
    first, last = one.training[0]["loss"], smooth([line["loss"] for line in one.training])[-1]
    held = [line["loss"] for line in one.evaluations]
    for wanted in (
        "wpipe, seed 0: 120 updates, 3,840 samples, in 11 s.",
        f"The training loss fell from {first:.3f} to {last:.3f}.",
        f"On validation data the loss was {held[-1]:.3f} at the end, "
        + ("the best of all" if held[-1] == min(held) else f"and best after {320 * (held.index(min(held)) + 1):,}"),
        "At the end the validation loss is below the entropy of single bytes (3.200).",
        "The ranks waited 12.5% of the time on average (the bubble), rank 3 most, 20.0%.",
        "The largest rank, rank 0, held 8.0 MiB at its peak, 50% of it weights.",
    ):
        assert wanted in words
    rising = [dict(line) | {"loss": at} for at, line in enumerate(one.training, start=1)]
    assert "The training loss rose from 1.000 to" in report([run(training=rising)], title="t", metric="loss")


def test_the_reading_of_several_runs() -> None:
    words = Reader(report(eight(), title="t", metric="loss")).words
    assert "8 runs: 1f1b, 2bw, wpipe, xpipe, 2 runs each." in words
    assert "xpipe ran fastest, 350 samples/s, and 2bw slowest, 290 samples/s." in words
    assert "2bw waited least, 7.5% of the time, and xpipe most, 12.5%." in words
    assert "needed least memory" not in words  # all hold the same
    assert "smallest bubble 2bw: 7.5%" in words
    finals = {name: [run(name, seed).final("loss") for seed in (0, 1)] for name in NAMES}
    assert f"differ by up to {max(max(pair) - min(pair) for pair in finals.values()):.3f}" in words
    alone = Reader(report([run("2bw"), run("wpipe")], title="t", metric="loss")).words
    assert "one run of each, so small differences may be chance" in alone


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_short_and_empty_runs(updates: int) -> None:
    bare: dict[str, Any] = {"memory": [], "bubbles": [], "configuration": "", "sample": "", "figures": {}}
    text = report([run(updates=updates, **bare)], title="t", metric="loss", reference=REFERENCE)
    assert len(charts(text)) == (4 if updates else 0)
    assert Reader(text).open == []
    for left_out in ("Ranks", "Timeline", "Generated text", "Configuration"):
        assert f"<h2>{left_out}" not in text


def test_the_page_loads_nothing_and_names_are_only_text() -> None:
    bad = "</script><b>bold</b>&amp;<!--" + "long" * 40
    picture = svg(timeline(schedule("wpipe", stages=2, microbatches=2), minibatches=1))
    runs = [run(name=bad, group=bad, timeline=picture, sample=bad, configuration=bad, figures={bad: bad})]
    text = report(
        [*runs, replace(runs[0], name="other")], title=bad, metric="loss", reference=(bad, 3.0), table=([bad], [[bad]])
    )
    reader = Reader(text)
    assert reader.open == []
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp|import\(", text)
    assert "b" not in {tag for tag, _ in reader.tags}
    assert {tag for tag, _ in reader.tags} & {"link", "iframe", "object", "embed", "base"} == set()
    sources = [attributes["src"] for attributes in reader.having("src")]
    assert len(sources) == 1  # equal pictures are shown once
    assert sources[0].startswith("data:image/svg+xml;base64,")
    assert not reader.having("href")
    assert reader.words.count(bad) > 10


def test_charts_can_be_read_without_seeing_them() -> None:
    reader = Reader(report(eight(), title="t", metric="loss"))
    pictures = [attributes for attributes in reader.having("role") if attributes["role"] == "img"]
    named = {attributes["id"] for attributes in reader.having("id")}
    assert len(pictures) == 6 + 4 + 4
    for picture in pictures:
        assert {picture["aria-labelledby"], picture["aria-describedby"]} <= named
    assert sum(attributes.get("class") == "data" for _, attributes in reader.tags) == 8


def test_equal_runs_give_equal_bytes() -> None:
    assert report(eight(), title="t", metric="loss") == report(eight(), title="t", metric="loss")


def test_runs_need_names_of_their_own() -> None:
    for runs in ([], [run(), run()]):
        with pytest.raises(WeftError, match="a report needs one run or more, each of another name"):
            report(runs, title="t", metric="loss")


WATCH = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)), true);
addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective));
</script>"""
LOOK = """<script>
addEventListener("load", () => {
  const shown = (one) => one.getBoundingClientRect();
  const over = document.querySelector(".over"), box = shown(over);
  const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const clashes = [...document.querySelectorAll("svg[role=img]")].flatMap((svg) => {
    const texts = [...svg.querySelectorAll(".tick")].map(shown);
    return texts.filter((one, at) => texts.slice(0, at).some((other) => meets(one, other)));
  });
  const inside = [...document.querySelectorAll("svg[role=img] text, rect, circle")].map(shown);
  over.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right, clientY: box.top + 9 }));
  const lengths = [...document.querySelectorAll("svg.curves path[data-name]")].map((path) => shown(path).height);
  parent.postMessage(JSON.stringify({
    wrong, width: innerWidth, needed: document.documentElement.scrollWidth, clashes: clashes.length,
    left: Math.min(...inside.map((one) => one.left)), right: Math.max(...inside.map((one) => one.right)),
    tip: document.querySelector(".tip").innerText, curves: lengths.length, flat: lengths.filter((one) => !one).length,
    picture: [...document.images].map((image) => image.complete && image.naturalWidth), text: document.body.innerText,
    columns: getComputedStyle(document.querySelector(".charts")).gridTemplateColumns.split(" ").length,
  }), "*");
});
</script>"""


FRAME = """<!doctype html><script>
addEventListener("message", (event) => { document.documentElement.dataset.said = event.data; });
</script><iframe src="report.html" style="width:%dpx;height:900px;border:0"></iframe>"""


def browse(text: str, folder: Path, width: int) -> dict[str, Any]:
    """What a page says of itself in a frame, which can be narrower than a browser's window."""
    watched = text.replace("<head>", "<head>" + WATCH).replace("</body>", LOOK + "</body>")
    (folder / "report.html").write_text(watched, "utf-8")
    page = folder / "frame.html"
    page.write_text(FRAME % width, "utf-8")
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=5000"
    done = subprocess.run(
        [
            str(BROWSER),
            *options.split(),
            *more.split(),
            *("--enable-logging=stderr", "--dump-dom", "--window-size=1500,1000"),
            f"--user-data-dir={folder / 'user'}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    said = next(attributes["data-said"] for tag, attributes in Reader(done.stdout).tags if tag == "html")
    found = json.loads(said)
    assert isinstance(found, dict)
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    picture = svg(timeline(schedule("wpipe", stages=4, microbatches=4), minibatches=2))
    runs = [replace(one, timeline=picture) for one in eight()] + [run("a" * 80, ranks=8)]
    head = ["schedule", *(f"column {at}" for at in range(9))]
    table = (head, [[name, *["12.5 MiB *"] * 9] for name in NAMES])
    said = browse(report(runs, title="T" * 90, metric="loss", reference=REFERENCE, table=table), tmp_path, width)
    assert said["wrong"] == []
    assert said["width"] == width
    assert said["needed"] == width  # nothing beyond the edge
    assert said["clashes"] == 0
    assert said["left"] >= 0
    assert said["right"] <= width
    assert said["columns"] == (1 if width < 500 else 2)
    assert said["picture"] == [pytest.approx(1600, rel=0.5)]
    assert said["curves"] == 5 * (8 + 5) + 1
    for wanted in ("Training loss over samples", "wpipe, mean of 2", "entropy of single bytes", "12.5 MiB", "rank 7"):
        assert wanted in said["text"]
    values = [run("wpipe", seed).training for seed in (0, 1)]
    last = sum(smooth([line["loss"] for line in lines])[-1] for lines in values) / 2
    assert said["tip"].split()[:2] == ["samples", "3,840"]
    assert f"{last:.3f}"[:4] in said["tip"].split("wpipe, mean of 2")[1]
