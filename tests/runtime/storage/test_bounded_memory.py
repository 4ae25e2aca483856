"""Saving, loading, exporting and streaming hold no second copy of the model: measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.scripts import ROOT, SOURCES, paths

TENSOR, MODEL = 16, 64  # MiB
SLACK = 12  # MiB: a block of 8, and what Python takes
LIMITS = {
    "save": SLACK,
    "load": SLACK,
    "load into a new pipeline": MODEL + SLACK,  # the optimizer's state, which was not there
    "export": TENSOR + SLACK,
    "stream": 2 * TENSOR + SLACK,  # the loop variable holds a tensor while the next one comes
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_second_copy_of_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.storage.bounded", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": paths(SOURCES, ROOT)}
    environment["MALLOC_MMAP_THRESHOLD_"] = "1000000"  # so that all that is freed goes back at once
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: figures[0] for name, figures in found.items() if figures[0] > LIMITS[name]} == {}
    assert {name: figures[1] for name, figures in found.items() if figures[1] <= LIMITS[name] + TENSOR} == {}
