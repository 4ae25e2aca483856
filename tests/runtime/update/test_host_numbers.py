"""Numbers on a device are not read for a prediction: updates are counted, and options are read after a change only.

A tensor on the meta device has no values, so whatever reads one fails. Other tests take the CPU for a device.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, lr_scheduler

import weft
from weft.runtime.update import PredictionOptions
from weft.runtime.update.cures import GapAware, NAdamW, gapaware
from weft.runtime.update.host_numbers import HostNumbers
from weft.runtime.update.optimizer import OptimizerPart
from weft.runtime.update.part import PartState
from weft.runtime.update.predictor import Predictor
from weft.runtime.update.rates_ahead import RatesAhead
from weft.runtime.update.rules import RULES

SHAPES = [(6, 4), (3,), (2, 2)]


class Trained:
    """Parameters with an optimizer and a predictor; the last one never has a gradient."""

    def __init__(
        self,
        make: Callable[..., Optimizer],
        device: str = "cpu",
        *,
        updates: int = 3,
        rates: bool = False,
        **options: Any,
    ) -> None:
        self.made = torch.Generator().manual_seed(2)
        self.live = [Parameter(torch.randn(shape, generator=self.made).to(device)) for shape in SHAPES]
        self.optimizer = make(self.live)
        self.scheduler = cosine(self.optimizer) if rates else None
        ahead = None if self.scheduler is None else RatesAhead(self.optimizer, cosine, self.scheduler)
        self.predictor = Predictor(self.optimizer, self.live, options=PredictionOptions(**options), rates=ahead)
        self.update(updates)

    def update(self, times: int = 1) -> None:
        for _ in range(times):
            for parameter in self.live[:-1]:
                parameter.grad = torch.randn(parameter.shape, generator=self.made).to(parameter.device)
            with self.predictor.step():
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def predict(self, ahead: int = 2) -> list[Tensor]:
        into = [Parameter(torch.empty_like(parameter)) for parameter in self.live]
        self.predictor.fingerprint(ahead)
        self.predictor.predict(into, ahead)
        return [parameter.detach() for parameter in into]

    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[parameter] for parameter in self.live[:-1]]


def cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


LINEAR: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.1, weight_decay=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: Adam(params, lr=0.1),
    "amsgrad": lambda params: Adam(params, lr=0.1, amsgrad=True),
    "AdamW": lambda params: AdamW(params, lr=0.1),
    "NAdam": lambda params: NAdam(params, lr=0.1),
    "NAdamW": lambda params: NAdamW(params, lr=0.1),
    "RAdam": lambda params: RAdam(params, lr=0.1),
    "Adamax": lambda params: Adamax(params, lr=0.1),
    "RMSprop": lambda params: RMSprop(params, lr=0.1),
}
CLOSED = {name: make for name, make in LINEAR.items() if name in ("momentum", "Adam", "amsgrad", "AdamW")}
CASES = [(name, "linear") for name in LINEAR] + [(name, "decayed") for name in CLOSED]


@pytest.mark.parametrize(("name", "extrapolation"), CASES)
@pytest.mark.parametrize("rates", [False, True])
def test_a_prediction_reads_nothing_from_a_device(name: str, extrapolation: str, rates: bool) -> None:
    trained = Trained(LINEAR[name], "meta", rates=rates, extrapolation=extrapolation)
    for state in trained.states():
        for number in {"step", "mu_product"} & state.keys():
            state[number] = state[number].to("meta")
    trained.predict()


def test_a_value_on_the_meta_device_can_not_be_read() -> None:
    for read in (int, float, Tensor.item):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.empty((), device="meta"))


# With the CPU taken for a device


@pytest.fixture
def cpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_device(value: Any) -> bool:
        return isinstance(value, Tensor)

    for module in ("predictor", "host_numbers"):
        monkeypatch.setattr(f"weft.runtime.update.{module}.on_device", on_device)


@pytest.mark.usefixtures("cpu_is_a_device")
@pytest.mark.parametrize(
    ("name", "extrapolation"), [case for case in CASES if "SGD" not in case and "momentum" not in case]
)
def test_updates_are_counted(name: str, extrapolation: str) -> None:
    """A counter that is not a number fails if it is read."""
    trained = Trained(LINEAR[name], extrapolation=extrapolation)
    expected = trained.predict()
    for state in trained.states():
        assert int(state["step"]) == 3
        state["step"].fill_(math.nan)
    for found, wanted in zip(trained.predict(), expected, strict=True):
        assert torch.equal(found, wanted)


class Steps(Adam):
    """Its rule records what it is given."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    told: list[int] = []
    monkeypatch.setitem(RULES, Steps, RULES[Adam])

    @weft.linear_rule(Steps)
    def direction(parameter: Any) -> Any:
        told.append(parameter.step)
        return parameter.state["exp_avg"]

    return told


@pytest.mark.usefixtures("cpu_is_a_device")
def test_counts_continue_from_a_loaded_state(steps: list[int]) -> None:
    trained = Trained(lambda params: Steps(params, lr=0.1), updates=5)
    trained.predict()
    assert steps == [5, 5]
    resumed = Trained(lambda params: Steps(params, lr=0.1), updates=0)
    resumed.optimizer.load_state_dict(trained.optimizer.state_dict())
    resumed.predictor.load(trained.predictor.state(), updates=5)
    resumed.update(2)
    resumed.predict()
    assert steps == [5, 5, 7, 7]
    assert int(resumed.states()[0]["step"]) == 7


def test_a_counter_on_the_host_is_read(steps: list[int]) -> None:
    trained = Trained(lambda params: Steps(params, lr=0.1))
    for state in trained.states():
        state["step"].fill_(40)
    trained.predict()
    assert steps == [40, 40]


