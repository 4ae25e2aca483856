"""The grid in the docstring of each method is the grid of its schedule."""

from importlib import import_module

import pytest

import weft
from weft.draw import grid
from weft.simulate import timeline


@pytest.mark.parametrize(
    ("module", "name", "stages", "options"),
    [
        ("gpipe", "gpipe", 4, {}),
        ("one_f_one_b", "1f1b", 4, {}),
        ("interleaved", "interleaved", 2, {}),
        ("zero_bubble", "zb-h1", 4, {}),
        ("asynchronous", "pipedream", 4, {}),
        ("asynchronous", "2bw", 4, {}),
        ("asynchronous", "xpipe", 4, {}),
        ("wpipe", "wpipe", 4, {}),
        ("weave", "weave", 4, {"slack": 0}),
    ],
)
def test_the_docstring_shows_the_grid(module: str, name: str, stages: int, options: dict[str, float]) -> None:
    text = import_module(f"weft.schedule.methods.{module}").__doc__ or ""
    shown = [line.strip() for line in text.splitlines() if line.startswith("    rank ")]
    assert len(shown) == stages
    schedule = weft.schedule(name, stages=stages, microbatches=4, **options)
    minibatches = 4 if schedule.weights.delay != 0 else 1
    drawn = grid(timeline(schedule, minibatches=minibatches), width=max(map(len, shown)))
    assert drawn.splitlines()[:stages] == shown
