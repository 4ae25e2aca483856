from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.draw.browser import dump_dom, needs_browser
from tests.draw.report.runs import NAMES, REFERENCE, Reader, charts, curves, eight_runs, make_run, slowly_smoothed

from weft.draw import svg
from weft.draw.report import report
from weft.errors import WeftError
from weft.schedule import schedule
from weft.simulate import timeline


def test_the_charts_of_one_run_show_its_lines() -> None:
    run = make_run()
    found = charts(report([run], title="t", metric="loss", reference=REFERENCE))
    assert list(found) == [
        "Loss over samples",
        "Loss over time",
        "Learning rate",
        "Throughput",
        "Peak memory of each rank",
        "Bubble of each rank",
    ]
    losses = [line["loss"] for line in run.training]
    for title, key in (("Loss over samples", "samples"), ("Loss over time", "seconds")):
        shown = curves(found[title])
        assert list(shown) == ["training", "training, smoothed", "validation"]
        assert [x for x, _ in shown["training"]] == pytest.approx([line[key] for line in run.training], abs=0.3)
        assert [y for _, y in shown["training"]] == pytest.approx(losses, abs=1e-3)
        assert [y for _, y in shown["training, smoothed"]] == pytest.approx(slowly_smoothed(losses), abs=1e-3)
        wanted = [line["loss"] for line in run.evaluations]
        assert [y for _, y in shown["validation"]] == pytest.approx(wanted, abs=1e-3)
        assert "entropy of single bytes</text>" in found[title]
    assert "time (s)" in found["Loss over time"]
    assert found["Peak memory of each rank"].count("<rect") == 8
    assert found["Bubble of each rank"].count("<rect") == 4


def test_several_runs_share_the_colour_of_their_group() -> None:
    runs = eight_runs()
    text = report(
        runs, title="t", metric="accuracy", table=(["schedule", "samples/s"], [["1f1b", "9"], ["wpipe", "12 *"]])
    )
    found = charts(text)
    assert "Validation accuracy over samples" in found
    assert "Validation accuracy over time" in found
    shown = curves(found["Validation accuracy over samples"])
    assert list(shown) == [run.name for run in runs] + [f"{name}, mean of 2" for name in NAMES]
    for name, tone, figure in zip(NAMES, range(4), [found["Training loss over time"]] * 4, strict=True):
        strokes = re.findall(rf'class="(\w+)" data-name="{name},[^"]*" stroke="([^"]*)"', figure)
        assert strokes == [(weight, f"var(--tone-{tone})") for weight in ("thin", "thin", "main")]
    pair = [[line["accuracy"] * 100 for line in run.evaluations] for run in runs[:2]]
    means = [sum(values) / 2 for values in zip(*pair, strict=True)]
    assert [y for _, y in shown["1f1b, mean of 2"]] == pytest.approx(means, abs=0.02)
    assert list(curves(found["Learning rate"])) == ["all runs"]
    assert found["Peak memory of each rank"].count('role="img"') == 4
    assert '<td class="best">12</td>' in text


def test_the_resident_set_is_shown_in_parts() -> None:
    figures = {"now": 300, "peak": 400, "process": 250, "counted": 100, "messages": 0, "rest": 50, "ranks": 1}
    title = "Resident set of each process at its peak"
    two = make_run(resident={"rank 0": figures, "rank 1": figures | {"peak": 390, "rest": -10, "counted": 150}})
    chart = charts(report([two], title="t", metric="loss"))[title]
    assert chart.count("<rect") == 3 + 2  # nothing for a part that is not above 0
    assert "empty process" in chart
    assert "400 B" in chart
    assert "Virtual" not in chart
    one = make_run(resident={"ranks 0–3": figures | {"ranks": 4}})
    assert "Virtual ranks share one process." in charts(report([one], title="t", metric="loss"))[title]


def test_a_category_of_memory_has_the_same_colour_in_all_reports() -> None:
    fp32 = {"weights": 40, "gradients": 20, "optimizer": 40, "activations": 30}
    pages = [report([make_run(memory=[memory])], title="t", metric="loss") for memory in (fp32, fp32 | {"masters": 40})]
    legends, bars = [], []
    for page in pages:
        chart = charts(page)["Peak memory of each rank"]
        legends.append(
            {name: colour for colour, name in re.findall(r"background:var\((.*?)\).*?</i>(.*?)</li>", chart)}
        )
        bars.append(dict(re.findall(r'fill="var\((.*?)\)"><title>rank 0, (\w+):', chart)))
    assert set(legends[0]) == set(fp32)
    assert legends[1].items() > legends[0].items()
    assert [{name: colour for colour, name in parts.items()} for parts in bars] == legends
    assert all(f"{colour}: #" in pages[1] for colour in legends[1].values())


@pytest.mark.parametrize("updates", [0, 1, 2])
def test_short_and_empty_runs(updates: int) -> None:
    bare: dict[str, Any] = {"memory": [], "bubbles": [], "configuration": "", "sample": "", "figures": {}}
    text = report([make_run(updates=updates, **bare)], title="t", metric="loss", reference=REFERENCE)
    assert len(charts(text)) == (4 if updates else 0)
    assert Reader(text).open == []
    for omitted in ("Ranks", "Timeline", "Generated text", "Configuration"):
        assert f"<h2>{omitted}" not in text


