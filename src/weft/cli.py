"""The command line `weft`: one function for each command. Imports torch only for commands that need it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft import __version__, faults
from weft import draw as pictures
from weft import simulate as run_simulation
from weft.arguments import (
    Parser,
    add_costs,
    add_job,
    add_json,
    add_schedule,
    add_trust,
    byte_count,
    cost_of,
    number,
    schedule_of,
    whole_number,
)
from weft.errors import RunError, WeftError
from weft.figures import (
    headline,
    method_figures,
    print_chunks,
    print_method_figures,
    print_methods,
    print_ranks,
    slack_text,
)
from weft.output import ROWS, print_table, write_text
from weft.schedule import METHODS, RULES, Schedule, check_sizes, delay_text, mean_over_chunks, verify, write_csv
from weft.simulate import Cost, slack, timeline
from weft.streams import open_missing, unblocked_output
from weft.text import format_count

FAILED = 1  # exit code of a failed run
MISTAKE = 2  # of a user's mistake
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; return the exit code."""
    return run_parser(_parser(), arguments)


def run_parser(parser: argparse.ArgumentParser, arguments: list[str] | None) -> int:
    """Run what the arguments select; the exit code is 0, 1 for a failed run, 2 for a mistake, which prints one line."""
    with contextlib.ExitStack() as output:
        training = False
        try:
            faults.arm()
            parsed = parser.parse_args(arguments)
            if training := getattr(parsed, "trains", _never)(parsed):
                open_missing()
                output.enter_context(unblocked_output(final=True))
            parsed.run(parsed)
            if sys.stdout is not None:  # it was closed from the start
                sys.stdout.flush()
            return 0
        except WeftError as problem:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
            return MISTAKE
        except MemoryError:
            print(f"{parser.prog}: out of memory; use fewer stages or micro-batches", file=sys.stderr)
            return MISTAKE
        except RunError as problem:
            print(f"{parser.prog}: {problem}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            print(f"{parser.prog}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except OSError as problem:
            if training or problem.filename is not None:
                cause = str(problem) if problem.filename is None else f"{problem.filename}: {problem.strerror}"
                print(f"{parser.prog}: {cause}", file=sys.stderr)
                return FAILED
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(problem, BrokenPipeError):  # the reader has read enough
                return 0
            print(f"{parser.prog}: the output can't be written: {problem.strerror}", file=sys.stderr)
            return MISTAKE


def _never(arguments: argparse.Namespace) -> bool:
    return False


def schedules(arguments: argparse.Namespace) -> None:
    """List the methods, with their figures at some size."""
    sizes = {"stages": arguments.stages, "microbatches": arguments.microbatches}
    check_sizes(**sizes)
    figures = method_figures(**sizes)
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
                    "figures": sizes | {"variants": figures[name]},
                }
                for name, method in METHODS.items()
            ]
        )
        return
    print_methods()
    print_method_figures(figures, **sizes)


def draw(arguments: argparse.Namespace) -> None:
    """Draw a schedule: in the terminal, or into a file."""
    schedule = schedule_of(arguments)
    cost = cost_of(arguments, schedule)
    if arguments.until is not None and not (arguments.output or "").lower().endswith(".svg"):
        raise WeftError("--until needs -o FILE.svg; use --width in a terminal, and zoom in other files")
    if arguments.output is not None and (arguments.width is not None or arguments.show_versions):
        raise WeftError(
            "--width and --show-versions are for the terminal; a file shows versions where blocks have room for them: "
            "draw less with --until (.svg), or zoom (.html)"
        )
    if arguments.output is None and not arguments.json:
        width = _or(arguments.width, shutil.get_terminal_size(fallback=(120, 24)).columns)
        minibatches = _or(arguments.minibatches, pictures.enough(schedule, cost, width=width))
        shown = timeline(schedule, cost, minibatches=minibatches)
        print(pictures.grid(shown, width=width, colour=_colour(arguments), versions=arguments.show_versions))
        return
    writers: dict[str, Callable[[], str]] = {
        ".svg": lambda: pictures.svg(shown, until=arguments.until),
        ".html": lambda: pictures.html(shown, headline(_figures(schedule, cost, shown.minibatches))),
        ".json": lambda: pictures.trace(shown),
    }
    ending = os.path.splitext(arguments.output or "")[1].lower()
    if arguments.output is not None and ending not in writers:
        raise WeftError(f"-o takes a file that ends in {', '.join(writers)} (got {arguments.output})")
    shown = timeline(schedule, cost, minibatches=_or(arguments.minibatches, 3))
    if arguments.output is not None:
        write_text(arguments.output, writers[ending]())
    if arguments.json:
        _print_json(
            schedule.about()
            | {
                "minibatches": shown.minibatches,
                "makespan": shown.makespan,
                "output": arguments.output,
                "blocks": [block.as_dict() for block in shown.blocks],
            }
        )
    else:
        print(f"{arguments.output}: {schedule.title}, {format_count(shown.minibatches, 'mini-batch')}")


