"""Many stages: the quick form in real processes, and what its pages say of results."""

from typing import Any

import pytest
import torch

from weft.bench import many_stages
from weft.bench.kept import Keep
from weft.bench.layers import Paced

ENVIRONMENT = {"environment": "2 cores, torch 0"}


def made(**seconds: list[float]) -> dict[str, Any]:
    """Results that are as simulated, unless told otherwise."""
    names = [f"weft {name}" for name in many_stages.WEFT] + [f"torch {name}" for name in many_stages.PEERS]
    given = {name: [1.0, 1.0, 1.0] for name in names} | {key.replace("_", " "): one for key, one in seconds.items()}
    one = {"simulated": dict.fromkeys(given, 1.0), "seconds": given}
    return ENVIRONMENT | {"stages": {"4": {"even": one, "uneven": one}, "8": {"even": one}}}


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return many_stages.measure(quick=True, keep=Keep())


def test_measured_over_simulated(quick: dict[str, Any]) -> None:
    """Sleeps never end early, so no more than the simulated throughput; a tenth more for what the windows cut off."""
    found = many_stages.ratios(quick["stages"]["4"]["even"])
    assert len(found) == len(many_stages.WEFT) + len(many_stages.PEERS)
    for name, some in found.items():
        assert 0.15 < max(some) < 1.1, (name, some)
        assert len(some) == 2


def test_the_pages_of_what_was_measured(quick: dict[str, Any]) -> None:
    results = ENVIRONMENT | quick | {"form": "quick"}
    tables = many_stages.tables(results)
    assert tables.keys() == {"ratios", "milliseconds"}
    assert "p = 4, even" in tables["ratios"]
    assert ENVIRONMENT["environment"] in tables["ratios"]
    assert many_stages.plots(results).keys() == {"ratios.svg"}
    assert many_stages.missed(results) == []


def test_simulated_times() -> None:
    """In units of a layer's forward; a stage is two layers, and B costs 2 F."""
    even = many_stages.simulated([(1.0, 2.0)] * 8, 4)
    assert even["weft wpipe"] == even["weft 2bw"] == even["weft xpipe"] == pytest.approx(4 * 6.0)
    assert even["weft 1f1b"] == even["torch GPipe"] == pytest.approx((4 + 3) * 6.0)
    assert even["weft interleaved"] == even["torch Interleaved1F1B"] == pytest.approx(4 * 6.0 + 3 * 3.0)
    assert 4 * 6.0 < even["weft zb-h1"] < even["weft 1f1b"]
    slow = many_stages.simulated(many_stages._paces(4, 1.5, 1.0), 4)
    stage = 2 * (many_stages.FORWARD + many_stages.BACKWARD)
    assert slow["weft 2bw"] == pytest.approx(4 * 1.5 * stage)
    assert 4 * 1.25 * stage <= slow["weft wpipe"] < 4 * 1.5 * stage  # the slow layers are on two ranks


def test_targets() -> None:
    assert many_stages.missed(made()) == []
    lines = many_stages.missed(made(weft_wpipe=[1.1, 1.1, 1.1], torch_GPipe=[2.0, 2.0, 2.0]))
    assert [line.partition(":")[0] for line in lines] == ["p = 4, even", "p = 4, uneven", "p = 8, even"]
    assert all("weft wpipe is 0.909" in line and line.endswith("missed") for line in lines)
    assert all(line.endswith("unsteady") for line in many_stages.missed(made(torch_1F1B=[1.0, 1.3, 2.0])))


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What paced layers would have slept."""
    noted: list[float] = []
    monkeypatch.setattr("weft.bench.layers.time.sleep", noted.append)
    return noted


@pytest.mark.parametrize("first", [True, False])
def test_a_paced_layer_sleeps_as_long_whether_or_not_its_input_has_a_gradient(first: bool, slept: list[float]) -> None:
    layer, value = Paced(forward=2.0, backward=4.0), torch.zeros(2, 4, requires_grad=not first)
    output = layer(value)
    assert slept == [2.0]
    output.sum().backward()
    assert sum(slept) == 6.0
    assert layer.weight.grad is not None
    assert float(layer.weight.grad) == 8.0


def test_halves_of_a_paced_backward(slept: list[float]) -> None:
    """What zero-bubble schedules take apart."""
    layer, value = Paced(forward=0.0, backward=4.0), torch.zeros(2, 4, requires_grad=True)
    torch.autograd.grad(layer(value).sum(), value)
    assert slept == [0.0, 2.0]
