"""Streams, marks and backends: of a device that has them, of the CPU, and of a device that has none."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.helpers import pretend
from tests.helpers.device_runs import Case, train
from tests.helpers.pretend.processes import in_process

from weft.runtime.device import (
    backend_for,
    current_stream,
    device_index,
    has_streams,
    mark,
    new_stream,
    on_stream,
    record_use,
    wait_for_mark,
)

CPU = torch.device("cpu")


def test_the_cpu_has_no_streams() -> None:
    assert not has_streams(CPU)
    assert not has_streams(torch.device("meta"))
    assert [new_stream(CPU), current_stream(CPU), mark(CPU)] == [None] * 3
    with on_stream(None), device_index(CPU):
        wait_for_mark(None, CPU)
        record_use([torch.ones(1)], CPU)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, TypeError])
@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_a_device_without_streams(kind: str, error: type[Exception]) -> None:
    """Such as MPS, which has events and one stream."""
    with mock.patch.object(torch, kind, side_effect=error("not here")):
        assert not has_streams.__wrapped__(torch.device("mps"))


@in_process
def test_side_streams_run_beside_the_current_one() -> None:
    pretend.load()
    device = torch.device("pretend", 0)
    assert has_streams(device)
    side, current = new_stream(device), current_stream(device)
    assert side is not None
    assert side != current
    with on_stream(side):
        assert current_stream(device) == side
        written = torch.ones(3, device=device)
        arrived = mark(device)
    assert current_stream(device) == current
    wait_for_mark(arrived, device)
    assert (written + 1).tolist() == [2.0] * 3
    record_use([written], device)
    del written
    torch.ones(1, device=device)


@in_process
def test_a_stream_that_does_not_wait_for_a_mark_is_noticed() -> None:
    """A control of the tests in this folder: each step of the one above is needed."""
    pretend.load().set_lag(100)
    device = torch.device("pretend", 0)
    side = new_stream(device)
    with on_stream(side):
        written = torch.ones(3, device=device)
        arrived = mark(device)
    with pytest.raises(RuntimeError, match="not ordered after"):
        written + 1
    wait_for_mark(arrived, device)
    written + 1
    del written  # without record_use
    with pytest.raises(RuntimeError, match="is freed after"):
        torch.ones(1, device=device)


@in_process
def test_only_tensors_of_the_device_are_recorded() -> None:
    pretend.load()
    others = [torch.ones(1), torch.ones(1, device="pretend:1")]
    with mock.patch.object(torch.Tensor, "record_stream") as recorded:
        record_use([*others, torch.ones(1, device="pretend:0")], torch.device("pretend", 0))
    assert recorded.call_count == 1


@in_process
def test_threads_can_have_another_current_device() -> None:
    pretend.load()
    with device_index(torch.device("pretend", 2)):
        assert torch.accelerator.current_device_index() == 2
        with device_index(CPU), device_index(torch.device("pretend")):
            assert torch.accelerator.current_device_index() == 2
    assert torch.accelerator.current_device_index() == 0


@in_process
def test_a_pipeline_on_a_device_without_streams(tmp_path: Path) -> None:
    """It blocks where others do not, and computes the same."""
    pretend.load()
    case = Case(method="wpipe", clip_norm=0.1, replicas=2, telemetry=2, pause="evaluate")
    expected = train(case, "cpu", tmp_path)
    names = ("streams", "host_copy")
    patches = [mock.patch(f"weft.runtime.device.{name}.has_streams", return_value=False) for name in names]
    with patches[0], patches[1], mock.patch("weft.runtime.engine.device_meter.has_streams", return_value=False):
        ran = train(case, "pretend:0", tmp_path)
    assert all(torch.equal(ran.state[name], tensor) for name, tensor in expected.state.items())
    assert (ran.last, ran.figures) == (expected.last, expected.figures)


@in_process
def test_the_backend_for_a_device() -> None:
    """Of the default process group; gloo moves host memory, whatever the device."""
    pretend.load()
    for name, expected in (("cpu:gloo,pretend:standin", "standin"), ("gloo", None), ("cpu:gloo,pretend:gloo", None)):
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(name, store=store, rank=0, world_size=1)
        try:
            assert backend_for(torch.device("pretend", 0)) == expected
            assert backend_for(CPU) is None
            assert backend_for(torch.device("xpu")) is None
        finally:
            dist.destroy_process_group()
