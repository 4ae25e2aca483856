"""Distances from the weights that a mini-batch reads to those that its update changes, against plain training."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.runtime.engine.staleness import MAX_SAMPLES, Staleness, distance

LR, MOMENTUM, ROWS, UPDATES = 0.1, 0.9, 8, 7


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    return [(torch.randn(ROWS, 6, generator=made), torch.randint(3, (ROWS,), generator=made)) for _ in range(UPDATES)]


def run(schedule: str, *, microbatches: int = 2, stages: int = 2, **options: Any) -> weft.Pipeline:
    pipe = weft.Pipeline(
        model(),
        loss_fn=functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM),
        schedule=schedule,
        microbatches=microbatches,
        stages=stages,
        balance=[1] * stages,
        **options,
    )
    for inputs, targets in batches():
        pipe.step(inputs, targets)
    pipe.flush()
    return pipe


def chunks(pipe: weft.Pipeline) -> list[dict[str, Any]]:
    return [chunk for rank in pipe.report().ranks for chunk in rank["chunks"]]


def weights(layer: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in layer.parameters()]


def write(layer: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(layer.parameters(), values, strict=True):
        parameter.data.copy_(value)


def apart(first: list[Tensor], second: list[Tensor]) -> float:
    flat = [torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in (first, second)]
    return float((flat[0] - flat[1]).square().sum().sqrt())


def delays(layers: list[nn.Module], **options: Any) -> weft.Report:
    pipe = weft.Pipeline(
        layers,
        loss_fn=functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=LR),
        microbatches=2,
        stages=2,
        balance=[1] * len(layers),
        **options,
    )
    return pipe.report()


def test_the_mean_delay_is_weighted_by_parameters() -> None:
    layers: list[nn.Module] = [nn.Linear(2, 3), nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 4)]
    report = delays(layers, schedule="wpipe")
    chunks = [chunk for rank in report.ranks for chunk in rank["chunks"]]
    assert {chunk["chunk"]: (chunk["parameters"], chunk["mean_delay"]) for chunk in chunks} == {
        0: (9, 1), 1: (20, 1), 2: (12, 0), 3: (12, 0),
    }  # fmt: skip
    assert report.mean_delay == report.as_dict()["mean_delay"] == pytest.approx(29 / 53)
    assert "delay in updates: mean 0.5472, largest 1" in str(report)


def test_the_mean_delay_is_over_micro_batches() -> None:
    """On the first of two ranks only the first micro-batch is late."""
    report = delays([nn.Linear(2, 3), nn.Linear(3, 2, bias=False)], schedule="pipedream")
    assert report.mean_delay == pytest.approx(0.5 * 9 / 15)


def test_tied_parameters_have_the_largest_delay_of_their_chunks() -> None:
    first, last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    last.weight = first.weight
    report = delays([first, nn.Linear(3, 3), nn.Linear(3, 3), last], schedule="wpipe")
    assert report.mean_delay == pytest.approx((9 + 12 + 9) / (9 + 12 + 12 + 9))


def test_2bw_is_one_update_late() -> None:
    """Forward and backward read the second newest version; the distance is the length of the last update."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM)
    versions: list[list[list[Tensor]]] = []
    for inputs, targets in batches():
        versions.append([weights(layer) for layer in plain])
        for layer, old in zip(plain, versions[-2] if len(versions) > 1 else versions[-1], strict=True):
            write(layer, old)
        optimizer.zero_grad()
        functional.cross_entropy(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
        for layer, newest in zip(plain, versions[-1], strict=True):
            write(layer, newest)
        optimizer.step()
    found = chunks(run("2bw", telemetry=1))
    assert [(chunk["chunk"], chunk["delay"], chunk["ahead"]) for chunk in found] == [(0, 1, 0), (1, 1, 0)]
    for chunk in (0, 1):
        samples = found[chunk]["samples"]
        assert [sample["minibatch"] for sample in samples] == list(range(UPDATES))
        expected = [apart(versions[max(t - 1, 0)][chunk], versions[t][chunk]) for t in range(UPDATES)]
        assert [sample["stale"] for sample in samples] == pytest.approx(expected, rel=1e-4)
        assert [sample["predicted"] for sample in samples] == [sample["stale"] for sample in samples]
        assert expected[-1] > 0


def test_xpipe_reads_predictions_of_the_weights_that_it_updates() -> None:
    """The forward of rank 0 reads a prediction from the version before; all backwards read the newest version."""
    first, second = plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=MOMENTUM)
    stale, predicted = [], []
    before, guess = weights(first), weights(first)
    for inputs, targets in batches():
        newest = weights(first)
        stale.append(apart(before, newest))
        predicted.append(apart(guess, newest))
        write(first, guess)
        loss = functional.cross_entropy(second(first(inputs)), targets)
        write(first, newest)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        before = newest
        buffers = [
            optimizer.state[parameter].get("momentum_buffer", torch.zeros_like(parameter))
            for parameter in first.parameters()
        ]
        guess = [
            weight - LR * buffer for weight, buffer in zip(newest, buffers, strict=True)
        ]  # from the newest version
        optimizer.step()
    options: dict[str, Any] = {"microbatches": 1, "predict": {"versions": "exact"}}
    found = chunks(run("xpipe", telemetry=1, **options))
    assert [(chunk["chunk"], chunk["delay"], chunk["ahead"]) for chunk in found] == [(0, 1, 1), (1, 0, 0)]
    assert [sample["stale"] for sample in found[0]["samples"]] == pytest.approx(stale, rel=1e-4)
    assert [sample["predicted"] for sample in found[0]["samples"]] == pytest.approx(predicted, rel=1e-4)
    assert all(sample["stale"] == sample["predicted"] == 0 for sample in found[1]["samples"])
    assert "distance to the weights met" in str(run("xpipe", telemetry=1, **options).report())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_synchronous_schedule_has_no_distance(schedule: str) -> None:
    for chunk in chunks(run(schedule, telemetry=2)):
        assert chunk["samples"] == [{"minibatch": t, "predicted": 0.0, "stale": 0.0} for t in (0, 2, 4, 6)]


