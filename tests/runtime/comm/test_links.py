"""Messages between processes: they arrive in order, in bounded memory that is never overwritten while in use."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.helpers.faults import Trial
from torch import Tensor

from weft import faults
from weft.errors import PeerError, RunError
from weft.runtime.comm.buffers import ALIGNMENT, Pool, aligned
from weft.runtime.comm.descriptions import MAX_DESCRIPTIONS
from weft.runtime.comm.links import (
    FIRST_CAPACITY,
    HEADER,
    LARGE,
    NO_PIECE,
    TAG,
    LinkError,
    ReceiveLink,
    SendLink,
)
from weft.runtime.comm.messages import Message
from weft.runtime.comm.pipes import PipeReader, PipeWriter
from weft.runtime.comm.shared_memory import SharedReceiver, SharedSender
from weft.runtime.tree import flatten, unflatten

LONG = timedelta(seconds=30)  # for messages that must arrive
SHORT = timedelta(seconds=0.2)  # for messages that never arrive
TEXT = "rank 0, chunk 3, micro-batch 7 (3F7): ValueError: größer als erlaubt"
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
]


@dataclass(frozen=True, kw_only=True)
class End:
    """One end of a link: rank 0 sends, rank 1 receives."""

    group: dist.ProcessGroup
    control: dist.ProcessGroup
    outgoing: SendLink | None
    incoming: ReceiveLink | None

    def meet(self) -> None:
        """Wait until both ends are here."""
        dist.barrier(group=self.control)

    def pass_on(self, messages: Iterator[Message]) -> Iterator[tuple[Message, Message]]:
        """Send all messages; at the other end, yield each message received with the one expected."""
        for message in messages:
            if self.outgoing is not None:
                self.outgoing.send(message)
            else:
                assert self.incoming is not None
                yield self.incoming.receive(LONG), message

    def check(self, messages: Iterator[Message]) -> int:
        """Pass on messages, which must arrive bit-identical; return how many arrived."""
        count = 0
        for came, message in self.pass_on(messages):
            same(came, message)
            count += 1
        return count


def same(came: Message, message: Message) -> None:
    assert came.key == message.key
    assert came.loss == message.loss or (math.isnan(came.loss) and math.isnan(message.loss))
    assert came.skeleton == message.skeleton, (came.skeleton, message.skeleton)
    assert list(came.grads) == list(message.grads)
    assert len(came.tensors) == len(message.tensors)
    for received, sent in zip(came.tensors, message.tensors, strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.data_ptr() % ALIGNMENT == 0 or not received.numel()
        bits = [tensor.detach().resolve_conj().contiguous().reshape(-1) for tensor in (received, sent)]
        assert torch.equal(*(tensor.view(torch.uint8) for tensor in bits)), (received, sent)


def filled(index: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that no other message has."""
    return (torch.arange(math.prod(shape)) + 1000 * index).reshape(shape).to(dtype)


def of(index: int, *values: Any, **options: Any) -> Message:
    return Message.pack((0, 1, index), values, **options)


# Cases; each is called on both ranks


def trees(end: End) -> int:
    """Any tree and dtype, empty, scalar and non-contiguous tensors, losses and requests for gradients."""
    made = torch.Generator().manual_seed(1)
    every = [torch.randint(0, 100, (3, 5), generator=made).to(dtype) for dtype in DTYPES]
    values: list[Any] = [
        torch.ones(1),
        tuple(every),
        [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64), torch.tensor(2.5), torch.tensor(7)],
        {"x": torch.ones(3), "more": {"mask": torch.tensor([True, False]), "n": 3, "name": "ä", "none": None}, "l": []},
        (torch.arange(12.0).reshape(3, 4).T, torch.ones(1).expand(4, 4), torch.arange(10)[::3]),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([float("nan"), float("inf"), -0.0])),
        {1: torch.ones(2), "1": torch.zeros(2)},
        (),
        None,
        3.5,
        torch.randn(5, 3, generator=made).requires_grad_(),
    ]

    def messages() -> Iterator[Message]:
        for index, value in enumerate(values * 2):  # the second time the descriptions are known
            tensors = flatten(value)[0]
            grads = [tensor.is_floating_point() and place % 2 == 0 for place, tensor in enumerate(tensors)]
            loss = [float("nan"), 0.1, -math.inf][index % 3]
            yield Message.pack((index % 2, 32767 - index, 2**40 + index), value, grads=grads, loss=loss)

    return end.check(messages())


