"""The pages of the benchmarks show the figures of results.json, and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import BENCHMARKS
from benchmarks.rendering import put_table, table_mark

ROOT = Path(__file__).parents[2]


def results_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS[name].folder / "results.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", BENCHMARKS)
def test_readme_shows_the_tables_of_its_results(name: str) -> None:
    page = (BENCHMARKS[name].folder / "README.md").read_text(encoding="utf-8")
    assert f"python -m benchmarks {name}" in page
    results = results_of(name)
    assert (results["benchmark"], results["form"]) == (name, "whole")
    assert results["environment"] in page
    for table, text in BENCHMARKS[name].tables(results).items():
        assert put_table(page, table, text) == page, f"{table}: run python -m benchmarks {name} --render"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_folder_has_the_plots_of_its_results(name: str) -> None:
    folder = BENCHMARKS[name].folder
    page = (folder / "README.md").read_text(encoding="utf-8")
    plots = BENCHMARKS[name].plots(results_of(name))
    assert {path.name for path in folder.glob("*.svg")} == plots.keys()
    assert set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)) == plots.keys()
    for file, text in plots.items():
        assert (folder / file).read_text(encoding="utf-8") == text, f"{file}: run python -m benchmarks {name} --render"


def test_results_page_shows_the_same_tables() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    marks = re.findall(table_mark("([a-z-]+)/([a-z0-9-]+)"), page)
    assert marks
    for name, table in marks:
        text = BENCHMARKS[name].tables(results_of(name))[table]
        assert put_table(page, f"{name}/{table}", text) == page, table_mark(f"{name}/{table}")
    for target in re.findall(r"\]\((\.\./[^)#]+)", page):
        assert (ROOT / "docs" / target).exists(), target
