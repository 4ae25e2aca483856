"""Models by name: published sizes, forms of data, weights by seed, custom models."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.models.cases import IMAGES, PAIRS, TEXT, VALUES, batch, real_net
from torch import nn

import weft
from weft.errors import WeftError
from weft.train.config import section
from weft.train.data_spec import DataSpec
from weft.train.models import MODELS, CustomModel, build_model
from weft.train.models.options import BERT, GPT, MLP, STEMS, VGG, Inception, ResNet, initial_std, stem_for
from weft.train.models.tasks import class_loss, token_loss, value_loss

LARGE = DataSpec(task="classification", form="images", channels=3, size=224, classes=1000)
PUBLISHED: list[tuple[dict[str, Any], DataSpec, int]] = [
    ({"name": "resnet18"}, LARGE, 11_689_512),
    ({"name": "resnet34"}, LARGE, 21_797_672),
    ({"name": "resnet50"}, LARGE, 25_557_032),
    ({"name": "resnet101"}, LARGE, 44_549_160),
    ({"name": "resnet152"}, LARGE, 60_192_808),
    ({"name": "resnext50_32x4d"}, LARGE, 25_028_904),
    ({"name": "resnext101_32x8d"}, LARGE, 88_791_336),
    ({"name": "vgg16"}, LARGE, 138_357_544),
    ({"name": "vgg16", "batch_norm": True}, LARGE, 138_365_992),
    ({"name": "inception_v3"}, LARGE, 23_834_568),
    ({"name": "inception_v3", "auxiliary": True}, LARGE, 27_161_264),
    ({"name": "gpt", "tied": True}, dataclasses.replace(TEXT, vocabulary=50257, context=1024), 124_439_808),
    ({"name": "bert"}, dataclasses.replace(PAIRS, vocabulary=30522, context=128, classes=2), 109_483_778),
]


def spec_for(name: str) -> DataSpec:
    return {"gpt": TEXT, "bert": PAIRS, "mlp": VALUES}.get(name, IMAGES)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("values", "spec", "count"), PUBLISHED, ids=["-".join(map(str, values.values())) for values, _, _ in PUBLISHED]
)
def test_full_models_have_the_published_size(values: dict[str, Any], spec: DataSpec, count: int) -> None:
    size = "base" if values["name"] in ("gpt", "bert") else "full"
    model = build_model(MODELS[values["name"]](size=size, **values), spec, seed=0).model
    assert parameters(model) == count


@pytest.mark.parametrize("name", MODELS)
def test_small_models_are_small_and_can_be_cut_for_four_ranks(name: str) -> None:
    options: Any = section(MODELS[name], {"name": name}, "model")
    spec = spec_for(name)
    net = real_net(options, spec, seed=0)
    inputs, targets = batch(spec, 2)
    output = net.model(inputs)
    assert output.shape == (targets.shape if spec.task == "regression" else (*targets.shape, output.shape[-1]))
    assert torch.isfinite(net.loss_fn(output, targets))
    assert 5_000 < parameters(net.model) < 4_000_000
    assert len(net.model) >= 8  # wpipe has two chunks per rank


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 64), (3, 224)])
@pytest.mark.parametrize("name", ["resnet18", "vgg16", "inception_v3"])
def test_images_of_other_sizes(name: str, channels: int, size: int) -> None:
    spec = dataclasses.replace(IMAGES, channels=channels, size=size)
    model = real_net(MODELS[name](name=name), spec, seed=0).model.eval()
    with torch.no_grad():
        assert model(batch(spec, 1)[0]).shape == (1, 10)


@pytest.mark.parametrize(("stem", "pixels"), [(32, 32), (64, 16), (224, 8)])
def test_stems_shrink_images(stem: int, pixels: int) -> None:
    model = real_net(ResNet(name="resnet18", stem=stem), IMAGES, seed=0).model
    assert model.stem(batch(IMAGES, 1)[0]).shape[-1] == pixels


def test_stems_by_size() -> None:
    assert [stem_for(0, size) for size in (28, 32, 64, 96, 224)] == [32, 32, 64, 64, 224]
    assert [stem_for(0, size, larger=True) for size in (32, 64, 224)] == [64, 224, 224]
    assert {stem_for(stem, 32) for stem in STEMS[1:]} == {32, 64, 224}


def test_the_published_inception_reduces_299_pixels_to_8() -> None:
    spec = dataclasses.replace(LARGE, size=299)
    model = build_model(Inception(name="inception_v3", size="full", auxiliary=True), spec, seed=0).model.to("meta")
    images = torch.empty(2, 3, 299, 299, device="meta")
    shapes = {}
    for name, layer in model.named_children():
        images = layer(images)
        shapes[name] = tuple((images[0] if isinstance(images, tuple) else images).shape[1:])
    assert (shapes["stem5"], shapes["mixed3"]) == ((192, 35, 35), (288, 35, 35))
    assert (shapes["mixed8"], shapes["mixed11"]) == ((768, 17, 17), (2048, 8, 8))


def test_an_auxiliary_classifier_is_for_training_only() -> None:
    net = real_net(Inception(name="inception_v3", auxiliary=True, dropout=0.0), IMAGES, seed=0)
    inputs, targets = batch(IMAGES, 2)
    main, auxiliary = net.model(inputs)
    expected = class_loss(main, targets) + 0.4 * class_loss(auxiliary, targets)
    assert torch.allclose(net.loss_fn((main, auxiliary), targets), expected)
    assert net.model.eval()(inputs).shape == main.shape


def test_the_weights_depend_on_the_seed_only() -> None:
    def built(seed: int) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = real_net(GPT(name="gpt", size="tiny"), TEXT, seed=seed).model.state_dict()
        return state

    before = torch.random.get_rng_state()
    first = built(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(1)
    assert all(torch.equal(tensor, first[name]) for name, tensor in built(1).items())
    assert not torch.equal(built(2)["head.output.weight"], first["head.output.weight"])


def test_initial_weights_of_a_gpt() -> None:
    spec = dataclasses.replace(TEXT, vocabulary=256)
    model = real_net(GPT(name="gpt"), spec, seed=0).model
    assert model.embedding.tokens.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert model.feedforward0.down.weight.std().item() == pytest.approx((128 * 2 * 4) ** -0.5, rel=0.05)
    assert model.attention0.projection.weight.std().item() == pytest.approx((128 * 2 * 4) ** -0.5, rel=0.05)
    assert not model.feedforward3.up.bias.any()
    inputs, targets = batch(spec, 100)
    # the entropy of 256 tokens, and logits of variance 1
    assert token_loss(model(inputs), targets).item() == pytest.approx(5.545 + 0.5, abs=0.1)


def stds(model: nn.Module) -> dict[str, float]:
    """The standard deviation of each parameter that varies."""
    found = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    return {name: std for name, std in found.items() if std}


def test_initial_weights_of_a_bert() -> None:
    model = real_net(BERT(name="bert", width=64, layers=2), dataclasses.replace(PAIRS, vocabulary=100), seed=0).model
    found = stds(model)
    assert set(found) == {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    for name, std in found.items():
        assert std == pytest.approx(1 / 8, rel=0.3 if "segments" in name or "classifier" in name else 0.05), name


@pytest.mark.parametrize("batch_norm", [False, True])
def test_initial_weights_of_a_vgg(batch_norm: bool) -> None:
    model = real_net(VGG(name="vgg16", batch_norm=batch_norm), IMAGES, seed=0).model
    found = stds(model)
    assert found["conv1.conv.weight"] == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.1)
    assert found["conv13.conv.weight"] == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.05)
    assert found["hidden1.linear.weight"] == pytest.approx(0.64 / 128**0.5, rel=0.05)
    assert found["head.weight"] == pytest.approx(0.64 / 128**0.5, rel=0.1)
    assert not any(name.endswith("bias") for name in found)
    assert not any("norm" in name for name in found)


def test_initial_weights_of_a_resnet() -> None:
    model = real_net(ResNet(name="resnet18"), IMAGES, seed=0).model
    found = stds(model)
    assert found["stem.conv.weight"] == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.1)
    assert found["stage4_block2.branch.conv2.weight"] == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.05)
    assert found["head.output.weight"] == pytest.approx((3 * 128) ** -0.5, rel=0.1)  # PyTorch's own
    assert not any("norm" in name for name in found)
    buffers = dict(model.named_buffers())
    assert all(not buffer.any() for name, buffer in buffers.items() if not name.endswith("running_var"))
    assert all((buffer == 1).all() for name, buffer in buffers.items() if name.endswith("running_var"))
    assert any(name.endswith("running_var") for name in buffers)


def test_initial_weights_of_an_inception() -> None:
    model = real_net(Inception(name="inception_v3", auxiliary=True), IMAGES, seed=0).model
    found = stds(model)
    assert found["mixed1.branches.1.1.conv.weight"] == pytest.approx(0.1, rel=0.1)
    assert found["head.output.weight"] == pytest.approx(0.1, rel=0.1)
    assert found["auxiliary.output.weight"] == pytest.approx(0.001, rel=0.1)
    assert found["head.output.bias"] <= 256**-0.5  # PyTorch's own


def test_initial_weights_of_an_mlp() -> None:
    found = stds(real_net(MLP(name="mlp"), VALUES, seed=0).model)
    assert found["layer3.linear.weight"] == pytest.approx((3 * 128) ** -0.5, rel=0.05)


def test_wide_models_start_as_published() -> None:
    assert (
        initial_std(GPT(name="gpt", size="base").resolved())
        == initial_std(BERT(name="bert", size="base").resolved())
        == 0.02
    )
    assert initial_std(GPT(name="gpt", width=100)) == 0.1


@pytest.mark.parametrize("name", MODELS)
def test_a_built_model_takes_no_memory(name: str) -> None:
    model = build_model(section(MODELS[name], {"name": name}, "model"), spec_for(name), seed=0).model
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_tied_gpt_shares_embedding_and_output() -> None:
    model = real_net(GPT(name="gpt", size="tiny", tied=True), TEXT, seed=0).model
    assert model.head.output.weight is model.embedding.tokens.weight
    assert "head.output.weight" in model.state_dict()


def test_a_gpt_sees_no_later_token() -> None:
    model = real_net(GPT(name="gpt", size="tiny"), TEXT, seed=0).model
    tokens = batch(TEXT, 1)[0]
    other = tokens.clone()
    other[0, 7:] = (other[0, 7:] + 1) % TEXT.vocabulary
    logits, changed = model(tokens), model(other)
    assert torch.allclose(logits[:, :7], changed[:, :7], atol=1e-6)
    assert not torch.allclose(logits[:, 7:], changed[:, 7:], atol=1e-3)


def test_options_override_the_size() -> None:
    options = GPT(name="gpt", layers=2, inner=100).resolved()
    assert (options.layers, options.width, options.heads, options.inner) == (2, 128, 4, 100)
    assert options.resolved() == options
    assert MLP(name="mlp", width=7).resolved().width == 7


@pytest.mark.parametrize(
    ("options", "spec", "message"),
    [
        (GPT(name="gpt"), PAIRS, "gpt takes tokens and learns language .*pairs, classification.*use bert"),
        (ResNet(name="resnet18"), TEXT, "resnet18 takes images .* for such data use gpt"),
        (MLP(name="mlp"), dataclasses.replace(VALUES, features=0), "mlp needs features"),
        (MLP(name="mlp"), dataclasses.replace(VALUES, task="clasification"), "did you mean 'classification'"),
        (GPT(name="gpt", width=130), TEXT, r"multiple of its heads \(width: 130, heads: 4\); use a width of 128"),
        (BERT(name="bert", vocabulary=49), PAIRS, "bert of 49 tokens can't read data of 50"),
        (GPT(name="gpt", positions=8), TEXT, "gpt of 8 positions can't read data of 12"),
        (ResNet(name="resnet18", groups=2), IMAGES, "resnet18 has no groups"),
        (Inception(name="inception_v3", stem=224), IMAGES, "needs 75 pixels"),
    ],
)
def test_models_that_do_not_fit_the_data_are_refused(options: Any, spec: DataSpec, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        build_model(options, spec, seed=0)


USER_CODE = """
import weft
from torch import nn
from weft.train.models import Net

