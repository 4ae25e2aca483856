"""Contenders: all compute the update of plain training, and layers that sleep sleep as long as they should."""

import re

import pytest
import torch
from torch import Tensor

from benchmarks.contenders import (
    SMALL_TASKS,
    TASKS,
    Contender,
    FirstUpdate,
    PacedLayer,
    Task,
    check_first_update,
    first_update,
    pipeline,
    shuffled,
)
from weft.errors import RunError


def contender_with(weights: dict[str, Tensor]) -> Contender:
    return Contender(step=lambda: None, weights=lambda: weights)


def test_shuffled_order_is_the_same_on_all_ranks() -> None:
    names = [f"contender {number}" for number in range(10)]
    assert all(sorted(shuffled(names, number)) == sorted(names) for number in range(7))
    assert shuffled(names, 3) == shuffled(iter(names), 3)
    assert len({tuple(shuffled(names, number)) for number in range(7)}) == 7


def test_other_weights_are_an_error() -> None:
    expected = first_update(SMALL_TASKS["resnext"], 2)
    check_first_update("same", contender_with({name: weight.after for name, weight in expected.items()}), expected)
    with pytest.raises(RunError, match="returns no weights"):
        check_first_update("none", contender_with({}), expected)
    with pytest.raises(RunError, match="a weight x that the model does not have"):
        check_first_update("more", contender_with({"x": torch.zeros(1)}), expected)


@pytest.mark.parametrize("task", [*SMALL_TASKS.values(), TASKS["transformer"]], ids=["transformer", "resnext", "large"])
def test_weight_without_or_with_a_doubled_update_fails(task: Task) -> None:
    """Each weight alone: an update may be a millionth of its weight."""
    expected = first_update(task, 2)
    for name, (before, after) in expected.items():
        almost = after + 1e-4 * (after - before)
        check_first_update("almost the same", contender_with({name: almost}), expected)
        for other in (before, 2 * after - before):
            with pytest.raises(RunError, match=re.escape(f"other: after the first update {name} is")):
                check_first_update("other", contender_with({name: other}), expected)


def test_weight_without_a_gradient_must_not_change() -> None:
    still = {"x": FirstUpdate(torch.ones(3), torch.ones(3))}
    check_first_update("still", contender_with({"x": torch.ones(3)}), still)
    with pytest.raises(RunError, match="whose update is 0"):
        check_first_update("moved", contender_with({"x": torch.ones(3) + 1e-6}), still)


def test_pipeline_is_closed() -> None:
    contender = pipeline("1f1b", SMALL_TASKS["transformer"], 2, stages=2)
    contender.step()
    contender.close()
    with pytest.raises(RunError, match="closed"):
        contender.step()


def test_layers_hand_over_at_most_a_mebibyte() -> None:
    for task in TASKS.values():
        value, _ = task.batch(1)
        with torch.no_grad():
            for layer in task.model():
                value = layer(value)
                assert value.nbytes <= 2**20


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that paced layers would have slept."""
    noted: list[float] = []
    monkeypatch.setattr("benchmarks.contenders.layers.time.sleep", noted.append)
    return noted


@pytest.mark.parametrize("first", [True, False])
def test_paced_layer_sleeps_as_long_with_and_without_a_gradient_of_its_input(first: bool, slept: list[float]) -> None:
    layer, value = PacedLayer(forward=2.0, backward=4.0), torch.zeros(2, 4, requires_grad=not first)
    output = layer(value)
    assert slept == [2.0]
    output.sum().backward()
    assert sum(slept) == 6.0
    assert layer.weight.grad is not None
    assert float(layer.weight.grad) == 8.0


def test_halves_of_a_paced_backward(slept: list[float]) -> None:
    """Zero-bubble schedules run them apart."""
    layer, value = PacedLayer(forward=0.0, backward=4.0), torch.zeros(2, 4, requires_grad=True)
    torch.autograd.grad(layer(value).sum(), value)
    assert slept == [0.0, 2.0]
