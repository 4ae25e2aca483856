"""The runtime: schedules executed on torch, by real ranks or by virtual ones."""

from weft.runtime import cures
from weft.runtime.cut import cut
from weft.runtime.launch import launch
from weft.runtime.pipeline import Pipeline, Result
from weft.runtime.report import Report
from weft.runtime.rules import linear_rule

__all__ = ["Pipeline", "Report", "Result", "cures", "cut", "launch", "linear_rule"]
