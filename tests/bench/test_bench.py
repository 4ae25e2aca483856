"""`weft bench`: what is kept, what is refused, and that a folder shows what was measured and nothing else."""

import json
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.bench import command
from weft.bench.benchmark import BENCHMARKS, digest, module_of
from weft.bench.kept import Keep
from weft.bench.writing import END, mark, put, quartiles, spread, table, unsteady
from weft.cli import main
from weft.errors import WeftError


def fake(**functions: Any) -> Any:
    """A benchmark that measures two parts, and can be told to break."""
    given = {
        "measure": lambda quick, keep: {"parts": [keep("one", lambda: 1.5), keep("two", lambda: 2.5)]},
        "tables": lambda results: {"parts": table(("part", "value"), enumerate(results["parts"]))},
        "plots": lambda results: {"parts.svg": f"<svg>{sum(results['parts'])}</svg>"},
        "missed": lambda results: [],
    }
    return SimpleNamespace(**(given | functions))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "module_of", lambda name: fake())
    return tmp_path / "benchmarks" / "throughput"


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in BENCHMARKS)
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_four_functions(name: str) -> None:
    module = module_of(name)
    assert all(callable(getattr(module, function)) for function in ("measure", "tables", "plots", "missed"))


def test_the_digest_is_of_all_sources_that_measure(tmp_path: Path) -> None:
    """The runtime among them; a page that is drawn anew leaves it as it is."""
    assert len(digest()) == 16
    for name in ("runtime/worker.py", "runtime/report.py", "bench/paced.py", "bench/memory/held.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        before = digest(tmp_path)
        (tmp_path / name).write_text("new = 1")
        assert digest(tmp_path) != before
        (tmp_path / name).write_text("new = 2")
        assert digest(tmp_path) != before
    for name in ("cli.py", "draw/plots.py", "bench/memory/pages.py", "bench/slow_link/report.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        before = digest(tmp_path)
        (tmp_path / name).write_text("new = 1")
        assert digest(tmp_path) == before


def test_everything_is_regenerated_from_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput"]) == 0
    assert "| 1 | 2.5 |" in capsys.readouterr().out
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert first.keys() == {"README.md", "results.json", "parts.svg"}
    assert "| 1 | 2.5 |" in first["README.md"]
    assert "![parts](parts.svg)" in first["README.md"]
    results = json.loads(first["results.json"])
    assert (results["form"], results["sources"]) == ("whole", digest())
    assert all(digest() not in text for name, text in first.items() if name != "results.json")
    for path in folder.iterdir():
        path.unlink()
    assert main(["bench", "throughput"]) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


def test_the_quick_form_writes_nothing_unless_asked(folder: Path) -> None:
    assert main(["bench", "throughput", "--quick"]) == 0
    assert not folder.exists()
    assert main(["bench", "throughput", "--quick", "-o", "here"]) == 0
    assert json.loads(Path("here/results.json").read_text())["form"] == "quick"


def test_a_target_that_is_missed_is_told_and_the_folder_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "module_of", lambda name: fake(missed=lambda results: ["0.9 is below 0.95"]))
    assert main(["bench", "throughput"]) == 1
    assert "0.9 is below 0.95" in capsys.readouterr().err
    assert (folder / "results.json").exists()


def test_a_quick_form_has_no_targets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor have its results, when they are shown later."""
    monkeypatch.setattr(command, "module_of", lambda name: fake(missed=lambda results: ["0.9 is below 0.95"]))
    assert main(["bench", "throughput", "--quick", "-o", "here"]) == 0
    assert main(["bench", "throughput", "--render", "-o", "here"]) == 0
    assert main(["bench", "throughput"]) == 1
    assert main(["bench", "throughput", "--render"]) == 1


def test_a_run_that_broke_goes_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def measure(quick: bool, keep: Keep) -> dict[str, Any]:
        def make(part: str) -> float:
            made.append(part)
            if part == "two" and made.count("two") == 1:
                raise WeftError("the power went")
            return 1.0

        return {"parts": [keep(part, partial(make, part)) for part in ("one", "two")]}

    monkeypatch.setattr(command, "module_of", lambda name: fake(measure=measure))
    assert main(["bench", "throughput", "--resume"]) == 2
    assert "nothing to go on with" in capsys.readouterr().err
    assert main(["bench", "throughput"]) == 2
    assert main(["bench", "throughput"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert made == ["one", "two"]
    assert main(["bench", "throughput", "--resume"]) == 0
    assert made == ["one", "two", "two"]
    assert not (folder / command.PARTIAL).exists()


def test_a_run_that_never_began_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(quick: bool, keep: Keep) -> None:
        raise WeftError("no data")

    monkeypatch.setattr(command, "module_of", lambda name: fake(measure=measure))
    assert main(["bench", "throughput"]) == 2
    assert not folder.exists()


def test_rendering_measures_nothing_and_fills_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench", "throughput"]) == 0
    monkeypatch.setattr(command, "module_of", lambda name: fake(measure=None))
    Path("page.md").write_text(f"before\n{mark('throughput/parts')}\nold\n{END}\nafter\n")
    assert main(["bench", "throughput", "--render", "--page", "page.md"]) == 0
    page = Path("page.md").read_text()
    assert "| 1 | 2.5 |" in page
    assert "old" not in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert main(["bench", "throughput", "--render", "--page", "nowhere.md"]) == 2
    assert main(["bench", "many-stages", "--render", "-o", str(folder)]) == 2
    (folder / "results.json").unlink()
    assert main(["bench", "throughput", "--render"]) == 2


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
        (["--page", "none.md"], "--page takes a page with a place for a table of throughput"),
        (["--page", "nowhere.md"], "--page takes a page with a place for a table of throughput"),
        (["--page", "endless.md"], "endless.md: the table throughput/parts has no end of its own"),
        (["-o", "endless"], "README.md: the table parts has no end of its own"),
        (["-o", "file"], "-o takes a folder (file is a file)"),
        (["--quick", "-o", "whole"], "whole holds the results of a whole run"),
        (["--render", "-o", "odd"], "results.json can't be read (it holds no object but list)"),
        (["--render", "-o", "formless"], "results.json is of the form None"),
    ],
)
def test_what_can_not_be_done_is_refused_before_anything_is_measured(
    options: list[str],
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("file").write_text("")
    Path("none.md").write_text("no mark")
    Path("page.md").write_text(f"{mark('throughput/parts')}\n{END}\n")
    Path("endless.md").write_text(f"{mark('throughput/parts')}\n{mark('memory/small')}\n{END}\n")
    for name in ("endless", "odd", "formless"):
        Path(name).mkdir()
    Path("endless/README.md").write_text(f"{mark('parts')}\n{mark('others')}\n{END}\n")
    Path("odd/results.json").write_text("[]")
    Path("formless/results.json").write_text('{"benchmark": "throughput"}')
    assert main(["bench", "throughput", "-o", "whole"]) == 0
    monkeypatch.setattr(command, "module_of", lambda name: fake(measure=None))
    capsys.readouterr()
    assert main(["bench", "throughput", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("weft: ")
    assert words in told
    assert not folder.exists()


@pytest.mark.parametrize(
    "options", [["--quick"], ["--render"], ["--resume"], ["--overwrite"], ["--page", "x.md"], ["--output", "x"]]
)
def test_the_list_takes_no_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert f"{options[0]} is about one benchmark; give its name, one of throughput" in capsys.readouterr().err


def test_an_unknown_name_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed"]) == 2
    assert "there are throughput" in capsys.readouterr().err


def test_kept_parts_survive_half_a_line_but_no_other_form(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    Keep(path, form={"sources": "a"})("one", lambda: [1, 2])
    with path.open("a") as file:
        file.write('{"part": "tw')
    kept = Keep(path, form={"sources": "a"}, resume=True)
    assert "one" in kept
    assert kept("one", lambda: None) == [1, 2]
    assert kept("two", lambda: 3) == 3
    assert Keep(path, form={"sources": "a"}, resume=True)("two", lambda: None) == 3
    with pytest.raises(WeftError, match="another form"):
        Keep(path, form={"sources": "b"}, resume=True)
    path.write_text("")
    with pytest.raises(WeftError, match="another form"):
        Keep(path, form={"sources": "a"}, resume=True)


def test_kept_parts_that_are_damaged_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    keep = Keep(path, form={})
    keep("one", lambda: 1)
    keep("two", lambda: 2)
    path.write_text(path.read_text().replace('"part": "one"', '"part": '))
    with pytest.raises(WeftError, match="line 2 is damaged"):
        Keep(path, form={}, resume=True)


def test_tables_and_spreads() -> None:
    assert table(("a", "b"), [("x", 1)]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert unsteady([1.0, 2.0, 3.0], 0.5) is False
    assert unsteady([1.0, 2.0, 9.0], 0.5) is True
    with pytest.raises(WeftError, match="no place for the table x"):
        put("a page", "x", "text")


def test_a_script_writes_its_table_between_its_own_marks(tmp_path: Path) -> None:
    write = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/writing.py"))["write"]
    readme = tmp_path / "README.md"
    marks = ["<!-- table cost: written by run.py --write -->", "<!-- end of the table cost -->"]
    readme.write_text("\n".join(["before", marks[0], "old", marks[1], "after\n"]))
    write(readme, "new", name="cost")
    assert readme.read_text() == "\n".join(["before", marks[0], "new", marks[1], "after\n"])
    with pytest.raises(WeftError, match="no place for the table"):
        write(readme, "new", name="learning")
    readme.write_text(marks[0])
    with pytest.raises(WeftError, match="no place for the table"):
        write(readme, "new", name="cost")
    assert readme.read_text() == marks[0]
