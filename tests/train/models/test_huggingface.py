"""GPT and BERT match transformers: the same logits with the same weights, exported or imported."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.sources import InMemory, read_all
from tests.train.models.cases import PAIRS, TEXT, batch, real_net
from torch import nn

from weft.errors import WeftError
from weft.runtime.storage import StoredWeights
from weft.train.data_spec import DataSpec
from weft.train.models import build_model, to_huggingface
from weft.train.models.options import BERT, GPT

Options: TypeAlias = "GPT | BERT"
CASES: dict[str, tuple[Options, DataSpec]] = {
    "gpt": (GPT(name="gpt", layers=2, width=16, heads=2, activation="gelu_new"), TEXT),
    "gpt-exact": (GPT(name="gpt", layers=2, width=16, heads=2, inner=24), TEXT),
    "gpt-tied": (GPT(name="gpt", layers=2, width=16, heads=2, tied=True), TEXT),
    "bert": (BERT(name="bert", layers=2, width=16, heads=2, inner=24, epsilon=1e-6, positions=20), PAIRS),
}


def transformers_model(config: dict[str, Any]) -> Any:
    """A transformers model in which all weights are random, also biases and norms."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, config["architectures"][0])
    model = kind(kind.config_class.from_dict(config)).eval()
    return randomized(model)


