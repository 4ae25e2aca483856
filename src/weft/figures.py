"""Simulated figures of schedules for the command line: of one schedule, and of all methods at some size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import WeftError
from weft.output import print_table
from weft.schedule import METHODS, delay_text, schedule
from weft.simulate import CATEGORIES, simulate
from weft.text import format_count, format_figure

Figures = dict[str, Any]  # of `Simulation.as_dict`

SYMBOLS = """p: stages; r: rank, from 0; v: chunks of a rank; G0, G1: first and second half of the model
W(t): weights after t updates, which mini-batch t updates; newest: on the rank; stashed: older, kept for backwards
bellwether: the first micro-batch of a mini-batch; in flight: between forward and backward"""


def headline(figures: Figures) -> dict[str, str]:
    """The most important figures of a schedule, as text."""
    steady = "" if figures["steady"] else " (no steady state; mean of the last mini-batches)"
    return {
        "bubble, steady": f"{figures['bubble']:.2%}{steady}",
        "throughput": f"{figures['throughput']:.6g} micro-batches per unit of time",
        "time of a mini-batch": f"{figures['period']:.6g}",
        "idle time of fill and drain": f"{figures['fill']:.6g}",
        f"makespan of {format_count(figures['minibatches'], 'mini-batch')}": f"{figures['makespan']:.6g}",
        "messages per micro-batch": f"{figures['messages_per_microbatch']:g}",
        "delay in updates": delay_text(figures["mean_delay"], figures["delay"], figures["ahead"]),
        "slack, time by which hops may take longer": slack_text(figures["slack"]),
    }


def slack_text(slack: Mapping[str, Any] | None) -> str:
    """Of messages; `slack` is `Slack.as_dict`."""
    if slack is None:
        return "not computed: too many actions"
    return "no messages between ranks" if slack["messages"] is None else format_figure(slack["messages"])


def print_ranks(figures: Figures) -> None:
    slacks = (figures["slack"] or {}).get("ranks") or [None] * figures["stages"]
    ranks = zip(figures["bubbles"], slacks, figures["in_flight"], figures["memory"], strict=True)
    print_table(
        ("rank", "bubble", "slack", "in flight", *(name.replace("_", " ") for name in CATEGORIES), "total"),
        [
            (
                rank,
                f"{bubble:.1%}",
                format_figure(slack),
                f"{held:g}",
                *(_amount(memory[name]) for name in (*CATEGORIES, "total")),
            )
            for rank, (bubble, slack, held, memory) in enumerate(ranks)
        ],
    )


def print_chunks(figures: Figures, placement: Sequence[int]) -> None:
    columns = (map(format_figure, figures[name]) for name in ("versions", "delay", "mean_delays", "ahead"))
    rows = [(chunk, *row) for chunk, row in enumerate(zip(placement, *columns, strict=True))]
    print_table(("chunk", "rank", "versions", "delay", "mean delay", "ahead"), rows)


def method_figures(**sizes: int) -> dict[str, list[dict[str, Any]]]:
    """The figures of each method and its variants, with equal stages."""
    return {
        name: [_variant(name, options, sizes) for options in ({}, *method.variants)] for name, method in METHODS.items()
    }


def _variant(name: str, options: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    try:
        found = simulate(schedule(name, **sizes, **options)).as_dict()
    except WeftError as problem:  # it can't have these sizes
        return {"options": dict(options), "problem": str(problem)}
    return {"options": dict(options)} | {key: found[key] for key in ("bubble", "in_flight", "mean_delay", "slack")}


def print_methods() -> None:
    """The table of methods, and what its symbols mean."""
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
    print_table(("schedule", "", "micro-batches", "forward; backward at", "options", ""), rows)
    print(f"\n{SYMBOLS}")


def print_method_figures(figures: Mapping[str, Sequence[Mapping[str, Any]]], *, stages: int, microbatches: int) -> None:
    about = f"{format_count(stages, 'stage')}, {format_count(microbatches, 'micro-batch')}"
    print(f"\n{about}: micro-batches in flight on the fullest rank (in stages), mean delay in updates,")
    print("and slack of messages: the time of a hop that is hidden, in forwards of a stage")
    rows = [_variant_row(name, variant) for name, variants in figures.items() for variant in variants]
    print_table(("schedule", "bubble", "in flight", "mean delay", "slack"), rows, limit=None)
    if any("problem" in variant for variants in figures.values() for variant in variants):
        print("– can't have this size: weft simulate with the same size says why")


def _variant_row(name: str, variant: Mapping[str, Any]) -> tuple[str, ...]:
    options = [
        f"--no-{option}" if value is False else f"--{option}" + ("" if value is True else f" {value}")
        for option, value in variant["options"].items()
    ]
    title = " ".join([name, *options])
    if "problem" in variant:
        return title, "–", "–", "–", "–"
    slack = (variant["slack"] or {}).get("messages")
    held, mean_delay = f"{max(variant['in_flight']):g}", format_figure(variant["mean_delay"])
    return title, f"{variant['bubble']:.1%}", held, mean_delay, format_figure(slack)


def _amount(value: float) -> str:
    """A number for reading: 4,000,003 rather than 4e+06."""
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e15 else f"{value:,.6g}"
