"""Many stages: the quick form in real processes, and what its pages say of results."""

from functools import partial
from typing import Any

import pytest
import torch

from weft.bench import many_stages, paced
from weft.bench.contender import Contender
from weft.bench.kept import Keep
from weft.bench.layers import Paced
from weft.schedule import METHODS

NAMES = [f"weft {name}" for name in many_stages.weft_schedules(4)] + [f"torch {name}" for name in many_stages.PEERS]
ENDLESS = [name for name in NAMES if (method := METHODS.get(name.split()[1])) and method.asynchronous]
ORDERS = {  # of two ranks with two chunks each and two micro-batches, in the form of torch's own
    "torch InterleavedZeroBubble": """
0F0,0F1,2F0,2F1,,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1
,1F0,1F1,3F0,3I0,3W0,3F1,3I1,3W1,1I0,1W0,1I1,1W1
""",
    "torch ZBVZeroBubble": """
0F0,0F1,,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1
,1F0,2F0,1F1,2F1,2I0,2W0,1I0,1W0,2I1,1I1,2W1,1W1
""",
}
ENVIRONMENT = {"environment": "2 cores, torch 0"}


def made(**seconds: list[float]) -> dict[str, Any]:
    """Results that are as simulated, unless told otherwise."""
    given = {name: [1.0, 1.0, 1.0] for name in NAMES} | {key.replace("_", " "): one for key, one in seconds.items()}
    one = {"simulated": dict.fromkeys(given, 1.0), "seconds": given}
    return ENVIRONMENT | {"stages": {"4": {"even": one, "uneven": one}, "8": {"even": one}}}


@pytest.fixture(scope="module")
def quick() -> dict[str, Any]:
    return many_stages.measure(quick=True, keep=Keep())


def test_measured_over_simulated(quick: dict[str, Any]) -> None:
    """Sleeps never end early, so no more than the simulated throughput; a tenth more for what the windows cut off.

    They need no core, so that even a busy machine tells asynchronous pipelines from ranks that take turns: 0.25.
    """
    found = many_stages.ratios(quick["stages"]["4"]["even"])
    assert list(found) == NAMES
    for name, some in found.items():
        assert (0.4 if name in ENDLESS else 0.15) < max(some) < 1.1, (name, some)
        assert len(some) == 3


def test_who_is_asynchronous() -> None:
    assert [name.removeprefix("weft ") for name in ENDLESS] == [
        "pipedream",
        "2bw",
        "wpipe",
        "xpipe",
        "2bw warmup 2",
        "wpipe warmup 2",
    ]


def test_the_pages_of_what_was_measured(quick: dict[str, Any]) -> None:
    results = ENVIRONMENT | quick | {"form": "quick"}
    tables = many_stages.tables(results)
    assert tables.keys() == {"ratios", "milliseconds"}
    assert "p = 4, even" in tables["ratios"]
    assert ENVIRONMENT["environment"] in tables["ratios"]
    assert "| weft wpipe warmup 2, m = 2p |" in tables["milliseconds"]
    assert many_stages.plots(results).keys() == {"ratios.svg"}


def test_simulated_times() -> None:
    """In units of a layer's forward; a stage is two layers, and B costs 2 F."""
    even = many_stages.simulated([(1.0, 2.0)] * 8, 4, ORDERS)
    assert even["weft wpipe"] == even["weft 2bw"] == even["weft xpipe"] == pytest.approx(4 * 6.0)
    assert even["weft 1f1b"] == even["torch GPipe"] == pytest.approx((4 + 3) * 6.0)
    assert even["weft interleaved"] == even["torch Interleaved1F1B"] == pytest.approx(4 * 6.0 + 3 * 3.0)
    assert 4 * 6.0 < even["weft zb-h1"] < even["weft 1f1b"]
    assert even["weft 2bw warmup 2"] == even["weft wpipe warmup 2"] == pytest.approx(2 * 4 * 6.0)
    ours = many_stages.simulated([(1.0, 2.0)] * 4, 2, ORDERS)
    for name in ORDERS:
        assert 2 * 6.0 < ours[name] < ours["torch 1F1B"] == pytest.approx((2 + 1) * 6.0)
    slow = many_stages.simulated(many_stages._paces(4, 1.5, 1.0), 4, ORDERS)
    stage = 2 * (many_stages.FORWARD + many_stages.BACKWARD)
    assert slow["weft 2bw"] == pytest.approx(4 * 1.5 * stage)
    assert 4 * 1.25 * stage <= slow["weft wpipe"] < 4 * 1.5 * stage  # the slow layers are on two ranks


def test_targets() -> None:
    assert many_stages.missed(made()) == []
    lines = many_stages.missed(made(weft_wpipe=[1.1, 1.1, 1.1], torch_GPipe=[2.0, 2.0, 2.0]))
    assert [line.partition(":")[0] for line in lines] == ["p = 4, even", "p = 4, uneven", "p = 8, even"]
    assert all("weft wpipe is 0.909" in line and line.endswith("missed") for line in lines)
    assert many_stages.missed(made(torch_1F1B=[1.1, 1.1, 1.1])) == []
    for name in ("torch_1F1B", "weft_1f1b"):
        lines = many_stages.missed(made(**{name: [0.5, 0.7, 1.0]}))
        assert len(lines) == 3
        assert all(line.endswith("unsteady") for line in lines)
    lines = many_stages.missed(made(weft_wpipe=[1 / 0.93, 1 / 0.95, 1 / 0.97]))
    assert len(lines) == 3
    assert all(
        line.endswith("0.950 (0.940 to 0.960) of the simulated throughput, asked 0.95: can't tell") for line in lines
    )


def test_a_race_takes_turns_and_closes_its_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    names = ["a", "b", "c", "d"]
    contenders = {
        name: Contender(step=partial(noted.append, name), weights=dict, close=partial(noted.append, "closed"))
        for name in names
    }
    seconds = paced.race(contenders, ["b"], 3)
    assert all(len(some) == 3 for some in seconds.values())
    assert noted[: paced.FILL] == ["b"] * paced.FILL
    assert noted[-4:] == ["closed"] * 4
    turns = [name for name in noted[paced.FILL : -4] if name != "b"]
    assert sorted(turns) == sorted("acd" * 3)
    assert turns != list("acd" * 3)
    assert noted.count("b") == paced.FILL + 3 * (1 + paced.STEPS)


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
