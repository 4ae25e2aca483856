"""The devices of all ranks: what can't work together is refused on every rank, and rank 0 says what was chosen."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.devices import device
from tests.helpers.fake_devices import fake_devices
from tests.runtime.assembly.test_bad_input import pipeline
from torch import nn

from weft.errors import WeftError
from weft.runtime.assembly.build import move_layers
from weft.runtime.assembly.devices import RankDevice, check_devices, describe_devices, say_once


def ranks_on(*devices: str, **changes: Any) -> list[RankDevice]:
    """Ranks of one host with these devices, which are identified by their names."""
    same: dict[str, Any] = {"host": "h", "reason": "so", "may_share": False} | changes
    return [RankDevice(device=device, **{"identity": device} | same) for device in devices]


def test_different_devices_are_accepted() -> None:
    check_devices(ranks_on("cuda:0", "cuda:1"))
    check_devices(ranks_on("cpu", "cpu"))
    check_devices(ranks_on("cuda:0") + ranks_on("cuda:0", host="other"))
    check_devices(ranks_on("cuda:0", identity="a") + ranks_on("cuda:0", identity="b"))  # one device a task
    check_devices(ranks_on("cuda:0", "cuda:0", may_share=True))


@pytest.mark.parametrize(
    "ranks",
    [
        ranks_on("cuda:0", "cuda:0"),
        ranks_on("cuda:0", "cuda:1", identity="a"),
        ranks_on("cuda:0") + ranks_on("cuda:0", may_share=True),
    ],
)
def test_two_ranks_on_one_device_are_refused(ranks: Sequence[RankDevice]) -> None:
    words = r"device of its own \(ranks 0 and 1, host: h, device: .*rank 0 has cuda:0: so; .*\); start as many ranks"
    with pytest.raises(WeftError, match=words):
        check_devices(ranks)


def test_devices_of_two_types_are_refused() -> None:
    with pytest.raises(WeftError, match=r"of one type \(rank 0: cpu, rank 2: cuda:1\); pass the same device="):
        check_devices(ranks_on("cpu", "cpu", "cuda:1"))


def test_a_line_says_what_was_chosen() -> None:
    assert list(describe_devices(ranks_on("cuda:0", "cuda:1"))) == ["computing on cuda:0, cuda:1: so"]
    assert list(describe_devices(ranks_on("cpu", "cpu", reason=""))) == []
    mixed = ranks_on("cuda:0", "cuda:1") + ranks_on("cuda:2", reason="the model is there")
    assert list(describe_devices(mixed)) == [
        "ranks 0, 1 computing on cuda:0, cuda:1: so",
        "rank 2 computing on cuda:2: the model is there",
    ]


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        say_once("a line of this test")
    assert capsys.readouterr().err == "weft: a line of this test\n"


def test_layers_that_share_a_weight_share_it_on_their_device() -> None:
    """On some devices PyTorch makes a new parameter for each module; so it does on meta."""
    first, second, norm, other_norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    second.weight, other_norm.running_mean = first.weight, norm.running_mean
    layers: list[nn.Module] = [first, nn.Sequential(second, norm), other_norm]
    alone = nn.Linear(2, 2)
    alone.weight = first.weight
    assert alone.to("meta").weight is not first.weight  # the control
    move_layers(layers, torch.device("meta"))
    assert second.weight is first.weight
    assert other_norm.running_mean is norm.running_mean
    assert second.bias is not first.bias
    tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


# On real ranks


def device_type() -> str:
    with pipeline() as pipe:
        return pipe._assembly.compute.device.type


def test_pipelines_compute_on_the_device_of_the_option(launch: Callable[..., list[Any]]) -> None:
    """`pytest --device NAME`; without it on the CPU, whatever the machine has."""
    expected = device().partition(":")[0]
    assert device_type() == expected
    assert launch(device_type, ranks=2) == [expected] * 2


def build(
    visible: int, uuids: list[list[str]] | None, unset: int | None, options: dict[str, Any]
) -> tuple[str, str, int | None]:
    """Build a pipeline on fake devices: the error, what was said, and the device that was set."""
    rank = dist.get_rank()
    environment = {} if rank == unset else {"LOCAL_RANK": str(rank)}
    own = None if uuids is None else uuids[rank]
    said, error = io.StringIO(), ""
    with fake_devices(visible, uuids=own, environment=environment) as fake, contextlib.redirect_stderr(said):
        try:
            pipeline(schedule="1f1b", **options).close()
        except WeftError as problem:
            error = str(problem)
    return error, said.getvalue(), fake.current


def test_ranks_that_see_the_same_single_device_are_refused(launch: Callable[..., list[Any]]) -> None:
    """They can't know that before they compare: a launcher may show each rank its own."""
    for error, said, current in launch(build, 1, [["a"], ["a"]], None, {"device": "cuda"}, ranks=2):
        assert "every rank of a host needs a device of its own (ranks 0 and 1, host: " in error
        assert 'device: cuda a; rank 0 has cuda:0: device="cuda", and no other one is visible' in error
        assert (said, current) == ("", None)


def test_what_one_rank_can_not_choose_all_refuse(launch: Callable[..., list[Any]]) -> None:
    errors = [error for error, _, _ in launch(build, 4, None, 1, {"device": "cuda"}, ranks=2)]
    assert "must know its own (visible cuda devices: 4, LOCAL_RANK: not set" in errors[0]
    assert errors[0] == errors[1]


def build_with_one_queue(device: str) -> str:
    """The error of a pipeline whose rank 1 has a single hardware queue."""
    rank = dist.get_rank()
    environment = {"LOCAL_RANK": str(rank)} | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if rank == 1 else {})
    with fake_devices(4, environment=environment):
        try:
            pipeline(schedule="1f1b", device=device).close()
        except WeftError as problem:
            return str(problem)
    return ""


def test_a_rank_with_one_hardware_queue_is_refused_by_all(launch: Callable[..., list[Any]]) -> None:
    for error in launch(build_with_one_queue, "cuda", ranks=2):
        assert "(CUDA_DEVICE_MAX_CONNECTIONS: 1): with one hardware queue, compute waits behind a message" in error
    assert launch(build_with_one_queue, "cpu", ranks=2) == ["", ""]


def test_the_cpu_is_not_chosen_in_silence(launch: Callable[..., list[Any]]) -> None:
    (error, said, current), (_, other, _) = launch(build, 4, None, None, {}, ranks=2)
    assert (error, current, other) == ("", None, "")
    assert said.startswith("weft: computing on cpu: the process group has no backend for cuda (visible cuda devices: 4")
    assert said.count("\n") == 1


def test_nothing_is_said_where_there_is_no_accelerator(launch: Callable[..., list[Any]]) -> None:
    assert launch(build, 0, None, None, {}, ranks=2) == [("", "", None)] * 2


def test_one_process_says_that_it_stays_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_devices(3):
        pipeline().close()
    said = capsys.readouterr().err
    assert said.startswith(
        "weft: computing on cpu: one process leaves a model on the CPU (visible cuda devices: 3); to"
    )
    assert 'pass device="cuda" or set WEFT_DEVICE=cuda' in said
