"""Models of transformers that were built from a config on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import WeftError
from weft.runtime.checkpoint import stored_weights
from weft.runtime.initial import make_tensors
from weft.runtime.partition import LayeredModel, named_tensors

LAYERS = 2
SIZES = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 48}
KINDS = ("gpt2", "llama", "llama-tied", "bert")


def config_of(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2Config(n_embd=32, n_layer=LAYERS, n_head=4, vocab_size=50, **tokens, **dropout)
    if kind == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertConfig(**SIZES, vocab_size=50, **dropout)
    tied = kind == "llama-tied"
    return transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, vocab_size=50, tie_word_embeddings=tied, rope_theta=500.0, **tokens
    )


def build(kind: str) -> Any:
    """A small model: tied embeddings, rotary frequencies, position ids."""
    transformers = pytest.importorskip("transformers")
    names = {"gpt2": "GPT2LMHeadModel", "bert": "BertForSequenceClassification"}
    return getattr(transformers, names.get(kind, "LlamaForCausalLM"))(config_of(kind))


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        return build(kind)


def blocks(kind: str) -> list[str]:
    """Where to cut it: before every block but the first."""
    name = {"gpt2": "transformer.h", "bert": "bert.encoder.layer"}.get(kind, "model.layers")
    return [f"{name}.{number}" for number in range(1, LAYERS)]


def tokens() -> Tensor:
    return torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))


def difference(output: Any, expected: Tensor) -> Tensor:
    """A loss: the largest difference from expected logits."""
    logits: Tensor = output["logits"]
    return (logits - expected).abs().max()


def pipeline(model: Any, **options: Any) -> weft.Pipeline:
    return weft.Pipeline(
        model,
        loss_fn=difference,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        schedule="1f1b",
        stages=2,
        microbatches=2,
        **options,
    )


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), weft.on_meta], ids=["meta", "weft.on_meta"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_starts_as_transformers_makes_it(
    kind: str, context: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    with context():
        model = build(kind)
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.dim() > 1)
    torch.manual_seed(0)
    made, plain = weft.materialize(model, seed=1), build(kind)
    for (name, parameter), (other, expected) in zip(made.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        if expected.std() == 0:  # biases of zero, norms of one
            assert torch.equal(parameter, expected), name
        else:
            error = 4 * expected.numel() ** -0.5  # four standard deviations of the difference
            assert parameter.std().item() == pytest.approx(expected.std().item(), rel=error), name
    buffers = dict(made.named_buffers())
    for name, expected in plain.named_buffers():
        assert torch.equal(buffers.pop(name), expected), name
    assert not buffers


def test_the_projections_of_a_gpt2_are_scaled() -> None:
    """By a rule of their parents: 0.02 / sqrt(2 x layers)."""
    made = weft.materialize(on_meta("gpt2"))
    for block in made.transformer.h:
        assert block.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for part in (block.attn, block.mlp):
            assert part.c_proj.weight.std().item() == pytest.approx(0.02 * (2 * LAYERS) ** -0.5, rel=0.1)


def test_buffers_are_those_of_the_formulas() -> None:
    llama, bert = weft.materialize(on_meta("llama")), weft.materialize(on_meta("bert"))
    frequencies = [500.0 ** (-2 * pair / 8) for pair in range(4)]  # heads of 8
    assert llama.model.rotary_emb.inv_freq.tolist() == pytest.approx(frequencies)
    assert bert.bert.embeddings.position_ids.tolist() == [list(range(512))]


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama-tied", True), ("llama", False)])
def test_tied_embeddings_stay_tied(kind: str, tied: bool) -> None:
    made = weft.materialize(on_meta(kind))
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) is tied


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_share_has_the_values_of_the_whole(kind: str) -> None:
    """Every third tensor, as if each were on another rank than its neighbours and its parent's other children."""
    whole = weft.materialize(on_meta(kind), seed=3).state_dict()
    model = on_meta(kind)
    state = model.state_dict(keep_vars=True)
    share = [tensor for _, _, tensor in named_tensors(model)][1::3]
    names = {name for name, tensor in state.items() if any(tensor is held for held in share)}
    layered = LayeredModel(layers=[model], root=model, state=state)
    make_tensors(layered, share, own=share, weights=None, open_weights=stored_weights, seed=3)
    found = model.state_dict()
    assert {name for name, tensor in found.items() if not tensor.is_meta} == names
    assert all(torch.equal(found[name], whole[name]) for name in names)
    assert len(whole) / 4 < len(names) < len(whole) / 2


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied", "bert"])
def test_a_pipeline_reads_what_save_pretrained_wrote(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = build(kind).eval()
    with torch.no_grad():
        for parameter in plain.parameters():  # also biases and norms
            parameter.add_(0.1 * torch.randn_like(parameter))
        logits = plain(input_ids=tokens()).logits
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    inputs = {"input_ids": tokens()}
    with pipeline(on_meta(kind), cut=blocks(kind), example=inputs, weights=tmp_path) as pipe:
        evaluated = pipe.evaluate([(inputs, logits)])
        state = pipe.state_dict()
    assert evaluated == pytest.approx(0.0, abs=1e-5)
    expected = plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["gpt2", "llama-tied"])
