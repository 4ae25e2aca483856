"""Messages between devices: receives that are posted ahead, sizes that change, and all that a message may hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.pretend.ranks import STAGED, STANDIN, needs_pretend_device
from tests.helpers.rank_functions import eventually
from tests.helpers.rank_runs import MICROBATCHES, WIDTH, Case, batch, pipeline
from torch import Tensor, nn

import weft
from weft.runtime.comm.device_links import DeviceReceiver, DeviceSender

pytestmark = needs_pretend_device

Launch = Callable[..., list[Any]]
PERIOD = 2  # messages of a mini-batch


def meet() -> None:
    dist.all_reduce(torch.zeros(1))  # of the host


class Link:
    """Rank 0 sends bytes to rank 1. Both make the same calls."""

    def __init__(self) -> None:
        from tests.helpers.pretend import nccl

        device = torch.device("pretend", dist.get_rank())
        group: Any = dist.new_group([0, 1], backend="standin")
        self.is_sender, self.device = dist.get_rank() == 0, device
        self.sender = DeviceSender(group, 1, device=device, period=PERIOD)
        self.receiver = DeviceReceiver(group, 0, device=device, period=PERIOD)
        self._sent = 0
        self.communicator = nccl.communicators()[-1]

    def move(self, size: int) -> list[int] | None:
        """Send a message, or receive and read it."""
        self._sent += 1
        if self.is_sender:
            self.send(size)
            return None
        return self.receive(size)

    def send(self, size: int) -> None:
        def write(flat: Tensor) -> None:
            flat[:size].copy_(torch.arange(self._sent, self._sent + size, device=self.device).to(torch.uint8))

        self.sender.send(size, write)

    def receive(self, size: int) -> list[int]:
        arrival = self.receiver.receive(size)
        if arrival is None:
            return []
        arrival.wait()
        content: list[int] = arrival.tensors[0][:size].tolist()
        return content

    def settle(self) -> None:
        if self.is_sender:
            self.sender.settle()
        else:
            self.receiver.settle()

    @property
    def log(self) -> list[tuple[str, int]]:
        return [(operation.op, operation.size) for operation in self.communicator.log]

    @property
    def outstanding(self) -> list[str]:
        return [operation.op for operation in self.communicator.outstanding]


def post_ahead() -> list[list[str]]:
    """Which operations are outstanding after each of some equal messages, when both ranks are done with it."""
    link, outstanding = Link(), []
    for _ in range(2 * PERIOD + 1):
        link.move(64)
        if link.is_sender:
            eventually(lambda: not link.sender.under_way)
        meet()
        outstanding.append(link.outstanding)
        meet()
    link.settle()
    eventually(lambda: not (link.sender.under_way or link.receiver.is_late))
    outstanding.append(link.outstanding)
    return outstanding


def test_a_receive_is_posted_ahead_once_two_mini_batches_had_the_same_sizes(pretend_launch: Launch) -> None:
    sender, receiver = pretend_launch(post_ahead, ranks=2)
    nothing: list[str] = []
    assert sender == [nothing] * (2 * PERIOD + 2)
    assert receiver == [nothing] * (2 * PERIOD - 1) + [["recv"]] * 2 + [nothing]


def change_sizes(sizes: Sequence[int | None]) -> tuple[list[list[int] | None], list[tuple[str, int]], list[str]]:
    """What arrived, what was sent, and what is left. None instead of a size: a flush."""
    link, arrived = Link(), []
    for size in sizes:
        if size is None:
            link.settle()
        else:
            arrived.append(link.move(size))
    link.settle()
    eventually(lambda: not (link.sender.under_way or link.receiver.is_late))
    return arrived, link.log, link.outstanding


def check_sizes(pretend_launch: Launch, sizes: Sequence[int | None]) -> list[tuple[str, int]]:
    """Every message arrives, whatever sizes the ones before had; the operations of the receiver."""
    receives: list[tuple[str, int]]
    (_, sends, left), (arrived, receives, unserved) = pretend_launch(change_sizes, sizes, ranks=2)
    messages = [size for size in sizes if size is not None]
    assert arrived == [
        [(number + place) % 256 for place in range(size)] for number, size in enumerate(messages, start=1)
    ]
    assert [size for _, size in sends] == [size for _, size in receives]
    assert left == unserved == []
    return receives


def test_a_larger_message_takes_a_second_operation_and_a_smaller_one_is_padded(pretend_launch: Launch) -> None:
    equal = [64] * 2 * PERIOD
    assert check_sizes(pretend_launch, [*equal, 128]) == [("recv", size) for size in (*[64] * 5, 128, 64)]
    assert check_sizes(pretend_launch, [*equal, 16]) == [("recv", size) for size in (*[64] * 5, 64)]
    assert check_sizes(pretend_launch, [*equal, 0]) == [("recv", size) for size in (*[64] * 5, 64)]
    assert check_sizes(pretend_launch, [*equal, None, 16]) == [("recv", size) for size in (*[64] * 5, 16)]


def test_messages_of_random_sizes(pretend_launch: Launch) -> None:
    chance = random.Random(0)
    sizes: list[int | None] = []
    for _ in range(60):
        sizes += chance.choice([[64, 128], [64, 128], [64, 128], [128, 64], [256, 8], [0, 64], [0, 0], [None]])
    receives = check_sizes(pretend_launch, sizes)
    assert len(receives) > sum(1 for size in sizes if size)  # some were posted for nothing


def count_bytes() -> list[int]:
    """Bytes of messages that are not received yet, and after they were."""
    link = Link()
    if not link.is_sender:
        meet()
        assert [link.receive(size) for size in (64, 128)] == [list(range(64)), list(range(128))]
        return [link.receiver.nbytes]
    for size in (64, 128):
        link.send(size)
    found = [link.sender.nbytes]
    meet()
    eventually(lambda: not link.sender.under_way)
    return [*found, link.sender.nbytes, len(link.sender._sends)]


def test_messages_count_until_they_are_received(pretend_launch: Launch) -> None:
    assert pretend_launch(count_bytes, ranks=2) == [[192, 0, 0], [0]]


# In a pipeline


def steps_ahead() -> list[list[str]]:
    """Operations that are outstanding after steps of equal size, and after a flush."""
    from tests.helpers.pretend import nccl

    def outstanding() -> list[str]:
        meet()
        return sorted(operation.op for communicator in nccl.communicators() for operation in communicator.outstanding)

    found = []
    with pipeline(Case(method="1f1b"), "pretend") as pipe:
        transport = pipe._assembly.transport
        for number in range(4):
            pipe.step(*batch(number, 2 * MICROBATCHES))
        eventually(transport.idle)
        found.append(outstanding())
        posted = transport.nbytes()
        assert pipe.report().ranks[dist.get_rank()]["peak_bytes"]["buffers"] >= posted
        pipe.flush()
        found.append(outstanding())
        assert transport.nbytes() <= posted - 2 * WIDTH * 4  # a micro-batch
    return found


def test_pipelines_post_receives_ahead_and_leave_none_after_a_flush(pretend_launch: Launch) -> None:
    assert pretend_launch(steps_ahead, ranks=2) == [[["recv"], []]] * 2


class Mixed(nn.Module):
    """A layer whose output has tensors of many kinds. One is always on the CPU."""

    def __init__(self, *, is_first: bool = False, is_last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_first, self.is_last = is_first, is_last

    def forward(self, given: Any) -> Any:
        if self.is_first:
            return self._begin(given)
        value, (numbers, mask), more = given["value"], given["pair"], given["more"]
        assert (value.dtype, numbers.dtype, mask.dtype) == (torch.float32, torch.int16, torch.bool)
        assert (numbers.device.type, mask.device, value.is_contiguous()) == ("cpu", value.device, True)
        assert more["empty"].shape == (len(value), 0, 3)
        assert more["scalar"].shape == ()
        mixed = self.linear(value) * mask + more["waves"].real + numbers.to(value.device).to(value.dtype)
        mixed = mixed * more["scalar"]
        if self.is_last:
            return mixed
        return {"value": mixed.t().contiguous().t(), "pair": (numbers + 1, mask), "more": more}

    def _begin(self, given: Tensor) -> Any:
        value = self.linear(given)
        more = {
            "waves": torch.complex(value, value.detach()),
            "empty": torch.empty(len(given), 0, 3, device=given.device),
            "scalar": value.detach().abs().mean(),
        }
        numbers = torch.arange(WIDTH, dtype=torch.int16)
        return {"value": value.t().contiguous().t(), "pair": (numbers, value.detach() > 0), "more": more}


def mixed_pipeline(device: str) -> weft.Pipeline:
    torch.manual_seed(1)
    layers = [Mixed(is_first=True), Mixed(), Mixed(), Mixed(is_last=True)]
    return weft.Pipeline(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        schedule="wpipe",
        microbatches=2,
        stages=None if dist.is_initialized() else 2,
        device=device,
        deadline=30.0,
    )


def train_mixed(device: str) -> list[Any]:
    """Weights and an evaluation, as plain data."""
    with mixed_pipeline(device) as pipe:
        for number, rows in enumerate((4, 4, 8, 2)):
            pipe.step(*batch(number, rows))
        found = [pipe.evaluate([batch(9, 5)]), pipe.predict(batch(9, 3)[0]).tolist()]
        return [*found, {name: tensor.tolist() for name, tensor in pipe.state_dict().items()}]


@pytest.mark.parametrize("backend", [STANDIN, STAGED], ids=["standin", "staged"])
def test_a_message_may_hold_any_dtype_shape_and_tensors_of_the_cpu(pretend_launch: Launch, backend: str) -> None:
    expected = train_mixed("cpu")
    assert pretend_launch(train_mixed, "pretend", ranks=2, backend=backend) == [expected] * 2
