"""The command line: `python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME` runs one."""

from __future__ import annotations

from benchmarks.harness import run
from weft.arguments import Parser, add_json
from weft.cli import run_parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; the exit code is 0, 1 for a failed run or a missed target, 2 for wrong arguments."""
    return run_parser(_parser(), arguments)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure weft beside what people would use instead; without a name, list the benchmarks.",
        allow_abbrev=False,
    )
    parser.add_argument("benchmark", nargs="?", metavar="NAME", help="which one (default: list them)")
    parser.add_argument("--quick", action="store_true", help="a short form, to try it out; writes with -o only")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="where to write (default: the benchmark's own folder)")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--overwrite", action="store_true", help="discard an interrupted run and start over")
    parser.add_argument("--render", action="store_true", help="measure nothing; make tables and plots of results.json")
    parser.add_argument("--page", action="append", default=[], metavar="FILE", help="put its tables into this page too")
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
