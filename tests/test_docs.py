"""README, CONTRIBUTING and the pages of `docs/` are true: commands and snippets run, links and paths exist.

The commands of a page run one after the other in one folder, as a reader would type them. So do its `py` snippets,
which need the files that the commands write, and its `python` snippets, which do not. A `toml` or `py` block that
begins with `# NAME.toml` or `# NAME.py` is saved under that name. What would take minutes is shortened, by these rules
only:

- `weft train` and `weft compare` get the settings of `SHORT` after their own, and virtual ranks: tests of real ones are
  in tests/train/test_processes.py. A command that resumes a run, or sets a number of updates, makes `MORE` updates more
  than the one before.
- `weft train --max-restarts` keeps its real ranks, which are forked (see tests/helpers/starter.py).
- The ranks of `weft doctor` check nothing: tests/doctor/test_command.py runs the whole command.
- `torchrun` lines run in real processes, all lines of a block at the same time, as on many machines. Here it is one
  machine, so the address is 127.0.0.1 and the port a free one.
- `make` lines are not run: they install packages. Their targets must exist.
"""

import json
import math
import os
import pkgutil
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
from tests.helpers.imports import LAYERS, ROOMS
from tests.helpers.scripts import Commands
from tests.train.test_start import TABLE

from weft.cli import main
from weft.doctor import command as doctor
from weft.doctor.checks import Check, Outcome
from weft.faults import FAULTS, PHASES
from weft.runtime.comm import SHARED_MEMORY_SWITCH
from weft.runtime.device.facts import SHARE
from weft.runtime.device.facts import VARIABLE as DEVICE_VARIABLE
from weft.schedule import load_schedule_function, write_csv
from weft.train.config import describe
from weft.train.job import Job, job_of, job_of_run
from weft.train.run import find_run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["README", "CONTRIBUTING", "CHANGELOG", *sorted(page.stem for page in DOCS.glob("*.md"))]
WIDTH = 120
UPDATES, MORE = 4, 1
SHORT: dict[str, Any] = {
    "train.batch": 16,
    "evaluate.every": 4,
    "evaluate.samples": 16,
    "checkpoint.every": 4,
    "log.every": 1,
    "log.sample": 4,
}
DEADLINE = 240.0  # seconds; for what hangs


def path_of(page: str) -> Path:
    """`README` and other names in capitals are at the root, the rest is in docs/."""
    return (ROOT if page.isupper() else DOCS) / f"{page}.md"


def text_of(page: str) -> str:
    return path_of(page).read_text("utf-8")


