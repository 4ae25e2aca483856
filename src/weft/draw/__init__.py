"""Drawings of timelines, simulated or measured, and the pages that report on training runs. Torch-free.

`weft.draw.timeline` makes the terminal grid, the SVG, the HTML page and the trace file; `weft.draw.report` makes the
report pages.
"""

from weft.draw.timeline import enough, grid, html, svg, trace

__all__ = ["enough", "grid", "html", "svg", "trace"]
