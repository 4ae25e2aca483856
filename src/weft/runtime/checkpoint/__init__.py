"""Saving, loading and resharding a pipeline's state; the form of a checkpoint on disk."""

from weft.runtime.checkpoint.files import inspect, read_model
from weft.runtime.checkpoint.model_state import load_state_dict, share_buffers, state_dict
from weft.runtime.checkpoint.pipeline_state import prepare, save

__all__ = ["inspect", "load_state_dict", "prepare", "read_model", "save", "share_buffers", "state_dict"]