def test_the_page_loads_nothing_and_names_are_only_text() -> None:
    bad = "</script><b>bold</b>&amp;<!--" + "long" * 40
    picture = svg(timeline(schedule("wpipe", stages=2, microbatches=2), minibatches=1))
    runs = [make_run(name=bad, group=bad, timeline=picture, sample=bad, configuration=bad, figures={bad: bad})]
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


def test_charts_are_accessible_as_text() -> None:
    reader = Reader(report(eight_runs(), title="t", metric="loss"))
    pictures = [attributes for attributes in reader.having("role") if attributes["role"] == "img"]
    named = {attributes["id"] for attributes in reader.having("id")}
    assert len(pictures) == 6 + 4 + 4
    for picture in pictures:
        assert {picture["aria-labelledby"], picture["aria-describedby"]} <= named
    assert sum(attributes.get("class") == "data" for _, attributes in reader.tags) == 8


def test_equal_runs_give_equal_bytes() -> None:
    assert report(eight_runs(), title="t", metric="loss") == report(eight_runs(), title="t", metric="loss")


def test_runs_need_unique_names() -> None:
    for runs in ([], [make_run(), make_run()]):
        with pytest.raises(WeftError, match="a report needs at least one run, and a different name for each"):
            report(runs, title="t", metric="loss")


RECORD_ERRORS = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)), true);
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
</script>"""
MEASURE = """<script>
addEventListener("load", () => {
  const box = (element) => element.getBoundingClientRect();
  const overlay = document.querySelector(".overlay");
  const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const clashes = [...document.querySelectorAll("svg[role=img]")].flatMap((svg) => {
    const texts = [...svg.querySelectorAll(".tick")].map(box);
    return texts.filter((text, index) => texts.slice(0, index).some((other) => overlap(text, other)));
  });
  const inside = [...document.querySelectorAll("svg[role=img] text, rect, circle")].map(box);
  const { right, top } = box(overlay);
  overlay.dispatchEvent(new PointerEvent("pointermove", { clientX: right, clientY: top + 9 }));
  const heights = [...document.querySelectorAll("svg.curves path[data-name]")].map((path) => box(path).height);
  parent.postMessage(JSON.stringify({
    errors, width: innerWidth, needed: document.documentElement.scrollWidth, clashes: clashes.length,
    left: Math.min(...inside.map((rect) => rect.left)), right: Math.max(...inside.map((rect) => rect.right)),
    tip: document.querySelector(".tip").innerText, curves: heights.length,
    picture: [...document.images].map((image) => image.complete && image.naturalWidth), text: document.body.innerText,
    columns: getComputedStyle(document.querySelector(".charts")).gridTemplateColumns.split(" ").length,
  }), "*");
});
</script>"""


FRAME = """<!doctype html><script>
addEventListener("message", (event) => { document.documentElement.dataset.found = event.data; });
</script><iframe src="report.html" style="width:%dpx;height:900px;border:0"></iframe>"""


def browse(text: str, folder: Path, width: int) -> dict[str, Any]:
    """Measurements of a page in a frame, which can be narrower than the browser window."""
    instrumented = text.replace("<head>", "<head>" + RECORD_ERRORS).replace("</body>", MEASURE + "</body>")
    (folder / "report.html").write_text(instrumented, "utf-8")
    page = folder / "frame.html"
    page.write_text(FRAME % width, "utf-8")
    document = Reader(dump_dom(page, "--window-size=1500,1000", "--virtual-time-budget=5000"))
    found = json.loads(next(attributes["data-found"] for tag, attributes in document.tags if tag == "html"))
    assert isinstance(found, dict)
    return found


@needs_browser
@pytest.mark.parametrize("width", [390, 1400])
def test_in_a_browser(tmp_path: Path, width: int) -> None:
    picture = svg(timeline(schedule("wpipe", stages=4, microbatches=4), minibatches=2))
    runs = [replace(run, timeline=picture) for run in eight_runs()] + [make_run("a" * 80, ranks=8)]
    head = ["schedule", *(f"column {index}" for index in range(9))]
    table = (head, [[name, *["12.5 MiB *"] * 9] for name in NAMES])
    found = browse(report(runs, title="T" * 90, metric="loss", reference=REFERENCE, table=table), tmp_path, width)
    assert found["errors"] == []
    assert found["width"] == width
    assert found["needed"] == width  # nothing beyond the edge
    assert found["clashes"] == 0
    assert found["left"] >= 0
    assert found["right"] <= width
    assert found["columns"] == (1 if width < 500 else 2)
    assert found["picture"] == [pytest.approx(1600, rel=0.5)]
    assert found["curves"] == 5 * (8 + 5) + 1
    for wanted in ("Training loss over samples", "wpipe, mean of 2", "entropy of single bytes", "12.5 MiB", "rank 7"):
        assert wanted in found["text"]
    values = [make_run("wpipe", seed).training for seed in (0, 1)]
    last = sum(slowly_smoothed([line["loss"] for line in lines])[-1] for lines in values) / 2
    assert found["tip"].split()[:2] == ["samples", "3,840"]
    assert f"{last:.3f}"[:4] in found["tip"].split("wpipe, mean of 2")[1]