def plain_values(end: End) -> int:
    """Values that compare equal in Python keep their type: 1, True and 1.0 in one place, 0.0 and -0.0."""
    values = [1, True, 1.0, False, 0, 0.0, -0.0, "1"]
    count = 0
    for came, message in end.pass_on(of(index, value, torch.ones(1)) for index, value in enumerate(values)):
        (received, _), (sent, _) = (unflatten(end.skeleton, end.tensors) for end in (came, message))
        assert (type(received), repr(received)) == (type(sent), repr(sent)), f"{sent!r} came as {received!r}"
        count += 1
    return count


def sizes(end: End) -> int:
    """Sizes that grow, shrink, alternate and jump; below, at and above the size of the posted receives."""
    edge = (FIRST_CAPACITY - 3 * ALIGNMENT) // 4
    made = np.random.default_rng(2)
    several = [
        *(2**power for power in range(17)),
        *(2**power for power in reversed(range(17))),
        *[1, 200_000] * 5,
        *(edge + change for change in range(-40, 40)),
        *made.integers(0, 300_000, 40).tolist(),
        0,
    ]
    return end.check(of(index, filled(index, size), torch.tensor(index)) for index, size in enumerate(several))


def all_larger(end: End) -> int:
    """Every posted receive is too small for its message: each is announced, and arrives in order."""
    messages = [of(index, filled(index, 3000 * (4 - index))) for index in range(4)]
    if end.outgoing is not None:
        for message in messages:  # as many as can be in flight
            end.outgoing.send(message)
        end.meet()
        return 0
    end.meet()
    assert end.incoming is not None
    for message in messages:
        same(end.incoming.receive(LONG), message)
    return len(messages)


def many_descriptions(end: End) -> int:
    """More shapes than are cached, and then the first ones again, which were evicted in between."""
    shapes = 2 * MAX_DESCRIPTIONS + 90
    rounds = [*range(shapes), *range(5), *range(shapes - 5, shapes), *range(MAX_DESCRIPTIONS + 10), *range(5)]
    return end.check(of(index, filled(index, size % 7, size)) for index, size in enumerate(rounds))


def long_descriptions(end: End) -> int:
    """A description that is larger than the receives, though its tensors are not."""
    return end.check(
        of(index, {f"{index % 2} {'x' * 100} {number}": filled(number, 1) for number in range(100)})
        for index in range(6)
    )


def bounded(end: End) -> list[list[int]]:
    """Bytes of buffers after each of 1,000 messages that alternate between two sizes."""
    nbytes, addresses = [], set()
    sizes = [100, 20_000]
    for index in range(1000):
        message = of(index, filled(index, sizes[index % 2]))
        if end.outgoing is not None:
            end.outgoing.send(message)
            nbytes.append(end.outgoing.nbytes)
        else:
            assert end.incoming is not None
            came = end.incoming.receive(LONG)
            same(came, message)
            addresses.add(came.tensors[0].data_ptr())
            del came
            nbytes.append(end.incoming.nbytes)
    return [nbytes, sorted(addresses)]


