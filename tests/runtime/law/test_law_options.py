"""Controls of the law, and cases beyond the table: flushes, short runs, optimizers with foreach and fused kernels,
learning rates, norms, replicas. On virtual ranks, as in `test_law.py`.
"""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.helpers.models import (
    ASYNCHRONOUS,
    BALANCE,
    MODELS,
    OPTIMIZERS,
    SYNCHRONOUS,
    Case,
    Run,
    ask_oracle,
    batches,
    build,
    check,
    distance,
    expected,
    loss_fn,
    train,
)
from tests.helpers.oracle import Delay, MakeOptimizer, Oracle, delays
from tests.helpers.pairwise import parametrize_product
from torch import nn

import weft

# Controls: variants of the law that give other results


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4)])
def test_methods_differ_exactly_where_the_law_says_so(model: str, p: int, m: int) -> None:
    ran = {name: train(Case(method=name, stages=p, microbatches=m, model=model)) for name in SYNCHRONOUS + ASYNCHRONOUS}
    for left, right in combinations(ran, 2):
        if {left, right} <= set(SYNCHRONOUS):
            # the gradient of a tied parameter is summed by chunk, and interleaved has other chunks
            assert distance(ran[left], ran[right]) <= (1e-6 if model == "transformer" else 0)
        else:
            assert distance(ran[left], ran[right]) > 1e-3, f"{left} and {right}"


@parametrize_product(model=MODELS, name=ASYNCHRONOUS, p=[2, 4])
def test_other_versions_do_not_match(model: str, name: str, p: int) -> None:
    """Weights that are too old, too new, or the newest in the backward only: each gives other results."""
    case = Case(method=name, stages=p, microbatches=p, model=model)
    ran = train(case)
    assert distance(ran, ask_oracle(case)) == 0
    assert distance(ran, ask_oracle(case, shift=lambda k, j: 1)) > 1e-3
    assert distance(ran, ask_oracle(case, shift=lambda k, j: -1)) > 1e-3
    assert distance(ran, ask_oracle(case, forgetful=True)) > 1e-3


@pytest.mark.parametrize("name", SYNCHRONOUS + ASYNCHRONOUS)
def test_one_wrong_chunk_or_micro_batch_is_enough_to_differ(name: str) -> None:
    case = Case(method=name, stages=4, microbatches=4)
    ran = train(case)
    shifts: list[Delay] = [partial(lambda wrong, k, j: int(k == wrong), wrong) for wrong in range(len(case.balance))]
    shifts += [partial(lambda wrong, k, j: int(j == wrong), wrong) for wrong in range(case.microbatches)]
    for shift in shifts:
        assert distance(ran, ask_oracle(case, shift=shift)) > 1e-4


def test_the_oracle_by_hand() -> None:
    """Loss w²/2 has the gradient w, so one update late is w(t+1) = w(t) - lr w(t-1); a flush restarts it."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    oracle = Oracle(
        nn.Sequential(layer),
        loss_fn=lambda output, target: output.square().mean() / 2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        microbatches=2,
        balance=[1],
        delay=lambda k, j: 1,
    )
    seen = []
    for t in range(5):
        if t == 3:
            oracle.flush()
        oracle.step(torch.ones(2, 1), torch.ones(2, 1))
        seen.append(oracle.model.state_dict()["0.weight"].item())
    assert seen == [0.5, 0.0, -0.25, -0.125, 0.0]  # 1-1/2, 1/2-1/2, 0-1/4; flushed: -1/4+1/8, -1/8+1/8


# Beyond the table


@parametrize_product(model=MODELS, name=ASYNCHRONOUS, flushes=[(5,), (1, 2, 6)])
def test_no_version_from_before_a_flush_is_read_after_it(name: str, model: str, flushes: tuple[int, ...]) -> None:
    case = Case(method=name, stages=2, microbatches=2, model=model, optimizer="momentum", flushes=flushes)
    check(case)
    assert distance(expected(case), expected(replace(case, flushes=()))) > 1e-4  # the flush has an effect


@pytest.mark.parametrize("name", SYNCHRONOUS + ASYNCHRONOUS)
@pytest.mark.parametrize("updates", [0, 1, 2])
def test_a_run_shorter_than_the_pipeline(name: str, updates: int) -> None:
    check(Case(method=name, stages=4, microbatches=4, model="transformer", updates=updates))


@parametrize_product(model=MODELS, name=["1f1b", *ASYNCHRONOUS], optimizer=["foreach", "fused", "fused-sgd"])
def test_foreach_and_fused_optimizers(name: str, optimizer: str, model: str) -> None:
    """They write weights in other ways than plain loops, also as seen by autograd."""
    check(Case(method=name, stages=2, microbatches=2, model=model, optimizer=optimizer))


@pytest.mark.parametrize("model", ["mlp", "transformer"])
@pytest.mark.parametrize("name", SYNCHRONOUS + ASYNCHRONOUS)
def test_the_learning_rate_steps_once_per_update(name: str, model: str) -> None:
    case = Case(method=name, stages=2, microbatches=4, model=model, optimizer="adam", lr_scheduler="halved")
    check(case)
    assert distance(expected(case), expected(replace(case, lr_scheduler=None))) > 1e-3


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "wpipe"])
def test_optimizers_that_share_a_rate_have_rates_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers write to a rate that is a tensor."""
    case = Case(method=name, stages=2, microbatches=2, optimizer="adam", lr_scheduler="halved")
    law, rate = expected(case), torch.tensor(0.01)
    makers: list[MakeOptimizer] = [
        lambda params: torch.optim.Adam(params, lr=rate.clone()),
        lambda params: torch.optim.Adam(params, lr=rate),
    ]
    runs = []
    for make in makers:
        monkeypatch.setitem(OPTIMIZERS, "adam", make)
        runs.append(train(case))
    assert distance(*runs) == 0
    assert distance(runs[0], law) < 1e-5  # the rate is rounded to float32
    assert rate == torch.tensor(0.01)