def test_files_of_a_model_without_its_head(kind: str, tmp_path: Path) -> None:
    """Published ones have other names (`wte.weight`); a tied head needs no more."""
    plain = build(kind)
    plain.base_model.save_pretrained(tmp_path / "base")
    plain.save_pretrained(tmp_path / "whole")
    with_head = weft.materialize(on_meta(kind), weights=tmp_path / "base")
    without = weft.materialize(on_meta(kind).base_model, weights=tmp_path / "whole")
    for made, expected in ((with_head, plain), (without, plain.base_model)):
        state = made.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_missing_head_is_refused(tmp_path: Path) -> None:
    build("llama").base_model.save_pretrained(tmp_path)
    with pytest.raises(WeftError, match=r"has no lm_head\.weight \(missing: 1\)"):
        weft.materialize(on_meta("llama"), weights=tmp_path)


def test_a_pipeline_trains_a_model_from_a_config() -> None:
    inputs, target = {"input_ids": tokens()}, torch.zeros(4, 7, 50)
    with pipeline(on_meta("gpt2"), cut=blocks("gpt2"), example=inputs, seed=2) as pipe:
        start = pipe.state_dict()
        pipe.step(inputs, target)
        loss = pipe.flush().loss
    plain = weft.materialize(on_meta("gpt2"), seed=2)
    assert all(torch.equal(start[name], tensor) for name, tensor in plain.state_dict().items())
    halves = [difference(plain(input_ids=half), target[:2]).item() for half in tokens().chunk(2)]
    assert loss == pytest.approx(sum(halves) / 2, rel=1e-5)


# A list of layers


class First(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return hidden


class Last(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": self.lm_head(self.ln_f(hidden))}


def layers_of(model: Any) -> list[nn.Module]:
    return [First(model), *model.transformer.h, Last(model)]


def test_layers_of_a_model_start_by_its_rules() -> None:
    """The list has no rules of its own: its layers don't know their model."""
    model = on_meta("gpt2")
    with pipeline(layers_of(model), weights=model._init_weights) as pipe:
        state = pipe.state_dict()
    assert torch.equal(state["0.wte.weight"], state["3.lm_head.weight"])
    assert state["2.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["2.attn.c_proj.weight"].std().item() == pytest.approx(0.02 * (2 * LAYERS) ** -0.5, rel=0.1)
    assert not state["2.mlp.c_fc.bias"].any()
    with pytest.raises(WeftError, match=r"nothing initializes the parameter 1\.attn.*\(Conv1D has no"):
        pipeline(layers_of(on_meta("gpt2")))
