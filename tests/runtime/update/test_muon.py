"""Muon for hidden matrices and AdamW for the rest: by the formula, the choice of matrices, prediction."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.muon_by_hand import MuonByHand
from tests.helpers.muon_by_hand import orthogonal as by_decomposition
from torch import Tensor, nn
from torch.nn import Parameter

import weft
from weft.errors import WeftError
from weft.runtime.update.optimizers import orthogonal as module
from weft.runtime.update.optimizers.orthogonal import iteration_dtype, orthogonal
from weft.runtime.update.predictor import PredictionOptions, Predictor

LR = 0.05
SHAPES = {
    "embed.weight": (9, 4),
    "up.weight": (12, 4),
    "down.weight": (4, 12),
    "square.weight": (6, 6),
    "up.bias": (4,),
}
Named = list[tuple[str, Parameter]]


def parameters(dtype: torch.dtype = torch.float64) -> Named:
    made = torch.Generator().manual_seed(3)
    return [(name, Parameter(torch.randn(shape, generator=made, dtype=dtype))) for name, shape in SHAPES.items()]


def is_matrix(name: str, parameter: Parameter) -> bool:
    return parameter.ndim == 2 and name != "embed.weight"


def gradients(named: Named, updates: int) -> list[list[Tensor]]:
    made = torch.Generator().manual_seed(4)
    return [[torch.randn(p.shape, generator=made, dtype=p.dtype) for _, p in named] for _ in range(updates)]


def trained(make: Callable[[Named], torch.optim.Optimizer], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    named = parameters(dtype)
    optimizer = make(named)
    for found in gradients(named, 5):
        for (_, parameter), gradient in zip(named, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for _, parameter in named]


def far(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"momentum": 0.7, "betas": (0.8, 0.9), "weight_decay": 0.3}]
)
def test_the_step_by_its_formula(options: dict[str, Any]) -> None:
    expected = trained(lambda named: MuonByHand(named, lr=LR, hidden=is_matrix, **options))
    assert far(trained(weft.optimizers.muon(LR, **options)), expected) < 1e-12
    single = trained(weft.optimizers.muon(LR, **options), torch.float32)
    assert (
        far(single, trained(lambda named: MuonByHand(named, lr=LR, hidden=is_matrix, **options), torch.float32)) < 1e-4
    )


@pytest.mark.parametrize(
    "wrong", [{"nesterov": False}, {"momentum": 0.94}, {"betas": (0.9, 0.94)}, {"weight_decay": 0.11}, {"scale": 0.21}]
)
def test_another_formula_gives_another_result(wrong: dict[str, Any]) -> None:
    expected = trained(lambda named: MuonByHand(named, lr=LR, hidden=is_matrix, **wrong))
    assert far(trained(weft.optimizers.muon(LR)), expected) > 1e-4


def test_the_others_are_those_of_adamw_to_the_bit() -> None:
    options: dict[str, Any] = {"betas": (0.8, 0.9), "weight_decay": 0.2, "eps": 1e-3}
    expected = trained(lambda named: torch.optim.AdamW([p for _, p in named], lr=LR, **options), torch.float32)
    found = trained(weft.optimizers.muon(LR, hidden=lambda name, parameter: False, **options), torch.float32)
    assert all(map(torch.equal, found, expected))


def test_the_matrices_are_those_of_torchs_muon_to_its_rounding() -> None:
    def of_torch(named: Named) -> torch.optim.Optimizer:
        matrices = [parameter for name, parameter in named if is_matrix(name, parameter)]
        return torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")

    expected, found = trained(of_torch), trained(weft.optimizers.muon(LR))
    assert 1e-5 < far(found[1:4], expected[1:4]) < 0.01 < far(found[:1], expected[:1])


def test_a_rate_may_be_a_tensor() -> None:
    found = trained(weft.optimizers.muon(torch.tensor(LR, dtype=torch.float64)))
    assert far(found, trained(weft.optimizers.muon(LR))) < 1e-12


def test_it_trains_without_a_pipeline_by_closures_and_copies() -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 1))
    optimizer = weft.optimizers.muon(lr=LR)(model.named_parameters())
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    inputs = torch.ones(8, 4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return float(loss.detach())

    first = optimizer.step(closure)
    copied = copy.deepcopy(optimizer)
    assert [optimizer.step(closure) for _ in range(20)][-1] < first / 4  # type: ignore[operator]
    other = weft.optimizers.muon(lr=LR)(model.named_parameters())
    other.load_state_dict(copied.state_dict())
    assert {tuple(state) for state in other.state.values()} == {("momentum_buffer",), ("step", "exp_avg", "exp_avg_sq")}


def test_unknown_options_parameters_without_names_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(WeftError, match=r"muon is for named parameters.*model\.named_parameters\(\) \(got Parameter\)"):
        weft.optimizers.MuonAdamW([Parameter(torch.ones(2, 2))], lr=LR)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        weft.optimizers.muon(LR, beta=0.9)
    words = nn.Embedding(4, 4, sparse=True)
    optimizer = weft.optimizers.muon(LR, hidden=lambda name, parameter: False)(words.named_parameters())
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(WeftError, match="muon needs dense gradients; use sparse=False"):
        optimizer.step()


# The orthogonal matrix


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3), (1, 5)])
def test_orthogonal_matrices(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = orthogonal(matrix, torch.float64)
    torch.testing.assert_close(found, by_decomposition(matrix), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(found)
    assert 0.68 < values.min() <= values.max() < 1.21
    assert torch.equal(orthogonal(torch.zeros(shape), torch.float32), torch.zeros(shape))
    assert orthogonal(matrix.float(), torch.bfloat16).dtype == torch.bfloat16


def test_cpus_iterate_in_float32_and_devices_in_bfloat16_where_they_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.float64]
    assert [iteration_dtype(torch.ones(2, 2, dtype=dtype)) for dtype in dtypes] == [torch.float32, *dtypes[1:]]

    class Device:
        supported = True

        def is_bf16_supported(self, including_emulation: bool = True) -> bool:
            return self.supported and not including_emulation

    on_device = torch.ones(2, 2, device="meta")
    for given, expected in [(Device(), torch.bfloat16), (object(), torch.float32)]:
        module._has_bfloat16.cache_clear()
        monkeypatch.setattr(torch, "get_device_module", lambda device, given=given: given)
        assert iteration_dtype(on_device) == expected
    module._has_bfloat16.cache_clear()


# Which parameters are hidden matrices


HIDDEN = [
    "attention0.qkv.weight", "attention0.projection.weight", "feedforward3.up.weight", "layer2.linear.weight",  # weft's
    "transformer.h.0.attn.c_attn.weight", "transformer.h.11.mlp.c_proj.weight",  # GPT-2
    "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj.weight",  # Llama
    "bert.encoder.layer.0.attention.output.dense.weight", "bert.encoder.layer.0.output.dense.weight",
    "gpt_neox.layers.0.attention.query_key_value.weight", "model.decoder.layers.0.fc1.weight",
    "decoder.block.0.layer.0.SelfAttention.q.weight", "2.heads.in_proj_weight", "encoder.layers.0.linear1.weight",
    "transformer.h.0.mlp.fc_out.weight", "layers.0.attn.out_proj.weight", "blocks.0.fc.weight",
]  # fmt: skip
NOT_HIDDEN = [
    "embedding.tokens.weight", "embedding.positions.weight", "head.output.weight", "head.classifier.weight",  # weft's
    "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight", "score.weight",
    "model.embed_tokens.weight", "tok_embeddings.weight", "output.weight", "gpt_neox.embed_in.weight",
    "embed_out.weight", "bert.embeddings.word_embeddings.weight", "classifier.weight", "qa_outputs.weight",
    "cls.predictions.decoder.weight", "vocab_projector.weight", "shared.weight", "heads.head.weight", "fc.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "layers.0.blocks.1.attn.relative_position_bias_table",
    "tok_emb.weight", "word_emb.weight", "emb.weight", "positions", "out.weight", "proj_out.weight",  # written by hand
    "cls.seq_relationship.weight", "logits_proj.weight", "transformer.w.weight", "backbone.layers.0.mixer.A_log",
]  # fmt: skip


def test_hidden_matrices_by_name_and_shape() -> None:
    matrix = Parameter(torch.ones(4, 3))
    assert [name for name in HIDDEN if not weft.optimizers.is_hidden_matrix(name, matrix)] == []
    assert [name for name in NOT_HIDDEN if weft.optimizers.is_hidden_matrix(name, matrix)] == []
    for shape in [(4,), (1, 4), (4, 1), (4, 3, 3, 3)]:
        assert not weft.optimizers.is_hidden_matrix("layer.weight", Parameter(torch.ones(shape)))
        assert not weft.optimizers.is_hidden_matrix("0.weight", Parameter(torch.ones(shape)))
    for name in ("weight", "0.weight", "3.0.weight"):
        with pytest.raises(WeftError, match=rf"this name says nothing \({name}, shape \(4, 3\)\); name the layers"):
            weft.optimizers.is_hidden_matrix(name, matrix)


# Prediction


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
def test_predictions_follow_the_momentum(extrapolation: str) -> None:
    """Zero gradients shrink the momentum of a matrix and leave its direction: decayed adds the decay of weights."""
    named = parameters()
    live = [parameter for _, parameter in named]
    optimizer = weft.optimizers.muon(LR, weight_decay=0.2)(named)
    predictor = Predictor(optimizer, live, options=PredictionOptions(extrapolation=extrapolation))
    for found in gradients(named, 5):
        for parameter, gradient in zip(live, found, strict=True):
            parameter.grad = gradient
        with predictor.step():
            optimizer.step()
    assert predictor.nbytes == 0
    into = [Parameter(torch.full_like(parameter, math.nan)) for parameter in live]
    before = copy.deepcopy([optimizer.state_dict(), live])
    predictor.predict(into, 3)
    for (name, parameter), predicted in zip(named, into, strict=True):
        state, expected = optimizer.state[parameter], parameter.detach()
        for ahead in range(1, 4):
            if extrapolation == "decayed":
                expected = expected * (1 - LR * 0.2)
            expected = expected - LR * direction(name, state, ahead if extrapolation == "decayed" else 0)
        torch.testing.assert_close(predicted.detach(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close([optimizer.state_dict(), live], before, rtol=0, atol=0)


def direction(name: str, state: dict[str, Tensor], ahead: int) -> Tensor:
    """The step for a rate of 1, after this number of zero gradients."""
    if "momentum_buffer" in state:
        buffer = state["momentum_buffer"]
        return 0.2 * math.sqrt(max(buffer.shape)) * by_decomposition(buffer)
    count = int(state["step"]) + ahead
    mean = state["exp_avg"] * 0.9**ahead / (1 - 0.9**count)
    return mean / ((state["exp_avg_sq"] * 0.95**ahead / (1 - 0.95**count)).sqrt() + 1e-8)
