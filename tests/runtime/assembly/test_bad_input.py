"""Bad input: the error states the rule, the values and the remedy, as early as possible and on every rank."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.devices import losses_behind, place_of_loss, step_until_read
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.errors import Diverged, PeerError, RunError, ScheduleError, WeftError

ROWS, WIDTH = 8, 4


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def layers(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def pipeline(model: Any = None, **options: Any) -> weft.Pipeline:
    chosen: dict[str, Any] = {
        "loss_fn": functional.mse_loss,
        "optimizer": sgd,
        "schedule": "1f1b",
        "microbatches": 4,
        "stages": None if dist.is_initialized() else 2,
    }
    return weft.Pipeline(layers() if model is None else model, **chosen | options)


def rows(count: int = ROWS) -> Tensor:
    return torch.ones(count, WIDTH)


def train(pipe: weft.Pipeline, *, steps: int) -> None:
    for _ in range(steps):
        pipe.step(rows(), rows())
    pipe.flush()


# Before anything is built


def named_sgd_at(named_parameters: list[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(named_parameters, lr=lr)


class PlainSteps(torch.optim.Optimizer):
    """Takes no names, whatever its argument is called."""

    def __init__(self, named_parameters: Iterable[nn.Parameter]) -> None:
        super().__init__([parameter.detach() for parameter in named_parameters], {})


def in_named_groups(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": named_parameters}, {"params": []}]
    return torch.optim.SGD(groups, lr=0.1)


def frozen() -> nn.Sequential:
    return layers().requires_grad_(False)


def own_2bw(weights: weft.Weights) -> weft.Schedule:
    order = weft.schedule("2bw", stages=2, microbatches=4)
    return weft.Schedule(name="own", stages=2, microbatches=4, streams=order.streams, weights=weights)


CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "microbatches 0": ({"microbatches": 0}, r"microbatches must be a whole number of 1 or more \(got 0\)"),
    "microbatches half": ({"microbatches": 2.5}, r"microbatches must be a whole number of 1 or more \(got 2\.5\)"),
    "microbatches none": ({"microbatches": None}, r"needs microbatches"),
    "stages 0": ({"stages": 0}, r"stages must be a whole number of 1 or more \(got 0\)"),
    "stages true": ({"stages": True}, r"stages must be a whole number of 1 or more \(got True\)"),
    "replicas 0": ({"replicas": 0}, r"replicas must be a whole number of 1 or more \(got 0\)"),
    "wpipe": (
        {"schedule": "wpipe", "microbatches": 3},
        r"multiple of stages \(microbatches: 3, stages: 2\); use 2 or 4",
    ),
    "2bw": ({"schedule": "2bw", "microbatches": 1}, r"2bw .*microbatches: 1, stages: 2.*; use"),
    "interleaved": ({"schedule": "interleaved", "microbatches": 3}, r"interleaved.*microbatches: 3, stages: 2.*; use"),
    "unknown": ({"schedule": "wpip"}, r"no schedule 'wpip', did you mean 'wpipe'\?; known: .*1f1b"),
    "predict synchronous": ({"schedule": "1f1b", "predict": {}}, r"predict= is for .*xpipe.*1f1b is synchronous"),
    "predict stash": (
        {"schedule": "pipedream", "predict": {}},
        r"predict= is for .*wpipe.*pipedream keeps its versions",
    ),
    "predict word": ({"schedule": "xpipe", "predict": "exact"}, r"predict is a dict.*got 'exact'"),
    "predict name": ({"schedule": "xpipe", "predict": {"version": "exact"}}, r"'version', did you mean 'versions'\?"),
    "predict value": ({"schedule": "xpipe", "predict": {"bias": "sgd"}}, r"bias is 'adam' or 'printed' \(got 'sgd'\)"),
    "predict without a rule": (
        {"schedule": "xpipe", "optimizer": lambda params: torch.optim.Rprop(params)},
        r"Rprop has no linear rule.*those that have one: .*Adam.*\"decayed\".*weft\.linear_rule",
    ),
    "predict and recompute": (
        {"schedule": "xpipe", "recompute": True},
        r"xpipe runs backwards at other weights.*leave recompute out",
    ),
    "predict and autocast": (
        {"schedule": "wpipe", "predict": {"versions": "exact"}, "precision": "bf16-autocast"},
        r"autocast saves.*; use precision=\"bf16\", or use a schedule",
    ),
    "predict built without": (
        {"schedule": weft.schedule("wpipe", stages=2, microbatches=4), "microbatches": None, "predict": {}},
        r"this wpipe was built without prediction.*leave predict out, or build one",
    ),
    "predict built otherwise": (
        {"schedule": weft.schedule("xpipe", stages=2, microbatches=4), "predict": {"versions": "exact"}},
        r"its own count of versions \(schedule: published, predict: exact\)",
    ),
    "predict from an old version": (
        {"schedule": own_2bw(weft.Weights(delay=1, ahead=1, bellwether=True))},
        r"predicts from version 0, but version 1 is the newest.*use delay=None",
    ),
    "predict without a rule on one rank": (
        {"schedule": "2bw", "predict": {}, "optimizer": lambda params: torch.optim.Rprop(params)},
        r"Rprop has no linear rule",
    ),
    "telemetry": ({"telemetry": 0}, r"telemetry must be a whole number of 1 or more \(got 0\)"),
    "more stages than layers": (
        {"stages": 5},
        r"at least one layer per chunk \(layers: 4, chunks: 5\); use fewer stages",
    ),
    "more chunks than layers": (
        {"schedule": "wpipe", "stages": 4},
        r"per chunk \(layers: 4, chunks: 8, 2 a stage under wpipe\); use 2 stages, or .*one chunk a stage, such as 2bw",
    ),
    "balance sum": (
        {"balance": [1, 2]},
        r"balance: \[1, 2\], sum: 3.*layers: 4, chunks: 2\); use for example \[2, 2\]",
    ),
    "balance 0": ({"balance": [0, 4]}, r"balance\[0\] must be a whole number of 1 or more \(got 0\)"),
    "balance word": ({"balance": "times"}, r"balance is .*got 'times'\), did you mean 'time'\?"),
    "balance time": ({"balance": "time"}, r"example: None\); pass example="),
    "recompute": (
        {"recompute": [True]},
        r'recompute is true, false or "layer", or one of them a chunk \(got \[True\], chunks: 2\)',
    ),
    "recompute numbers": ({"recompute": [1, 0]}, r'recompute is true, false or "layer", or one of them a chunk'),
    "recompute words": ({"recompute": [True, "layers"]}, r"one of them a chunk \(got \[True, 'layers'\], chunks: 2\)"),
    "predict and recompute by layer": (
        {"schedule": "xpipe", "recompute": [False, "layer"], "predict": {"versions": "exact"}},
        r"xpipe runs backwards at other weights.*leave recompute out",
    ),
    "split backwards by layer": (
        {"schedule": "zb-h1", "recompute": [True, "layer"]},
        r"zb-h1 splits backwards.*recompute by layer would save little; recompute whole chunks, or .*such as 1f1b",
    ),
    "clip 0": ({"clip_norm": 0.0}, r"clip_norm is a number above 0, or None \(got 0\.0\)"),
    "clip nan": ({"clip_norm": math.nan}, r"clip_norm is a number above 0, or None \(got nan\)"),
    "precision": ({"precision": "fp16"}, r"precision is \"fp32\" or \"bf16\" or \"bf16-autocast\" \(got 'fp16'\)"),
    "nan": ({"nan": "ignore"}, r"nan is \"stop\" or \"skip\".*got 'ignore'"),
    "seed": ({"seed": 0.5}, r"seed is a whole number \(got 0\.5\)"),
    "deadline": ({"deadline": 0}, r"deadline is a number of seconds above 0 \(got 0\)"),
    "device unknown": ({"device": "cude"}, r"device must be a device, .*got 'cude'\), did you mean 'cuda'\?"),
    "device number": ({"device": 1}, r"device must be a device, .*such as \"cpu\", .*got 1\)"),
    "device meta": ({"device": "meta"}, r"can compute \(got 'meta'\); only the model may be on meta"),
    "device absent": ({"device": "vulkan"}, r'device="vulkan": PyTorch sees no vulkan device.*; use device="cpu"'),
    "no optimizer": ({"optimizer": lambda params: None}, r"optimizer is a function .*got NoneType"),
    "other parameters": (
        {"optimizer": lambda params: sgd(layers().parameters())},
        r"exactly the parameters that it is given.*given: 4, held: 8, without 0\.weight\); build it from the",
    ),
    "too few parameters": (
        {"optimizer": lambda params: sgd(params[:1])},
        r"exactly the parameters that it is given.*given: 4, held: 1, without 0\.bias\); build it from the function",
    ),
    "lbfgs": ({"optimizer": torch.optim.LBFGS}, r"LBFGS.*use another optimizer"),
    "a name of jobs": ({"optimizer": "muon"}, r"optimizer is a function .*got str\); names are for jobs"),
    "muon that is not called": (
        {"optimizer": weft.optimizers.muon},
        r"got partial from it\); call it first, as in optimizer=weft.optimizers.muon\(lr=1e-3\)",
    ),
    "misnamed pairs": (
        {"optimizer": lambda named_params: torch.optim.SGD([pair[1] for pair in named_params], lr=0.1)},
        r"calls it named_params\); call it named_parameters, or params",
    ),
    "a scheduler": (
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd(layers().parameters()), 1)},
        r"lr_scheduler is a function .*got StepLR\); use one such as lambda optimizer",
    ),
    "an optimizer": ({"optimizer": sgd(layers().parameters())}, r"optimizer is a function.*such as lambda params"),
    "an optimizer and a number": (
        {"optimizer": (torch.optim.SGD, 0.1)},
        r"or a class and its arguments, such as \(torch\.optim\.SGD, .*\(got tuple\)",
    ),
    "unknown arguments": (
        {"optimizer": (torch.optim.SGD, {"rate": 0.1})},
        r"optimizer is called with the parameters.*; SGD can't be: .*unexpected keyword argument 'rate'",
    ),
    "missing arguments": (
        {"optimizer": named_sgd_at},
        r"optimizer is called with the parameters.*; named_sgd_at can't be: missing a required argument: 'lr'",
    ),
    "pairs that are not taken": (
        {"optimizer": (PlainSteps, {})},
        r"is called named_parameters, and failed \(PlainSteps: AttributeError: 'tuple' object has no .*\)\."
        r".*build groups of parameters, as in \[parameter for",
    ),
    "pairs and an empty group": (
        {"optimizer": in_named_groups},
        r"\(in_named_groups: ValueError: all optimizer param groups should be with/without names.*\[parameter for",
    ),
    "names without words": (
        {"optimizer": weft.optimizers.muon(lr=0.1)},
        r"this name says nothing \(0\.weight, shape \(4, 4\)\); name the layers.*or give hidden=",
    ),
    "vectors for muon": (
        {"optimizer": weft.optimizers.muon(lr=0.1, hidden=lambda name, parameter: True)},
        r"muon is for real matrices \(hidden= chose 0\.bias, of shape \(4,\).*; let hidden= return False for it",
    ),
    "rate of muon": ({"optimizer": weft.optimizers.muon(lr=-1)}, r"lr of muon is a number of at least 0 \(got -1\)"),
    "momentum of muon": (
        {"optimizer": weft.optimizers.muon(lr=1, momentum=1)},
        r"momentum of muon is a number of at least 0 and below 1 \(got 1\)",
    ),
    "no loss": ({"loss_fn": None}, r"loss_fn is a function"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_invalid_options_are_refused(case: str) -> None:
    options, message = CHOICES[case]
    with pytest.raises(WeftError, match=message):
        pipeline(**options)


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: nn.Sequential(), r"at least one layer"),
    "no layers": (list, r"at least one layer"),
    "no parameters": (
        lambda: nn.Sequential(nn.Tanh(), nn.ReLU()),
        r"nothing to train: no parameter needs a gradient \(parameters: 0, layers: 2\); set requires_grad",
    ),
    "frozen": (
        frozen,
        r"nothing to train: no parameter needs a gradient \(parameters: 80, layers: 4\); set requires_grad",
    ),
    "a function": (lambda: [nn.Linear(4, 4), torch.tanh], r"a list of layers must hold nn\.Modules \(got "),
    "no module": (lambda: "model", r"only an nn\.Module can be cut into layers \(got str\)"),
    "no example": (lambda: nn.Linear(4, 4), r"needs an example.*example: None\); pass"),
}


@pytest.mark.parametrize("case", MODELS)
def test_invalid_models_are_refused(case: str) -> None:
    make, message = MODELS[case]
    with pytest.raises(WeftError, match=message):
        pipeline(make())


def test_custom_schedules_are_verified() -> None:
    """A schedule that would deadlock is refused before any rank runs."""
    stuck = weft.Schedule(name="stuck", stages=2, microbatches=1, streams=["0B0 0F0", "1F0 1B0"])
    with pytest.raises(ScheduleError):
        pipeline(schedule=stuck, microbatches=1)


@pytest.mark.parametrize("options", [{"stages": 3}, {"microbatches": 8}, {"microbatches": 0}], ids=str)
def test_a_schedule_for_other_sizes(options: dict[str, int]) -> None:
    built = weft.schedule("1f1b", stages=2, microbatches=4)
    values = f"stages: {options.get('stages', 2)}, microbatches: {options.get('microbatches', 4)}"
    with pytest.raises(
        WeftError, match=rf"for 2 stages and 4 micro-batches \({values}\); build it for those|whole number"
    ):
        pipeline(schedule=built, **options)


# Arguments of a step


@pytest.mark.parametrize("samples", [0, 2, 6, 9])
@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_a_batch_that_micro_batches_do_not_divide(what: str, samples: int) -> None:
    pipe = pipeline()
    batch = {"inputs": rows(), "targets": rows()} | {what: rows(samples)}
    message = rf"equal micro-batches \(samples: {samples}, 4 micro-batches\); use a multiple of 4 samples"
    with pytest.raises(WeftError, match=message):
        pipe.step(**batch)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "wpipe"])
def test_a_refused_batch_has_no_effect(schedule: str) -> None:
    """On virtual ranks, which all refuse it at once: training continues as if it had not been passed."""
    pipes = []
    for bad in (False, True):
        torch.manual_seed(0)
        pipes.append(pipeline(schedule=schedule))
        for t in range(4):
            if bad:
                for batch in ((rows(6), rows()), (rows(), rows(6)), (rows(), None)):
                    with pytest.raises(WeftError):
                        pipes[-1].step(*batch)
            pipes[-1].step(rows() * t, rows())
    undisturbed, disturbed = (pipe.state_dict() for pipe in pipes)
    assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)


def test_replicas_need_a_multiple_too() -> None:
    pipe = pipeline(replicas=2)
    message = r"samples: 12, 4 micro-batches x 2 replicas\); use a multiple of 8 samples"
    with pytest.raises(WeftError, match=message):
        pipe.step(rows(12), rows(12))


@pytest.mark.parametrize(("what", "rank", "chunk"), [("inputs", 0, 0), ("targets", 1, 1)])
def test_missing_inputs_and_targets_are_refused(what: str, rank: int, chunk: int) -> None:
    pipe = pipeline()
    batch = {"inputs": rows(), "targets": rows()} | {what: None}
    with pytest.raises(WeftError, match=rf"rank {rank} holds chunk {chunk} and needs {what} \(got None\)"):
        pipe.step(**batch)


def test_parts_of_different_sizes() -> None:
    with pytest.raises(WeftError, match=r"inputs must have the same first dimension, the samples \(sizes: 4, 8\)"):
        pipeline().step((rows(8), rows(4)), rows())


def test_a_batch_of_another_kind() -> None:
    class Encoded(collections.UserDict[str, Tensor]):
        pass

    with pytest.raises(WeftError, match=r"tensors, numbers, strings and None.*Encoded"):
        pipeline().step(Encoded(x=rows()), rows())


class Strange(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {super().forward(x)}


def test_a_layer_output_that_no_message_can_carry() -> None:
    model = nn.Sequential(Strange(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(WeftError, match=r"builtins\.set\); let the layer before the cut return such values"):
        pipeline(model).step(rows(), rows())


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a vector": (lambda output, target: (output - target).sum(1), r"a tensor of shape \(2,\)"),
    "a table": (lambda output, target: functional.mse_loss(output, target, reduction="none"), r"shape \(2, 4\)"),
    "a float": (lambda output, target: (output - target).mean().item(), r"got float"),
    "nothing": (lambda output, target: None, r"got NoneType"),
    "a whole number": (lambda output, target: (output > target).sum(), r"a tensor of shape \(\)"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_no_number(case: str) -> None:
    loss_fn, got = LOSSES[case]
    with pytest.raises(WeftError, match=rf"loss_fn must return one floating-point number.*{got}.*; take its mean"):
        pipeline(loss_fn=loss_fn).step(rows(), rows())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "2bw"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_without_a_gradient(schedule: str, recompute: bool) -> None:
    pipe = pipeline(loss_fn=lambda output, target: target.mean(), schedule=schedule, recompute=recompute)
    with pytest.raises(
        WeftError, match=r"loss depends on no parameter that needs a gradient; let loss_fn use the output"
    ):
        pipe.step(rows(), rows())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(value: float) -> None:
    message = place_of_loss(1, 0) + rf': the loss is {value}; lower the learning rate.*nan="skip"'
    pipe = pipeline()
    pipe.step(rows(), rows())
    with pytest.raises(Diverged, match=message):
        step_until_read(pipe, rows(), rows() * value)


def test_an_evaluation_without_batches() -> None:
    with pytest.raises(WeftError, match=r"evaluate needs at least one sample \(got none from the loader\)"):
        pipeline().evaluate([])


# Exceptions in user code


class Fails(nn.Linear):
    """Fails in its n-th forward or in the backward of that forward."""

    def __init__(self, *, at: int, backward: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.left, self.backward = at, backward

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.left -= 1
        if self.left < 0 and not self.backward:
            raise KeyError("no such thing")
        if self.left < 0:
            y.register_hook(lambda gradient: self.fail())  # type: ignore[no-untyped-call]
        return y

    def fail(self) -> None:
        raise KeyError("no such thing")


def failing(*, at: int, backward: bool = False) -> nn.Sequential:
    return nn.Sequential(*layers(2), Fails(at=at, backward=backward), *layers(1))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("schedule", "backward", "action"),
    [
        ("1f1b", False, "1F5"),
        ("1f1b", True, "1B5"),
        ("zb-h1", True, "1I5"),
        ("2bw", False, "1F5"),
        ("2bw", True, "1B5"),
    ],
)
def test_an_exception_names_its_place(schedule: str, backward: bool, action: str, recompute: bool) -> None:
    """Rank, chunk, micro-batch and cause. With a recompute each forward runs a second time, in the backward."""
    at = 5 if not recompute else 10 if not backward else 11
    pipe = pipeline(failing(at=at, backward=backward), schedule=schedule, balance=[2, 2], recompute=recompute)
    place = rf"rank 1, chunk 1, mini-batch 1, micro-batch 1 \({action}\): KeyError: 'no such thing'"
    with pytest.raises(RunError, match=place) as caught:
        train(pipe, steps=3)
    assert isinstance(caught.value.__cause__, KeyError)


class BadStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise KeyError("no such thing")


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"replicas": 2}], ids=["", "clip", "replicas"])
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_an_exception_in_an_update_names_its_place(schedule: str, options: dict[str, Any]) -> None:
    """Also where the update waits for gradients of other ranks and runs later."""
    pipe = pipeline(schedule=schedule, optimizer=lambda params: BadStep(params, lr=0.1), **options)
    with pytest.raises(RunError, match=r"rank \d, chunk \d, mini-batch 0, update.*: KeyError: 'no such thing'"):
        train(pipe, steps=1)


def test_an_exception_in_the_loss_names_its_place() -> None:
    """For example, with targets of the wrong shape."""
    with pytest.raises(RunError, match=r"rank 1, chunk 1, mini-batch 0, micro-batch 0 \(1F0\): "):
        pipeline(loss_fn=functional.cross_entropy).step(rows(), torch.zeros(8, 3, dtype=torch.long))


def test_inputs_and_targets_of_different_sizes() -> None:
    with pytest.raises(WeftError, match=r"as many samples.*\(inputs: 8, targets: 4\)"):
        pipeline().step(rows(), rows()[:4])


def test_several_targets_for_each_input() -> None:
    """Flattened targets, one per token, stay with their inputs."""
    inputs, losses = rows(), []
    for targets in (inputs, inputs.flatten()):
        torch.manual_seed(0)
        pipe = pipeline(loss_fn=lambda output, target: nn.functional.mse_loss(output.flatten(), target.flatten()))
        pipe.step(inputs, targets)
        losses.append(pipe.flush().loss)
    assert losses[0] == losses[1] is not None


def test_an_exception_in_an_evaluation_names_its_place() -> None:
    with pytest.raises(RunError, match=r"rank 1, chunk 1, .*micro-batch 2.*: KeyError: 'no such thing'"):
        pipeline(failing(at=2), balance=[2, 2]).evaluate([(rows(), rows())])


def test_a_broken_pipeline_reports_the_first_error() -> None:
    pipe = pipeline(failing(at=0))
    with pytest.raises(RunError):
        pipe.step(rows(), rows())
    for again in (lambda: pipe.step(rows(), rows()), lambda: pipe.evaluate([(rows(), rows())])):
        with pytest.raises(RunError, match=r"broke before \(rank 1, chunk 1, .*no such thing.*\); build a new one"):
            again()


# On every rank


def model_of(rank: int, difference: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = layers(4 + (rank if difference == "layers" else 0))
    return model.double() if difference == "dtype" and rank else model


def bad(case: str, rank: int) -> object:
    """Make one mistake on a rank."""
    if case in ("layers", "dtype"):
        return pipeline(model_of(rank, case))
    torch.manual_seed(0)
    if case == "seed":
        return pipeline(seed=rank)
    if case == "schedule":
        return pipeline(schedule=["1f1b", "gpipe"][rank])
    if case == "replicas":
        return pipeline(replicas=3)
    if case == "stages":
        return pipeline(stages=4)
    if case == "more stages than layers":
        return pipeline(layers(1))
    if case == "batch":
        return pipeline().step(rows(6), rows())
    if case == "loss":
        return pipeline(loss_fn=lambda output, target: output - target).step(rows(), rows())
    if case == "nan":
        return step_until_read(pipeline(), rows(), rows() * math.nan)
    if case == "exception":
        return pipeline(failing(at=1), balance=[2, 2]).step(rows(), rows())
    raise AssertionError(case)


EVERYWHERE = {  # on both ranks
    "layers": r"all ranks need the same model; rank 1's differs.*10 tensors instead of 8.*same code and settings",
    "dtype": r"all ranks need the same model; .*0\.weight .*torch\.float64.* instead of 0\.weight .*torch\.float32",
    "seed": r"all ranks need the same seed \(rank 0: 0, rank 1: 1\); build",
    "schedule": r"all ranks need the same schedule \(rank 0: .*, rank 1: .*\); build",
    "replicas": r"replicas must divide the number of ranks \(ranks: 2, replicas: 3\)",
    "stages": r"stages: 4, ranks: 2, replicas: 1\); leave it out, or start 4 ranks",
    "more stages than layers": r"at least one layer per chunk \(layers: 1, chunks: 2\)",
}
FIRST_HAND = {  # the rank that raises, and its error; the other rank repeats it
    "batch": (0, WeftError, r"samples: 6, 4 micro-batches\); use a multiple of 4"),
    "loss": (1, WeftError, r"loss_fn must return one floating-point number.*\(2, 4\)"),
    "nan": (1, Diverged, ("" if losses_behind() else "rank 1, chunk 1, ") + place_of_loss(0, 0) + ": the loss is nan"),
    "exception": (1, RunError, r"rank 1, chunk 1, mini-batch 0, micro-batch 1 \(1F1\): KeyError: 'no such thing'"),
}


def on_two_ranks(cases: list[str]) -> list[tuple[str, str]]:
    """Type and message of the error that each mistake raises on this rank."""
    torch.set_num_threads(1)
    found = []
    for case in cases:
        try:
            bad(case, dist.get_rank())
        except Exception as problem:
            found.append((type(problem).__name__, str(problem)))
        else:
            found.append(("", ""))
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def errors(launch: Callable[..., list[Any]]) -> dict[str, list[tuple[str, str]]]:
    """By case: type and message of the error on both ranks."""
    cases = [*EVERYWHERE, *FIRST_HAND]
    ranks = launch(on_two_ranks, cases, ranks=2)
    return dict(zip(cases, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize("case", EVERYWHERE)
def test_all_ranks_refuse_before_training(errors: dict[str, list[tuple[str, str]]], case: str) -> None:
    for kind, message in errors[case]:
        assert kind == WeftError.__name__
        assert re.search(EVERYWHERE[case], message, re.DOTALL)


@pytest.mark.parametrize("case", FIRST_HAND)
def test_all_ranks_report_the_cause(errors: dict[str, list[tuple[str, str]]], case: str) -> None:
    """Every rank reports the cause, not just a lost connection. On a device, each rank reads the loss itself."""
    rank, kind, message = FIRST_HAND[case]
    own, other = errors[case][rank], errors[case][1 - rank]
    assert own[0] == kind.__name__
    assert other[0] == PeerError.__name__ or (other[0] == kind.__name__ and case == "nan" and losses_behind())
    for _, said in (own, other):
        assert re.search(message, said, re.DOTALL)
