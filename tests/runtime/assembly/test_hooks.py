"""Hooks of parameters work where autograd sees the parameters themselves, and are refused elsewhere."""

from typing import Any

import pytest
import torch
from tests.helpers.plain import batches, linear, sgd
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.errors import WeftError


def pipeline(model: nn.Sequential, **options: Any) -> weft.Pipeline:
    given: dict[str, Any] = {"schedule": "1f1b", "balance": [2, 2]} | options
    return weft.Pipeline(model, loss_fn=functional.mse_loss, optimizer=sgd, microbatches=4, stages=2, **given)


def test_a_hook_changes_gradients() -> None:
    model = linear(4)
    weight, bias = model[0].parameters()
    weight.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    before = weight.detach().clone(), bias.detach().clone()
    pipe = pipeline(model)
    pipe.step(*batches(1)[0])
    state = pipe.state_dict()
    assert torch.equal(state["0.0.weight"], before[0])
    assert not torch.equal(state["0.0.bias"], before[1])


def keep(parameter: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precision": "bf16"}, "passes read bf16 weights"),
        ({"schedule": "2bw"}, "passes of 2bw read versions"),
        ({"schedule": "xpipe"}, "passes of xpipe read versions"),
        ({"meta": True}, "it is on the meta device"),
    ],
)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_not_be_called_is_refused(options: dict[str, Any], why: str, register: str) -> None:
    given = dict(options)
    with weft.on_meta() if given.pop("meta", False) else torch.device("cpu"):
        model = linear(4)
    getattr(model.get_parameter("0.0.weight"), register)(keep)
    with pytest.raises(WeftError, match=rf"0\.0\.weight has a hook for its gradient.*{why}"):
        pipeline(model, **given)


@pytest.mark.parametrize("schedule", ["zb-h1", "weave"])
def test_a_hook_that_a_split_backward_would_deceive_is_refused(schedule: str) -> None:
    model = linear(4)
    model[0].register_full_backward_hook(lambda module, given, out: None)
    balance = [1] * 4 if schedule == "weave" else [2, 2]
    pipeline(model, schedule=schedule, balance=balance)
    model = linear(4)
    model[0].register_backward_hook(lambda module, given, out: None)
    with pytest.raises(WeftError, match=f"0.* has a hook of register_backward_hook.*{schedule} splits backwards"):
        pipeline(model, schedule=schedule, balance=balance)
    pipeline(model, schedule="1f1b")
