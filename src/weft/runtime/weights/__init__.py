"""Which weights a pass reads, and how gradients become an update.

A `ParameterSet` keeps the versions of a chunk's weights; `GradientSync` averages, ties, checks and clips gradients over
ranks.
"""

from weft.runtime.weights.gradient_sync import GradientSync, PendingUpdate
from weft.runtime.weights.groups import gradient_sync_for, norm_groups
from weft.runtime.weights.parameter_set import ParameterSet, gradient_bytes
from weft.runtime.weights.versions import Leaves, RoundedVersions
from weft.runtime.weights.whole_norm import WholeNorm

__all__ = [
    "GradientSync",
    "Leaves",
    "ParameterSet",
    "PendingUpdate",
    "RoundedVersions",
    "WholeNorm",
    "gradient_bytes",
    "gradient_sync_for",
    "norm_groups",
]
