"""What all benchmarks share: stored parts, the digest of sources, schedules by name, deadlines, the environment."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness import ResumeCache, describe_environment, fits, require_files, schedule_named
from benchmarks.harness.catalog import sources_digest
from weft.errors import WeftError

ROOT = Path(__file__).parents[2]


def test_stored_parts_survive_half_a_line_but_no_other_form(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    ResumeCache(path, form={"sources": "a"})("first", lambda: [1, 2])
    with path.open("a") as file:
        file.write('{"part": "seco')
    cache = ResumeCache(path, form={"sources": "a"}, resume=True)
    assert "first" in cache
    assert cache("first", lambda: None) == [1, 2]
    assert cache("second", lambda: 3) == 3
    assert ResumeCache(path, form={"sources": "a"}, resume=True)("second", lambda: None) == 3
    with pytest.raises(WeftError, match="another form"):
        ResumeCache(path, form={"sources": "b"}, resume=True)
    path.write_text("")
    with pytest.raises(WeftError, match="another form"):
        ResumeCache(path, form={"sources": "a"}, resume=True)


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    cache = ResumeCache(path, form={})
    cache("first", lambda: 1)
    cache("second", lambda: 2)
    path.write_text(path.read_text().replace('"part": "first"', '"part": '))
    with pytest.raises(WeftError, match="line 2 is damaged"):
        ResumeCache(path, form={}, resume=True)


def test_digest_covers_all_sources_that_measure(tmp_path: Path) -> None:
    """Of weft and of the benchmarks; a change of what only reads results leaves it as it is."""
    sources = {"weft": tmp_path / "src/weft", "benchmarks": tmp_path / "benchmarks"}
    assert len(sources_digest()) == 16

    def changes(name: str) -> set[bool]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = [sources_digest(sources)]
        for text in ("new = 1", "new = 2"):
            path.write_text(text)
            digests.append(sources_digest(sources))
        return {digests[0] != digests[1], digests[1] != digests[2]}

    for name in ("engine/worker.py", "engine/report.py"):
        assert changes(f"src/weft/{name}") == {True}
    for name in ("many_stages/ranks.py", "memory/measure.py", "harness/deadline.py", "contenders/layers.py"):
        assert changes(f"benchmarks/{name}") == {True}
    for name in ("src/weft/cli.py", "src/weft/draw/report/page.py", "benchmarks/rendering/plots.py"):
        assert changes(name) == {False}
    assert changes("benchmarks/memory/pages.py") == {False}


def test_schedules_by_name_with_options() -> None:
    assert schedule_named("wpipe warmup 2", 2, 4).options == {"warmup": 2}
    assert schedule_named("xpipe versions exact", 2, 4).options == {"versions": "exact"}
    assert (fits("wpipe", 2, 4), fits("wpipe", 2, 3)) == (True, False)
    with pytest.raises(WeftError, match="pairs of a name and a value"):
        schedule_named("wpipe warmup", 2, 4)
    with pytest.raises(WeftError, match="no schedule"):
        fits("wpip", 2, 4)


def test_process_that_hangs_exits_and_shows_where() -> None:
    code = "import time\nfrom benchmarks.harness import exit_after\n"
    code += "with exit_after({}):\n    time.sleep({})\nprint('out')"
    hung, done = (
        subprocess.run(
            [sys.executable, "-c", code.format(*times)], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        for times in ((0.2, 100), (100, 0))
    )
    assert (hung.returncode, hung.stdout) == (1, "")
    assert 'File "<string>", line 4 in <module>' in hung.stderr
    assert (done.returncode, done.stdout) == (0, "out\n")


def test_environment_names_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Abacus 9: wooden\n"
    module = "benchmarks.harness.environment"
    monkeypatch.setattr(f"{module}.Path", lambda path: SimpleNamespace(read_text=lambda encoding: text))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 3, 5}, raising=False)
    assert describe_environment("torch").startswith("3 cores (Abacus 9: wooden), ")
    text = "Hardware : a board\n"
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert describe_environment("torch").startswith("3 cores (riscv64), ")


def test_missing_data_fails_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").touch()
    require_files(tmp_path, ["text.txt"])
    with pytest.raises(WeftError, match=r"needs more\.txt in the folder that WEFT_DATA .*; set it, or use"):
        require_files(tmp_path, ["text.txt", "more.txt"])


def test_imports_of_rooms() -> None:
    """Only from the room, never from its modules; `rendering` < `harness` < `contenders` < the benchmarks."""
    rooms = ("rendering", "harness", "contenders")
    for path in (ROOT / "benchmarks").rglob("*.py"):
        home = path.relative_to(ROOT / "benchmarks").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            _, room, *module = name.split(".") if name.startswith("benchmarks.") else ("", "")
            if room in rooms and home != room:
                assert not module or home == "__main__.py", f"{path} imports {name}"
                assert home not in rooms or rooms.index(room) < rooms.index(home), f"{path} imports {name}"


def test_a_process_ends_with_its_parent() -> None:
    """Both write to one pipe, so its end is that of both; only the parent is killed."""
    imports = "import os, subprocess, sys, time; from benchmarks.harness import exit_with_parent"
    child = f"{imports}; exit_with_parent(int(sys.argv[1])); print('tied', flush=True); time.sleep(600)"
    start = f"{imports}; subprocess.run([sys.executable, '-c', {child!r}, str(os.getpid())])"
    with subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "tied\n"
        parent.kill()
        assert not parent.communicate(timeout=60)[0]