def simulate(arguments: argparse.Namespace) -> None:
    """Simulate a schedule: time, memory, delay, slack, traffic."""
    schedule = schedule_of(arguments)
    figures = _figures(schedule, cost_of(arguments, schedule), arguments.minibatches)
    if arguments.json:
        _print_json(figures)
        return
    print(schedule.title)
    print_table(("", ""), list(headline(figures).items()))
    print("\neach rank: most micro-batches in flight (in whole stages), memory by category when the total is largest")
    print_ranks(figures)
    print("\nweights of each chunk: versions held, delay in updates (largest and mean), updates predicted ahead")
    print_chunks(figures, schedule.placement)


def check(arguments: argparse.Namespace) -> None:
    """Verify a schedule against every rule; optionally write it as CSV."""
    if arguments.output is not None and not arguments.output.endswith(".csv"):
        raise WeftError(f"-o takes a file that ends in .csv (got {arguments.output}); use weft draw for pictures")
    schedule = schedule_of(arguments, verified=False)
    verdict = verify(schedule, slots=arguments.slots, in_flight=arguments.in_flight)
    if arguments.output is not None:
        write_text(arguments.output, write_csv(schedule))
    mean_delay = mean_over_chunks(verdict.mean_delays, [1] * schedule.chunks)
    spare = slack(schedule)
    hidden = None if spare is None else spare.as_dict()
    if arguments.json:
        _print_json(
            schedule.about()
            | {
                "rules": list(verdict.rules),
                "minibatches": verdict.minibatches,
                "actions": verdict.actions,
                "in_flight": list(verdict.in_flight),
                "delay": list(verdict.delay),
                "mean_delay": mean_delay,
                "mean_delays": list(verdict.mean_delays),
                "ahead": list(verdict.ahead),
                "slack": hidden,
                "slots": verdict.slots,
                "output": arguments.output,
            }
        )
        return
    print(verdict)
    print_table(("", ""), [(rule, RULES[rule]) for rule in verdict.rules])
    if "law" not in verdict.rules:
        print("law: none is known for this schedule; versions are created, read and freed correctly")
    in_flight = [f"{held:g}" for held in verdict.in_flight[:ROWS]] + ["…"] * (schedule.stages > ROWS)
    print(f"micro-batches in flight, by rank: {', '.join(in_flight)}")
    print(f"delay in updates: {delay_text(mean_delay, verdict.delay, verdict.ahead)}")
    print(f"slack, time by which hops may take longer (stages alike, F = 1): {slack_text(hidden)}")
    print(f"a link needs room for {verdict.slots} unread message{'s' if verdict.slots > 1 else ''}")


