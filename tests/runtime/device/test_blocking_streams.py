"""Kernels behind an all-reduce wait for its peers. A rank that lets compute wait for a sum too early hangs.

The law's tests show that no rank does (`test_ranks_law.py`). Here sums run on the compute stream, on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from tests.helpers import pretend
from tests.helpers.pretend.ranks import needs_pretend_device
from tests.helpers.rank_runs import Case, pipeline, train

from weft.errors import RunError
from weft.runtime.comm import process_transport
from weft.runtime.weights import all_reduce

pytestmark = needs_pretend_device

LIMIT = 1.0  # seconds that a kernel waits for the gates of its stream


def train_with_sums_on_the_compute_stream(case: Case) -> str:
    pretend.load().set_gate_limit(LIMIT)
    with (
        mock.patch.object(process_transport, "new_stream", return_value=None),
        mock.patch.object(all_reduce, "new_stream", return_value=None),
        pytest.raises(RunError) as error,
    ):
        train(pipeline(case, "pretend"), case)
    return str(error.value)


@pytest.mark.parametrize("method", ["wpipe", "interleaved"])
def test_tied_weights_hang_if_their_sums_run_on_the_compute_stream(
    pretend_launch: Callable[..., list[Any]], method: str
) -> None:
    errors = pretend_launch(train_with_sums_on_the_compute_stream, Case(method=method, tied=True), ranks=2)
    assert all(f"waited {LIMIT:g} s for a gate that stayed closed: all_reduce (SUM)" in error for error in errors), (
        errors
    )
