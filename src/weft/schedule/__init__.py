"""Schedules as data: actions, schedules, the verifier and the lowered form that everything else reads. Torch-free.

`methods/` has one file for each family of methods; `schedule(name, ...)` builds one of them by name.
"""

from weft.schedule.actions import (
    BACKWARDS,
    NONE,
    RETIRING,
    Action,
    B,
    F,
    I,
    Op,
    Rows,
    U,
    W,
    alternate,
    as_rows,
    is_any,
    join,
    pair_up,
)
from weft.schedule.catalog import METHODS, Method, methods_with, predicting_methods, schedule
from weft.schedule.core import Schedule, check_sizes, is_number
from weft.schedule.csv_format import load_csv, read_csv, torch_can_express, write_csv
from weft.schedule.delays import delay_text, max_ahead, max_delay, mean_delay, mean_over_chunks
from weft.schedule.find_block import DEFAULT_SLACK, find_block
from weft.schedule.lower import lower, shared_weights
from weft.schedule.program import Program, Row, Step, prediction_of
from weft.schedule.recompute import (
    RecomputeChoice,
    check_autocast,
    check_recompute,
    is_recompute_choice,
    recompute_choices,
    splits_backwards,
)
from weft.schedule.timeline import Block, Timeline
from weft.schedule.user_schedule import load_schedule_function
from weft.schedule.verify import RULES, Verdict, verify, verify_program
from weft.schedule.weights import Weights

__all__ = [
    "BACKWARDS",
    "DEFAULT_SLACK",
    "METHODS",
    "NONE",
    "RETIRING",
    "RULES",
    "Action",
    "B",
    "Block",
    "F",
    "I",
    "Method",
    "Op",
    "Program",
    "RecomputeChoice",
    "Row",
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
    "check_autocast",
    "check_recompute",
    "check_sizes",
    "delay_text",
    "find_block",
    "is_any",
    "is_number",
    "is_recompute_choice",
    "join",
    "load_csv",
    "load_schedule_function",
    "lower",
    "max_ahead",
    "max_delay",
    "mean_delay",
    "mean_over_chunks",
    "methods_with",
    "pair_up",
    "predicting_methods",
    "prediction_of",
    "read_csv",
    "recompute_choices",
    "schedule",
    "shared_weights",
    "splits_backwards",
    "torch_can_express",
    "verify",
    "verify_program",
    "write_csv",
]
