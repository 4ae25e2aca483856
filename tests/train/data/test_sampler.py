"""The order of samples is a function of seed and update."""

import random

import numpy as np
import pytest
import torch

from weft.errors import WeftError
from weft.train.data.sampler import BatchSampler, index_checksum


def epoch_of(sampler: BatchSampler, epoch: int) -> list[int]:
    updates = range(epoch * sampler.per_epoch, (epoch + 1) * sampler.per_epoch)
    return [int(index) for update in updates for index in sampler.indices(update)]


def test_every_sample_comes_once_per_epoch_and_the_rest_is_dropped() -> None:
    sampler = BatchSampler(24, 6, seed=1)
    assert sampler.per_epoch == 4
    assert [sampler.epoch(update) for update in (0, 3, 4, 11)] == [0, 0, 1, 2]
    for epoch in range(3):
        assert sorted(epoch_of(sampler, epoch)) == list(range(24))
    assert len(set(epoch_of(BatchSampler(27, 6, seed=1), 0))) == 24


def test_epochs_and_seeds_have_different_orders() -> None:
    sampler = BatchSampler(64, 8, seed=0)
    orders = [epoch_of(sampler, 0), epoch_of(sampler, 1), epoch_of(BatchSampler(64, 8, seed=1), 0), list(range(64))]
    assert len({tuple(order) for order in orders}) == 4


def test_the_samples_of_an_update_do_not_depend_on_other_updates() -> None:
    first, second = BatchSampler(50, 7, seed=3), BatchSampler(50, 7, seed=3)
    forwards = [first.indices(update).tolist() for update in range(30)]
    np.random.seed(9)
    random.seed(9)
    torch.manual_seed(9)
    backwards = [second.indices(update).tolist() for update in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_global_generators_are_left_alone() -> None:
    np.random.seed(5)
    before = np.random.random()
    np.random.seed(5)
    BatchSampler(50, 7, seed=3).indices(0)
    assert np.random.random() == before


def test_checksums_distinguish_batches_but_not_integer_types() -> None:
    indices = np.array([3, 1, 2])
    assert index_checksum(indices) == index_checksum(indices.astype(np.int32)) == index_checksum(indices[::-1][::-1])
    assert index_checksum(indices) != index_checksum(np.array([1, 3, 2]))


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(WeftError, match="batch: 9, samples: 8"):
        BatchSampler(8, 9, seed=0)
