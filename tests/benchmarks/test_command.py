"""`python -m benchmarks`: what it lists, measures, resumes, writes and refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import BENCHMARKS, Benchmark, Results, ResumeCache, command
from benchmarks.harness.catalog import sources_digest
from benchmarks.rendering import END, table, table_mark
from weft.errors import WeftError

ROOT = Path(__file__).parents[2]


class FakeBenchmark(Benchmark):
    """Measures two parts; its folder is in the current directory."""

    @property
    def folder(self) -> Path:
        return Path.cwd() / "folder"

    def measure(self, *, quick: bool, cache: ResumeCache) -> dict[str, Any]:
        return {"parts": [cache("first", lambda: 1.5), cache("second", lambda: 2.5)]}

    def tables(self, results: Results) -> dict[str, str]:
        return {"parts": table(("part", "value"), enumerate(results["parts"]))}

    def plots(self, results: Results) -> dict[str, str]:
        return {"parts.svg": f"<svg>{sum(results['parts'])}</svg>"}

    def missed(self, results: Results) -> list[str]:
        return []


Replace = Callable[..., None]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Replace the throughput benchmark by a fake one, with other methods."""

    def replaced(**methods: Any) -> None:
        kind = type("Fake", (FakeBenchmark,), methods)
        monkeypatch.setitem(BENCHMARKS, "throughput", kind(name="throughput", about="two parts", takes="no time"))

    return replaced


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Replace) -> Path:
    monkeypatch.chdir(tmp_path)
    replace()
    return tmp_path / "folder"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHMARKS)
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_functions(name: str) -> None:
    benchmark = BENCHMARKS[name]
    assert (benchmark.folder / "__init__.py").is_file()
    assert callable(benchmark._module("measure").measure)
    assert all(callable(getattr(benchmark._module("pages"), function)) for function in ("tables", "plots", "missed"))


def test_every_package_is_in_the_catalog() -> None:
    folders = {path.parent.name for path in (ROOT / "benchmarks").glob("*/measure.py")}
    assert folders == {benchmark.package for benchmark in BENCHMARKS.values()}


def test_runs_from_a_checkout() -> None:
    """Listing and rendering import no torch."""
    code = "import runpy, sys\nsys.argv = ['benchmarks', *sys.argv[1:]]\ntry:\n"
    code += "    runpy.run_module('benchmarks', run_name='__main__')\nexcept SystemExit as end:\n"
    code += "    sys.exit(end.code or (9 if 'torch' in sys.modules else 0))"
    done = subprocess.run(
        [sys.executable, "-c", code, "startup", "--render", "--json"], cwd=ROOT, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["benchmark"] == "startup"


def test_pages_need_neither_torch_nor_matplotlib() -> None:
    """To make tables; only a plot needs matplotlib."""
    imports = "\n".join(f"import benchmarks.{benchmark.package}.pages" for benchmark in BENCHMARKS.values())
    code = f"import sys\n{imports}\nsys.exit(bool({{'torch', 'matplotlib'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_everything_is_regenerated_from_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput"]) == 0
    assert "| 1 | 2.5 |" in capsys.readouterr().out
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert first.keys() == {"README.md", "results.json", "parts.svg"}
    assert "| 1 | 2.5 |" in first["README.md"]
    assert "python -m benchmarks throughput" in first["README.md"]
    assert "![parts](parts.svg)" in first["README.md"]
    results = json.loads(first["results.json"])
    assert (results["form"], results["sources"]) == ("whole", sources_digest())
    assert all(sources_digest() not in text for name, text in first.items() if name != "results.json")
    for path in folder.iterdir():
        path.unlink()
    assert main(["throughput"]) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


def test_quick_form_writes_nothing_without_a_folder(folder: Path) -> None:
    assert main(["throughput", "--quick"]) == 0
    assert not folder.exists()
    assert main(["throughput", "--quick", "-o", "here"]) == 0
    assert json.loads(Path("here/results.json").read_text())["form"] == "quick"