def layers(width, spec):
    return [nn.Linear(spec.features, width), nn.Linear(width, spec.classes)]

def earlier(width, facts):
    return layers(width, facts)

def on_meta(width, spec):
    def ones(module):
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
    with weft.on_meta():
        return Net(model=nn.Sequential(*layers(width, spec)), weights=ones)

def whole(width):
    def loss(output, target):
        return output.sum()
    return Net(model=nn.Sequential(nn.Linear(5, width)), loss_fn=loss)

def nothing():
    return 3
"""


def test_a_custom_model(tmp_path: Path) -> None:
    file = tmp_path / "user_file.py"
    file.write_text(USER_CODE)
    net = build_model(CustomModel(name=f"{file}:layers", options={"width": 4}), VALUES, seed=0)
    assert [layer.weight.shape for layer in net.model] == [(4, 5), (2, 4)]
    assert net.loss_fn is value_loss
    again = build_model(CustomModel(name=f"{file}:layers", options={"width": 4}), VALUES, seed=0)
    assert torch.equal(net.model[0].weight, again.model[0].weight)
    earlier = build_model(CustomModel(name=f"{file}:earlier", options={"width": 4}), VALUES, seed=0)
    assert torch.equal(net.model[0].weight, earlier.model[0].weight)  # a function for an earlier version still works
    net = build_model(CustomModel(name=f"{file}:whole", options={"width": 4}), VALUES, seed=0)
    assert net.loss_fn(torch.ones(3), None) == 3
    with pytest.raises(WeftError, match=r"must return an nn.Module.*\(got int\)"):
        build_model(CustomModel(name=f"{file}:nothing"), VALUES, seed=0)


def test_a_custom_model_without_weights(tmp_path: Path) -> None:
    """The function builds it on the meta device, and may say how it is initialized."""
    file = tmp_path / "user_file.py"
    file.write_text(USER_CODE)
    net = build_model(CustomModel(name=f"{file}:on_meta", options={"width": 4}), VALUES, seed=0)
    assert net.model[0].weight.is_meta
    model = weft.materialize(net.model, weights=net.weights, seed=0)
    assert model[0].weight.tolist() == [[1.0] * 5] * 4
    assert model[1].bias.abs().max() > 0  # PyTorch's own


def test_options_need_no_torch() -> None:
    code = "import sys; import weft.train.models.options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
