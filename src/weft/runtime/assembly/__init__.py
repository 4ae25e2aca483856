"""Put a rank together: settings and their checks, consistency between ranks, the layout of chunks, building them.

`assemble` turns a model and the `Settings` of a pipeline into workers that are ready to run.
"""

from weft.runtime.assembly.assemble import Assembly, assemble
from weft.runtime.assembly.build import BuiltChunk
from weft.runtime.assembly.consistency import check_same
from weft.runtime.assembly.description import versions
from weft.runtime.assembly.layout import Layout
from weft.runtime.assembly.settings import Settings, refuse_unknown

__all__ = ["Assembly", "BuiltChunk", "Layout", "Settings", "assemble", "check_same", "refuse_unknown", "versions"]
