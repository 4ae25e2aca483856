"""Pictures of a timeline, simulated or measured: text grid, SVG, page and trace file. Torch-free."""

from weft.draw.page import html
from weft.draw.picture import svg
from weft.draw.terminal import grid
from weft.draw.tracing import trace

__all__ = ["grid", "html", "svg", "trace"]