def test_missed_target_fails_after_the_folder_is_written(
    folder: Path, replace: Replace, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(missed=lambda self, results: ["0.9 is below 0.95"])
    assert main(["throughput"]) == 1
    assert "0.9 is below 0.95" in capsys.readouterr().err
    assert (folder / "results.json").exists()


def test_quick_form_has_no_targets(folder: Path, replace: Replace) -> None:
    """Neither when it is measured nor when it is rendered."""
    replace(missed=lambda self, results: ["0.9 is below 0.95"])
    assert main(["throughput", "--quick", "-o", "here"]) == 0
    assert main(["throughput", "--render", "-o", "here"]) == 0
    assert main(["throughput"]) == 1
    assert main(["throughput", "--render"]) == 1


def test_interrupted_run_resumes(folder: Path, replace: Replace, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[str] = []

    def measure(self: Any, quick: bool, cache: ResumeCache) -> dict[str, Any]:
        def make(part: str) -> float:
            made.append(part)
            if part == "second" and made.count("second") == 1:
                raise WeftError("the power went out")
            return 1.0

        return {"parts": [cache(part, partial(make, part)) for part in ("first", "second")]}

    replace(measure=measure)
    assert main(["throughput", "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert main(["throughput"]) == 2
    assert main(["throughput"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert made == ["first", "second"]
    assert main(["throughput", "--resume"]) == 0
    assert made == ["first", "second", "second"]
    assert not (folder / command.PARTIAL).exists()


def test_run_that_never_began_leaves_nothing(folder: Path, replace: Replace) -> None:
    def measure(self: Any, quick: bool, cache: ResumeCache) -> None:
        raise WeftError("no data")

    replace(measure=measure)
    assert main(["throughput"]) == 2
    assert not folder.exists()


def test_rendering_measures_nothing_and_fills_pages(folder: Path, replace: Replace) -> None:
    assert main(["throughput"]) == 0
    replace(measure=None)
    Path("page.md").write_text(f"before\n{table_mark('throughput/parts')}\nold\n{END}\nafter\n")
    assert main(["throughput", "--render", "--page", "page.md"]) == 0
    page = Path("page.md").read_text()
    assert "| 1 | 2.5 |" in page
    assert "old" not in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert main(["throughput", "--render", "--page", "nowhere.md"]) == 2
    assert main(["many-stages", "--render", "-o", str(folder)]) == 2
    (folder / "results.json").unlink()
    assert main(["throughput", "--render"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--render", "--quick"], "--render and --quick exclude each other"),
        (["--render", "--resume"], "--render and --resume exclude each other"),
        (["--render", "--overwrite"], "--render and --overwrite exclude each other"),
        (["--quick", "--resume"], "--quick and --resume exclude each other"),
        (["--quick", "--overwrite"], "--quick and --overwrite exclude each other"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--quick", "--page", "page.md"], "--quick writes with -o FOLDER only"),
        (["--page", "none.md"], "--page takes a page with a mark for a table: <!-- table throughput/"),
        (["--page", "nowhere.md"], "--page takes a page with a mark for a table: <!-- table throughput/"),
        (["--page", "endless.md"], "endless.md: the table throughput/parts has no end mark"),
        (["-o", "endless"], "README.md: the table parts has no end mark"),
        (["-o", "file"], "-o takes a folder (file is a file)"),
        (["--quick", "-o", "whole"], "whole holds the results of a whole run"),
        (["--render", "-o", "odd"], "results.json can't be read (it holds a list, not an object)"),
        (["--render", "-o", "formless"], "results.json has the form None"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_mistakes_fail_in_one_line_before_anything_is_measured(
    options: list[str], words: str, folder: Path, replace: Replace, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    Path("none.md").write_text("no mark")
    Path("page.md").write_text(f"{table_mark('throughput/parts')}\n{END}\n")
    Path("endless.md").write_text(f"{table_mark('throughput/parts')}\n{table_mark('memory/small')}\n{END}\n")
    for name in ("endless", "odd", "formless"):
        Path(name).mkdir()
    Path("endless/README.md").write_text(f"{table_mark('parts')}\n{table_mark('others')}\n{END}\n")
    Path("odd/results.json").write_text("[]")
    Path("formless/results.json").write_text('{"benchmark": "throughput"}')
    assert main(["throughput", "-o", "whole"]) == 0
    replace(measure=None)
    capsys.readouterr()
    assert main(["throughput", *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m benchmarks: ")
    assert message.count("\n") == 1
    assert words in message
    assert not folder.exists()


@pytest.mark.parametrize(
    "options", [["--quick"], ["--render"], ["--resume"], ["--overwrite"], ["--page", "x.md"], ["--output", "x"]]
)
def test_list_takes_no_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert f"{options[0]} needs the name of a benchmark, one of throughput" in capsys.readouterr().err


def test_unknown_name_fails_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("many_stages", "did you mean 'many-stages'?"), ("speed", "choose one of throughput, ")):
        assert main([name]) == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1


def test_missing_matplotlib_fails_before_measuring(
    folder: Path, replace: Replace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quick form that writes nothing does without."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["throughput", "--quick"]) == 0
    replace(measure=None)
    assert main(["throughput"]) == 2
    assert "plots need matplotlib" in capsys.readouterr().err
