"""Lists of tensors: one call for all tensors of a kind, with the results of a loop."""

import itertools

import pytest
import torch
from torch import Tensor

from weft.runtime.tensors import by_kind, copy_tensors

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
