"""Save and load the state of a pipeline, also with another number of stages; the format of checkpoints on disk.

`iter_state_dict` and `load_state_dict` are the model alone; `save` and `prepare` (for a load) are everything.
`stored_weights` reads the model alone, also from safetensors files of others.
"""

from weft.runtime.checkpoint.files import inspect, read_model
from weft.runtime.checkpoint.model_state import iter_state_dict, load_state_dict, share_buffers
from weft.runtime.checkpoint.pipeline_state import prepare, save
from weft.runtime.checkpoint.weights import stored_weights

__all__ = [
    "inspect",
    "iter_state_dict",
    "load_state_dict",
    "prepare",
    "read_model",
    "save",
    "share_buffers",
    "stored_weights",
]
