import os

import pytest
from tests.helpers import devices

from weft.errors import WeftError


@pytest.mark.parametrize(("name", "expected"), [("cpu", 0.0), ("pretend:1", 0.0), ("cuda", 1e-4), ("xpu:0", 1e-4)])
def test_only_the_kernels_of_the_cpu_have_its_bits(name: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEVICE", name)
    assert devices.tolerance(0.0) == expected
    assert devices.tolerance(1e-3) == 1e-3


def test_the_option_sets_the_device_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEFT_DEVICE", "WEFT_SHARE_DEVICES", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "")  # so that the old value comes back
        monkeypatch.delenv(name)
    devices.choose("cpu")
    assert devices.device() == "cpu"
    assert "WEFT_SHARE_DEVICES" not in os.environ
    devices.choose("cuda")
    assert devices.device() == "cuda"
    assert os.environ["WEFT_SHARE_DEVICES"] == "1"
    assert devices.python_path() == []


def test_a_device_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DEVICE", "cpu")
    devices.check()
    monkeypatch.setenv("WEFT_DEVICE", "vulkan")
    with pytest.raises(WeftError, match="PyTorch sees no vulkan device"):
        devices.check()