def held(end: End) -> list[int]:
    """An activation is unchanged while anything holds it (itself, a view, an array, autograd); then it is reused.

    Returns the bytes of buffers with nothing held, with much held, and after the release.
    """
    kept: list[tuple[Callable[[], Tensor], Tensor]] = []  # how to read a held activation, and its expected value
    nbytes = []

    def step(index: int) -> Tensor:
        if end.outgoing is not None:
            end.outgoing.send(of(index, filled(index, 50, 40)))
            return filled(index, 50, 40)
        assert end.incoming is not None
        return end.incoming.receive(LONG).tensors[0]

    def note_bytes() -> None:
        nbytes.append(0 if end.incoming is None else end.incoming._pool.nbytes)

    for index in range(20):
        step(index)
    note_bytes()
    for index in range(20, 60):
        came, expected = step(index), filled(index, 50, 40)
        factor = torch.ones((), requires_grad=True)
        ways: list[list[tuple[Callable[[], Tensor], Tensor]]] = [
            [(partial(torch.as_tensor, came), expected)],
            [(partial(torch.as_tensor, came[3:7].T), expected[3:7].T)],
            [(partial(torch.as_tensor, came.numpy()), expected)],
            [(partial(_gradient, (factor * came).sum(), factor), expected.sum())],
            [],
        ]
        kept += ways[index % 5]
        del came, ways
    note_bytes()
    for index in range(60, 100):
        step(index)
    while kept:
        what, value = kept.pop()
        assert torch.equal(what(), value)
    for index in range(100, 160):
        step(index)
    note_bytes()
    return nbytes


