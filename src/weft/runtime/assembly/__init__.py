"""Putting a rank together: settings, consistency between ranks, the layout of chunks, building them."""

from weft.runtime.assembly.assemble import Assembly, assemble
from weft.runtime.assembly.build import BuiltChunk
from weft.runtime.assembly.layout import Layout
from weft.runtime.assembly.settings import Settings

__all__ = ["Assembly", "BuiltChunk", "Layout", "Settings", "assemble"]
