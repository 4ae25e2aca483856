"""The pages of `docs/` about `weft train` are true: every command in them runs, and the table of keys is complete.

The commands of a page run one after the other in one folder, as a reader would type them, and so do its `py` snippets,
which need what the commands have made (`python` ones stand alone: see test_readme.py). A `toml` or `py` block that
begins with `# NAME.toml` or `# NAME.py` is saved under that name. What would take minutes is cut short, by these rules
and no others:

- `weft train` and `weft compare` get the settings of `CUTS` behind their own, and ranks that take turns in this process
  (`schedule.virtual`): tests of real ones are in tests/train/test_processes.py. A command that goes on with a run, or
  has a number of updates of its own, makes `MORE` updates more than the one before.
- `torchrun` lines run in real processes, all lines of a block at the same time, as on many machines: here it is one, so
  the address is 127.0.0.1 and the port a free one.
"""

import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.cli import main
from weft.train.config import describe
from weft.train.job import Job, job_of
from weft.train.run.folder import run_folder

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (
    "getting-started",
    "choosing-a-schedule",
    "your-own-model",
    "many-machines",
    "checkpoints",
    "reading-the-report",
)
UPDATES, MORE = 4, 1
CUTS: dict[str, Any] = {
    "train.batch": 16,
    "evaluate.every": 4,
    "evaluate.samples": 16,
    "checkpoint.every": 4,
    "log.every": 1,
    "log.sample": 4,
}
DEADLINE = 240.0  # seconds; for what hangs


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text("utf-8")


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """Language and text of a page's blocks, in their order."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in found if language in languages]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader of a page might be: beside the examples, with some text of their own."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    monkeypatch.chdir(tmp_path)
    threads, path, modules = torch.get_num_threads(), list(sys.path), set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    torch.set_num_threads(threads)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("weft_user_"):
            del sys.modules[name]
    for number, handler in handlers.items():
        signal.signal(number, handler)


# Commands


def job_in(words: list[str]) -> Job:
    """The job that a `weft train` or `weft compare` command is about."""
    sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    if "--resume" in words:
        return run_folder(words[words.index("--resume") + 1]).job(sets)
    files = [word for word in words if word.endswith(".toml")]
    return job_of(files[0] if files else None, sets)


def cut(words: list[str], updates: int, *, virtual: bool = True) -> list[str]:
    """A command that takes a second instead of minutes; see the top of this file."""
    job = job_in(words)
    settings = CUTS | {"train.updates": updates}
    if virtual:
        settings |= {"schedule.virtual": True, "schedule.ranks": job.schedule.ranks or 2}
    if "--resume" not in words:
        if job.model.name == "gpt" and not job.model.weights:
            settings |= {"model.size": "tiny", "model.width": 16}
        if hasattr(job.data, "context"):
            settings["data.context"] = 16
    return [*words, *(word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}"))]


def run_weft(line: str, updates: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that begins with weft, cut short, in this process."""
    command, _, file = line.partition(" > ")
    words = shlex.split(command, comments=True)[1:]
    wanted = 2 if "exits with 2" in line else 0
    cuttable = words[0] == "train" or (words[0] == "compare" and "--resume" not in words)
    if cuttable and not wanted:
        words = cut(words, updates, virtual="--max-restarts" not in words)  # which is for real ranks
    capsys.readouterr()
    assert main(words) == wanted, (line, capsys.readouterr().err)
    captured = capsys.readouterr()
    assert captured.err if wanted else captured.out
    if file:
        Path(file.strip()).write_text(captured.out, "utf-8")


