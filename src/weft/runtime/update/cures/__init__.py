"""Cures for stale gradients, beside prediction: each a small policy of its own, each from a paper.

PipeMare     a smaller learning rate for late chunks, in the first updates
GapAware     gradients divided by how far the weights have moved meanwhile
NAdamW       an optimizer: Nesterov's look-ahead with a long momentum and a discounted gradient
"""

from weft.runtime.update.cures.base import Cure, Treatment
from weft.runtime.update.cures.gapaware import GapAware
from weft.runtime.update.cures.nadamw import NAdamW
from weft.runtime.update.cures.pipemare import PipeMare

__all__ = ["Cure", "GapAware", "NAdamW", "PipeMare", "Treatment"]
