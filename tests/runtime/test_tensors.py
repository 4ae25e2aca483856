"""Lists of tensors: one call for all tensors of a kind, with the results of a loop."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from weft.runtime import tensors as module
from weft.runtime.tensors import as_real, by_kind, copies_of, copy_tensors, in_batches

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.float32, torch.float64, torch.int64]


def mixed(value: int) -> list[Tensor]:
    """Tensors of many kinds, one of them empty, one strided."""
    tensors = [torch.full((2, size), value).to(dtype) for size, dtype in enumerate(DTYPES)]
    return [*tensors, torch.full((3, 4), float(value)).T]


def test_all_kinds_are_copied() -> None:
    targets, sources = mixed(0), mixed(7)
    strides = [target.stride() for target in targets]
    copy_tensors(targets, sources)
    for target, source, stride in zip(targets, sources, strides, strict=True):
        assert torch.equal(target, source)
        assert target.stride() == stride


def test_a_copy_may_change_the_dtype() -> None:
    target = [torch.empty(2, dtype=torch.bfloat16)]
    copy_tensors(target, [torch.tensor([1.0, 1.001])])
    assert target[0].tolist() == [1.0, 1.0]


def test_empty_lists_are_copied() -> None:
    copy_tensors([], [])
    assert list(by_kind([])) == []


@pytest.mark.parametrize("lengths", [(0, 1), (1, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lists_of_unequal_length_are_refused(lengths: tuple[int, int], device: str) -> None:
    lists = [[torch.empty(1, device=device)] * length for length in lengths]
    with pytest.raises((ValueError, RuntimeError), match=r"argument|same number of tensors|at least one tensor"):
        copy_tensors(*lists)


def test_on_a_device_each_kind_has_one_call() -> None:
    kinds = itertools.product([torch.float32, torch.bfloat16], ["meta", "cpu", "meta"])
    tensors = [torch.empty(1, dtype=dtype, device=device) for dtype, device in kinds]
    calls = list(by_kind(tensors, list(range(6))))  # type: ignore[arg-type]
    assert [positions for _, positions in calls] == [[0, 2], [1], [3, 5], [4]]
    assert all(len({(tensor.dtype, tensor.device) for tensor in call}) == 1 for call, _ in calls)


def test_on_a_cpu_all_kinds_have_one_call() -> None:
    tensors = mixed(0)
    [(call,)] = by_kind(tensors)
    assert all(found is given for found, given in zip(call, tensors, strict=True))


def test_copies_are_separate() -> None:
    originals = mixed(3)
    copies = copies_of(originals)
    for copy, original in zip(copies, originals, strict=True):
        assert torch.equal(copy, original)
        assert (copy.dtype, copy.stride()) == (original.dtype, original.stride())
    originals[0].zero_(), originals[1].zero_()  # the first one has no elements
    assert copies[1].tolist() == [[3], [3]]


def test_complex_numbers_are_pairs_over_the_same_memory() -> None:
    real, pairs = torch.ones(2), torch.zeros(2, dtype=torch.complex64)
    assert as_real(real) is real
    as_real(pairs)[1, 1] = 5
    assert pairs.tolist() == [0, 5j]


# Batches


def numbers_in_batches(tensors: Sequence[Tensor]) -> list[list[int]]:
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    return [[numbers[id(tensor)] for tensor in batch] for batch in in_batches(tensors)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([11], [[0]]),
        ([3, 3, 3], [[0, 1, 2]]),
        ([10, 0, 0], [[0, 1, 2]]),
        ([3, 11, 3, 4], [[1], [0, 2, 3]]),  # a large tensor is alone, and those around it are together
        ([6, 6, 4, 1], [[0], [1, 2], [3]]),
    ],
)
def test_small_tensors_share_a_batch(
    sizes: list[int], expected: list[list[int]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, other = ("CPU_BATCH", "DEVICE_BATCH") if device == "cpu" else ("DEVICE_BATCH", "CPU_BATCH")
    monkeypatch.setattr(module, limit, 10)
    monkeypatch.setattr(module, other, 0)
    assert numbers_in_batches([torch.empty(size, device=device) for size in sizes]) == expected


def test_on_a_device_a_batch_is_of_one_kind() -> None:
    kinds = itertools.product(["meta", "cpu"], [torch.float32, torch.bfloat16], range(2))
    tensors = [torch.empty(1, dtype=dtype, device=device) for device, dtype, _ in kinds]
    assert numbers_in_batches(tensors) == [[0, 1], [2, 3], [4, 5, 6, 7]]