def randomized(model: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    return model


def transformers_logits(model: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = (model(**inputs) if isinstance(inputs, dict) else model(input_ids=inputs)).logits
    return found


def weft_logits(model: nn.Module, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(inputs)
    return found


def write(folder: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("case", CASES)
def test_export_to_transformers(case: str) -> None:
    options, spec = CASES[case]
    model = randomized(real_net(options, spec, seed=0).model)
    config, weights = to_huggingface(options, spec, InMemory(model.state_dict()))
    other = transformers_model(config)
    missing, unknown = other.load_state_dict(read_all(weights), strict=False)
    assert unknown == []
    assert missing == (["lm_head.weight"] if case == "gpt-tied" else [])
    inputs = batch(spec, 3)[0]
    torch.testing.assert_close(weft_logits(model, inputs), transformers_logits(other, inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_import_from_transformers(case: str, tmp_path: Path) -> None:
    options, spec = CASES[case]
    config, _ = to_huggingface(options, spec, InMemory(real_net(options, spec, seed=0).model.state_dict()))
    other = transformers_model(config)
    other.save_pretrained(tmp_path)  # in the form that transformers writes
    start = type(options)(name=options.name, dropout=0.0, weights=str(tmp_path))
    if isinstance(start, GPT):
        start = dataclasses.replace(start, tied=case == "gpt-tied")
    net = real_net(start, spec, seed=1)
    assert net.notes == ()
    inputs = batch(spec, 3)[0]
    torch.testing.assert_close(weft_logits(net.model, inputs), transformers_logits(other, inputs), rtol=0, atol=1e-5)


def test_export_and_import_are_inverse(tmp_path: Path) -> None:
    for name, (options, spec) in CASES.items():
        state = randomized(real_net(options, spec, seed=0).model).state_dict()
        config, weights = to_huggingface(options, spec, InMemory(state))
        folder = write(tmp_path / name, config, read_all(weights))
        back = real_net(dataclasses.replace(options, weights=folder), spec, seed=1).model.state_dict()
        assert all(torch.equal(back[key], tensor) for key, tensor in state.items())


def test_sizes_come_from_a_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_layer": 3, "n_embd": 24, "n_positions": 64, "vocab_size": 99}))
    for place in (tmp_path, file):
        found = GPT(name="gpt", config=str(place), heads=2).resolved()
        assert (found.layers, found.width, found.heads, found.positions, found.vocabulary) == (3, 24, 2, 64, 99)
        assert (found.activation, found.inner, found.config) == ("gelu_new", 96, "")
    model = real_net(GPT(name="gpt", config=str(file), heads=2), TEXT, seed=0).model
    assert model(batch(TEXT, 2)[0]).shape == (2, 12, 99)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, r"must be for a gpt2 \(model_type: bert\); use model.name=bert"),
        ({"model_type": "llama"}, "weft's models read gpt2 and bert"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "supports only activation_function 'gelu_new'"),
        ([], "must be for a gpt2"),
    ],
)
def test_configs_that_do_not_fit_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeftError, match=message):
        GPT(name="gpt", config=str(tmp_path)).resolved()


def saved(tmp_path: Path, case: str) -> tuple[Options, DataSpec, Path, dict[str, torch.Tensor]]:
    options, spec = CASES[case]
    config, weights = to_huggingface(options, spec, InMemory(real_net(options, spec, seed=0).model.state_dict()))
    state = read_all(weights)
    folder = write(tmp_path, config, state)
    return dataclasses.replace(options, weights=folder), spec, tmp_path / "model.safetensors", state


def test_a_published_encoder_without_a_head(tmp_path: Path) -> None:
    options, spec, file, state = saved(tmp_path, "bert")
    old = {name.removeprefix("bert."): tensor for name, tensor in state.items() if not name.startswith("classifier")}
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in old.items()}
    old |= {"embeddings.position_ids": torch.arange(20), "cls.seq_relationship.bias": torch.zeros(2)}
    save_file(old, file)
    net = real_net(options, spec, seed=7)
    assert len(net.notes) == 1
    assert net.notes[0].endswith("has no head.classifier.weight, head.classifier.bias: they keep their initial values")
    assert torch.equal(net.model.head.pooler.weight, state["bert.pooler.dense.weight"])
    initial = real_net(dataclasses.replace(options, weights=""), spec, seed=7).model
    assert torch.equal(net.model.head.classifier.weight, initial.head.classifier.weight)
    assert not torch.equal(net.model.head.pooler.weight, initial.head.pooler.weight)
    assert torch.equal(
        net.model.attention1.qkv.weight[16:32], load_file(file)["encoder.layer.1.attention.self.key.weight"]
    )


def test_a_published_gpt_without_prefix_and_output(tmp_path: Path) -> None:
    options, spec, file, state = saved(tmp_path, "gpt-tied")
    old = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file({**old, "h.0.attn.bias": torch.ones(1, 1, 12, 12)}, file)
    assert isinstance(options, GPT)
    model = real_net(dataclasses.replace(options, tied=False), spec, seed=7).model
    assert torch.equal(model.head.output.weight, state["transformer.wte.weight"])
    assert model.head.output.weight is not model.embedding.tokens.weight


def test_weights_are_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any dtype, and nothing else than what makes up the tensor."""
    options, spec, file, state = saved(tmp_path, "bert")
    save_file({name: tensor.half() for name, tensor in state.items()}, file)
    net = build_model(options, spec, seed=0)
    source, shapes = net.weights, {name: tuple(tensor.shape) for name, tensor in net.model.state_dict().items()}
    assert {name: source.form(name) for name in source.names()} == {
        name: (torch.float16, shape) for name, shape in shapes.items()
    }
    read: list[str] = []
    plain = StoredWeights.read_into

    def record(stored: StoredWeights, name: str, tensor: torch.Tensor) -> None:
        read.append(name)
        plain(stored, name, tensor)

    monkeypatch.setattr(StoredWeights, "read_into", record)
    weight = torch.empty(48, 16)
    source.read_into("attention1.qkv.weight", weight)
    assert read == [f"bert.encoder.layer.1.attention.self.{part}.weight" for part in ("query", "key", "value")]
    assert torch.equal(weight, torch.cat([state[name].half().float() for name in read]))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    options, spec, file, state = saved(tmp_path, "bert")
    key = "bert.encoder.layer.1.output.dense.weight"

    def refuse(given: dict[str, torch.Tensor], message: str) -> None:
        save_file(given, file)
        with pytest.raises(WeftError, match=message):
            build_model(options, spec, seed=0)

    refuse({name: tensor for name, tensor in state.items() if name != key}, f"has no {key}")
    refuse({**state, "bert.encoder.layer.2.x": torch.ones(1)}, r"has bert.encoder.layer.2.x, .*\(unknown: 1\)")
    refuse({**state, key: torch.ones(16, 3)}, rf"{key} of .* another shape \(file: \[16, 3\], model: \[16, 24\]\)")
    file.write_bytes(b"no safetensors")
    with pytest.raises(WeftError, match="not an intact safetensors file"):
        build_model(options, spec, seed=0)
    file.unlink()
    with pytest.raises(WeftError, match=r"weights are safetensors files \(.* holds none\)"):
        build_model(options, spec, seed=0)
