"""The facts that decide a rank's device, and the backends of a group that weft makes, on fake devices."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.fake_devices import fake_devices

from weft.errors import WeftError
from weft.runtime.device import check_device, choose_backend, choose_device, device_identity, gather_facts, own_backend

FOUR = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def tensor_on(device: str) -> Any:
    return types.SimpleNamespace(device=torch.device(device))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank, over gloo."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


# Facts


def test_what_is_read_without_a_group() -> None:
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_LAUNCH_BLOCKING": "1", "WEFT_SHARE_DEVICES": "1"}
    with fake_devices(4, environment=FOUR | variables):
        facts = gather_facts(is_launched=True)
    assert (facts.requested, facts.default, facts.model, facts.group, facts.is_new) == (None, None, (), None, False)
    assert (facts.accelerator, facts.visible, facts.current, facts.is_set, facts.is_used) == (
        "cuda",
        4,
        0,
        False,
        False,
    )
    assert (facts.local_rank, facts.local_ranks, facts.is_launched) == (1, 4, True)
    assert (facts.may_share, facts.connections, facts.blocking) == (True, "1", ("CUDA_LAUNCH_BLOCKING",))


@pytest.mark.parametrize(("current", "is_set"), [(0, False), (2, True)])
def test_a_current_device_above_0_was_set(current: int, is_set: bool) -> None:
    with fake_devices(4, current=current):
        facts = gather_facts(is_launched=False)
    assert (facts.current, facts.is_set, facts.is_used) == (current, is_set, True)


@pytest.mark.usefixtures("group")
def test_the_device_of_the_process_group_was_set() -> None:
    """Even at index 0: init_process_group(device_id=...)."""
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
    with fake_devices(4, environment=FOUR):
        facts = gather_facts("cuda", is_launched=False)
        assert (facts.current, facts.is_set) == (0, True)
        assert choose_device(facts).device == "cuda:0"


@pytest.mark.usefixtures("group")
def test_the_backends_of_the_group() -> None:
    with fake_devices(4, environment=FOUR):
        facts = gather_facts(is_launched=False)
        assert facts.group == {"cpu": "gloo", "cuda": "gloo"}
        assert facts.backend is None  # gloo sends host memory
        assert "backends: cpu:gloo,cuda:gloo" in choose_device(facts).reason


def test_the_model_counts_without_its_tensors_on_meta() -> None:
    with fake_devices(4):
        names = ["cuda:1", "meta", "cpu", "cuda:1"]
        assert gather_facts(None, map(tensor_on, names), is_launched=False).model == ("cpu", "cuda:1")
        assert gather_facts(None, map(tensor_on, ["meta"]), is_launched=False).model == ()


def test_the_type_in_question_is_that_of_the_named_device() -> None:
    """Where PyTorch sees two types, such as a GPU and a device of a plug-in."""
    with fake_devices(3, kind="xpu") as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
        for facts in (
            gather_facts("xpu:2", is_launched=False),
            gather_facts(None, [tensor_on("xpu:2")], is_launched=False),
        ):
            assert (facts.accelerator, facts.visible) == ("xpu", 3)
            assert choose_device(facts).device == "xpu:2"
        fake.visible = 0
        with pytest.raises(
            WeftError, match=r'^device="xpu:2": PyTorch sees no xpu device; use device="cpu", or install'
        ):
            choose_device(gather_facts("xpu:2", is_launched=False))


def test_variables_that_hide_devices_are_named() -> None:
    hidden = {"WEFT_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    with (
        fake_devices(0, environment=hidden),
        pytest.raises(
            WeftError, match=r"^WEFT_DEVICE=cuda: PyTorch sees no cuda device \(CUDA_VISIBLE_DEVICES=\); use"
        ),
    ):
        choose_device(gather_facts(is_launched=False))


def test_a_device_without_a_module_is_not_there() -> None:
    with pytest.raises(WeftError, match="PyTorch sees no vulkan device"):
        choose_device(gather_facts("vulkan", is_launched=False))


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "one", "-1"])
def test_a_variable_that_is_no_number(name: str, value: str) -> None:
    with (
        fake_devices(4, environment={name: value}),
        pytest.raises(WeftError, match=rf"{name} must be a whole number of 0 or more \(got '{value}'\)"),
    ):
        gather_facts(is_launched=False)


def test_an_empty_default_is_none() -> None:
    with fake_devices(4, environment={"WEFT_DEVICE": ""}):
        assert gather_facts(is_launched=False).default is None


def test_a_default_that_is_no_device() -> None:
    with (
        fake_devices(4, environment={"WEFT_DEVICE": "cude"}),
        pytest.raises(WeftError, match=r"WEFT_DEVICE must be a device, such as .*got 'cude'\), did you mean 'cuda'\?"),
    ):
        gather_facts(is_launched=False)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cude", r"device must be a device, such as .*got 'cude'\), did you mean 'cuda'\?"),
        ("CUDA", r"got 'CUDA'\), did you mean 'cuda'\?"),
        ("cude:1", r"got 'cude:1'\), did you mean 'cuda'\?"),
        ("cuda:x", r"got 'cuda:x'\)$"),
        ("cuda:-1", r"got 'cuda:-1'\)$"),
        ("", r"got ''\)$"),
        (1, r"got 1\)$"),
        ("meta", r"device that can compute \(got 'meta'\); only the model may be on meta$"),
    ],
)
def test_what_is_no_device(device: Any, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        check_device(device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_there_is_one_cpu(device: Any) -> None:
    assert check_device(device) == torch.device("cpu")


# Identity


def test_a_device_is_identified_by_its_uuid() -> None:
    with fake_devices(2, uuids=["a", "b"], environment={"CUDA_VISIBLE_DEVICES": "5,6"}):
        assert device_identity(torch.device("cuda:1")) == "cuda b"


@pytest.mark.parametrize(
    ("environment", "index", "expected"),
    [
        ({}, 1, "cuda 1"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 0, "cuda 1"),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, 1, "cuda 1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, "cuda 1 "),
        ({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2"}, 0, "cuda 0 1 2"),
    ],
)
def test_or_by_its_index_among_all(environment: dict[str, str], index: int, expected: str) -> None:
    with fake_devices(2, environment=environment):
        assert device_identity(torch.device("cuda", index)) == expected


# The backends of a new group


@pytest.mark.parametrize(
    ("visible", "environment", "requested", "launched", "backend", "current"),
    [
        (4, FOUR, None, True, "cuda:nccl,cpu:gloo", 1),
        (4, FOUR, None, False, "cuda:nccl,cpu:gloo", 1),
        (4, FOUR, "nccl", True, "nccl", 1),
        (4, FOUR, "cpu:gloo,cuda:nccl", False, "cpu:gloo,cuda:nccl", 1),
        (4, FOUR, "gloo", True, "gloo", None),
        (4, FOUR | {"WEFT_DEVICE": "cpu"}, None, True, "gloo", None),
        (4, FOUR | {"WEFT_DEVICE": "cuda:3"}, None, True, "cuda:nccl,cpu:gloo", 3),
        (2, FOUR, None, True, "gloo", None),
        (1, FOUR, None, False, "cuda:nccl,cpu:gloo", 0),
        (1, FOUR, None, True, "gloo", None),
        (2, FOUR | {"WEFT_SHARE_DEVICES": "1"}, None, True, "gloo", 1),
        (1, FOUR | {"WEFT_SHARE_DEVICES": "1"}, None, False, "gloo", 0),
        (4, FOUR | {"WEFT_SHARE_DEVICES": "1"}, None, True, "cuda:nccl,cpu:gloo", 1),
        (0, FOUR, None, True, "gloo", None),
    ],
)
def test_the_backends_of_a_new_group(
    visible: int, environment: dict[str, str], requested: str | None, launched: bool, backend: str, current: int | None
) -> None:
    with fake_devices(visible, environment=environment) as fake:
        assert choose_backend(requested, is_launched=launched) == backend
    assert fake.current == current


@pytest.mark.parametrize(("requested", "launched"), [(None, False), ("nccl", True), ("nccl", False)])
def test_more_ranks_than_devices_are_refused(requested: str | None, launched: bool) -> None:
    with (
        fake_devices(2, environment=FOUR) as fake,
        pytest.raises(
            WeftError, match=r"ranks of this host: 4, LOCAL_RANK: 1, visible cuda devices: 2\); start 2 ranks"
        ),
    ):
        choose_backend(requested, is_launched=launched)
    assert fake.current is None


def test_an_accelerator_without_a_backend_of_its_own() -> None:
    """MPS, for example: PyTorch names gloo for it."""
    with fake_devices(1, kind="mps", environment={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) as fake:
        assert own_backend("mps") is None
        assert choose_backend(None, is_launched=True) == "gloo"
        assert fake.current is None
        facts = gather_facts(is_launched=True, new_group={"cpu": "gloo"})
        assert "the process group has no backend for mps" in choose_device(facts).reason


def test_a_registered_backend_of_another_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "hpu", "hccl")
    with fake_devices(4, kind="hpu", environment=FOUR), pytest.MonkeyPatch.context() as patch:
        assert own_backend("hpu") is None  # named, but not in this PyTorch
        patch.setattr(dist, "is_backend_available", lambda name: name == "hccl")
        assert own_backend("hpu") == "hccl"
        assert choose_backend(None, is_launched=True) == "hpu:hccl,cpu:gloo"