def _gradient(of: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(of, at)[0]


def both_ways(end: End) -> int:
    """A link in each direction over one group, as between two stages: they do not mix."""
    other = 1 - dist.get_rank()
    dist.barrier(group=end.control)
    group = dist.new_group(backend="gloo", timeout=LONG)
    outgoing = SendLink(group, other, slots=2, timeout=LONG)
    incoming = ReceiveLink(group, other, slots=2, device=torch.device("cpu"))
    for index in range(50):
        size = (index * 977) % 4000
        outgoing.send(of(index, filled(index + dist.get_rank(), size)))
        same(incoming.receive(LONG), of(index, filled(index + other, size)))
    return 50


def aborted(end: End) -> str:
    """The reason of a failure arrives after the messages sent before it."""
    if end.outgoing is not None:
        end.outgoing.send(of(0, torch.ones(1)))
        end.outgoing.abort(TEXT, LONG).wait(LONG)
        end.meet()
        return ""
    assert end.incoming is not None
    same(end.incoming.receive(LONG), of(0, torch.ones(1)))
    try:
        end.incoming.receive(LONG)
    except PeerError as problem:
        end.meet()
        return str(problem)
    raise AssertionError("a message arrived")


def aborted_at_length(end: End) -> str:
    """A reason that is too long for any receive is truncated, even inside a character."""
    if end.outgoing is not None:
        end.outgoing.abort("x" + "ü" * FIRST_CAPACITY, LONG).wait(LONG)
        end.meet()
        return ""
    assert end.incoming is not None
    try:
        end.incoming.receive(LONG)
    except PeerError as problem:
        end.meet()
        return str(problem)
    raise AssertionError("a message arrived")


def aborted_unheard(end: End) -> str:
    """A neighbour that does not read delays nobody beyond the deadline."""
    said = ""
    if end.outgoing is not None:
        end.outgoing.send(of(0, torch.ones(1)))  # takes the only receive
        try:
            end.outgoing.abort(TEXT, SHORT).wait(SHORT)
        except LinkError as problem:
            said = str(problem)
    end.meet()
    return said


def nothing_comes(end: End) -> str:
    said = ""
    if end.incoming is not None:
        try:
            end.incoming.receive(SHORT)
        except LinkError as problem:
            said = str(problem)
    end.meet()
    return said


def nobody_reads(end: End) -> list[Any]:
    """A full link makes its sender wait, and no longer than the deadline."""
    said: list[Any] = []
    if end.outgoing is not None:
        try:
            for index in range(20):
                said = [index]
                end.outgoing.send(of(index, torch.ones(1)))
        except LinkError as problem:
            said.append(str(problem))
    end.meet()
    return said


def no_room(end: End) -> int:
    """Shared memory that can't grow: such messages go over gloo, and the piece still serves smaller ones."""
    allocate = os.posix_fallocate
    count = 0
    for index, size in enumerate([5_000, 50_000, 50_000, 5_000, 50_000]):
        os.posix_fallocate = refuse if index in (1, 2) else allocate
        count += end.check(iter([of(index, filled(index, size))]))
        if end.incoming is not None:
            end.incoming._shared_receiver.release()  # type: ignore[union-attr]
        end.meet()
    return count


def refuse(*_: int) -> None:
    raise OSError("No space left on device")


TEN = b'["*", false, ["float32", [10], false, false]]'  # the description of a tensor
FORGED: dict[str, dict[str, Any]] = {  # what no rank sends, by what the receiver says of it
    "rank 0's message has -1 bytes (it may have 64 to MEMORY, the memory of this machine)": {"op": LARGE, "size": -1},
    "rank 0's message has 3 bytes (it may have 64 to MEMORY": {"op": LARGE, "size": 3},
    f"rank 0's message has {2**62} bytes (it may have 64 to MEMORY": {"op": LARGE, "size": 2**62},
    "rank 0's message has 640 bytes in a buffer of 4096, with a description of -1": {"text_size": -1},
    "rank 0's message has 640 bytes in a buffer of 4096, with a description of 577": {"text_size": 577},
    "rank 0's message has -64 bytes in a buffer of 4096": {"size": -64, "text_size": -128},
    "rank 0's message has 4097 bytes in a buffer of 4096": {"size": 4097},
    "rank 0's message has description 77, which was never sent": {"number": 77},
    "rank 0's message has a description that can't be read (JSONDecodeError": {"text": b"no JSON"},
    "rank 0's message has a description that can't be read (ValueError: no tensor has dtype load and shape (2,))": {
        "text": b'["*", false, ["load", [2], false, false]]'
    },
    "rank 0's message has a description that can't be read (ValueError: no tensor has dtype int8 and shape (-2, -3))": {
        "text": b'["*", false, ["int8", [-2, -3], false, false]]'
    },
    f"rank 0's message has {9 * 2**62} bytes (it may have 0 to MEMORY": {
        "text": b'["*", false, ["int8", [4611686018427387904, 9], false, false]]'
    },
    "rank 0's message has tensors of 640 bytes in 512": {"text": b'["*", false, ["int8", [640], false, false]]'},
    "rank 0's message has tensors in shared memory, and these ranks share none": {"text": TEN, "piece": 5},
}
FORGED_PIECES: dict[str, dict[str, Any]] = {
    "rank 0's piece of shared memory has -1 bytes (it may have 0 to MEMORY": {"piece_size": -1},
    f"rank 0's piece of shared memory has {2**62} bytes (it may have 0 to MEMORY": {"piece_size": 2**62},
    "rank 0's message has tensors in 1000 bytes of shared memory (mmap length is greater than": {"piece_size": 1000},
    "rank 0's message has tensors of 64 bytes in 32": {"piece_size": 32},
    "[Errno 2] No such file or directory": {"piece_size": 64, "piece": 2**30},
}


def forge(
    *, op: int = 0, number: int = 0, text: bytes = b"", text_size: int | None = None, size: int = 640, **piece: int
) -> Tensor:
    flat = torch.zeros(FIRST_CAPACITY, dtype=torch.uint8)
    text_size = len(text) if text_size is None else text_size
    place = piece.get("piece", NO_PIECE), piece.get("piece_size", 0)
    HEADER.pack_into(flat.numpy().data, 0, op, 0, 0, 0.0, number, text_size, size, *place)
    flat.numpy()[64 : 64 + len(text)] = np.frombuffer(text, np.uint8)
    return flat


def forged(end: End) -> list[str]:
    """What the receiver says of each message; a message that is not forged arrives between them."""
    said = []
    for options in FORGED.values():
        if end.outgoing is not None:
            end.outgoing._isend(forge(**options), TAG).wait(LONG)
        else:
            said.append(_refusal(end))
    end.check(iter([of(0, filled(0, 10))]))
    return said


def forged_pieces(end: End) -> list[str]:
    """Each names a file of 128 bytes as its piece, or none."""
    said = []
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(2 * ALIGNMENT))
        for options in FORGED_PIECES.values():
            if end.outgoing is not None:
                piece: dict[str, Any] = {"text": TEN, "piece": file.fileno(), **options}
                end.outgoing._put(forge(**piece), timeout=LONG)
            else:
                said.append(_refusal(end))
        end.meet()
    return said


