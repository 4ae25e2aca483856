"""The folders of the benchmarks and the results page show the figures of results.json, and nothing else."""

import json
import re
from pathlib import Path

import pytest

from weft.bench.benchmark import BENCHMARKS, module_of
from weft.bench.writing import mark, put

ROOT = Path(__file__).parents[2]
UNMEASURED = "has not been run yet"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_folder_shows_its_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = ROOT / "benchmarks" / name
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"weft bench {name}" in page
    if not (folder / "results.json").exists():
        assert UNMEASURED in page
        return
    assert UNMEASURED not in page
    module, results = module_of(name), json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert (results["benchmark"], results["form"]) == (name, "whole")
    assert results["environment"] in page
    for table, text in module.tables(results).items():
        assert put(page, table, text) == page, f"{table}: weft bench {name} --render"
    pictures = module.plots(results)
    assert {path.name for path in folder.glob("*.svg")} == pictures.keys()
    assert set(re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)) == pictures.keys()
    for file, text in pictures.items():
        assert (folder / file).read_text(encoding="utf-8") == text, f"{file}: weft bench {name} --render"


def test_the_results_page_shows_the_same_tables() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    marks = re.findall(r"<!-- table ([a-z-]+)/([a-z0-9-]+): written by weft bench -->", page)
    assert marks
    for name, table in marks:
        results = json.loads((ROOT / "benchmarks" / name / "results.json").read_text(encoding="utf-8"))
        assert put(page, f"{name}/{table}", module_of(name).tables(results)[table]) == page, mark(f"{name}/{table}")
    for target in re.findall(r"\]\((\.\./[^)#]+)", page):
        assert (ROOT / "docs" / target).exists(), target
