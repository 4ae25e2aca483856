"""Saving, loading and resharding a pipeline's state."""

from weft.runtime.checkpoint import pipeline_state
from weft.runtime.checkpoint.files import inspect, read_model

__all__ = ["inspect", "pipeline_state", "read_model"]
