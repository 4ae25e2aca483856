"""The orders of work, one file for each family of methods, with its grid in the docstring.

`catalog.py` lists the methods by name, `law.py` states which weights each of them reads.
"""

from weft.schedule.methods.asynchronous import paci, pipedream, pipeoptim, spectrain, two_buffered, xpipe
from weft.schedule.methods.gpipe import gpipe
from weft.schedule.methods.interleaved import interleaved
from weft.schedule.methods.one_f_one_b import one_f_one_b
from weft.schedule.methods.weave import weave
from weft.schedule.methods.wpipe import wpipe
from weft.schedule.methods.zero_bubble import zb_h1

__all__ = [
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "paci",
    "pipedream",
    "pipeoptim",
    "spectrain",
    "two_buffered",
    "weave",
    "wpipe",
    "xpipe",
    "zb_h1",
]
