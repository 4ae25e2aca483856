"""The README is true: its commands run, its snippets run, its links lead somewhere."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_docs import MORE, UPDATES, run_weft

from weft.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


LINES = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("weft ")]
TRAINING = [line for line in LINES if line.split()[1] in ("train", "compare", "export")]
COMMANDS = [line for line in LINES if line not in TRAINING]


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = 2 if "exits with 2" in command else 0
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == expected
    captured = capsys.readouterr()
    assert captured.err if expected else captured.out
    if "-o" in words:
        assert (copy / words[words.index("-o") + 1]).stat().st_size > 0


def test_the_commands_that_train_run_one_after_the_other(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut short, as the pages' own are."""
    (job,) = blocks("toml")
    Path("job.toml").write_text(job)
    updates = UPDATES
    for line in TRAINING:
        updates += MORE if "train.updates=" in line else 0
        run_weft(line, updates, capsys)
    assert (copy / "runs" / "gpt-wpipe" / "export" / "huggingface" / "config.json").exists()


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_snippet_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[number], f"README snippet {number}", "exec"), {})
    assert capsys.readouterr().out


def test_the_costs_of_the_readme_are_those_of_the_example() -> None:
    assert json.loads(blocks("json")[0]) == json.loads((ROOT / "examples" / "costs.json").read_text())


def test_the_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["train", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert links
    for link in links:
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, snippet in enumerate(blocks("python", page.read_text())):
        exec(compile(snippet, f"{page.name} snippet {number}", "exec"), names)
        assert capsys.readouterr().out


@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_example_trains(start: list[str], tmp_path: Path) -> None:
    """From a plain script and under torchrun, as its text says."""
    command = [sys.executable, *start, str(ROOT / "examples" / "train.py"), "wpipe", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.search(r"mini-batch +20 +loss \d", done.stdout)
    assert "peak total" in done.stdout
