"""`weft bench`: measure, and write the folder: results.json, the tables of its README, its pictures."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from weft.bench.benchmark import BENCHMARKS, Module, Results, digest, module_of
from weft.bench.kept import Keep
from weft.bench.writing import END, environment, mark, put
from weft.errors import RunError, WeftError
from weft.output import print_table, write_text

PARTIAL = "partial.jsonl"


def bench(arguments: Namespace) -> None:
    """List the benchmarks, or run one."""
    name = arguments.benchmark
    if name is None:
        if arguments.json:
            print(json.dumps({name: vars(one) for name, one in BENCHMARKS.items()}, indent=2))
        else:
            print_table(("benchmark", "takes", ""), [(n, one.takes, one.about) for n, one in BENCHMARKS.items()])
        return
    module = module_of(name)
    if arguments.render and (arguments.quick or arguments.resume):
        raise WeftError("--render makes tables and pictures of results that are there; leave --quick and --resume out")
    folder = _folder(arguments)
    results = _read(folder) if arguments.render else _measured(arguments, module, folder)
    if not arguments.quick or arguments.output is not None:
        write(name, module, results, folder, pages=[Path(page) for page in arguments.page])
    if arguments.json:
        print(json.dumps(results, indent=2, allow_nan=False))
    else:
        print("\n\n".join(module.tables(results).values()))
    if missed := module.missed(results):
        raise RunError(f"{name}: {len(missed)} missed or too unsteady to tell:\n" + "\n".join(missed))


def write(name: str, module: Module, results: Results, folder: Path, *, pages: list[Path] = []) -> None:  # noqa: B006
    """Everything that a folder shows of its results; `pages` are others that show some of its tables."""
    write_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")
    for file, picture in module.plots(results).items():
        write_text(folder / file, picture)
    tables = module.tables(results)
    readme = folder / "README.md"
    if not readme.exists():
        write_text(readme, _blank(name, tables, list(module.plots(results))))
    page = readme.read_text(encoding="utf-8")
    for table, text in tables.items():
        page = put(page, table, text)
    write_text(readme, page)
    for other in pages:
        page = other.read_text(encoding="utf-8")
        for table, text in tables.items():
            if mark(f"{name}/{table}") in page:
                page = put(page, f"{name}/{table}", text)
        write_text(other, page)


def _measured(arguments: Namespace, module: Module, folder: Path) -> dict[str, Any]:
    name, partial = arguments.benchmark, folder / PARTIAL
    keep = Keep()
    if not arguments.quick:
        if arguments.resume and not partial.exists():
            raise WeftError(f"{partial} is not there, so there is nothing to go on with; leave --resume out")
        if partial.exists() and not arguments.resume and not arguments.overwrite:
            raise WeftError(
                f"{partial} is of a run that did not end; go on with --resume, or begin anew with --overwrite"
            )
        keep = Keep(partial, form={"benchmark": name, "sources": digest(name)}, resume=arguments.resume)
        keep.say(f"{name}: {BENCHMARKS[name].about}; takes {BENCHMARKS[name].takes}, and goes on with --resume")
    begin = time.monotonic()
    results = module.measure(quick=arguments.quick, keep=keep)
    about = {
        "benchmark": name,
        "form": "quick" if arguments.quick else "whole",
        "environment": environment("torch"),
        "seconds": round(time.monotonic() - begin),
    }
    if not arguments.quick:
        write_text(folder / "results.json", json.dumps(about | results, indent=1, allow_nan=False) + "\n")
        partial.unlink()
    return about | results


def _folder(arguments: Namespace) -> Path:
    if arguments.quick and arguments.output is None:
        return Path(tempfile.gettempdir())  # nothing is written
    folder = Path(arguments.output or Path("benchmarks") / arguments.benchmark)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(folder: Path) -> dict[str, Any]:
    try:
        results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise WeftError(
            f"{folder / 'results.json'} can't be read ({problem}); measure first, without --render"
        ) from None
    return results


def _blank(name: str, tables: dict[str, str], plots: list[str]) -> str:
    """A README for a folder that has none."""
    parts = [f"# {name}", BENCHMARKS[name].about, f"```\nweft bench {name}\n```"]
    parts += [f"{mark(table)}\n{END}" for table in tables]
    parts += [f"![{plot.removesuffix('.svg')}]({plot})" for plot in plots]
    return "\n\n".join(parts) + "\n"