def _refusal(end: End) -> str:
    assert end.incoming is not None
    try:
        end.incoming.receive(LONG)
    except (RunError, LinkError) as problem:
        return str(problem)
    raise AssertionError("a message arrived")


SHARING = [  # through shared memory and a pipe too, with three slots
    trees,
    sizes,
    all_larger,
    many_descriptions,
    long_descriptions,
    bounded,
    held,
    aborted,
    aborted_at_length,
    nothing_comes,
    nobody_reads,
    no_room,
]
CASES: dict[str, tuple[Callable[[End], Any], int, bool]] = {
    f"{case.__name__} {slots}": (case, slots, False)
    for case, several in (
        (trees, (1, 3)),
        (plain_values, (3,)),
        (sizes, (1, 3)),
        (all_larger, (3,)),
        (many_descriptions, (1, 3)),
        (long_descriptions, (1, 3)),
        (bounded, (1, 3)),
        (held, (1, 3)),
        (both_ways, (2,)),
        (aborted, (3,)),
        (aborted_at_length, (1,)),
        (aborted_unheard, (1,)),
        (nothing_comes, (3,)),
        (nobody_reads, (1, 3)),
        (forged, (len(FORGED) + 1,)),
    )
    for slots in several
}
CASES |= {f"{case.__name__} shared": (case, 3, True) for case in SHARING}
CASES |= {"forged_pieces shared": (forged_pieces, len(FORGED_PIECES), True)}


def run_case(name: str) -> Any:
    """The result of a case at this end."""
    case, slots, shares = CASES[name]
    pipe = PipeWriter(slots=slots)
    sender = torch.tensor([os.getpid(), pipe.number])
    dist.broadcast(sender, 0)
    group, control = (dist.new_group(backend="gloo", timeout=LONG) for _ in range(2))
    timeout = SHORT if case is nobody_reads else LONG
    sends = dist.get_rank() == 0
    sharing: dict[str, Any] = {"shared_sender": SharedSender(), "pipe": pipe} if shares else {}
    end = End(
        group=group,
        control=control,
        outgoing=SendLink(group, 1, slots=slots, timeout=timeout, **sharing) if sends else None,
        incoming=None if sends else _incoming(group, slots, sender.tolist() if shares else None),
    )
    end.meet()
    pipe.is_open_there()
    result = case(end)
    dist.barrier()  # a process that leaves its group drops its last messages
    return result


def _incoming(group: dist.ProcessGroup, slots: int, sender: list[int] | None) -> ReceiveLink:
    sharing: dict[str, Any] = {}
    if sender is not None:
        sharing = {"shared_receiver": SharedReceiver(sender[0]), "pipe": PipeReader(*sender)}
    return ReceiveLink(group, 0, slots=slots, device=torch.device("cpu"), **sharing)


Results: TypeAlias = "Callable[[str], list[Any]]"


@pytest.fixture
def results(launch: Callable[..., list[Any]]) -> Results:
    """The results of a case at both ends."""
    return lambda name: launch(run_case, name, ranks=2)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("trees 1", 22),
        ("trees 3", 22),
        ("sizes 1", 165),
        ("sizes 3", 165),
        ("many_descriptions 1", 883),
        ("many_descriptions 3", 883),
        ("long_descriptions 1", 6),
        ("long_descriptions 3", 6),
        ("all_larger 3", 4),
        ("trees shared", 22),
        ("sizes shared", 165),
        ("many_descriptions shared", 883),
        ("long_descriptions shared", 6),
        ("all_larger shared", 4),
        ("no_room shared", 5),
    ],
)
def test_messages_arrive_in_order(results: Results, name: str, count: int) -> None:
    assert results(name) == [0, count]


def test_equal_plain_values_keep_their_types(results: Results) -> None:
    assert results("plain_values 3") == [0, 8]


def test_links_of_both_directions_do_not_mix(results: Results) -> None:
    assert results("both_ways 2") == [50, 50]


