"""The command `weft`: one command a function. Never imports torch for what needs none."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from weft import __version__
from weft import draw as pictures
from weft import schedule as by_name
from weft import simulate as run_simulation
from weft.errors import WeftError
from weft.output import write_text
from weft.schedule import METHODS, RULES, Schedule, load_csv, verify, write_csv
from weft.schedule.core import count
from weft.schedule.load import load_function
from weft.simulate import CATEGORIES, ChunkCost, Cost, Link, timeline

MISTAKE = 2  # exit code for a user's mistake
INTERRUPTED = 130
ROWS = 16  # lines of a table that a terminal shows; --json has all


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; the exit code is 0, or 2 for a user's mistake, which is told in one clear line."""
    try:
        parsed = _parser().parse_args(arguments)
        parsed.run(parsed)
        sys.stdout.flush()
        return 0
    except WeftError as problem:
        print(f"weft: {problem}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def schedules(arguments: argparse.Namespace) -> None:
    """List the methods."""
    if arguments.json:
        _print_json(
            [
                {
                    "name": name,
                    "asynchronous": method.asynchronous,
                    "microbatches": method.needs,
                    "weights": method.weights,
                    "options": method.options,
                    "summary": method.summary,
                }
                for name, method in METHODS.items()
            ]
        )
        return
    rows = [
        (
            name,
            "async" if method.asynchronous else "sync",
            method.needs,
            method.weights,
            " ".join(f"--{option.replace('_', '-')}" for option in method.options),
            method.summary,
        )
        for name, method in METHODS.items()
    ]
    _print_table(("schedule", "", "micro-batches", "forward; backward at", "options", ""), rows)


def draw(arguments: argparse.Namespace) -> None:
    """Draw a schedule: in the terminal, or into a file."""
    schedule = _schedule(arguments)
    cost = _cost(arguments, schedule)
    if arguments.output is None and not arguments.json:
        width = _or(arguments.width, shutil.get_terminal_size(fallback=(120, 24)).columns)
        minibatches = _or(arguments.minibatches, _enough(schedule, cost, width))
        shown = timeline(schedule, cost, minibatches=minibatches)
        print(pictures.grid(shown, width=width, colour=_colour(arguments), versions=arguments.show_versions))
        return
    shown = timeline(schedule, cost, minibatches=_or(arguments.minibatches, 3))
    if arguments.output is not None:
        writers: dict[str, Callable[[], str]] = {
            ".svg": lambda: pictures.svg(shown, until=arguments.until),
            ".html": lambda: pictures.html(shown, _headline(run_simulation(schedule, cost).as_dict())),
            ".json": lambda: pictures.trace(shown),
        }
        ending = os.path.splitext(arguments.output)[1].lower()
        if ending not in writers:
            raise WeftError(f"-o takes a file that ends in {', '.join(writers)} (got {arguments.output})")
        if arguments.until is not None and ending != ".svg":
            raise WeftError(f"--until is for .svg files, the others can be zoomed (got {arguments.output})")
        write_text(arguments.output, writers[ending]())
    if arguments.json:
        _print_json(
            {
                "schedule": schedule.name,
                "minibatches": shown.minibatches,
                "makespan": shown.makespan,
                "output": arguments.output,
                "blocks": [block.as_dict() for block in shown.blocks],
            }
        )
    else:
        print(f"{arguments.output}: {schedule.title}, {count(shown.minibatches, 'mini-batch')}")


def simulate(arguments: argparse.Namespace) -> None:
    """Simulate a schedule: time, memory, delay, traffic."""
    schedule = _schedule(arguments)
    figures = run_simulation(schedule, _cost(arguments, schedule), minibatches=arguments.minibatches).as_dict()
    if arguments.json:
        _print_json(figures)
        return
    print(schedule.title)
    _print_table(("", ""), list(_headline(figures).items()))
    ranks = zip(figures["in_flight"], figures["bubbles"], figures["memory"], strict=True)
    print("\npeak a rank: micro-batches in flight (in whole stages), then memory by category")
    _print_table(
        ("rank", "bubble", "in flight", *(name.replace("_", " ") for name in CATEGORIES), "total"),
        [
            (rank, f"{bubble:.1%}", f"{held:g}", *(f"{memory[name]:g}" for name in (*CATEGORIES, "total")))
            for rank, (held, bubble, memory) in enumerate(ranks)
        ],
    )
    print("\nweights a chunk: versions held, updates late, updates predicted ahead")
    per_chunk = zip(schedule.placement, figures["versions"], figures["delay"], figures["ahead"], strict=True)
    _print_table(("chunk", "rank", "versions", "delay", "ahead"), [(k, *row) for k, row in enumerate(per_chunk)])


def check(arguments: argparse.Namespace) -> None:
    """Verify a schedule against every rule; write it as CSV if asked."""
    schedule = _schedule(arguments, verified=False)
    verdict = verify(schedule, slots=arguments.slots, in_flight=arguments.in_flight)
    if arguments.output is not None:
        if not arguments.output.endswith(".csv"):
            raise WeftError(f"-o takes a file that ends in .csv (got {arguments.output}); weft draw makes pictures")
        write_text(arguments.output, write_csv(schedule))
    if arguments.json:
        _print_json(
            {
                "schedule": schedule.name,
                "stages": schedule.stages,
                "microbatches": schedule.microbatches,
                "rules": list(verdict.rules),
                "minibatches": verdict.minibatches,
                "actions": verdict.actions,
                "in_flight": list(verdict.in_flight),
                "slots": verdict.slots,
                "output": arguments.output,
            }
        )
        return
    window = count(verdict.minibatches, "mini-batch")
    print(f"{schedule.title}: every rule holds ({verdict.actions} actions of {window} run)")
    _print_table(("", ""), [(rule, RULES[rule]) for rule in verdict.rules])
    if "law" not in verdict.rules:
        print("law: no law is known for this schedule; its versions exist, live and die as they should")
    print(f"a link has to hold {verdict.slots} unread message{'s' if verdict.slots > 1 else ''}")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: what it runs and the arguments it takes."""

    run: Callable[[argparse.Namespace], None]
    arguments: Callable[[argparse.ArgumentParser], None]


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print data instead of text")


def _schedule_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a name that 'weft schedules' lists, a file.csv, or package.module:function")
    parser.add_argument("--stages", type=_whole, metavar="P", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=_whole, metavar="M", help="micro-batches a mini-batch")
    parser.add_argument("--chunks", type=_whole, metavar="V", help="chunks a rank (interleaved; default 2)")
    parser.add_argument("--warmup", type=_whole, help="more forwards ahead to hide slow links (2bw, wpipe; default 1)")
    parser.add_argument("--versions", help="xpipe: published (default) or exact count of updates to predict")
    parser.add_argument("--vertical-sync", action="store_true", default=None, help="pipedream with vertical sync")
    _json_argument(parser)


def _cost_arguments(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "of a whole stage, in units of your choice")
    costs.add_argument("--forward", type=float, metavar="T", help="time of a forward (default 1)")
    costs.add_argument("--backward", type=float, metavar="T", help="time of a backward (default 2)")
    costs.add_argument("--update", type=float, metavar="T", help="time of an update (default 0)")
    for name, default in (("activation", 1), ("input", 0), ("weight", 1), ("gradient", 1), ("optimizer", 2)):
        costs.add_argument(f"--{name}-bytes", type=float, metavar="N", help=f"default {default}")
    costs.add_argument("--recompute", action="store_true", default=None, help="keep inputs only, run forwards twice")
    costs.add_argument("--latency", type=float, metavar="T", help="time of a hop (default 0)")
    costs.add_argument("--bandwidth", type=float, metavar="N", help="bytes a time of a link (default: without limit)")
    costs.add_argument("--no-overlap", action="store_true", default=None, help="sending stops the sender's compute")
    costs.add_argument("--costs", metavar="FILE", help="costs of each chunk and link, as JSON, instead of all these")


def _draw_arguments(parser: argparse.ArgumentParser) -> None:
    _schedule_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="a .svg, .html or .json (Perfetto) file")
    parser.add_argument("--minibatches", type=_whole, metavar="N", help="window (default: the width, or 3 in a file)")
    parser.add_argument("--until", type=float, metavar="T", help="draw the time before T only, in a .svg")
    parser.add_argument("--width", type=_whole, metavar="N", help="columns (default: the terminal's)")
    parser.add_argument("--colour", "--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--show-versions", action="store_true", help="a line below each rank: weight versions read")
    _cost_arguments(parser)


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    _schedule_arguments(parser)
    parser.add_argument("--minibatches", type=_whole, metavar="N", help="window that the makespan is of")
    _cost_arguments(parser)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _schedule_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the schedule to a .csv file")
    parser.add_argument("--slots", type=_whole, metavar="N", help="unread messages a link holds (default: as needed)")
    parser.add_argument("--in-flight", type=float, metavar="X", help="micro-batches a rank may hold, in stages")


COMMANDS: dict[str, Command] = {
    "schedules": Command(run=schedules, arguments=_json_argument),
    "draw": Command(run=draw, arguments=_draw_arguments),
    "simulate": Command(run=simulate, arguments=_simulate_arguments),
    "check": Command(run=check, arguments=_check_arguments),
}


class _Parser(argparse.ArgumentParser):
    """A parser that tells a mistake in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        raise WeftError(f"{message}; '{self.prog} --help' tells more")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="weft",
        description="Asynchronous pipeline-parallel training: draw, simulate and check its schedules.",
        epilog="Try: weft draw wpipe --stages 4 --microbatches 4",
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        words = (command.run.__doc__ or "").strip()
        one = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        command.arguments(one)
        one.set_defaults(run=command.run)
    return parser


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number (got {text[:40]!r})") from None


def _schedule(arguments: argparse.Namespace, *, verified: bool = True) -> Schedule:
    """The schedule that the arguments name; a user's own is verified, unless the caller will do that."""
    name: str = arguments.name
    options = {key: getattr(arguments, key) for key in ("chunks", "warmup", "versions", "vertical_sync")}
    options = {key: value for key, value in options.items() if value is not None}
    sizes = {key: getattr(arguments, key) for key in ("stages", "microbatches")}
    if name.endswith(".csv"):
        schedule = load_csv(name)
        given = [key for key, value in sizes.items() if value not in (None, getattr(schedule, key))] + list(options)
        if given:
            raise WeftError(f"{name} says itself what it is; leave --{given[0].replace('_', '-')} out")
    else:
        if missing := [key for key, value in sizes.items() if value is None]:
            raise WeftError(f"{name} needs --{missing[0]}, such as --stages 4 --microbatches 8")
        if ":" not in name:
            return by_name(name, **sizes, **options)
        schedule = load_function(name)(**sizes, **options)
    if verified:
        verify(schedule)
    return schedule


def _cost(arguments: argparse.Namespace, schedule: Schedule) -> Cost:
    given = {key: value for key, value in vars(arguments).items() if value is not None}
    stage = {one: given[one] for one in _STAGE_COSTS if one in given}
    link = {one.name: given[one.name] for one in fields(Link) if one.name in given}
    if "no_overlap" in given:
        link["overlap"] = False
    if "costs" not in given:
        return Cost.uniform(schedule, **stage, link=Link(**link))
    if stage or link:
        raise WeftError(f"--costs holds all costs; leave --{next(iter(stage | link)).replace('_', '-')} out")
    try:
        with open(given["costs"], encoding="utf-8") as file:
            cost = Cost.from_json(file.read())
    except (OSError, UnicodeDecodeError) as problem:
        raise WeftError(f"{given['costs']} can't be read: {problem}") from None
    cost.check(schedule)
    return cost


_STAGE_COSTS = (
    "forward",
    "backward",
    "update",
    "activation_bytes",
    "input_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "recompute",
)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _enough(schedule: Schedule, cost: Cost, width: int) -> int:
    """Mini-batches that fill a terminal's width: none takes less time than its work on a rank."""
    work = min(
        sum(one.forward + one.backward_input + one.backward_weight for one in _of_rank(schedule, cost, rank))
        for rank in range(schedule.stages)
    )
    unit = min((one.forward for one in cost.chunks if one.forward), default=work)
    columns = width / 3  # a cell is no narrower
    return 2 + int(columns * unit / (work * schedule.microbatches)) if work else 2


def _of_rank(schedule: Schedule, cost: Cost, rank: int) -> list[ChunkCost]:
    return [cost.chunks[chunk] for chunk in schedule.chunks_of(rank)]


def _headline(figures: dict[str, Any]) -> dict[str, str]:
    """The figures that people ask for first, in words."""
    steady = "" if figures["steady"] else " (no steady state was found; the last mini-batches' mean)"
    return {
        "bubble, steady": f"{figures['bubble']:.2%}{steady}",
        "throughput": f"{figures['throughput']:.6g} micro-batches a time",
        "time of a mini-batch": f"{figures['period']:.6g}",
        "idle of fill and drain": f"{figures['fill']:.6g}",
        f"makespan of {count(figures['minibatches'], 'mini-batch')}": f"{figures['makespan']:.6g}",
        "messages a micro-batch": f"{figures['messages_per_microbatch']:g}",
    }


def _colour(arguments: argparse.Namespace) -> bool:
    if arguments.colour == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return bool(arguments.colour == "always")


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def _print_table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Columns as wide as their longest cell; the middle of a long table is left out."""
    shown = rows if len(rows) <= ROWS else [*rows[: ROWS - 2], ("…",) + ("",) * (len(head) - 1), rows[-1]]
    table = [tuple(str(cell) for cell in row) for row in ([head] if any(head) else []) + shown]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
