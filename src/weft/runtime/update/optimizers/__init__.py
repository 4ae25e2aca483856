"""Optimizers that know the names of their parameters, for `optimizer=` of a pipeline or for training without one.

muon         hidden matrices by Muon, everything else by AdamW, in one optimizer
"""

from weft.runtime.update.optimizers.hidden import is_hidden_matrix
from weft.runtime.update.optimizers.muon import MuonAdamW, muon

__all__ = ["MuonAdamW", "is_hidden_matrix", "muon"]