@pytest.mark.parametrize("slots", [1, 3])
def test_buffers_are_bounded_and_reused(results: Results, slots: int) -> None:
    """The receiver has one buffer per posted receive and one in use, the sender one per send in flight and one that is
    being filled. While messages grow, each may get a second one, which stays: there are no more after 1,000."""
    (sending, _), (receiving, addresses) = results(f"bounded {slots}")
    largest = aligned(20_000 * 4) + 4 * ALIGNMENT
    assert len(set(receiving[100:])) == 1
    assert max(receiving) <= 2 * (slots + 1) * largest
    assert max(sending) <= 2 * (slots + 2) * largest
    assert len(addresses) <= 3 * (slots + 1)  # a description moves the data further back


def test_shared_memory_is_bounded_and_reused(results: Results) -> None:
    """A piece for each message in flight, one being read, and one that was read and is not released yet."""
    (sending, _), (receiving, addresses) = results("bounded shared")
    assert 2 <= len(addresses) < 20  # small messages do not use it
    assert max(sending) <= 8 * (aligned(20_000 * 4) + FIRST_CAPACITY)
    assert max(receiving) <= 8 * FIRST_CAPACITY


def test_held_shared_memory_is_never_overwritten(results: Results) -> None:
    """Both ends check what they hold; the receiver's own buffers contain only headers, however much is held."""
    _, (nothing, much, again) = results("held shared")
    assert nothing == much == again


@pytest.mark.parametrize("slots", [1, 3])
def test_held_buffers_are_never_overwritten(results: Results, slots: int) -> None:
    _, (nothing, much, again) = results(f"held {slots}")
    assert much >= nothing + 30 * 50 * 40 * 4  # four of five were held
    assert again <= much


@pytest.mark.parametrize(("short", "long"), [("3", "1"), ("shared", "shared")])
def test_the_reason_of_a_failure_reaches_the_other_end(results: Results, short: str, long: str) -> None:
    assert results(f"aborted {short}")[1] == TEXT
    text = results(f"aborted_at_length {long}")[1]
    assert text.startswith("xüü")
    assert FIRST_CAPACITY / 2 - 100 < len(text) < FIRST_CAPACITY / 2


@pytest.mark.parametrize(
    ("name", "end"),
    [("nothing_comes 3", 1), ("nothing_comes shared", 1), ("aborted_unheard 1", 0)],
    ids=["receiving", "receiving from a pipe", "aborting"],
)
def test_a_wait_ends_at_its_deadline(results: Results, name: str, end: int) -> None:
    """The transport recognizes a timeout by these words."""
    assert "timed out" in results(name)[end].lower()


@pytest.mark.parametrize(("name", "count"), [("nobody_reads 1", 3), ("nobody_reads 3", 7), ("nobody_reads shared", 4)])
def test_a_full_link_blocks_its_sender(results: Results, name: str, count: int) -> None:
    """After `slots` messages that are received but unread, and `slots` + 1 in flight; or as many as a pipe holds."""
    (sent, text), _ = results(name)
    assert sent == count
    assert "timed out" in text.lower()


@pytest.mark.parametrize(
    ("name", "expected"), [(f"forged {len(FORGED) + 1}", FORGED), ("forged_pieces shared", FORGED_PIECES)]
)
def test_sizes_that_can_not_be_are_refused(results: Results, name: str, expected: dict[str, Any]) -> None:
    """Before memory is allocated for them; the error names the rank, the size and the limit."""
    memory = str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    said = results(name)[1]
    assert len(said) == len(expected)
    for text, beginning in zip(said, expected, strict=True):
        assert text.startswith(beginning.replace("MEMORY", memory))


# Faults


def interrupted(environment: dict[str, str]) -> list[str]:
    """Send a small and a large message with faults armed; what each end has seen."""
    os.environ.update(environment)
    faults.arm()
    group = dist.new_group(backend="gloo", timeout=LONG)
    sends = dist.get_rank() == 0
    outgoing = SendLink(group, 1, slots=2, timeout=LONG) if sends else None
    incoming = None if sends else ReceiveLink(group, 0, slots=2, device=torch.device("cpu"))
    for name in environment:
        del os.environ[name]
    faults.arm()
    seen = []
    try:
        for index, size in enumerate((10, 10_000)):
            if outgoing is not None:
                outgoing.send(of(index, filled(index, size)))
            elif incoming is not None:
                same(incoming.receive(LONG if index == 0 else SHORT), of(index, filled(index, size)))
            seen.append("a message")
    except RuntimeError as problem:
        seen.append(str(problem))
    dist.barrier()
    return seen


