"""The generators of devices: of those whose modules show them, and of those with functions only."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator

import pytest
import torch

from weft.errors import WeftError
from weft.runtime.device import device_generator, random_state_restored
from weft.runtime.engine.randomness import Seeds

CPU, XPU, MPS = torch.device("cpu"), torch.device("xpu", 1), torch.device("mps", 0)


class Modules:
    """Modules of two devices without hardware: xpu shows its generators, mps has functions for its only one."""

    def __init__(self) -> None:
        self.xpu = [torch.Generator(), torch.Generator()]
        self.mps = torch.Generator()
        self.used: list[torch.device] = []
        self.modules = {
            "xpu": types.SimpleNamespace(default_generators=(), current_device=lambda: 0),
            "mps": types.SimpleNamespace(
                get_rng_state=lambda device: self.mps.get_state(),
                set_rng_state=lambda state, device: self.mps.set_state(state),
                manual_seed=self.mps.manual_seed,
            ),
            "mtia": types.SimpleNamespace(),
        }

    def first_use(self, size: int, *, device: torch.device) -> None:
        """`torch.empty`: a device has no generators before."""
        self.used.append(device)
        self.modules["xpu"].default_generators = self.xpu


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    modules = Modules()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: modules.modules[device.type])
        patch.setattr(torch, "empty", modules.first_use)
        yield modules


def draws(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator).item())


@pytest.mark.parametrize(("device", "index"), [(XPU, 1), (torch.device("xpu"), 0)])
def test_a_device_that_shows_its_generators(modules: Modules, device: torch.device, index: int) -> None:
    assert device_generator(device) is modules.xpu[index]
    assert modules.used == [device]


def test_a_device_without_any_is_refused(modules: Modules) -> None:
    with pytest.raises(
        WeftError, match=r"mtia:0 can't .*torch\.mtia has no get_rng_state, set_rng_state, manual_seed\)"
    ):
        device_generator(torch.device("mtia", 0))


@pytest.mark.parametrize("device", [CPU, XPU, MPS])
def test_seeds_repeat_what_a_layer_draws_and_leave_no_trace(modules: Modules, device: torch.device) -> None:
    drawn_from = {"cpu": torch.default_generator, "xpu": modules.xpu[1], "mps": modules.mps}[device.type]
    seeds = Seeds(device)
    drawn_from.manual_seed(7)
    expected = draws(drawn_from)
    drawn_from.manual_seed(7)
    seeds.save()
    seeds.set(3)
    first = draws(drawn_from), draws(torch.default_generator)
    seeds.set(3)
    assert (draws(drawn_from), draws(torch.default_generator)) == first
    seeds.set(4)
    assert (draws(drawn_from), draws(torch.default_generator)) != first
    seeds.restore()
    assert draws(drawn_from) == expected


@pytest.mark.parametrize("device", [CPU, XPU, MPS])
def test_the_state_of_the_named_devices_is_restored(modules: Modules, device: torch.device) -> None:
    generators = {CPU: torch.default_generator, XPU: modules.xpu[1], MPS: modules.mps}
    before = {known: generator.get_state() for known, generator in generators.items()}
    with contextlib.suppress(LookupError), random_state_restored([device, torch.device("meta")]):
        for generator in generators.values():
            draws(generator)
        raise LookupError
    kept = [known for known, generator in generators.items() if torch.equal(generator.get_state(), before[known])]
    assert kept == [known for known in generators if known in (CPU, device)]  # the others show that drawing counts
