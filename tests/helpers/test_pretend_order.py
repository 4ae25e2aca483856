"""The stream sanitizer finds races and early frees, and nothing else; gates block what is behind them."""

import threading

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process

DEVICE = "pretend:0"


def side_stream() -> torch.Stream:
    stream = torch.Stream(device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    return stream


@in_process
def test_a_read_that_is_not_ordered_after_a_write() -> None:
    stream = torch.Stream(device=DEVICE)
    ours = torch.ones(3, device=DEVICE)
    with (
        stream,
        pytest.raises(RuntimeError, match=r"the read by aten::add.* is not ordered after the write by aten::fill_"),
    ):
        ours + 1
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        ours + 1
    assert len(pretend.load().errors()) == 1


@in_process
def test_a_write_that_is_not_ordered_after_a_read() -> None:
    stream = side_stream()
    ours = torch.ones(3, device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        ours + 1
        event = stream.record_event()
    ours + 1  # two reads are no race
    with pytest.raises(RuntimeError, match=r"the write by aten::add_.* is not ordered after the read by aten::add"):
        ours.add_(1)
    torch.accelerator.current_stream().wait_event(event)
    ours.add_(1)


@in_process
def test_an_event_orders_only_what_is_before_it() -> None:
    stream = side_stream()
    with stream:
        ours = torch.ones(3, device=DEVICE)
        event = stream.record_event()
        ours.add_(1)
    torch.accelerator.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="not ordered"):
        ours + 1


@in_process
def test_order_passes_from_stream_to_stream() -> None:
    first, second = side_stream(), side_stream()
    ours = torch.ones(3, device=DEVICE)
    first.wait_stream(torch.accelerator.current_stream())
    second.wait_stream(first)
    with second:
        ours + 1
    torch.accelerator.current_stream().wait_stream(second)


@in_process
def test_a_host_that_has_waited_orders_what_it_launches() -> None:
    stream = side_stream()
    with stream:
        tensors = [torch.ones(3, device=DEVICE)]
    stream.synchronize()
    tensors[0] + 1
    for lag in (0, 3):
        pretend.load().set_lag(lag)
        with stream:
            tensors.append(torch.ones(3, device=DEVICE))
            event = stream.record_event()
        assert event.query() == (lag == 0)
        if lag == 0:
            tensors[-1] + 1
    with pytest.raises(RuntimeError, match="not ordered"):
        tensors[-1] + 1
    torch.accelerator.synchronize()


@in_process
def test_parts_of_a_buffer_are_used_on_their_own() -> None:
    buffer = torch.zeros(8, device=DEVICE)
    stream = side_stream()
    with stream:
        buffer[:4].add_(1)
    buffer[4:].add_(1)
    with pytest.raises(RuntimeError, match="not ordered"):
        buffer[3:].add_(1)


@in_process
def test_copies_and_lists_are_kernels_too() -> None:
    stream = torch.Stream(device=DEVICE)
    pinned = torch.zeros(3).pin_memory()
    ours = torch.ones(3, device=DEVICE)
    others = [torch.ones(3, device="pretend:1"), torch.ones(3, device=DEVICE)]
    for use in (
        lambda: pinned.copy_(ours, non_blocking=True),
        lambda: ours.copy_(pinned, non_blocking=True),
        lambda: others[0].copy_(ours),
        lambda: torch._foreach_add_([ours, others[1]], 1),
        lambda: torch._foreach_copy_([ours], [others[1]]),
        lambda: torch.nn.functional.linear(ours, others[1].view(1, 3)),
    ):
        with stream, pytest.raises(RuntimeError, match="not ordered"):
            use()


@in_process
def test_memory_that_is_freed_while_another_stream_uses_it() -> None:
    controls = pretend.load()
    stream = side_stream()
    ours = torch.ones(3, device=DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        kept = ours + 1
    del ours
    with pytest.raises(RuntimeError, match=r"is freed after the read by aten::add"):
        torch.ones(1, device=DEVICE)
    assert len(controls.errors()) == 1
    controls.reset_errors()
    for remedy in ("record_stream", "wait"):
        ours = torch.ones(3, device=DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            kept = ours + 1
        if remedy == "record_stream":
            ours.record_stream(stream)
        else:
            torch.accelerator.current_stream().wait_stream(stream)
        del ours
    torch.ones(1, device=DEVICE)
    assert controls.errors() == []
    del kept


@in_process
def test_errors_can_be_collected_with_their_stacks() -> None:
    controls = pretend.load()
    controls.set_sanitizer("collect", stacks=True)
    stream = torch.Stream(device=DEVICE)
    ours = torch.ones(3, device=DEVICE)
    with stream:
        ours.add_(1)
    (error,) = controls.errors()
    assert error.count("test_errors_can_be_collected_with_their_stacks") == 2
    controls.set_sanitizer("off")
    ours + 1
    assert len(controls.errors()) == 1


@in_process
def test_a_gate_blocks_what_is_behind_it() -> None:
    controls = pretend.load()
    controls.set_gate_limit(0.05)
    stream = side_stream()
    ours = torch.ones(3, device=DEVICE)
    gate = controls.Gate("all-reduce 7")
    before = stream.record_event()
    controls.block_stream(stream, gate)
    after = stream.record_event()
    assert before.query()
    assert not after.query()
    assert not stream.query()
    ours.add_(1)  # this stream is free
    torch.accelerator.current_stream().wait_event(after)
    for wait in (lambda: ours.add_(1), after.synchronize, torch.accelerator.synchronize):
        with pytest.raises(RuntimeError, match=r"a gate that stayed closed: all-reduce 7"):
            wait()
    controls.set_gate_limit(30)
    blocked = threading.Event()
    results = []

    def compute() -> None:
        blocked.set()
        results.append(ours.add_(1).tolist())

    thread = threading.Thread(target=compute)
    thread.start()
    assert blocked.wait(10)
    thread.join(0.05)
    assert thread.is_alive()
    gate.open()
    thread.join(10)
    assert results == [[3.0] * 3]
    assert after.query()


@in_process
def test_a_gate_can_open_into_an_error() -> None:
    controls = pretend.load()
    gate = controls.Gate("send 1")
    stream = side_stream()
    controls.block_stream(stream, gate)
    gate.open("the sizes differ")
    with stream, pytest.raises(RuntimeError, match="the sizes differ"):
        torch.ones(1, device=DEVICE)
    gate.open()
    with stream:
        torch.ones(1, device=DEVICE)


@in_process
def test_the_host_can_run_ahead_of_a_gate_that_stays_closed() -> None:
    controls = pretend.load()
    controls.set_gate_limit(0.05, run_ahead=True)
    stream = side_stream()
    gate = controls.Gate("receive 2")
    controls.block_stream(stream, gate)
    with stream:
        torch.ones(3, device=DEVICE)
        after = stream.record_event()
    assert not after.query()
    with pytest.raises(RuntimeError, match="a gate that stayed closed: receive 2"):
        after.synchronize()
    gate.open()  # for the next test
