"""The pretend device behaves as an accelerator does: devices, streams, events, generators, memory, operators."""

import copy
import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = "pretend:0"


def test_without_a_compiler_there_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(pretend.build.FOLDER, str(tmp_path))
    assert pretend.unavailable() == "the pretend device needs a C++ compiler (g++, or CXX)"
    with pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler"):
        pretend.build.build()


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, tests.helpers.pretend; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@in_process
def test_it_is_the_accelerator() -> None:
    controls = pretend.load()
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    assert torch.accelerator.device_count() == 4
    assert torch.get_device_module("pretend").device_count() == 4
    with controls.visible_devices(1):
        assert torch.accelerator.device_count() == 1
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.empty(1, device="pretend:1")
    with controls.visible_devices(0):
        assert not torch.accelerator.is_available()


@in_process
def test_each_thread_has_its_current_device() -> None:
    torch.accelerator.set_device_index(2)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(1, device="pretend").device.index))
    thread.start()
    thread.join()
    assert seen == [0]
    assert torch.empty(1, device="pretend").device.index == torch.accelerator.current_device_index() == 2
    torch.accelerator.set_device_index(0)


@in_process
def test_devices_do_not_mix() -> None:
    ours = torch.ones(3, device=DEVICE)
    for other in (torch.ones(3), torch.ones(3, device="pretend:1")):
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            ours + other
        with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
            torch._foreach_add_([ours], [other])
    assert (ours * torch.tensor(2.0)).device == ours.device  # a scalar of the CPU is an argument of the kernel
    assert ours.to("pretend:1").device.index == 1


@in_process
def test_streams_and_events() -> None:
    stream = torch.Stream(device=DEVICE)
    assert torch.accelerator.current_stream().stream_id == 0
    with stream:
        assert torch.accelerator.current_stream() == stream
        torch.ones(1, device=DEVICE)
        event = stream.record_event()
    assert torch.accelerator.current_stream() != stream
    torch.accelerator.current_stream().wait_event(event)
    event.synchronize()
    stream.wait_stream(torch.accelerator.current_stream())
    assert event.query()
    assert stream.query()
    torch.accelerator.synchronize()
    timing = [torch.Event(device=DEVICE, enable_timing=True) for _ in range(2)]
    for recorded in timing:
        recorded.record()
    assert timing[0].elapsed_time(timing[1]) >= 0


@in_process
def test_autograd_runs_on_the_streams_of_the_forward() -> None:
    stream = torch.Stream(device=DEVICE)
    weight = torch.ones(3, 3, device=DEVICE, requires_grad=True)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        loss = (weight @ weight).sum()
    torch.accelerator.current_stream().wait_stream(stream)
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[6.0] * 3] * 3
    assert pretend.load().errors() == []


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(2), nn.Linear(36, 16), nn.LayerNorm(16),
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip


def _train(model: nn.Module, device: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    samples, targets = torch.randn(2, 3, 8, 8).to(device), torch.tensor([1, 2]).to(device)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(samples), targets))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@in_process
def test_results_have_the_bits_of_the_cpu() -> None:
    model = _model()
    expected = _train(copy.deepcopy(model), "cpu")
    actual = _train(copy.deepcopy(model).to(DEVICE), DEVICE)
    assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))


@in_process
def test_attention_and_recurrent_cells() -> None:
    for layer in (nn.LSTM(4, 5, 2), nn.GRU(4, 5, 2), nn.MultiheadAttention(4, 2)):
        inputs = torch.randn(3, 2, 4)
        arguments = 3 if isinstance(layer, nn.MultiheadAttention) else 1
        ours = copy.deepcopy(layer).to(DEVICE)
        expected, actual = layer(*[inputs] * arguments)[0], ours(*[inputs.to(DEVICE)] * arguments)[0]
        torch.autograd.backward([expected.square().sum(), actual.square().sum()])
        torch.testing.assert_close(actual.cpu(), expected)
        for parameter, other in zip(layer.parameters(), ours.parameters(), strict=True):
            assert other.grad is not None
            torch.testing.assert_close(other.grad.cpu(), parameter.grad)