def test_a_fault_in_a_send_leaves_half_a_message(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    trial = Trial(tmp_path, "send:2:0:raise")
    sent, (first, second) = launch(interrupted, trial.environment, ranks=2)
    trial.check()
    assert sent == ["a message", "a fault was requested"]
    assert first == "a message"
    assert "timed out" in second.lower()


def test_a_fault_in_a_receive_comes_before_the_tensors(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    trial = Trial(tmp_path, "receive:2:1:raise")
    sent, received = launch(interrupted, trial.environment, ranks=2)
    trial.check()
    assert sent == ["a message", "a message"]
    assert received == ["a message", "a fault was requested"]


# Buffers alone


def test_a_buffer_is_reused_when_nothing_holds_it() -> None:
    pool = Pool()
    first = pool.acquire(1000)
    address = first.data_ptr()
    assert first.shape == (1000,)
    assert first.dtype == torch.uint8
    del first
    assert pool.acquire(900).data_ptr() == address
    assert pool.nbytes == aligned(1000)


@pytest.mark.parametrize(
    "hold",
    [
        lambda flat: flat,
        lambda flat: flat[5:6],
        lambda flat: flat[:64].view(torch.float32).view(4, 4).T,
        lambda flat: flat.detach(),
        lambda flat: flat.numpy(),
        lambda flat: memoryview(flat.numpy()),
        lambda flat: flat.untyped_storage(),
        lambda flat: flat[:64].view(torch.float32).requires_grad_().square(),  # held only by its graph
        lambda flat: [flat.expand(3, -1)],
    ],
    ids=["itself", "slice", "view", "detached", "array", "memory", "storage", "graph", "tree"],
)
def test_a_buffer_is_not_reused_while_anything_holds_it(hold: Callable[[Tensor], Any]) -> None:
    pool = Pool()
    flat = pool.acquire(128)
    flat.zero_()
    address = flat.data_ptr()
    kept = hold(flat)
    del flat
    assert (pool.nbytes, pool.free_bytes) == (128, 0)
    others = [pool.acquire(128) for _ in range(3)]
    assert address not in {tensor.data_ptr() for tensor in others}
    assert len({tensor.data_ptr() for tensor in others}) == 3
    assert (pool.nbytes, pool.free_bytes) == (4 * 128, 0)
    del kept
    assert pool.free_bytes == 128
    assert pool.acquire(128).data_ptr() == address


def test_buffers_are_aligned_whatever_their_size() -> None:
    """Like torch's own memory: kernels may sum in another order on unaligned memory."""
    pool = Pool()
    taken = [pool.acquire(size) for size in range(1, 300, 7)]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in taken)
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    """Otherwise a header could take the buffer that a large message needs next."""
    pool = Pool()
    several = {size: pool.acquire(size) for size in (640, 64, 6400)}
    addresses = {size: tensor.data_ptr() for size, tensor in several.items()}
    several.clear()
    assert [pool.acquire(size).data_ptr() for size in (64, 100, 1000)] == [addresses[size] for size in (64, 640, 6400)]


def test_buffers_that_are_too_small_are_freed() -> None:
    """Growing messages leave no smaller buffers behind."""
    pool = Pool()
    for size in range(64, 64 * 500, 64):
        pool.acquire(size)
    assert pool.nbytes == 64 * 499
    assert pool.free_bytes == pool.nbytes


def test_alternating_sizes_share_the_same_buffers() -> None:
    pool = Pool()
    for turn in range(100):
        keep = [pool.acquire(100 + 1000 * ((turn + place) % 3)) for place in range(3)]
        assert len({tensor.data_ptr() for tensor in keep}) == 3
        del keep
    assert pool.nbytes <= 3 * aligned(2100)
