"""Cures for stale gradients, besides prediction; each from a paper.

Optimistic   what is new in the change of an update counts more
PipeMare     a smaller learning rate for chunks with a delay, in the first updates
GapAware     gradients divided by how far the weights have moved since the forward
NAdamW       an optimizer: Nesterov's look-ahead with a long momentum and a discounted gradient
"""

from weft.runtime.update.cures.base import Cure, CurePart
from weft.runtime.update.cures.gapaware import GapAware
from weft.runtime.update.cures.nadamw import NAdamW
from weft.runtime.update.cures.optimistic import Optimistic
from weft.runtime.update.cures.pipemare import PipeMare
from weft.runtime.update.part import PartState

__all__ = ["Cure", "CurePart", "GapAware", "NAdamW", "Optimistic", "PartState", "PipeMare"]