@in_process
def test_each_device_has_its_generator() -> None:
    def dropped(device: str) -> list[float]:
        dropped: list[float] = nn.functional.dropout(torch.ones(64, device=device)).tolist()
        return dropped

    torch.manual_seed(1)
    first = [dropped(DEVICE), dropped("pretend:1")]
    torch.manual_seed(1)
    torch.rand(5)  # the CPU's generator has no part in it
    assert [dropped(DEVICE), dropped("pretend:1")] == first
    module = torch.get_device_module("pretend")
    module.default_generators[0].manual_seed(1)
    state = module.get_rng_state(0)
    dropped("pretend:1")
    assert dropped(DEVICE) == first[0]
    assert dropped(DEVICE) != first[0]
    module.set_rng_state(state, 0)
    assert dropped(DEVICE) == first[0]
    with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator"):
        torch.rand(2, device=DEVICE, generator=torch.Generator())
    generator = torch.Generator(device=DEVICE).manual_seed(7)
    same = torch.rand(2, device=DEVICE, generator=generator).tolist()
    assert torch.rand(2, device=DEVICE, generator=generator.manual_seed(7)).tolist() == same


@in_process
def test_checkpointing_repeats_the_dropout() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(DEVICE)
    inputs = torch.ones(4, 8, device=DEVICE, requires_grad=True)
    torch.manual_seed(0)
    (expected,) = torch.autograd.grad(layer(inputs).sum(), inputs)
    torch.manual_seed(0)
    (actual,) = torch.autograd.grad(checkpoint(layer, inputs, use_reentrant=False).sum(), inputs)
    assert actual.tolist() == expected.tolist()


@in_process
def test_memory_is_counted() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated() == before + (1 << 20)
    del tensor
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + (1 << 20)
    assert torch.accelerator.max_memory_reserved() >= before + (1 << 20)
    assert torch.accelerator.memory_allocated(1) == 0


@in_process
def test_autocast_computes_in_low_precision() -> None:
    inputs = torch.randn(4, 4)
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = nn.functional.mse_loss(layer(inputs) @ inputs, inputs)
    with torch.autocast("pretend", dtype=torch.bfloat16):
        product = copy.deepcopy(layer).to(DEVICE)(inputs.to(DEVICE)) @ inputs.to(DEVICE)
        actual = nn.functional.mse_loss(product, inputs.to(DEVICE))
    assert product.dtype == torch.bfloat16
    assert actual.dtype == torch.float32
    assert torch.equal(actual.cpu(), expected)


@in_process
def test_optimizers_for_lists_of_tensors() -> None:
    controls = pretend.load()
    values = [torch.randn(5) for _ in range(8)]
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        expected, actual = (
            [value.to(device).clone().requires_grad_() for value in values] for device in ("cpu", DEVICE)
        )
        launches = {}
        for parameters in (expected, actual):
            optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)  # type: ignore[arg-type]
            for _ in range(2):  # the first step makes the state
                for parameter in parameters:
                    parameter.grad = parameter.detach() * 2
                before = controls.launches()
                optimizer.step()
            launches[parameters[0].device.type] = controls.launches() - before
        assert launches["cpu"] == 0
        assert (launches["pretend"] > 2 * len(values)) == (options == {"foreach": False})
        assert all(torch.equal(left, right.cpu()) for left, right in zip(expected, actual, strict=True))


@in_process
def test_tensors_are_saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.save({"tensor": torch.ones(3, device="pretend:1")}, file)
    file.seek(0)
    assert torch.load(file)["tensor"].device == torch.device("pretend:1")
    file.seek(0)
    assert torch.load(file, map_location="cpu")["tensor"].tolist() == [1.0] * 3


@in_process
def test_results_and_views_share_memory_as_they_should() -> None:
    tensor = torch.zeros(2, 3, device=DEVICE)
    tensor.t()[1].fill_(1)
    tensor.unfold(1, 2, 1)[:, 1, 1].fill_(2)
    assert tensor.tolist() == [[0.0, 1.0, 2.0]] * 2
    target = torch.empty(0, device=DEVICE)
    torch.add(tensor, 1, out=target)
    assert target.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert tensor.clone().data_ptr() != tensor.data_ptr()
    tensor.untyped_storage().resize_(64)
    assert tensor.tolist() == [[0.0, 1.0, 2.0]] * 2
