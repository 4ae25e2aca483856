"""What `weights=` takes, and what it says of everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.sources import InMemory
from torch import Tensor, nn

import weft
from weft.errors import WeftError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def state() -> dict[str, Tensor]:
    model = Net()
    for number, tensor in enumerate(model.state_dict().values()):
        tensor.fill_(number)
    return dict(model.state_dict())


def made(weights: Any) -> dict[str, Tensor]:
    with weft.on_meta():
        model = Net()
    return dict(weft.materialize(model, weights=weights).state_dict())


def test_a_dict_of_tensors() -> None:
    given = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in state().items()}
    given["blocks.0.weight"] = given["blocks.0.weight"].t().contiguous().t()
    found = made(given)
    assert found.keys() == state().keys()
    for name, tensor in state().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_pipeline_keeps_a_copy_of_a_dict() -> None:
    """Training does not change the dict."""
    with weft.on_meta():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    given = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
    pipe = weft.Pipeline(
        model,
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.Adam,
        stages=2,
        schedule="1f1b",
        microbatches=1,
        weights=given,
    )
    assert all((tensor == 1).all() for tensor in pipe.state_dict().values())
    pipe.step(torch.ones(2, 3), torch.ones(2, 1))
    pipe.flush()
    assert not all((tensor == 1).all() for tensor in pipe.state_dict().values())
    assert all((tensor == 1).all() for tensor in given.values())


@pytest.mark.parametrize("weights", [3, [torch.ones(100)], nn.Linear(2, 2)], ids=["int", "list", "module"])
def test_other_values_are_named_by_their_type(weights: Any) -> None:
    kind = type(weights).__name__
    with pytest.raises(WeftError, match=rf"names, form, read_into.*got an object of type {kind}\)") as refused:
        made(weights)
    assert "100" not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.0.bias": 1.0}, r"must hold tensors with values \(blocks\.0\.bias: float\)"),
        ({"blocks.0.bias": torch.empty(4, device="meta")}, r"blocks\.0\.bias: a tensor on the meta device"),
        ({0: torch.ones(1)}, r"must have names as keys \(got 0\)"),
    ],
)
def test_dicts_of_other_things_are_refused(change: dict[Any, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        made(state() | change)


class WrongForm(InMemory):
    def __init__(self, answer: Any) -> None:
        super().__init__(state())
        self._answer = answer

    def form(self, name: str) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "NoneType"),
        (torch.Size([4, 3]), "int, int"),
        (((4, 3), torch.float32), "tuple, dtype"),
        (torch.ones(100), "Tensor"),
        ((torch.float32, ("4", "3")), "dtype, tuple"),
    ],
)
def test_a_wrong_form_names_the_object_and_the_rule(answer: Any, got: str) -> None:
    words = rf"form of WrongForm must return a dtype and a shape \(for blocks\.0\.weight, got {got}\)"
    with pytest.raises(WeftError, match=words):
        made(WrongForm(answer))


@pytest.mark.parametrize("answer", [(torch.float32, torch.Size([4, 3])), (torch.float32, [4, 3])])
def test_forms_that_are_right(answer: Any) -> None:
    with pytest.raises(WeftError, match=r"blocks\.0\.bias has another shape"):  # the first one fits
        made(WrongForm(answer))


def renamed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state().items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.student.of.another.library."])
def test_missing_names_show_the_closest_one(tmp_path: Path, prefix: str) -> None:
    save_file(renamed(prefix), tmp_path / "model.safetensors")
    name = "blocks.0.weight"
    with pytest.raises(WeftError) as refused:
        made(tmp_path / "model.safetensors")
    assert f"has no {name} (missing: 7); " in str(refused.value)
    assert str(refused.value).endswith(f"or rename them (it has {prefix}{name})")


def test_missing_names_show_one_that_is_there() -> None:
    with pytest.raises(WeftError, match=r"missing: 7\).*\(it has zzz, which the model does not\)$"):
        made({"zzz": torch.ones(1)})
    incomplete = state()
    del incomplete["blocks.0.bias"]
    with pytest.raises(WeftError, match=r"has no blocks\.0\.bias \(missing: 1\); give weights= those of this model$"):
        made(incomplete)
