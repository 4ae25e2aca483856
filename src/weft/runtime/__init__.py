"""The runtime: schedules executed on torch, by real ranks or by virtual ones."""

from weft.runtime.partition import cut
from weft.runtime.pipeline import Pipeline, Result
from weft.runtime.process import launch
from weft.runtime.report import Report
from weft.runtime.update import cures, linear_rule

__all__ = ["Pipeline", "Report", "Result", "cures", "cut", "launch", "linear_rule"]
