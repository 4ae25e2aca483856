"""How weights move, and where they will be: optimizers, prediction, cures for stale gradients.

What happens at an update is one protocol, `UpdatePart`, which all of these implement.
"""

from weft.runtime.update import cures, optimizers
from weft.runtime.update.cures.base import Cure, cure_for
from weft.runtime.update.makers import OptimizerMaker, SchedulerMaker, check_optimizer, takes_names
from weft.runtime.update.optimizer import options_of, tensor_bytes
from weft.runtime.update.part import PartState, UpdatePart
from weft.runtime.update.predictions import Predictions
from weft.runtime.update.predictor import PredictionOptions, check_rule
from weft.runtime.update.rules import linear_rule
from weft.runtime.update.updater import Updater

__all__ = [
    "Cure",
    "OptimizerMaker",
    "PartState",
    "PredictionOptions",
    "Predictions",
    "SchedulerMaker",
    "UpdatePart",
    "Updater",
    "check_optimizer",
    "check_rule",
    "cure_for",
    "cures",
    "linear_rule",
    "optimizers",
    "options_of",
    "takes_names",
    "tensor_bytes",
]
