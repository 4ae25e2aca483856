"""What a model's weights are at the start: tensors on the meta device become real, where they are needed.

`make_tensors` reads or initializes what one process holds; `drop_values` frees what it does not hold.
"""

from weft.runtime.initial.materialize import OpenWeights, Weights, make_tensors
from weft.runtime.initial.on_meta import on_meta
from weft.runtime.initial.places import drop_values, places_of, without_values

__all__ = ["OpenWeights", "Weights", "drop_values", "make_tensors", "on_meta", "places_of", "without_values"]
