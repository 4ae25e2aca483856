"""Controls of `test_prediction_law.py`: variants of the law that give other results, the foundations of the oracle,
and the weights that the engine reads.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, combinations, product
from typing import Any

import pytest
import torch
from tests.helpers import models
from tests.helpers.models import WIDTH, distance
from tests.helpers.pairwise import parametrize_rows
from tests.helpers.prediction_cases import ADDED, METHODS, SGD, Case, ask_oracle, expected, law_of, train
from tests.helpers.prediction_oracle import PredictionOracle, Reads
from torch import Tensor, nn
from torch.nn import functional

from weft.runtime.engine.chunk import Chunk
from weft.runtime.engine.in_flight import InFlight
from weft.runtime.weights.parameter_set import ParameterSet

# Variants of the law that give other results


def in_chunk(wrong: int, change: Callable[[Reads], Reads]) -> Callable[[Reads, int], Reads]:
    return lambda reads, k: change(reads) if k == wrong else reads


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_one_update_more_or_less_makes_a_difference(method: str, versions: str) -> None:
    """In one chunk, the forward predicts one update more or less or from an older version, or the backward predicts
    further, or reads the weights of the forward instead of the newest, or the reverse."""
    case = Case(method=method, versions=versions, stages=2 if method == "wpipe" else 4, microbatches=4)
    law, ran = law_of(case), train(case)
    assert distance(ran, expected(case)) == 0
    changes: list[Callable[[Reads], Reads]] = [
        lambda reads: reads._replace(ahead=reads.ahead + 1),
        lambda reads: reads._replace(ahead=max(0, reads.ahead - 1)),
        lambda reads: reads._replace(delay=reads.delay + 1),
        lambda reads: reads._replace(backward=None if reads.backward is not None else 0),
        lambda reads: reads if reads.backward is None else reads._replace(backward=reads.backward + 1),
    ]
    for number, change in enumerate(changes):
        wrong = [k for k in range(len(case.balance) - 1) if change(law(k, 0)) != law(k, 0)]
        if number > 2:  # a first layer reads no weights in its backward; without a delay they are the same
            wrong = [k for k in wrong if k > 0 and (law(k, 0).delay or law(k, 0).ahead)]
        for k in wrong[-1:]:
            assert distance(ran, ask_oracle(case, broken=in_chunk(k, change))) > 1e-5, (number, k)


class EachItsOwn(PredictionOracle):
    """Tied weights are read like the other weights of the chunk: a bug, not the law."""

    def reads(self, chunks: Iterable[int], k: int, j: int) -> Reads:
        return self.law(k, j)


@pytest.mark.parametrize(("method", "versions"), METHODS)
def test_tied_weights_are_predicted_alike_for_all_their_chunks(method: str, versions: str) -> None:
    case = Case(method=method, versions=versions, stages=2, microbatches=2, model="transformer")
    assert distance(expected(case), ask_oracle(case, kind=EachItsOwn)) > 1e-5
    state = train(case).state
    assert torch.equal(state["0.weight"], state["7.weight"])


def test_methods_differ_exactly_where_the_law_says_so() -> None:
    """By the weights that every layer reads. With p = m = 4, the exact count of PipeOptim is that of SpecTrain, and the
    count of 2bw is that of XPipe."""
    cases = [Case(method=method, versions=versions, stages=4, microbatches=4) for method, versions in METHODS]
    ran = {case: train(case) for case in cases}
    alike = []
    for left, right in combinations(cases, 2):
        same = by_layer(left) == by_layer(right)
        alike += [f"{left.method} {right.method} {right.versions}"] * same
        far = distance(ran[left], ran[right])
        assert far == 0 if same else far > 1e-5, f"{left} and {right}"
    assert alike == ["xpipe 2bw exact", "spectrain pipeoptim exact"]


def by_layer(case: Case) -> list[Reads]:
    law, ends = law_of(case), list(accumulate(case.balance))
    chunks = [next(k for k, end in enumerate(ends) if layer < end) for layer in range(ends[-1])]
    found = [law(k, j) for k in chunks for j in range(case.microbatches)]
    return [
        reads._replace(backward=0) if reads == Reads(0, 0, None) else reads for reads in found
    ]  # W_t in either case


def test_the_oracle_by_hand() -> None:
    """Loss w²/2 has the gradient w. Two updates ahead of one late, from the last gradient g: w(t-1) - 2 lr g(t-2)."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    oracle = PredictionOracle(
        nn.Sequential(layer),
        loss_fn=lambda output, target: output.square().mean() / 2,
        optimizer=lambda params: SGD(params, lr=0.5),
        microbatches=2,
        balance=[1],
        law=lambda k, j: Reads(delay=1, ahead=2, backward=None),
    )
    seen = []
    for t in range(4):
        if t == 3:
            oracle.flush()
        oracle.step(torch.ones(2, 1), torch.ones(2, 1))
        seen.append(oracle.model.state_dict()["0.weight"].item())
    # read, which is the gradient: 1, 1 (no state yet), 1/2 - 1 = -1/2; flushed: 1/4 - (-1/2) = 3/4
    assert seen == [0.5, 0.0, 0.25, -0.125]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 4),
        nn.Conv2d(1, 1, 3, padding=1),
        nn.LayerNorm(4),
        nn.BatchNorm2d(1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_overwriting_weights_gives_a_backward_at_the_new_weights(layer: nn.Module) -> None:
    """The gradient of a layer depends only on its input and its weights, so it can be computed directly: with a forward
    of the same input at the other weights."""
    x = torch.randn(4, 1, 4, 4) if isinstance(layer, nn.Conv2d | nn.BatchNorm2d) else torch.randn(4, 4)
    grads = []
    for swapped in (True, False):
        leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in layer.named_parameters()}
        given = x.clone().requires_grad_()
        if not swapped:
            for leaf in leaves.values():
                leaf.data.add_(1)
        output = torch.func.functional_call(layer, leaves, (given,))
        if swapped:
            for leaf in leaves.values():
                leaf.data.add_(1)
        weights = torch.arange(output.numel(), dtype=torch.float32).reshape(output.shape)
        grads.append(torch.autograd.grad((output * weights).sum(), [given, *leaves.values()]))
    for left, right in zip(*grads, strict=True):
        assert torch.equal(left, right)


