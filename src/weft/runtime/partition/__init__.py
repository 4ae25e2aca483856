"""From a model to layers, and from layers to chunks: cutting, exporting, balancing."""

from weft.runtime.partition.balance import chunk_layers
from weft.runtime.partition.cut import cut
from weft.runtime.partition.layers import LayeredModel, call_layer, layered_model, named_tensors

__all__ = ["LayeredModel", "call_layer", "chunk_layers", "cut", "layered_model", "named_tensors"]
