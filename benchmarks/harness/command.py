"""Run one benchmark and write its folder: results.json, the tables of its README, its plots."""

from __future__ import annotations

import importlib.util
import json
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.catalog import BENCHMARKS, Benchmark, Results, benchmark_named, sources_digest
from benchmarks.harness.environment import describe_environment
from benchmarks.harness.resume_cache import ResumeCache
from benchmarks.rendering import END, put_table, table_mark
from weft.errors import RunError, WeftError
from weft.output import print_table, write_text

PARTIAL = "partial.jsonl"
QUICK, WHOLE = "quick", "whole"
BEGIN = re.compile(table_mark("TABLE").replace("TABLE", "(.+?)"))
EXCLUSIVE = (
    ("render", "quick"),
    ("render", "resume"),
    ("render", "overwrite"),
    ("quick", "resume"),
    ("quick", "overwrite"),
    ("resume", "overwrite"),
)


def run(arguments: Namespace) -> None:
    """List the benchmarks, or run one."""
    if arguments.benchmark is None:
        _list(arguments)
        return
    benchmark = benchmark_named(arguments.benchmark)
    folder, pages = Path(arguments.output or benchmark.folder), [Path(page) for page in arguments.page]
    writes = not arguments.quick or arguments.output is not None
    _check(arguments, folder, pages, writes=writes)
    results = _read(benchmark, folder) if arguments.render else _measure(arguments, benchmark, folder)
    if writes:
        write(benchmark, results, folder, pages=pages)
    if arguments.json:
        print(json.dumps(results, indent=2, allow_nan=False))
    else:
        print("\n\n".join(benchmark.tables(results).values()))
    if results["form"] != QUICK and (missed := benchmark.missed(results)):  # a quick form has no targets
        raise RunError(f"{benchmark.name}: {len(missed)} missed or without a clear verdict:\n" + "\n".join(missed))


def _list(arguments: Namespace) -> None:
    for option in ("quick", "render", "resume", "overwrite", "page", "output"):
        if vars(arguments)[option]:
            raise WeftError(f"--{option} needs the name of a benchmark, one of {', '.join(BENCHMARKS)}")
    if arguments.json:
        listed = {name: {"about": known.about, "takes": known.takes} for name, known in BENCHMARKS.items()}
        print(json.dumps(listed, indent=2))
    else:
        rows = [(name, known.takes, known.about) for name, known in BENCHMARKS.items()]
        print_table(("benchmark", "takes", ""), rows)


def _check(arguments: Namespace, folder: Path, pages: Sequence[Path], *, writes: bool) -> None:
    """Refuse, before anything is measured, what can't be done afterwards."""
    name, given = arguments.benchmark, vars(arguments)
    for first, second in EXCLUSIVE:
        if given[first] and given[second]:
            raise WeftError(f"--{first} and --{second} exclude each other; leave one of them out")
    if folder.exists() and not folder.is_dir():
        raise WeftError(f"-o takes a folder ({folder} is a file); choose another place")
    if not writes and pages:
        raise WeftError("--page needs results that are written, and --quick writes with -o FOLDER only; add -o")
    if arguments.quick and writes and _form(folder) == WHOLE:
        raise WeftError(f"{folder} holds the results of a whole run, which --quick would replace; choose another")
    if writes and importlib.util.find_spec("matplotlib") is None:
        raise WeftError("plots need matplotlib, which is not installed; run: pip install -e '.[dev]'")
    readme = folder / "README.md"
    if writes and readme.is_file():
        _check_marks(readme)
    for page in pages:
        if not page.is_file() or f"<!-- table {name}/" not in page.read_text(encoding="utf-8"):
            raise WeftError(f"--page takes a page with a mark for a table: {table_mark(f'{name}/TABLE')} (got {page})")
        _check_marks(page)


def _check_marks(page: Path) -> None:
    """Every table has its own end mark: else writing it would replace the text after it."""
    _, *rest = BEGIN.split(page.read_text(encoding="utf-8"))
    for table, text in zip(rest[::2], rest[1::2], strict=True):
        if END not in text:
            raise WeftError(f"{page}: the table {table} has no end mark; put {END} after it")


def write(benchmark: Benchmark, results: Results, folder: Path, *, pages: Sequence[Path] = ()) -> None:
    """Write all that a folder shows of its results; `pages` are others that show some of its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_results(folder, results)
    plots, tables = benchmark.plots(results), benchmark.tables(results)
    for file, plot in plots.items():
        write_text(folder / file, plot)
    readme = folder / "README.md"
    if not readme.exists():
        write_text(readme, _blank(benchmark, tables, list(plots)))
    page = readme.read_text(encoding="utf-8")
    for table, text in tables.items():
        page = put_table(page, table, text)
    write_text(readme, page)
    for path in pages:
        page = path.read_text(encoding="utf-8")
        for table, text in tables.items():
            if table_mark(f"{benchmark.name}/{table}") in page:
                page = put_table(page, f"{benchmark.name}/{table}", text)
        write_text(path, page)


def _measure(arguments: Namespace, benchmark: Benchmark, folder: Path) -> dict[str, Any]:
    partial = folder / PARTIAL
    about = {
        "benchmark": benchmark.name,
        "form": QUICK if arguments.quick else WHOLE,
        "environment": describe_environment("numpy", "torch"),
        "sources": sources_digest(),
    }
    if arguments.quick:
        return about | benchmark.measure(quick=True, cache=ResumeCache())
    if arguments.resume and not partial.exists():
        raise WeftError(f"there is nothing to resume ({partial} does not exist); leave --resume out")
    if partial.exists() and not arguments.resume and not arguments.overwrite:
        raise WeftError(f"{partial} is of an interrupted run; continue with --resume or start over with --overwrite")
    cache = ResumeCache(partial, form=about, resume=arguments.resume)
    cache.log(f"{benchmark.name}: {benchmark.about}; takes {benchmark.takes}, can be resumed with --resume")
    results = about | benchmark.measure(quick=False, cache=cache)
    folder.mkdir(parents=True, exist_ok=True)
    _write_results(folder, results)  # before a table or a plot can fail
    partial.unlink(missing_ok=True)
    return results


def _write_results(folder: Path, results: Results) -> None:
    write_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")


def _read(benchmark: Benchmark, folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        results = _object(path)
    except (OSError, ValueError) as problem:
        raise WeftError(f"{path} can't be read ({problem}); measure first, without --render") from None
    if (found := results.get("benchmark")) != benchmark.name:
        raise WeftError(f"{path} holds results of {found}, not of {benchmark.name}; give its folder with -o")
    if results.get("form") not in (QUICK, WHOLE):
        raise WeftError(f"{path} has the form {results.get('form')}, neither {QUICK} nor {WHOLE}; measure again")
    return results


def _form(folder: Path) -> str | None:
    """The form of the results that a folder holds."""
    try:
        found: str | None = _object(folder / "results.json").get("form")
    except (OSError, ValueError):
        return None
    return found


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    return found


def _blank(benchmark: Benchmark, tables: dict[str, str], plots: list[str]) -> str:
    """A README for a folder without one."""
    parts = [f"# {benchmark.name}", benchmark.about, f"```\npython -m benchmarks {benchmark.name}\n```"]
    parts += [f"{table_mark(table)}\n{END}" for table in tables]
    parts += [f"![{plot.removesuffix('.svg')}]({plot})" for plot in plots]
    return "\n\n".join(parts) + "\n"