def prose_of(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    """Language and text of a page's blocks, in their order."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    return [(language, text) for language, text in found if language in languages]


def command_lines(text: str) -> list[str]:
    """The commands of a block; a backslash at the end of a line continues it."""
    return re.sub(r"\\\n\s*", "", text).splitlines()


# Pages that start torchrun. tests/train/test_processes.py and tests/runtime/process/ cover weft train and weft.launch
# under torchrun.
SLOW = {"many-machines", "training"}
WITH_COMMANDS = [
    pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in PAGES if blocks(page, "sh")
]
WITH_SNIPPETS = [page for page in PAGES if blocks(page, "python")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader of a page might be: next to the examples, with some text files."""
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
        return job_of_run(find_run(words[words.index("--resume") + 1]).path, sets)
    files = [word for word in words if word.endswith(".toml")]
    return job_of(files[0] if files else None, sets)


def shortened(words: list[str], updates: int, *, virtual: bool = True) -> list[str]:
    """A command that takes a second instead of minutes; see the top of this file."""
    job = job_in(words)
    settings = SHORT | {"train.updates": updates}
    if virtual:
        settings |= {"schedule.virtual": True, "schedule.ranks": job.schedule.ranks or 2}
    if "--resume" not in words:
        if job.model.name == "gpt" and not job.model.weights:
            settings |= {"model.size": "tiny", "model.width": 16}
        if hasattr(job.data, "context"):
            settings["data.context"] = 16
    return [*words, *(word for key, value in settings.items() for word in ("--set", f"{key}={str(value).lower()}"))]


def run_weft(line: str, updates: int, capsys: pytest.CaptureFixture[str], in_processes: Commands) -> None:
    """A line that begins with weft, shortened, in this process if it needs no real ranks."""
    words = shlex.split(line, comments=True)[1:]
    expected = 2 if "exits with 2" in line else 0
    trains = words[0] == "train" or (words[0] == "compare" and "--resume" not in words)
    real = "--max-restarts" in words
    if trains and not expected:
        words = shortened(words, updates, virtual=not real)
    if real:
        done = in_processes.run(*words)
        assert (done.code, bool(done.out)) == (expected, True), (line, done.err)
        return
    capsys.readouterr()
    assert main(words) == expected, (line, capsys.readouterr().err)
    captured = capsys.readouterr()
    assert captured.err if expected else captured.out
    if "-o" in words:
        output = Path(words[words.index("-o") + 1])
        assert any(output.iterdir()) if output.is_dir() else output.stat().st_size > 0


def on_one_machine(line: str, port: int, updates: int) -> list[str]:
    """A torchrun line, shortened, for this machine."""
    words = shlex.split(line)
    here = {"--master-addr": "127.0.0.1", "--master-port": str(port)}
    words = [here.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    weft = words.index("weft") + 1
    assert words[weft - 2] == "-m"
    agent = [sys.executable, "-m", "torch.distributed.run", *words[1:weft]]
    return [*agent, *shortened(words[weft:], updates, virtual=False)]


def run_torchrun(lines: list[str], updates: int) -> None:
    """All lines at the same time; whatever happens, no process is left."""
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
        outputs = [agent.communicate(timeout=DEADLINE)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # which torchrun passes on to its ranks
                agent.wait(timeout=60)
    assert [agent.returncode for agent in agents] == [0] * len(agents), outputs
    assert sum("report.html" in output for output in outputs) == 1


def run_example(line: str) -> None:
    """examples/train.py, alone or under torchrun, with few mini-batches."""
    start, script, *schedule = line.partition("examples/train.py")
    words = shlex.split(start)
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    else:
        assert words == ["python"]
        words = [sys.executable]
    command = [*words, script, *"".join(schedule).split(), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert re.search(r"mini-batch +20 +loss \d", done.stdout)
    assert "peak total" in done.stdout


def all_is_well(checks: list[Check], *args: object, **options: object) -> list[Outcome]:
    """In place of `run_on_ranks`."""
    return [Outcome(check=check.name, verdict="passed", found="not run") for check in checks]


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_of_a_page_runs(
    page: str,
    folder: Path,
    commands: Commands,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "run_on_ranks", all_is_well)
    ran, updates = 0, UPDATES
    names: dict[str, object] = {}
    for language, text in blocks(page, "toml", "sh", "py"):
        first = text.partition("\n")[0]
        if re.fullmatch(r"# \w+\.(toml|py)", first):
            Path(first.removeprefix("# ")).write_text(text, "utf-8")
            continue
        if language == "py":
            exec(compile(text, f"{page}.md", "exec"), names)
            assert capsys.readouterr().out
            continue
        lines = command_lines(text)
        agents = [line for line in lines if re.match(r"torchrun .* -m weft ", line)]
        for line in lines:
            if line.startswith("weft "):
                updates += MORE if "train.updates=" in line or "--resume" in line else 0
                run_weft(line, updates, capsys, commands)
            elif line.startswith("make "):
                assert line.split()[1] in targets(), line
            elif line.startswith("export "):
                for name, value in (setting.split("=") for setting in line.split()[1:]):
                    monkeypatch.setenv(name, value)
                    commands.environment[name] = value
            elif "examples/train.py" in line:
                run_example(line)
            else:
                assert line in agents, f"{page}.md has a line that no test runs: {line}"
            ran += 1
        if agents:
            run_torchrun(agents, updates)
    assert ran > 1
    for run in (find_run(job.parent.name) for job in Path("runs").glob("*/job.toml")):
        if not (run.path / "compare.json").exists():
            summary = run.summary()
            assert summary is not None
            assert math.isfinite(summary["final"]["loss"])
        assert run.report.stat().st_size > 10_000


def without_numbers(text: str) -> set[str]:
    return {re.sub(r"[\d.,:/%]+( [KMG]iB)?", "#", line) for line in text.splitlines()}


def test_the_output_on_a_page_is_what_a_run_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(text for _, text in blocks("getting-started", "text"))
    assert main(["train", *shortened([], UPDATES)]) == 0
    assert without_numbers(shown) <= without_numbers(capsys.readouterr().out)


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for number, (_, snippet) in enumerate(blocks(page, "python")):
        exec(compile(snippet, f"{page}.md snippet {number}", "exec"), names)
        assert capsys.readouterr().out


# Text


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        target = path_of(page).parent / name if name else path_of(page)
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {anchor_of(heading) for heading in headings}, link


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_every_page_can_be_found(page: str) -> None:
    """README links to all of them."""
    assert page == "README" or f"({path_of(page).relative_to(ROOT)})" in text_of("README")


@pytest.mark.parametrize(
    "page",
    [*map(path_of, PAGES), *sorted(ROOT.glob("benchmarks/*/README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_lines_are_short(page: Path) -> None:
    """A row of a table can't be wrapped, and neither can an address."""
    lines = enumerate(page.read_text("utf-8").splitlines(), start=1)
    long = [number for number, line in lines if len(line) > WIDTH and not line.startswith("|") and "://" not in line]
    assert not long


@pytest.mark.parametrize("page", PAGES)
def test_every_python_name_exists(page: str) -> None:
    """`weft.Pipeline`, `weft.train.models.Net(…)`: packages, modules and what is in them."""
    for name in re.findall(r"`(weft(?:\.\w+)+)", prose_of(page)):
        assert pkgutil.resolve_name(name) is not None, name


# CONTRIBUTING


def test_every_path_in_contributing_exists() -> None:
    paths = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[^`\s]*)`", text_of("CONTRIBUTING"))
    assert len(paths) > 30
    for path in paths:
        assert (ROOT / path).exists(), path


def test_every_name_in_contributing_is_in_its_file() -> None:
    """`NAME` in `path/file.py`."""
    named = re.findall(r"((?:`\w+` and )?`\w+`) in `([\w./]+\.py)`", text_of("CONTRIBUTING"))
    assert len(named) > 15
    for names, path in named:
        for name in re.findall(r"\w+(?=`)", names):
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text("utf-8")), f"{path} has no {name}"


def test_the_drawings_show_the_order_of_imports() -> None:
    """From top to bottom; tests/test_imports.py checks that imports keep to it."""
    packages, rooms = (re.findall(r"^(\w+)", text, re.MULTILINE) for _, text in blocks("CONTRIBUTING", "text"))
    (modules,) = re.findall(r"small modules: ([^.]*)\.", text_of("CONTRIBUTING"))
    small = re.findall(r"`(\w+)`", modules)
    layers = [layer for layer in reversed(LAYERS) if not layer.startswith("__")]
    assert packages == layers[: len(packages)]
    assert sorted(small) == sorted(layers[len(packages) :])
    assert rooms == [room for room in reversed(ROOMS) if room != "__init__"]


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_every_make_target_in_the_text_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"`make ([\w-]+)`", text_of(page)):
            assert target in targets(), f"{page}.md names make {target}"


def test_the_costs_of_the_simulator_page_are_those_of_the_example() -> None:
    ((_, costs),) = blocks("simulator", "json")
    assert json.loads(costs) == json.loads((ROOT / "examples" / "costs.json").read_text("utf-8"))


def test_the_schedule_of_the_page_is_that_of_the_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, snippet),) = blocks("your-own-schedule", "python")
    names: dict[str, Any] = {}
    exec(compile(snippet, "your-own-schedule.md", "exec"), names)
    sizes = {"stages": 4, "microbatches": 4}
    example = load_schedule_function("examples/own_schedule.py:stale")(**sizes)
    assert write_csv(names["stale"](**sizes)) == write_csv(example)


# Many machines: what can't run here contains a command that does


def weft_commands(text: str) -> list[str]:
    """From `-m weft` to the end of the line or quote."""
    return [" ".join(command.split()) for command in re.findall(r"-m weft [^'\n]*", text)]


def shown_lines() -> list[str]:
    return [line for _, text in blocks("many-machines", "sh") for line in command_lines(text)]


def last_torchrun() -> str:
    return next(line for line in reversed(shown_lines()) if line.startswith("torchrun "))


def flags(text: str) -> set[str]:
    """The options of torchrun in a text."""
    whole = " ".join(text.split())
    return set(re.findall(r"--[\w-]+", whole.partition("torchrun ")[2].partition("-m weft")[0]))


def test_the_slurm_script_parses_and_runs_the_tested_command(tmp_path: Path) -> None:
    ((_, script),) = blocks("many-machines", "bash")
    (tmp_path / "job.sh").write_text(script)
    done = subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (inner,) = re.findall(r"srun bash -c '(.*)'", script, re.DOTALL)
    assert subprocess.run(["bash", "-n", "-c", inner], capture_output=True).returncode == 0
    assert weft_commands(script) == weft_commands(last_torchrun())
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
    assert weft_commands(command) == weft_commands(last_torchrun())
    assert flags(command) == flags(last_torchrun()) - {"--max-restarts"}
    # torchrun finds the first pod by the name that the Service of the subdomain gives it
    name = job["metadata"]["name"]
    assert f"--master-addr {name}-0.{pod['subdomain']} " in command
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completionMode"] == "Indexed"
    assert f"--nnodes {job['spec']['completions']} " in command
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


# The table of all keys

OPENING = """# Configuration

All keys of a job, as printed by `weft train --print-config`; this page is generated from the code. The key `train.lr`
is `lr` in the section `[train]` of a file, and `--set train.lr=1e-3` on the command line.
[getting-started.md](getting-started.md) shows a first job file.
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


VARIABLES = """## Environment variables

| variable | meaning |
| --- | --- |
| `WEFT_DEVICE` | where ranks compute, if the code does not say: `cpu`, `cuda`, `cuda:1`; see [gpus.md](gpus.md) |
| `WEFT_SHARE_DEVICES` | `1` lets ranks of a host share devices, for tests on few devices |
| `WEFT_SHARED_MEMORY` | `0` sends messages of ranks on a host over the process group, not through shared memory |
"""


def configuration() -> str:
    """docs/configuration.md; each model and each data format has its own table."""
    parts = [OPENING]
    sections: dict[str, list[Any]] = {}
    for row in describe(Job):
        sections.setdefault(row[0].rpartition(".")[0].partition(".")[0], []).append(row)
    about = {section.name: getattr(section.default_factory, "__doc__", "") for section in fields(Job)}
    for section, rows in sections.items():
        parts.append(f"## {TITLES.get(section, f'`{section}`')}\n")
        if section not in ("model", "data"):
            parts += [f"{about[section].strip()}\n"] if section else []
            parts.append(table(rows) + "\n")
            continue
        parts.append(table(rows[:1]) + "\n")
        choices: dict[str, list[Any]] = {}
        for key, kind, default, meaning, limits in rows[1:]:
            names, _, meaning_alone = meaning.partition(": ")
            choices.setdefault(names, []).append((key, kind, default, meaning_alone, limits))
        for names, keys in choices.items():
            parts.append(f"### {names}\n")
            parts.append(table(keys) + "\n")
    return "\n".join([*parts, VARIABLES])


def test_the_configuration_page_has_every_key(request: pytest.FixtureRequest) -> None:
    """`pytest tests/test_docs.py -k configuration --write-golden` writes it."""
    page = DOCS / "configuration.md"
    if request.config.getoption("--write-golden"):
        page.write_text(configuration(), "utf-8")
    assert page.read_text("utf-8") == configuration()
    keys = {row[0] for row in describe(Job)}
    shown = set(re.findall(r"^\| `([\w.]+)` \|", page.read_text("utf-8"), re.MULTILINE))
    assert shown == keys | {DEVICE_VARIABLE, SHARE, SHARED_MEMORY_SWITCH}


def test_keys_in_the_text_exist() -> None:
    """A key in the running text is one of the job's."""
    keys = {row[0] for row in describe(Job)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for page in PAGES:
        for name in re.findall(r"`(\w+\.\w+)(?:=[^`]*)?`", prose_of(page)):
            if name.partition(".")[0] in sections:
                known = name in keys or name.endswith((".toml", ".json", ".md", ".py"))
                assert known, f"{page}.md names {name}"


# Guarantees


def test_every_promise_names_a_test_that_exists() -> None:
    rows = [line for line in text_of("guarantees").splitlines() if "`tests/" in line]
    named = [(row, name) for row in rows for name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)]
    assert len(rows) > 20
    assert {row for row, _ in named} == set(rows)
    for _, (file, test) in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


def test_the_page_of_guarantees_has_every_phase_and_fault() -> None:
    page = text_of("guarantees")
    table = page.partition("| phase | when |")[2]
    assert dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE)) == PHASES
    (faults,) = re.findall(r"The faults are (.*?)\. The phases", page, re.DOTALL)
    assert re.findall(r"`([\w=A-Z]+)`", faults) == [*FAULTS, "slow=SECONDS"]


def test_the_page_of_guarantees_has_the_default_deadlines() -> None:
    job = job_of(None)
    deadlines = dict(re.findall(r"^\| `(\w+\.\w+)`[^|]*\| (\d+) s \|", text_of("guarantees"), re.MULTILINE))
    assert deadlines == {
        "schedule.timeout": f"{job.schedule.timeout:g}",
        "schedule.deadline": f"{job.schedule.deadline:g}",
        "checkpoint.deadline": f"{job.checkpoint.deadline:g}",
        "checkpoint.grace": f"{job.checkpoint.grace:g}",
    }


def test_the_table_of_starts_is_the_one_that_is_tested() -> None:
    head, *rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in text_of("checkpoints").splitlines()
        if line.startswith("|") and line.count("|") == 6 and "---" not in line
    ]
    assert [name.removeprefix("weft ") for name in head[1:]] == list(TABLE)
    *states, running = rows
    tested = [[outcome.removesuffix(" at 0").removesuffix(" at 4") for outcome in row] for row in TABLE.values()]
    assert [list(column) for column in zip(*(row[1:] for row in states), strict=True)] == tested
    assert running[1:] == ["refuses"] * len(TABLE)
