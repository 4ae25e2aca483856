import os

import pytest
from tests.helpers import devices


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