def train(arguments: argparse.Namespace) -> None:
    """Train a job: the built-in one, that of a file, or that of a run to resume."""
    from weft.train.command import train as run

    run(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Train a job under several schedules and compare them."""
    from weft.train.command import compare as run

    run(arguments)


def export(arguments: argparse.Namespace) -> None:
    """Export the model of a run for plain PyTorch and Hugging Face."""
    from weft.train.command import export as run

    run(arguments)


def doctor(arguments: argparse.Namespace) -> None:
    """Check whether this machine can train, on its own devices."""
    from weft.doctor import doctor as run

    run(arguments)


@dataclass(frozen=True, kw_only=True)
class Command:
    """The function of a command, its arguments, and whether it trains: then it does not depend on its output."""

    run: Callable[[argparse.Namespace], None]
    arguments: Callable[[argparse.ArgumentParser], None]
    trains: Callable[[argparse.Namespace], bool] = _never
    epilog: str | None = None


def _schedules_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=whole_number, default=4, metavar="P", help="of the figures (default 4)")
    parser.add_argument("--microbatches", type=whole_number, default=8, metavar="M", help="the same (default 8)")
    add_json(parser)


def _draw_arguments(parser: argparse.ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="a .svg, .html or .json (Perfetto) file")
    parser.add_argument(
        "--minibatches",
        type=whole_number,
        metavar="N",
        help="mini-batches to draw (default: as many as fit; 3 in a file)",
    )
    parser.add_argument("--until", type=number, metavar="T", help="draw only the time before T (.svg)")
    parser.add_argument("--width", type=whole_number, metavar="N", help="columns (default: the terminal's)")
    parser.add_argument("--colour", "--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--show-versions", action="store_true", help="show the weight versions below each rank")
    add_costs(parser)


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument(
        "--minibatches",
        type=whole_number,
        metavar="N",
        help="mini-batches of the makespan (default: as many as it takes to reach the steady state)",
    )
    add_costs(parser)


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    add_schedule(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the schedule to a .csv file")
    parser.add_argument(
        "--slots", type=whole_number, metavar="N", help="unread messages that a link holds (default: as needed)"
    )
    parser.add_argument(
        "--in-flight", type=number, metavar="X", help="limit of micro-batches in flight on a rank, in stages"
    )


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--print-config", action="store_true", help="print the complete job as TOML and exit")
    parser.add_argument("--resume", metavar="RUN", help="resume a run from its latest checkpoint")
    parser.add_argument("--checkpoint", metavar="WHICH", help="with --resume: latest, previous, best or a name")
    parser.add_argument(
        "--allow-new-data", action="store_true", help="resume even if the data differs from the checkpoint's"
    )
    add_trust(parser)
    parser.add_argument(
        "--continue", action="store_true", dest="go_on", help="resume the run with the job's name, or start it"
    )


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--schedules", metavar="A,B", help="schedules to compare (default: 1f1b,2bw,wpipe,xpipe)")
    parser.add_argument(
        "--seeds",
        type=whole_number,
        metavar="N",
        help="runs of each schedule, with seeds from train.seed on (default: 1)",
    )
    parser.add_argument(
        "--target", type=number, metavar="X", help="report the time to this metric (default: the best that all reach)"
    )
    parser.add_argument("--resume", metavar="FOLDER", help="resume a comparison; finished runs are kept")
    add_trust(parser)


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="a run's folder, or its name in runs/")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="destination (default: RUN/export)")
    parser.add_argument("--checkpoint", default="latest", metavar="WHICH", help="latest, previous, best or a name")
    parser.add_argument(
        "--shard-size", type=byte_count, metavar="SIZE", help="the most bytes of a file, such as 500MB (default 5GB)"
    )
    add_trust(parser)
    add_json(parser)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="KIND", help="cpu, cuda, … (default: every available kind)")
    parser.add_argument(
        "--seconds", type=number, default=30.0, metavar="N", help="limit for each kind of device (default 30)"
    )
    add_json(parser)


DEVICE = "The device is chosen by WEFT_DEVICE (cpu, cuda, cuda:1); see docs/gpus.md"
COMMANDS: dict[str, Command] = {
    "train": Command(run=train, arguments=_train_arguments, trains=lambda given: not given.print_config, epilog=DEVICE),
    "compare": Command(run=compare, arguments=_compare_arguments, trains=lambda given: True, epilog=DEVICE),
    "export": Command(run=export, arguments=_export_arguments),
    "schedules": Command(run=schedules, arguments=_schedules_arguments),
    "draw": Command(run=draw, arguments=_draw_arguments),
    "simulate": Command(run=simulate, arguments=_simulate_arguments),
    "check": Command(run=check, arguments=_check_arguments),
    "doctor": Command(run=doctor, arguments=_doctor_arguments),
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="weft",
        description="Asynchronous pipeline-parallel training: train jobs; draw, simulate and check schedules.",
        epilog="Try: weft train, or weft draw wpipe --stages 4 --microbatches 4",
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        description = (command.run.__doc__ or "").strip()
        subparser = commands.add_parser(
            name, help=description, description=description, epilog=command.epilog, allow_abbrev=False
        )
        command.arguments(subparser)
        subparser.set_defaults(run=command.run, trains=command.trains, parser=subparser)
    return parser


def _figures(schedule: Schedule, cost: Cost, minibatches: int | None) -> dict[str, Any]:
    return run_simulation(schedule, cost, minibatches=minibatches).as_dict()


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _colour(arguments: argparse.Namespace) -> bool:
    if arguments.colour == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return bool(arguments.colour == "always")


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))
