"""Executes a schedule with torch, on real ranks (one process each) or on virtual ranks inside one process.

Each sub-package is a room with one purpose; CONTRIBUTING lists them in order. `Pipeline` is the facade.
"""

from weft.runtime.initial import on_meta
from weft.runtime.partition import cut
from weft.runtime.pipeline import Pipeline, Result
from weft.runtime.process import launch
from weft.runtime.report import Report
from weft.runtime.update import cures, linear_rule, optimizers
from weft.runtime.whole_model import materialize

__all__ = [
    "Pipeline",
    "Report",
    "Result",
    "cures",
    "cut",
    "launch",
    "linear_rule",
    "materialize",
    "on_meta",
    "optimizers",
]
