"""How weights move, and where they will be: optimizer rules, prediction, cures for stale gradients."""

from weft.runtime.update import cures
from weft.runtime.update.cures.base import Cure, Treatment, cure_for, lateness
from weft.runtime.update.prediction import Choice, Predictions, Predictor, SchedulerMaker, check_rule, ghost_of
from weft.runtime.update.rules import linear_rule

__all__ = [
    "Choice",
    "Cure",
    "Predictions",
    "Predictor",
    "SchedulerMaker",
    "Treatment",
    "check_rule",
    "cure_for",
    "cures",
    "ghost_of",
    "lateness",
    "linear_rule",
]
