"""Arguments that several commands share, and the schedules and costs that they name."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import fields
from typing import Any, NoReturn

from weft import schedule as by_name
from weft.errors import WeftError
from weft.schedule import METHODS, Schedule, load_csv, load_schedule_function, verify
from weft.simulate import Cost, Link
from weft.text import did_you_mean

SCHEDULE_OPTIONS = ("chunks", "warmup", "versions", "predict", "vertical_sync", "fresh", "slack", "split")


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with a suggestion for an unknown option."""

    def error(self, message: str) -> NoReturn:
        raise WeftError(f"{message}; see '{self.prog} --help'")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        parsed, unknown = self.parse_known_args(given, namespace)
        if unknown:
            parser: argparse.ArgumentParser = getattr(parsed, "parser", self)
            known = [name for name in parser._option_string_actions if name.startswith("--")]
            may_be_key = hasattr(parsed, "sets") and unknown[0].startswith("--")
            hint = (_key_instead(unknown[0], given) if may_be_key else "") or did_you_mean(unknown[0], known)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed


def _key_instead(option: str, given: list[str]) -> str:
    """`, did you mean '--set train.lr=0.1'?` if the option has the name of a key of the job."""
    from weft.train.config import describe
    from weft.train.job import Job

    name, equals, value = option.partition("=")
    if not equals:
        value = next(iter(given[given.index(option) + 1 :]), "")
        value = "…" if not value or value.startswith("-") else value
    name = name.lstrip("-").replace("-", "_")
    keys = dict.fromkeys(key for key, *_ in describe(Job) if key.rpartition(".")[2] == name)
    return f", did you mean {' or '.join(repr(f'--set {key}={value}') for key in keys)}?" if keys else ""


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number (got {text[:40]!r})") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number (got {text[:40]!r})") from None


def byte_count(text: str) -> int:
    """`500MB`, `2GiB`, `1000`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"must be an amount of bytes, such as 500MB or 2GiB (got {text[:40]!r})")
    amount, unit, binary = found.groups()
    exponent = "KMGT".index(unit.upper()) + 1 if unit else 0
    if (count := int(float(amount) * (1024 if binary else 1000) ** exponent)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least a byte (got {text[:40]!r})")
    return count


def recompute(text: str) -> Any:
    """True, False or "layer", or a list of them."""
    known = {"true": True, "false": False, "layer": "layer"}
    parts = text.split(",")
    if not known.keys() >= set(parts):
        raise argparse.ArgumentTypeError(f"must be true, false or layer, or several of them (got {text[:40]!r})")
    choices = [known[part] for part in parts]
    return choices if len(choices) > 1 else choices[0]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", metavar="JOB.toml", help="the job; every key has a default")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="sets",
        metavar="KEY=VALUE",
        help="set a key, such as schedule.name=xpipe",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    parser.add_argument(
        "--max-restarts", type=whole_number, default=0, metavar="N", help="restart up to N times when a rank dies"
    )
    add_json(parser)


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="import code that the run of another user names")


def add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", help="a name that 'weft schedules' lists, a file.csv, file.py:function or package.module:function"
    )
    parser.add_argument("--stages", type=whole_number, metavar="P", help="number of stages")
    parser.add_argument("--microbatches", type=whole_number, metavar="M", help="micro-batches of a mini-batch")
    parser.add_argument("--chunks", type=whole_number, metavar="V", help="interleaved: chunks of each rank (default 2)")
    parser.add_argument(
        "--warmup",
        type=whole_number,
        metavar="N",
        help="2bw, wpipe: multiply the forwards ahead by N, to hide slow links (default 1)",
    )
    parser.add_argument(
        "--versions",
        metavar="WHICH",
        help="xpipe, spectrain, pipeoptim: count of versions to predict, published (default) or exact",
    )
    parser.add_argument(
        "--predict",
        metavar="WHICH",
        help="2bw, wpipe, weave: predict weights; backward at the same (published) or at the newest version (exact)",
    )
    parser.add_argument("--vertical-sync", action="store_true", default=None, help="pipedream: vertical sync")
    parser.add_argument(
        "--fresh",
        action="store_true",
        default=None,
        help="wpipe: every forward reads the newest version, so only the first turn of a mini-batch is late",
    )
    parser.add_argument(
        "--slack", type=number, metavar="N", help="weave: time of a hop to hide, in forwards of a stage (default 0.5)"
    )
    parser.add_argument(
        "--split",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="weave: split backwards (the default), so that fewer micro-batches are in flight",
    )
    add_json(parser)


def add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "time and bytes of a whole stage, in any unit")
    costs.add_argument("--forward", type=number, metavar="T", help="time of a micro-batch's forward (default 1)")
    costs.add_argument("--backward", type=number, metavar="T", help="time of its backward (default 2)")
    costs.add_argument("--update", type=number, metavar="T", help="time of an update (default 0)")
    for name, default, words in (
        ("activation", 1, "kept from a forward to its backward"),
        ("input", 0, "sent from chunk to chunk"),
        ("weight", 1, "of one version of the weights"),
        ("gradient", 1, "of the gradients"),
        ("optimizer", 2, "of the optimizer's state"),
        ("master", 0, "of the masters, which compute weights of lower precision are rounded from"),
    ):
        costs.add_argument(f"--{name}-bytes", type=number, metavar="N", help=f"{words} (default {default})")
    costs.add_argument(
        "--recompute",
        nargs="?",
        const=True,
        type=recompute,
        metavar="layer",
        help="keep only inputs, and repeat the forward: of a chunk, or layer by layer; or one of true, false and layer "
        "for each chunk, such as layer,true,false",
    )
    costs.add_argument("--layers", type=number, metavar="N", help="layers of a stage, for --recompute layer")
    costs.add_argument("--latency", type=number, metavar="T", help="time of a message, without its bytes (default 0)")
    costs.add_argument(
        "--bandwidth", type=number, metavar="N", help="bytes per unit of time on a link (default: unlimited)"
    )
    costs.add_argument("--no-overlap", action="store_true", default=None, help="a rank does not compute while it sends")
    costs.add_argument(
        "--costs", metavar="FILE", help="JSON file with the costs of each chunk and link, instead of these options"
    )


def schedule_of(arguments: argparse.Namespace, *, verified: bool = True) -> Schedule:
    """The schedule that the arguments name; a user's schedule is verified, unless the caller does that."""
    name: str = arguments.name
    options = {key: getattr(arguments, key) for key in SCHEDULE_OPTIONS}
    options = {key: value for key, value in options.items() if value is not None}
    sizes = {key: getattr(arguments, key) for key in ("stages", "microbatches")}
    if name.endswith(".csv"):
        schedule = load_csv(name)
        given = [key for key, value in sizes.items() if value not in (None, getattr(schedule, key))] + list(options)
        if given:
            raise WeftError(f"{name} is complete; leave --{given[0].replace('_', '-')} out")
    elif name in METHODS:
        return by_name(name, **_all_of(sizes, name), **options)
    elif ":" in name:
        schedule = load_schedule_function(name)(**_all_of(sizes, name), **options)
    elif name.endswith(".py"):
        raise WeftError(f"a file may have several functions; name the one that builds the schedule: {name}:function")
    else:
        return by_name(name, stages=1, microbatches=1)  # raises, with a suggestion
    if verified:
        verify(schedule)
    return schedule