@parametrize_product(model=MODELS, name=["1f1b", "2bw"], p=[2, 4])
def test_clipping_uses_the_norm_of_the_whole_model(name: str, p: int, model: str) -> None:
    """To 1e-6: the squares of a norm are summed by chunk."""
    case = Case(method=name, stages=p, microbatches=p, model=model, optimizer="momentum", clip_norm=0.5)
    check(case, within=1e-6)
    assert distance(expected(case), expected(replace(case, clip_norm=None))) > 1e-3  # clipping has an effect


@pytest.mark.parametrize("model", ["mlp", "transformer"])
@pytest.mark.parametrize("name", SYNCHRONOUS + ASYNCHRONOUS)
def test_replicas_share_a_mini_batch(name: str, model: str) -> None:
    """To 1e-6: each replica sums its micro-batches before the mean over replicas. Not conv: each replica has its own
    BatchNorm statistics."""
    check(Case(method=name, stages=2, microbatches=2, model=model, optimizer="momentum", replicas=2), within=1e-6)


@pytest.mark.parametrize("name", SYNCHRONOUS + ASYNCHRONOUS)
def test_tied_weights_stay_equal(name: str) -> None:
    state = train(Case(method=name, stages=4, microbatches=4, model="transformer", optimizer="adamw")).state
    assert torch.equal(state["0.weight"], state["7.weight"])


@pytest.mark.parametrize("name", SYNCHRONOUS + ASYNCHRONOUS)
def test_training_starts_from_the_given_model(name: str) -> None:
    """The state before the first step is that of the model, and a flush without steps changes nothing."""
    model = build("transformer")
    start = {key: value.clone() for key, value in model.state_dict().items()}
    pipe = weft.Pipeline(
        model,
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS["sgd"],
        schedule=name,
        microbatches=2,
        stages=2,
        balance=BALANCE[4 if name in ("interleaved", "wpipe", "weave") else 2],
    )
    for _ in range(2):
        pipe.flush()
        assert distance(Run(state=pipe.state_dict(), losses=[]), Run(state=start, losses=[])) == 0
    pipe.step(*batches("transformer", 1)[0])
    pipe.flush()
    once = {key: value.clone() for key, value in pipe.state_dict().items()}
    pipe.flush()
    assert distance(Run(state=pipe.state_dict(), losses=[]), Run(state=once, losses=[])) == 0


@pytest.mark.parametrize(
    ("slack", "split", "microbatches", "replicas"),
    [(0, True, 6, 1), (0.5, True, 12, 1), (0.5, False, 14, 1), (0, True, 6, 2)],
)
def test_weave_on_eight_ranks(slack: float, split: bool, microbatches: int, replicas: int) -> None:
    """Sixteen chunks of one layer, whose delays differ from chunk to chunk."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(*build("mlp"), *build("mlp"))
    options: dict[str, Any] = {"slack": slack, "split": split}
    schedule = weft.schedule("weave", stages=8, microbatches=microbatches, **options)
    late = delays("weave", 8, microbatches, **options)
    oracle = Oracle(
        model,
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS["momentum"],
        microbatches=replicas * microbatches,
        balance=[1] * 16,
        delay=lambda k, j: late(k, j % microbatches),
    )
    rows = 2 * microbatches * replicas
    generator = torch.Generator().manual_seed(4)
    with weft.Pipeline(
        model,
        loss_fn=loss_fn,
        optimizer=OPTIMIZERS["momentum"],
        schedule=schedule,
        stages=8,
        balance=[1] * 16,
        replicas=replicas,
    ) as pipe:
        for _ in range(4):
            inputs, targets = (
                torch.randn(rows, 16, generator=generator),
                torch.randint(16, (rows,), generator=generator),
            )
            pipe.step(inputs, targets)
            oracle.step(inputs, targets)
        pipe.flush()
        ran = Run(state=pipe.state_dict(), losses=[])
    law = Run(state=dict(oracle.model.state_dict()), losses=[])
    assert distance(ran, law) <= (0 if replicas == 1 else 1e-6)
