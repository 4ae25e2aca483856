"""Every family of models trains in a pipeline, with the same loss as without one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.train.models.cases import IMAGES, PAIRS, TEXT, VALUES, batch, real_net

import weft
from weft.runtime.tree import pieces
from weft.train.data_spec import DataSpec
from weft.train.models import build_model
from weft.train.models.options import BERT, GPT, MLP, VGG, Inception, ResNet

CASES: dict[str, tuple[Any, DataSpec]] = {
    "gpt": (GPT(name="gpt", size="tiny"), TEXT),
    "gpt-tied": (GPT(name="gpt", size="tiny", tied=True), TEXT),
    "bert": (BERT(name="bert", size="tiny", dropout=0.0), PAIRS),
    "resnet": (ResNet(name="resnet18"), IMAGES),
    "resnext": (ResNet(name="resnext50_32x4d"), IMAGES),
    "vgg": (VGG(name="vgg16", dropout=0.0), IMAGES),
    "inception": (Inception(name="inception_v3", dropout=0.0), IMAGES),
    "inception-auxiliary": (Inception(name="inception_v3", dropout=0.0, auxiliary=True), IMAGES),
    "mlp": (MLP(name="mlp"), VALUES),
}


NEAR: dict[Any, float] = {"fp32": 1e-5, "bf16": 0.02}


@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_trains_it(case: str, precision: Any) -> None:
    options, spec = CASES[case]
    net, plain = build_model(options, spec, seed=3), real_net(options, spec, seed=3)
    with weft.Pipeline(
        net.model,
        loss_fn=net.loss_fn,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        schedule="wpipe",
        stages=2,
        microbatches=2,
        weights=net.weights,
        seed=3,
        precision=precision,
    ) as pipe:
        inputs, targets = batch(spec, 4)
        pipe.step(inputs, targets)
        first = pipe.flush().loss
        pipe.step(*batch(spec, 4, seed=1))
        second = pipe.flush().loss
        evaluated = pipe.evaluate([(inputs, targets)])
        state = pipe.state_dict()
    parts = zip(pieces(inputs, 2), pieces(targets, 2), strict=True)
    losses = [net.loss_fn(plain.model(piece), target).item() for piece, target in parts]
    assert first == pytest.approx(sum(losses) / 2, rel=NEAR[precision])
    assert second is not None
    assert math.isfinite(second)
    initial = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    assert list(state) == list(initial)
    assert all(not torch.equal(state[name], initial[name]) for name, _ in plain.model.named_parameters())
    plain.model.load_state_dict(state)
    with torch.no_grad():
        assert evaluated == pytest.approx(net.loss_fn(plain.model.eval()(inputs), targets).item(), rel=NEAR[precision])