def test_overwriting_the_weights_of_attention() -> None:
    """The values of one product and the gradients of another: the other plus a constant."""
    layer, x = models.Attention().double(), torch.randn(3, 5, WIDTH, dtype=torch.float64)
    here = {name: parameter.detach().clone().requires_grad_() for name, parameter in layer.named_parameters()}
    there = {name: (leaf.detach() + 0.1).requires_grad_() for name, leaf in here.items()}
    old = {name: leaf.detach().clone() for name, leaf in here.items()}

    def linear(value: Tensor, weight: str, bias: str) -> Tensor:
        new = functional.linear(value, there[weight], there[bias])
        return new + (functional.linear(value, old[weight], old[bias]) - new).detach()

    given = [x.clone().requires_grad_() for _ in range(2)]
    swapped = torch.func.functional_call(layer, here, (given[0],))
    for name, leaf in here.items():
        leaf.data.copy_(there[name])
    parts = linear(given[1], "heads.in_proj_weight", "heads.in_proj_bias").chunk(3, -1)
    q, k, v = (tensor.reshape(3, 5, 2, -1).transpose(1, 2) for tensor in parts)
    heads = functional.scaled_dot_product_attention(q, k, v)
    plain = given[1] + linear(heads.transpose(1, 2).flatten(2), "heads.out_proj.weight", "heads.out_proj.bias")
    torch.testing.assert_close(swapped, plain)
    for tensor, other in zip(
        torch.autograd.grad(swapped.square().sum(), [given[0], *here.values()]),
        torch.autograd.grad(plain.square().sum(), [given[1], *there.values()]),
        strict=True,
    ):
        torch.testing.assert_close(tensor, other)


# The weights that the engine reads


@dataclass(frozen=True, kw_only=True)
class Read:
    """A pass of a chunk: the version that it reads or predicts from, how far ahead, and the newest version."""

    forward: bool
    chunk: int
    index: int
    version: int
    ahead: int
    newest: int


def spied(patch: pytest.MonkeyPatch, case: Case) -> list[Read]:
    """All passes of a run, identified by the tensors that modules and autograd read."""
    reads: list[Read] = []
    origin: dict[int, tuple[int, int]] = {}
    predict, forward = ParameterSet.predict, Chunk.forward

    def note(chunk: Chunk, index: int, leaves: list[nn.Parameter], *, is_forward: bool) -> None:
        versions = chunk.sets[0].versions
        names = {id(kept): (number, 0) for number, kept in versions._leaves.items()} | origin
        version, ahead = names[id(leaves)]
        newest = versions.newest
        reads.append(
            Read(forward=is_forward, chunk=chunk.number, index=index, version=version, ahead=ahead, newest=newest)
        )

    def spy_predict(self: ParameterSet, key: Any, ahead: int) -> None:
        predict(self, key, ahead)
        origin[id(self.predicted(key))] = self.versions.newest, ahead

    def spy_forward(self: Chunk, index: int, in_flight: InFlight) -> Any:
        note(self, index, in_flight.weights[0], is_forward=True)
        return forward(self, index, in_flight)

    def spied_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
        def spy(self: Chunk, index: int, gradients: Any, weights: Any = None) -> Any:
            note(self, index, (weights or self.in_flight[index].weights)[0], is_forward=False)
            return backward(self, index, gradients, weights)

        return spy

    patch.setattr(ParameterSet, "predict", spy_predict)
    patch.setattr(Chunk, "forward", spy_forward)
    for name in ("backward", "backward_inputs"):
        patch.setattr(Chunk, name, spied_backward(getattr(Chunk, name)))
    train(case)
    return reads


COUNTED = [
    Case(method=method, versions=versions, stages=p, microbatches=m, updates=p + 1)
    for (method, versions), p, m in product(METHODS, [1, 2, 4], [1, 2, 4, 8])
    if method not in ADDED or m % p == 0
]


@parametrize_rows("case", COUNTED, lambda case: (case.method, case.versions, case.stages, case.microbatches))
def test_version_counts(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts by formula: updates between a forward and its own, and all backwards at W_t."""
    method, p, m = case.method, case.stages, case.microbatches
    reads, law = spied(monkeypatch, case), law_of(case)
    assert len(reads) == 2 * len(case.balance) * m * case.updates
    for read in reads:
        (t, j), k = divmod(read.index, m), read.chunk
        delay, ahead, backward = law(k, j)
        version = max(0, t - delay)
        if read.forward:
            assert (read.version, read.ahead) == (version, ahead), read
            if method not in ("wpipe", "weave"):  # by the order of work alone
                assert read.newest == max(0, t - max(0, -(-(p - 1 - k - j) // m))), read
        else:
            assert read.newest == t, read
            assert (read.version, read.ahead) == ((version, ahead) if backward is None else (t, backward)), read
