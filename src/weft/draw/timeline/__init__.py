"""Drawings of one timeline: the terminal grid, the SVG picture, the HTML viewer and the trace file.

`drawing` decides once, for all of them, how a block is labelled and coloured.
"""

from weft.draw.timeline.html_viewer import html
from weft.draw.timeline.svg_picture import svg
from weft.draw.timeline.terminal_grid import enough, grid
from weft.draw.timeline.trace_file import trace

__all__ = ["enough", "grid", "html", "svg", "trace"]
