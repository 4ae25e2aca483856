"""Tensors in safetensors files: read one at a time into memory that is there already, and written block by block.

`TensorSource` is what all sources of weights share; `StoredWeights` is one for a file or a folder of files,
`TensorMapping` one for tensors in memory.
"""

from weft.runtime.storage.model_folder import SHARD_SIZE, write_model
from weft.runtime.storage.reader import TensorFile
from weft.runtime.storage.safetensors_header import Form, stored_form
from weft.runtime.storage.source import TensorSource
from weft.runtime.storage.stored_weights import StoredWeights
from weft.runtime.storage.tensor_mapping import TensorMapping
from weft.runtime.storage.writer import FileWriter, write_safetensors

__all__ = [
    "SHARD_SIZE",
    "FileWriter",
    "Form",
    "StoredWeights",
    "TensorFile",
    "TensorMapping",
    "TensorSource",
    "stored_form",
    "write_model",
    "write_safetensors",
]