class Counted(Tensor):
    """A tensor that counts how often the host reads it."""

    reads = 0

    def item(self) -> Any:
        Counted.reads += 1
        return super().item()


def counted(value: float) -> Counted:
    Counted.reads = 0
    return torch.tensor(value, dtype=torch.float64).as_subclass(Counted)


@pytest.mark.usefixtures("cpu_is_a_device")
def test_an_option_is_read_once_after_each_change() -> None:
    numbers, rate, beta = HostNumbers(), counted(0.5), counted(0.25)
    group: dict[str, Any] = {"lr": rate, "betas": (0.9, beta), "eps": 1e-8, "params": [Parameter(torch.ones(2))]}
    for _ in range(3):
        found = numbers.options(group)
        assert (found["lr"], found["betas"], found["eps"]) == (0.5, (0.9, 0.25), 1e-8)
    assert Counted.reads == 2
    assert group["lr"] is rate  # the group is as it was
    rate.fill_(0.75)
    assert [numbers.options(group)["lr"] for _ in range(2)] == [0.75, 0.75]
    assert Counted.reads == 3
    group["lr"] = counted(2.0)
    assert [numbers.options(group)["lr"] for _ in range(2)] == [2, 2]
    assert Counted.reads == 1


def test_options_on_the_host_are_passed_on() -> None:
    group = {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "params": []}
    assert HostNumbers().options(group) is group


@pytest.mark.usefixtures("cpu_is_a_device")
@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
def test_a_prediction_follows_a_rate_on_a_device(extrapolation: str) -> None:
    def make(rate: Any) -> Trained:
        return Trained(lambda params: Adam(params, lr=rate, foreach=False), extrapolation=extrapolation)

    rate = torch.tensor(0.125)  # exact in binary: both compute the same
    with_tensor, with_number = make(rate), make(0.125)
    for new in (0.125, 0.5, 0.25):
        rate.fill_(new)
        with_number.optimizer.param_groups[0]["lr"] = new
        for found, wanted in zip(with_tensor.predict(), with_number.predict(), strict=True):
            assert torch.equal(found, wanted)
    fingerprints = []
    for new in (0.25, 0.5):
        rate.fill_(new)
        fingerprints.append(with_tensor.predictor.fingerprint(2))
    assert fingerprints[0] != fingerprints[1]


@pytest.mark.usefixtures("cpu_is_a_device")
def test_gap_aware_reads_a_rate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    live = [Parameter(torch.ones(2)) for _ in range(3)]
    rate = counted(0.5)
    part = GapAware().treat(SGD(live, lr=rate), live, 1.0)
    assert isinstance(part, gapaware._GapDamping)
    for _ in range(4):
        part.first_read(live)
        for parameter in live:
            parameter.grad = torch.ones(2)
        with part.step():
            pass
    assert Counted.reads == 1


def test_what_nadam_has_on_the_host_is_loaded_there() -> None:
    """PyTorch moves it to the device of the parameters, and then every step waits for it."""
    trained = Trained(lambda params: NAdam(params, lr=0.1, foreach=False))
    saved = OptimizerPart(trained.optimizer, trained.live).state()
    there = Trained(lambda params: NAdam(params, lr=0.1, foreach=False), "meta", updates=0)
    there.optimizer.load_state_dict(trained.optimizer.state_dict())
    assert there.states()[0]["mu_product"].is_meta  # what weft corrects
    OptimizerPart(there.optimizer, there.live).load(saved, updates=3)
    for loaded, state in zip(there.states(), trained.states(), strict=True):
        assert torch.equal(loaded["mu_product"], state["mu_product"])
        assert loaded["exp_avg"].is_meta
    assert isinstance(saved, PartState)


# On the pretend device, which counts what makes the host wait

CAPTURABLE = {
    "Adam, capturable": lambda params: Adam(params, lr=0.1, capturable=True),
    "AdamW, foreach, capturable": lambda params: AdamW(params, lr=0.1, capturable=True, foreach=True),
    "NAdamW, capturable": lambda params: NAdamW(params, lr=0.1, capturable=True),
    "RMSprop, capturable": lambda params: RMSprop(params, lr=0.1, capturable=True),
}


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
@pytest.mark.parametrize("rates", [False, True])
@pytest.mark.parametrize("name", [*LINEAR, *CAPTURABLE])
@in_process
def test_a_prediction_does_not_wait(name: str, rates: bool, extrapolation: str) -> None:
    controls = pretend.load()
    trained = Trained((LINEAR | CAPTURABLE)[name], "pretend", rates=rates, extrapolation=extrapolation)
    controls.reset_counts()
    trained.predict()
    assert controls.counts() == {}
    trained.live[0].detach().sum().item()
    assert controls.waits() == 1


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
@pytest.mark.parametrize("rates", [False, True])
@in_process
def test_a_rate_on_the_device_is_read_once_after_a_change(rates: bool, extrapolation: str) -> None:
    def make(params: list[Parameter]) -> Optimizer:
        return Adam(params, lr=torch.tensor(0.1, device=params[0].device), capturable=True)

    controls = pretend.load()
    trained = Trained(make, "pretend", rates=rates, extrapolation=extrapolation)
    trained.predict()
    trained.update()  # a scheduler writes the next rate
    reads = []
    for _ in range(3):
        controls.reset_counts()
        trained.predict()
        reads.append(controls.waits())
    assert reads == [int(rates), 0, 0]


@in_process
def test_a_prediction_launches_few_kernels() -> None:
    controls = pretend.load()
    trained = Trained(LINEAR["Adam"], "pretend")
    before = controls.launches()
    trained.predict()
    assert controls.launches() - before <= 8  # a loop has 3 for each parameter, and these allocate
