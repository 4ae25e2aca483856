"""Pictures of a timeline, simulated or measured: text grid, SVG, page and trace file. Torch-free."""

from weft.draw.page import html
from weft.draw.picture import svg
from weft.draw.terminal import enough, grid
from weft.draw.tracing import trace

__all__ = ["enough", "grid", "html", "svg", "trace"]
