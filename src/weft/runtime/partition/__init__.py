"""A model becomes layers, and layers become chunks.

`layered_model` takes a list of layers or cuts any model with torch.export; `chunk_layers` balances layers over chunks.
"""

from weft.runtime.partition.balance import chunk_layers
from weft.runtime.partition.cut import cut
from weft.runtime.partition.layers import LayeredModel, call_layer, layer_input, layered_model
from weft.runtime.partition.members import ComputeDtypes, Place, named_tensors, state_tensors

__all__ = [
    "ComputeDtypes",
    "LayeredModel",
    "Place",
    "call_layer",
    "chunk_layers",
    "cut",
    "layer_input",
    "layered_model",
    "named_tensors",
    "state_tensors",
]