def test_telemetry_is_off_by_default() -> None:
    pipe = run("2bw")
    assert [chunk["samples"] for chunk in chunks(pipe)] == [[], []]
    assert "distance" not in str(pipe.report())


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_an_invalid_interval_is_refused(every: Any) -> None:
    with pytest.raises(weft.WeftError, match="telemetry"):
        run("2bw", telemetry=every)


# Staleness alone


def test_nothing_is_kept_after_the_update() -> None:
    staleness = Staleness(2)
    assert [t for t in range(6) if staleness.due(t)] == [0, 2, 4]
    read, old = [torch.ones(3), torch.zeros(2, 2)], [torch.zeros(3), torch.zeros(2, 2)]
    staleness.sample(0, read, old)
    staleness.sample(2, read, read)
    assert staleness.nbytes == 2 * 7 * 4 + 7 * 4  # equal tensors are kept once
    read[0].zero_()
    staleness.measure(0, [torch.ones(3), 2 * torch.ones(2, 2)])
    assert list(staleness.samples) == [{"minibatch": 0, "predicted": 4.0, "stale": pytest.approx(math.sqrt(19))}]
    staleness.measure(1, read)  # was not sampled
    staleness.measure(2, [torch.ones(3), torch.zeros(2, 2)])
    assert staleness.samples[1] == {"minibatch": 2, "predicted": 0.0, "stale": 0.0}
    assert staleness.nbytes == 0


def test_the_last_samples_are_kept() -> None:
    staleness = Staleness(1)
    for t in range(MAX_SAMPLES + 5):
        staleness.sample(t, [], [])
        staleness.measure(t, [])
    assert [sample["minibatch"] for sample in staleness.samples] == list(range(5, MAX_SAMPLES + 5))


def test_telemetry_does_not_change_training() -> None:
    states = [run("2bw", telemetry=every).state_dict() for every in (None, 1)]
    for without, measured in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(without, measured)


def test_distances_of_low_precision_weights_are_accurate() -> None:
    zeros = torch.zeros(100_000, dtype=torch.bfloat16)
    assert distance([zeros], [zeros + 1]).item() == pytest.approx(math.sqrt(100_000), rel=1e-5)
    assert distance([torch.zeros(2, dtype=torch.complex64)], [torch.tensor([3j, 4])]).item() == pytest.approx(5)


def test_the_distance_is_over_tensors_of_all_kinds() -> None:
    made = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.complex64]
    pairs = [[torch.randn(50, 2, generator=made).to(dtype) for dtype in dtypes] for _ in range(2)]
    expected = math.sqrt(sum(float((a - b).abs().double().square().sum()) for a, b in zip(*pairs, strict=True)))
    found = distance(*pairs)
    assert (found.shape, found.is_floating_point()) == ((), True)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_the_distance_is_not_read_by_the_host() -> None:
    """A tensor on the meta device has no values that could be read."""
    weights = [torch.empty(3, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16)]
    assert distance([torch.empty_like(weight) for weight in weights], weights).device.type == "meta"
    with pytest.raises(RuntimeError):
        weights[0].sum().item()