def on_one_machine(line: str, port: int, updates: int) -> list[str]:
    """A torchrun line, cut short, for this machine."""
    words = shlex.split(line)
    here = {"--master-addr": "127.0.0.1", "--master-port": str(port)}
    words = [here.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    weft = words.index("weft") + 1
    assert words[weft - 2] == "-m"
    agent = [sys.executable, "-m", "torch.distributed.run", *words[1:weft]]
    again = ["--set", "schedule.virtual=false"]  # a configuration that a cut command has printed says otherwise
    return [*agent, *cut(words[weft:], updates, virtual=False), *again]


def run_torchrun(lines: list[str], updates: int) -> None:
    """All lines at the same time; whatever happens, none is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            on_one_machine(line, port, updates),
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for line in lines
    ]
    try:
        told = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # which torchrun passes on to its ranks
                agent.wait(timeout=60)
    assert [agent.returncode for agent in agents] == [0] * len(agents), told
    assert sum("report.html" in one for one in told) == 1


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran, updates = 0, UPDATES
    names: dict[str, object] = {}
    for language, text in blocks(page, "toml", "sh", "py"):
        first, *lines = text.splitlines()
        if re.fullmatch(r"# \w+\.(toml|py)", first):
            Path(first.removeprefix("# ")).write_text(text, "utf-8")
            continue
        if language == "py":
            exec(compile(text, f"{page}.md", "exec"), names)
            assert capsys.readouterr().out
            continue
        agents = [line for line in (first, *lines) if line.startswith("torchrun ")]
        for line in (first, *lines):
            if line.startswith("weft "):
                updates += MORE if "train.updates=" in line or "--resume" in line else 0
                run_weft(line, updates, capsys)
            else:
                assert line in agents, f"{page}.md has a line that no test runs: {line}"
            ran += 1
        if agents:
            run_torchrun(agents, updates)
    assert ran > 2
    for run in (run_folder(one.parent.name) for one in Path("runs").glob("*/job.toml")):
        if not (run.path / "compare.json").exists():
            summary = run.summary()
            assert summary is not None
            assert math.isfinite(summary["final"]["loss"])
        assert run.report.stat().st_size > 10_000


# Many machines: what can't be run here is the same command in another dress


def weft_commands(text: str) -> list[str]:
    """From `-m weft` to the end of the line or quote."""
    return [" ".join(one.split()) for one in re.findall(r"-m weft [^'\n]*", text)]


def real_commands() -> list[str]:
    return [one for _, text in blocks("many-machines", "sh") for one in weft_commands(text)]


def last_torchrun() -> str:
    lines = [line for _, text in blocks("many-machines", "sh") for line in text.splitlines()]
    return next(line for line in reversed(lines) if line.startswith("torchrun "))


def flags(text: str) -> set[str]:
    """The options of torchrun in a text."""
    whole = " ".join(text.split())
    return set(re.findall(r"--[\w-]+", whole.partition("torchrun ")[2].partition("-m weft")[0]))


def test_the_slurm_script_parses_and_runs_the_tested_command(tmp_path: Path) -> None:
    ((_, script),) = blocks("many-machines", "bash")
    (tmp_path / "job.sh").write_text(script)
    done = subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (inner,) = re.findall(r"srun bash -c '(.*)'", script)
    assert subprocess.run(["bash", "-n", "-c", inner], capture_output=True).returncode == 0
    assert weft_commands(script) == [real_commands()[-1]]
    assert flags(inner) == flags(last_torchrun()) - {"--max-restarts"}


def test_the_manifest_parses_and_runs_the_tested_command() -> None:
    yaml = pytest.importorskip("yaml")
    ((_, text),) = blocks("many-machines", "yaml")
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    shell, option, command = container["command"]
    assert (shell, option) == ("sh", "-c")
    assert subprocess.run(["sh", "-n", "-c", command], capture_output=True).returncode == 0
    assert weft_commands(command) == [real_commands()[-1]]
    assert flags(command) == flags(last_torchrun()) - {"--max-restarts"}
    # the first pod is found under the name that torchrun is told, which the Service of the subdomain gives it
    name = job["metadata"]["name"]
    assert f"--master-addr {name}-0.{pod['subdomain']} " in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    assert f"--nnodes {job['spec']['completions']} " in command
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


# The table of all keys

OPENING = """# Configuration

All keys of a job, as `weft train --print-config` prints them; this page is made from them. In a file a key `train.lr`
is `lr` in the section `[train]`; on the command line it is `--set train.lr=1e-3`.
[getting-started.md](getting-started.md) has a first job file.
"""
TITLES = {
    "": "The job",
    "model": "`model`",
    "data": "`data`",
}


def table(rows: list[tuple[str, str, str, str, str]]) -> str:
    """Rows of `describe` as Markdown."""
    lines = ["| key | type | default | meaning | limits |", "| --- | --- | --- | --- | --- |"]
    for key, kind, default, meaning, limits in rows:
        shown = [f"`{key}`", kind, f"`{default}`", meaning, limits]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in shown)} |")
    return "\n".join(lines)


def configuration() -> str:
    """docs/configuration.md; the models and the data have tables of their own."""
    parts = [OPENING]
    sections: dict[str, list[Any]] = {}
    for row in describe(Job):
        sections.setdefault(row[0].rpartition(".")[0].partition(".")[0], []).append(row)
    about = {one.name: getattr(one.default_factory, "__doc__", "") for one in fields(Job)}
    for section, rows in sections.items():
        parts.append(f"## {TITLES.get(section, f'`{section}`')}\n")
        if section not in ("model", "data"):
            parts += [f"{about[section].strip()}\n"] if section else []
            parts.append(table(rows) + "\n")
            continue
        parts.append(table(rows[:1]) + "\n")
        choices: dict[str, list[Any]] = {}
        for key, kind, default, meaning, limits in rows[1:]:
            names, _, words = meaning.partition(": ")
            choices.setdefault(names, []).append((key, kind, default, words, limits))
        for names, own in choices.items():
            parts.append(f"### {names}\n")
            parts.append(table(own) + "\n")
    return "\n".join(parts)


def test_the_configuration_page_has_every_key(request: pytest.FixtureRequest) -> None:
    """`pytest tests/test_docs.py -k configuration --write-golden` writes it anew."""
    page = DOCS / "configuration.md"
    if request.config.getoption("--write-golden"):
        page.write_text(configuration(), "utf-8")
    assert page.read_text("utf-8") == configuration()
    keys = {row[0] for row in describe(Job)}
    assert set(re.findall(r"^\| `([\w.]+)` \|", page.read_text("utf-8"), re.MULTILINE)) == keys


def test_keys_that_pages_name_are_there() -> None:
    """A key in the running text is one of the job's."""
    keys = {row[0] for row in describe(Job)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
        for one in re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", prose):
            if one.partition(".")[0] in sections:
                known = one in keys or one.endswith((".toml", ".json", ".md"))
                assert known, f"{page}.md names {one}"
