"""`weft bench`: measure, and write the folder: results.json, the tables of its README, its pictures."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.bench.benchmark import BENCHMARKS, Module, Results, digest, module_of
from weft.bench.kept import Keep
from weft.bench.writing import END, environment, mark, put
from weft.errors import RunError, WeftError
from weft.output import print_table, write_text

PARTIAL = "partial.jsonl"
QUICK, WHOLE = "quick", "whole"
BEGIN = re.compile(mark("TABLE").replace("TABLE", "(.+?)"))


def bench(arguments: Namespace) -> None:
    """List the benchmarks, or run one."""
    name = arguments.benchmark
    if name is None:
        _refuse_options(arguments)
        if arguments.json:
            print(json.dumps({name: vars(one) for name, one in BENCHMARKS.items()}, indent=2))
        else:
            print_table(("benchmark", "takes", ""), [(n, one.takes, one.about) for n, one in BENCHMARKS.items()])
        return
    module = module_of(name)
    folder, pages = Path(arguments.output or Path("benchmarks") / name), [Path(page) for page in arguments.page]
    _check(arguments, folder, pages)
    results = _read(name, folder) if arguments.render else _measured(arguments, module, folder)
    if not arguments.quick or arguments.output is not None:
        write(name, module, results, folder, pages=pages)
    if arguments.json:
        print(json.dumps(results, indent=2, allow_nan=False))
    else:
        print("\n\n".join(module.tables(results).values()))
    if results["form"] != QUICK and (missed := module.missed(results)):  # a quick form has no targets
        raise RunError(f"{name}: {len(missed)} missed or too unsteady to tell:\n" + "\n".join(missed))


def _refuse_options(arguments: Namespace) -> None:
    """A list takes --json alone."""
    for name in ("quick", "render", "resume", "overwrite", "page", "output"):
        if vars(arguments)[name]:
            raise WeftError(f"--{name} is about one benchmark; give its name, one of {', '.join(BENCHMARKS)}")


def _check(arguments: Namespace, folder: Path, pages: Sequence[Path]) -> None:
    """Refuse, before anything is measured, what can't be done afterwards."""
    name, given = arguments.benchmark, vars(arguments)
    for one, other in (
        ("render", "quick"),
        ("render", "resume"),
        ("render", "overwrite"),
        ("quick", "resume"),
        ("quick", "overwrite"),
        ("resume", "overwrite"),
    ):
        if given[one] and given[other]:
            raise WeftError(f"--{one} and --{other} exclude each other; leave one of them out")
    if folder.exists() and not folder.is_dir():
        raise WeftError(f"-o takes a folder ({folder} is a file); name another place")
    if arguments.quick and arguments.output is None and pages:
        raise WeftError(
            "--page shows what was written, and --quick writes with -o FOLDER only; give -o, or leave --page out"
        )
    if arguments.quick and arguments.output is not None and _form(folder) == WHOLE:
        raise WeftError(f"{folder} holds the results of a whole run, which --quick would replace; name another folder")
    readme = folder / "README.md"
    if readme.is_file() and (not arguments.quick or arguments.output is not None):
        _check_marks(readme)
    for page in pages:
        if not page.is_file() or f"<!-- table {name}/" not in page.read_text(encoding="utf-8"):
            raise WeftError(
                f"--page takes a page with a place for a table of {name}: {mark(f'{name}/TABLE')} (got {page})"
            )
        _check_marks(page)


def _check_marks(page: Path) -> None:
    """Every table that begins has an end of its own: else its next text would take the place of what follows."""
    _, *rest = BEGIN.split(page.read_text(encoding="utf-8"))
    for table, text in zip(rest[::2], rest[1::2], strict=True):
        if END not in text:
            raise WeftError(f"{page}: the table {table} has no end of its own; put {END} behind it")


def write(name: str, module: Module, results: Results, folder: Path, *, pages: Sequence[Path] = ()) -> None:
    """Everything that a folder shows of its results; `pages` are others that show some of its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_results(folder, results)
    pictures, tables = module.plots(results), module.tables(results)
    for file, picture in pictures.items():
        write_text(folder / file, picture)
    readme = folder / "README.md"
    if not readme.exists():
        write_text(readme, _blank(name, tables, list(pictures)))
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
    about = {
        "benchmark": name,
        "form": QUICK if arguments.quick else WHOLE,
        "environment": environment("torch"),
        "sources": digest(),
    }
    if arguments.quick:
        return about | module.measure(quick=True, keep=Keep())
    if arguments.resume and not partial.exists():
        raise WeftError(f"{partial} is not there, so there is nothing to go on with; leave --resume out")
    if partial.exists() and not arguments.resume and not arguments.overwrite:
        raise WeftError(f"{partial} is of a run that did not end; go on with --resume, or begin anew with --overwrite")
    keep = Keep(partial, form=about, resume=arguments.resume)
    keep.say(f"{name}: {BENCHMARKS[name].about}; takes {BENCHMARKS[name].takes}, and goes on with --resume")
    results = about | module.measure(quick=False, keep=keep)
    folder.mkdir(parents=True, exist_ok=True)
    _write_results(folder, results)  # before a table or a picture can fail
    partial.unlink(missing_ok=True)
    return results


def _write_results(folder: Path, results: Results) -> None:
    write_text(folder / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")


def _read(name: str, folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        results = _object(path)
    except (OSError, ValueError) as problem:
        raise WeftError(f"{path} can't be read ({problem}); measure first, without --render") from None
    if results.get("benchmark") != name:
        raise WeftError(f"{path} holds results of {results.get('benchmark')}, not of {name}; name its folder with -o")
    if results.get("form") not in (QUICK, WHOLE):
        raise WeftError(f"{path} is of the form {results.get('form')}, neither {QUICK} nor {WHOLE}; measure anew")
    return results


def _form(folder: Path) -> str | None:
    """Of the results that a folder holds."""
    try:
        found: str | None = _object(folder / "results.json").get("form")
    except (OSError, ValueError):
        return None
    return found


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"it holds no object but {type(found).__name__}")
    return found


def _blank(name: str, tables: dict[str, str], plots: list[str]) -> str:
    """A README for a folder that has none."""
    parts = [f"# {name}", BENCHMARKS[name].about, f"```\nweft bench {name}\n```"]
    parts += [f"{mark(table)}\n{END}" for table in tables]
    parts += [f"![{plot.removesuffix('.svg')}]({plot})" for plot in plots]
    return "\n\n".join(parts) + "\n"
