"""What makes the host wait is counted, and what does not is not; completion can lag; clocks can be fake."""

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process

DEVICE = "pretend:0"


@in_process
def test_waits_are_counted_by_kind() -> None:
    controls = pretend.load()
    ours = torch.ones(3, device=DEVICE)
    mask = ours > 0
    pinned = torch.zeros(3).pin_memory()
    assert pinned.is_pinned()
    event = torch.accelerator.current_stream().record_event()
    cases = [
        ("item", lambda: ours[0].item()),
        ("item", lambda: bool(mask.all())),
        ("copy to host", lambda: ours.cpu()),
        ("copy to host", lambda: ours.tolist()),
        ("copy to host", lambda: pinned.copy_(ours)),
        ("copy to host", lambda: torch.zeros(3).copy_(ours, non_blocking=True)),
        ("copy to device", lambda: torch.zeros(3).to(DEVICE)),
        ("copy to device", lambda: torch.zeros(3).to(DEVICE, non_blocking=True)),
        ("copy to device", lambda: pinned.to(DEVICE)),
        ("copy to device", lambda: torch.tensor(1.0, device=DEVICE)),
        ("copy to device", lambda: ours[torch.tensor([1])]),
        ("nonzero", lambda: ours.nonzero()),
        ("nonzero", lambda: ours[mask]),
        ("masked_select", lambda: ours.masked_select(mask)),
        ("equal", lambda: torch.equal(ours, ours)),
        ("_unique2", lambda: torch.unique(ours)),
        ("event synchronize", event.synchronize),
        ("stream synchronize", torch.accelerator.current_stream().synchronize),
        ("device synchronize", torch.accelerator.synchronize),
    ]
    for kind, wait in cases:
        controls.reset_counts()
        wait()  # type: ignore[no-untyped-call]
        assert controls.counts() == {kind: 1}, kind


@in_process
def test_other_work_does_not_wait() -> None:
    controls = pretend.load()
    pinned = torch.ones(3).pin_memory()
    controls.reset_counts()
    ours = pinned.to(DEVICE, non_blocking=True)
    ours.add_(1).mul_(torch.tensor(2.0))
    weight = torch.full((3,), 2.0, device=DEVICE, requires_grad=True)
    torch.autograd.backward(torch.nn.functional.dropout(weight * ours).sum())
    torch.optim.SGD([weight], lr=0.1, momentum=0.9).step()
    ours.to("pretend:1")
    ours[1:2].fill_(0)
    pinned.copy_(ours, non_blocking=True)
    assert torch.accelerator.current_stream().record_event().query()
    assert controls.counts() == {}
    assert pinned.tolist() == [4.0, 0.0, 4.0]


@in_process
def test_traces_say_where_the_host_waited() -> None:
    controls = pretend.load()
    with controls.tracing():
        torch.ones(1, device=DEVICE).item()
    (trace,) = controls.traces()
    assert trace.startswith("item")
    assert "test_traces_say_where_the_host_waited" in trace


@in_process
def test_an_event_completes_after_the_lag() -> None:
    controls = pretend.load()
    controls.set_lag(2)
    ours = torch.ones(3, device=DEVICE)
    event = torch.accelerator.current_stream().record_event()
    assert [event.query() for _ in range(3)] == [False, False, True]
    assert controls.counts() == {"poll": 2}
    event.record()
    assert not event.query()
    ours.add_(1)
    assert event.query()
    event.record()
    event.synchronize()
    assert event.query()


@in_process
def test_copies_with_pinned_memory_lag_too() -> None:
    controls = pretend.load()
    controls.set_lag(2)
    stream = torch.accelerator.current_stream()
    target = torch.zeros(3).pin_memory()
    target.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    event = stream.record_event()
    assert target.isnan().all()  # read too early
    while not event.query():
        pass
    assert target.tolist() == [1.0] * 3
    source = torch.ones(3).pin_memory()
    copied = source.to(DEVICE, non_blocking=True)
    stream.record_event().synchronize()
    source.zero_()  # in time
    assert controls.errors() == []
    source.to(DEVICE, non_blocking=True)
    source.fill_(1)  # too early
    copied.add_(1).add_(1)
    with pytest.raises(RuntimeError, match="pinned memory was changed"):
        copied.add_(1)


@in_process
def test_the_fake_clock() -> None:
    controls = pretend.load()
    controls.set_clock(2.0)
    side = torch.Stream(device=DEVICE)
    main = torch.accelerator.current_stream()
    begin, middle, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(3))
    begin.record()
    ours = torch.ones(3, device=DEVICE)
    middle.record()
    side.wait_event(middle)
    with side:
        later = ours + 1
        later = later + 1
    end.record(side)
    assert begin.elapsed_time(middle) == 2
    assert begin.elapsed_time(end) == 6
    middle.record()  # the first stream did not wait for the second
    assert begin.elapsed_time(middle) == 2
    main.wait_stream(side)
    middle.record()
    assert begin.elapsed_time(middle) == 6
    controls.set_clock(lambda op, _, __: 5.0 if "mul" in op else 1.0)
    begin.record()
    later.mul_(2).add_(1)
    end.record()
    assert begin.elapsed_time(end) == 6
    controls.set_lag(5)
    end.record()
    with pytest.raises(RuntimeError, match="must be complete"):
        begin.elapsed_time(end)
