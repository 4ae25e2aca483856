"""The HTML report of one training run or of several: figures, a summary in sentences, charts, configuration."""

from weft.draw.report.page import report
from weft.draw.report.runs import Run

__all__ = ["Run", "report"]
