"""Schedules as data: torch-free. Described once, then verified, simulated, drawn and executed."""

from weft.schedule.actions import Action, B, F, I, Op, Rows, U, W, alternate, as_rows, join, pair_up
from weft.schedule.catalog import METHODS, Method, schedule
from weft.schedule.core import Schedule
from weft.schedule.files import load_csv, read_csv, torch_can_express, write_csv
from weft.schedule.lower import Program, Step, lower
from weft.schedule.timeline import Block, Timeline
from weft.schedule.verify import RULES, Verdict, verify
from weft.schedule.weights import Weights

__all__ = [
    "METHODS",
    "RULES",
    "Action",
    "B",
    "Block",
    "F",
    "I",
    "Method",
    "Op",
    "Program",
    "Rows",
    "Schedule",
    "Step",
    "Timeline",
    "U",
    "Verdict",
    "W",
    "Weights",
    "alternate",
    "as_rows",
    "join",
    "load_csv",
    "lower",
    "pair_up",
    "read_csv",
    "schedule",
    "torch_can_express",
    "verify",
    "write_csv",
]