def _all_of(sizes: dict[str, int | None], name: str) -> dict[str, Any]:
    if missing := [key for key, value in sizes.items() if value is None]:
        raise WeftError(f"{name} needs --{missing[0]}, such as --stages 4 --microbatches 8")
    return sizes


def cost_of(arguments: argparse.Namespace, schedule: Schedule) -> Cost:
    """The costs that the arguments give."""
    given = {key: value for key, value in vars(arguments).items() if value is not None}
    stage = {name: given[name] for name in _STAGE if name in given}
    link = {field.name: given[field.name] for field in fields(Link) if field.name in given}
    if "no_overlap" in given:
        link["overlap"] = False
    if "costs" in given:
        if stage or link:
            raise WeftError(f"--costs holds all costs; leave --{next(iter(stage | link)).replace('_', '-')} out")
        return _from_file(given["costs"], schedule)
    choice = given.get("recompute")
    by_layer = "layer" in (choice if isinstance(choice, list) else [choice])
    if by_layer and "layers" not in given:
        raise WeftError("--recompute layer needs --layers, the layers of a stage, such as --layers 12")
    if "layers" in given and not by_layer:
        raise WeftError("--layers counts with --recompute layer only; leave it out, or add --recompute layer")
    if "bandwidth" in given and not given.get("input_bytes"):
        raise WeftError("--bandwidth needs --input-bytes, the size of a message; without it nothing is sent")
    return Cost.uniform(schedule, **stage, link=Link(**link))


def _from_file(path: str, schedule: Schedule) -> Cost:
    try:
        with open(path, encoding="utf-8") as file:
            cost = Cost.from_json(file.read())
    except OSError as problem:
        raise WeftError(f"{path} can't be read: {problem.strerror}") from None
    except (UnicodeDecodeError, WeftError) as problem:
        raise WeftError(f"{path}: {problem}") from None
    cost.check(schedule)
    return cost


_STAGE = (
    "forward",
    "backward",
    "update",
    "activation_bytes",
    "input_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "master_bytes",
    "recompute",
    "layers",
)
