"""How many kernels an update launches does not depend on the number of parameters: each is a call for a whole list."""

from typing import Any
from unittest import mock

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.prediction_cases import OPTIMIZERS
from tests.helpers.pretend.processes import in_process
from torch import Tensor, nn

import weft
from weft.runtime.comm import AllReduce
from weft.runtime.device import mark
from weft.runtime.engine.staleness import Staleness
from weft.runtime.tensors import copies_of, copy_tensors
from weft.runtime.update.predictions import Predictions
from weft.runtime.update.predictor import Predictor
from weft.runtime.weights.all_reduce import Group, GroupSums
from weft.runtime.weights.gradient_sync import Average, GradientSync, Norm, PendingUpdate
from weft.runtime.weights.parameter_set import ParameterSet

DEVICE = "pretend:0"
FEW, MANY = 10, 40  # layers, each with a weight and a bias
WIDTH = 4
UPDATES = 8  # RAdam's rule has another form in the first six


class Counter:
    """The kernels that calls of a method have launched, one number a call."""

    def __init__(self, owner: Any, name: str) -> None:
        self.calls: list[int] = []
        method = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            before = pretend.load().launches()
            result = method(*args, **options)
            self.calls.append(pretend.load().launches() - before)
            return result

        self.patch = mock.patch.object(owner, name, counted)


def per_call(owner: Any, name: str, layers: int, schedule: str, **options: Any) -> int:
    """The launches of the last call of a method in a run on two stages."""
    torch.manual_seed(0)
    counter = Counter(owner, name)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    pipe = weft.Pipeline(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=options.pop("optimizer", OPTIMIZERS["adam"]),
        schedule=schedule,
        microbatches=2,
        stages=2,
        device=DEVICE,
        **options,
    )
    with counter.patch, pipe:
        for _ in range(UPDATES):
            pipe.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    return counter.calls[-1]


@pytest.mark.parametrize(
    ("owner", "name", "schedule", "options"),
    [
        (ParameterSet, "update", "2bw", {}),  # copies a version
        (ParameterSet, "update", "1f1b", {}),
        (ParameterSet, "update", "2bw", {"cure": weft.cures.GapAware()}),
        (ParameterSet, "update", "2bw", {"cure": weft.cures.Optimistic()}),
        (Staleness, "sample", "2bw", {"telemetry": 1}),
        (Staleness, "measure", "2bw", {"telemetry": 1}),
        (Predictions, "make", "xpipe", {"predict": {"extrapolation": "decayed"}}),
    ],
    ids=["version", "update", "gap-aware", "optimistic", "sample", "distance", "decayed prediction"],
)
@in_process
def test_parts_of_an_update(owner: Any, name: str, schedule: str, options: dict[str, Any]) -> None:
    few = per_call(owner, name, FEW, schedule, **options)
    assert few == per_call(owner, name, MANY, schedule, **options)
    assert few > 0


# Nesterov's look-ahead and Muon's matrices are computed for each parameter
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"nesterov", "muon", "hidden-matrices"}))
@in_process
def test_linear_predictions(optimizer: str) -> None:
    few, many = (
        per_call(Predictor, "predict", layers, "xpipe", optimizer=OPTIMIZERS[optimizer]) for layers in (FEW, MANY)
    )
    assert few == many
    assert 0 < few < FEW


# Gradient sync of a rank in a process of its own


def sync_launches(layers: int, *, replicas: int, limit: float | None) -> int:
    """From the gradients of a mini-batch to those that its update takes."""
    member = (0, 0, 0)
    groups = {member: Group(name="replicas", members=(member, (1, 0, 0)))}
    own = {member: Group(name="norm", members=(member,))}
    across = AllReduce(on_host=lambda tensor: None, on_device=lambda tensor: mark(torch.device(DEVICE)))
    sums = GroupSums({member}, {"replicas": across}, device=torch.device(DEVICE))
    sync = GradientSync(
        sums=sums,
        stages=[
            *([Average(groups=groups, replicas=replicas)] if replicas > 1 else []),
            Norm(groups=own, ties={}, limit=limit),
        ],
    )
    parameters = [torch.ones(WIDTH, WIDTH, device=DEVICE) for _ in range(2 * layers)]
    update = PendingUpdate(
        member=member,
        minibatch=0,
        parameters=parameters,
        gradients=list(copies_of(parameters)),
        numbers=torch.zeros(2, dtype=torch.float64, device=DEVICE),
    )
    before = pretend.load().launches()
    sync.begin(update)
    while not update.done:
        sync.advance(update)
    launches = pretend.load().launches() - before
    sync.close()
    return launches


@pytest.mark.parametrize(("replicas", "limit"), [(1, None), (1, 0.1), (2, None), (2, 0.1)])
@in_process
def test_averaging_and_clipping(replicas: int, limit: float | None) -> None:
    few = sync_launches(FEW, replicas=replicas, limit=limit)
    assert few == sync_launches(MANY, replicas=replicas, limit=limit)


# Control


@in_process
def test_a_loop_over_parameters_is_noticed() -> None:
    def looping(targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            copy_tensors([target], [source])

    with mock.patch("weft.runtime.weights.versions.copy_tensors", looping):
        few, many = (per_call(ParameterSet, "update", layers, "2bw") for layers in (FEW, MANY))
    assert many - few == 2 * (MANY - FEW) // 2  # of the last stage: half of the layers, with two parameters each
