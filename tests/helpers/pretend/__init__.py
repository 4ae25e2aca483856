"""A pretend accelerator for tests on machines without one, and a stand-in for NCCL between its ranks.

`load()` builds and registers a PyTorch device named `pretend` in host memory, and returns its controls (`controls.py`).
`unavailable()` says why that is not possible here. Importing this package does neither.

What it models:
- Several devices (`WEFT_PRETEND_DEVICES`, default 4) with a current device, streams, events and generators of their
  own, through PyTorch's generic interfaces. Tensors of a device do not mix with the CPU's nor with another device's.
- What makes the host wait (`counts`), and how many kernels are launched (`launches`).
- The order of streams. Kernels run at once, so results are right even where a real device would have a race. The stream
  sanitizer finds these races: it follows events with vector clocks, and checks each use and each free of memory.
- Late completion: with `set_lag(n)`, events and copies to pinned memory complete n launches or queries later.
- Time: events read a fake clock, if `set_clock` has set one.
- Waiting for peers: a stream that a closed `Gate` blocks runs no kernel until the gate opens. `nccl.py` builds
  communicators from that.

What it can't:
- The host runs each kernel itself, so it blocks on a gate as soon as it launches a kernel behind it. On a real device
  the host would run ahead. A program that passes here does not rely on that; one that hangs here may not hang there.
  For tests of failures, `set_gate_limit(…, run_ahead=True)` lets the host run ahead of what never completes.
- A use of memory is a range of bytes from a tensor's first to its last element. Columns of one matrix overlap.
- The host's own reads and writes of pinned memory are unseen. With a lag, memory that is read too early holds NaN or
  -1, and a source that is overwritten too early is reported.
- A query that returns True orders all later launches after the event, as on a real device. Without a lag all queries do
  that at once and hide races; test with a lag.
- Composite operators launch the kernels of their parts, so counts of launches are not those of CUDA, except that a
  `torch._foreach_*` call is one launch.
- Autocast casts what the CPU's autocast casts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tests.helpers.pretend import build

if TYPE_CHECKING:
    from tests.helpers.pretend.controls import Controls


def unavailable() -> str | None:
    """Why the device can't be had on this machine, for the reason of a skipped test; None if it can."""
    if build.target().exists() or (lacking := build.missing()) is None:
        return None
    return f"the pretend device needs {lacking}"


def load() -> Controls:
    """Register the device in this process, once, and return its controls. Builds it first, about 20 s, if need be.

    A process has the device before its first backward, or not at all: autograd counts devices only then. It is the
    accelerator of the whole process from now on, so run tests with it in processes of their own (`processes.py`).
    """
    controls = autoload()
    importlib.import_module("tests.helpers.pretend.controls").check_autograd()
    return controls


def autoload() -> Controls:
    """The same, as `import torch` does it, before anything can have run; the process may still fork others."""
    controls: Controls = importlib.import_module("tests.helpers.pretend.controls").CONTROLS
    return controls
