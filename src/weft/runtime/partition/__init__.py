"""From a model to layers, and from layers to chunks: cutting, exporting, balancing."""

from weft.runtime.partition.balance import chunk_layers
from weft.runtime.partition.cut import cut
from weft.runtime.partition.layers import Model, call, model_of, tensors_of

__all__ = ["Model", "call", "chunk_layers", "cut", "model_of", "tensors_of"]
