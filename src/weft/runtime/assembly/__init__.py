"""Putting a rank together: settings, consistency between ranks, the layout of chunks, building them."""

from weft.runtime.assembly import consistency, settings
from weft.runtime.assembly.build import Built, Layout, build, own_layers, plan, without_weights

__all__ = ["Built", "Layout", "build", "consistency", "own_layers", "plan", "settings", "without_weights"]
