"""Models from other sources: exported programs, pipes of torch.distributed.pipelining, Hugging Face."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.cuts import WIDTH, Block, Skips, expect_same, loss_of, rows, run, train
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import WeftError
from weft.runtime.partition.cut import cut_layers

# Exported models


def piped(model: nn.Module, *inputs: Tensor) -> Any:
    from torch.distributed.pipelining import pipeline

    return pipeline(model, inputs)


class Marked(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.third.weight = self.first.weight
        self.dropout = dropout

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        from torch.distributed.pipelining import pipe_split

        h = self.first(x)
        pipe_split()  # type: ignore[no-untyped-call]
        left, right = self.second(h).chunk(2, -1)
        pipe_split()  # type: ignore[no-untyped-call]
        out = self.third(torch.cat([left, right * 2], -1) * scale) + h
        return functional.dropout(out, self.dropout, self.training) if self.dropout else out


def test_a_pipe_of_torch_pipelining() -> None:
    model, inputs = Marked(), (rows(4), rows(4, seed=1))
    plain = copy.deepcopy(model)
    layers = cut_layers(piped(model, *inputs), at=None, example=None)
    assert [list(layer.state_dict()) for layer in layers] == [
        ["first.weight", "first.bias"],
        ["second.weight", "second.bias"],
        ["first.weight", "third.bias"],
    ]
    shared = layers[0].get_parameter("first.weight")
    assert shared is layers[2].get_parameter("first.weight")  # the Pipe had two copies of it
    for training in (True, False):  # the modes agree without dropout and the like
        for form in (inputs, {"scale": inputs[1], "x": inputs[0]}):
            (found,) = run([layer.train(training) for layer in layers], form)
            assert torch.equal(found, plain(*inputs))
    with pytest.raises(WeftError, match=r"fixed x to a tensor of \[4, 8\] \(got a tensor of \[3, 8\]\)"):
        run(layers, (rows(3), rows(3)))
    train(layers, inputs)
    loss_of(plain(*inputs)).backward()  # type: ignore[no-untyped-call]
    found_gradients = {name: parameter.grad for layer in layers for name, parameter in layer.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found_gradients[name], parameter.grad, rtol=0, atol=1e-6)
    with pytest.raises(WeftError, match="cut at its own marks, not at names"):
        cut_layers(piped(model, *inputs), at=["second"], example=None)


def test_a_pipe_has_one_mode() -> None:
    inputs = (rows(4), rows(4, seed=1))
    layers = cut_layers(piped(Marked(dropout=0.5), *inputs), at=None, example=None)
    run(layers, inputs)
    with pytest.raises(WeftError, match="exported for training has no graph for evaluation; pass the model"):
        run([layer.eval() for layer in layers], inputs)


def test_an_exported_program() -> None:
    model = Skips().eval()
    inputs = (rows(4), rows(4, seed=1))
    layers = cut_layers(torch.export.export(model, inputs), at=None, example=None)
    assert len(layers) == 4
    expect_same(model, layers, inputs, training=False)
    with pytest.raises(WeftError, match="exported for evaluation has no graph for training"):
        run([layer.train() for layer in layers], inputs)
    with pytest.raises(WeftError, match="has no mark to cut it at"):
        cut_layers(torch.export.export(Block(), (rows(4),)), at=None, example=None)


# Hugging Face


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


HUGGING_FACE = {
    "bert": (bert, ["bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"]),
    "gpt2": (gpt2, ["transformer.h.0", "transformer.h.1", "lm_head"]),
}


def tokens_of(batch: int, length: int, *, padded: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(100, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 1 :] = 0 if padded else 1
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_hugging_face_models(name: str) -> None:
    make, at = HUGGING_FACE[name]
    torch.manual_seed(0)
    model = make()
    as_dict = name == "gpt2"  # the other model takes positional arguments
    without = {"use_cache": False} if as_dict else {}  # a cache changes the layout of keys, and so the rounding
    example = tokens_of(1, 7)
    layers = cut_layers(model, at=at, example=example if as_dict else tuple(example.values()))
    assert len(layers) == len(at) + 1
    assert {id(parameter) for layer in layers for parameter in layer.parameters()} == {
        id(parameter) for parameter in model.parameters()
    }
    plain = copy.deepcopy(model)
    for training in (True, False):
        plain.train(training)
        for layer in layers:
            layer.train(training)
        for batch, length, padded in ((4, 4, True), (3, 9, False), (1, 5, True)):
            inputs = tokens_of(batch, length, padded=padded)
            plain.zero_grad()
            model.zero_grad()
            torch.manual_seed(1)
            expected = plain(**inputs, **without)
            loss_of(expected).backward()  # type: ignore[no-untyped-call]
            torch.manual_seed(1)
            found = train(layers, inputs if as_dict else tuple(inputs.values()))
            assert type(found) is type(expected)
            assert torch.equal(found.logits, expected.logits)
            for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-6)
    if name == "gpt2":
        assert getattr(model.config, "use_cache", None) is True
        assert layers[0].get_parameter("transformer.wte.weight") is layers[-1].get_parameter("transformer.wte.weight")
