import random

import numpy as np
import pytest
import torch

from weft.errors import WeftError
from weft.train.data.sampler import BatchSampler, index_checksum


def epoch_of(order: BatchSampler, epoch: int) -> list[int]:
    updates = range(epoch * order.per_epoch, (epoch + 1) * order.per_epoch)
    return [int(index) for update in updates for index in order.indices(update)]


def test_every_sample_comes_once_an_epoch_and_the_rest_is_left_out() -> None:
    order = BatchSampler(24, 6, seed=1)
    assert order.per_epoch == 4
    assert [order.epoch(update) for update in (0, 3, 4, 11)] == [0, 0, 1, 2]
    for epoch in range(3):
        assert sorted(epoch_of(order, epoch)) == list(range(24))
    assert len(set(epoch_of(BatchSampler(27, 6, seed=1), 0))) == 24


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = BatchSampler(64, 8, seed=0)
    orders = [epoch_of(order, 0), epoch_of(order, 1), epoch_of(BatchSampler(64, 8, seed=1), 0), list(range(64))]
    assert len({tuple(one) for one in orders}) == 4


def test_an_update_has_its_samples_whoever_asks_and_whenever() -> None:
    here, there = BatchSampler(50, 7, seed=3), BatchSampler(50, 7, seed=3)
    forwards = [here.indices(update).tolist() for update in range(30)]
    np.random.seed(9)
    random.seed(9)
    torch.manual_seed(9)
    backwards = [there.indices(update).tolist() for update in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_global_generators_are_left_alone() -> None:
    np.random.seed(5)
    before = np.random.random()
    np.random.seed(5)
    BatchSampler(50, 7, seed=3).indices(0)
    assert np.random.random() == before


def test_checksums_tell_batches_apart_whatever_their_type() -> None:
    indices = np.array([3, 1, 2])
    assert index_checksum(indices) == index_checksum(indices.astype(np.int32)) == index_checksum(indices[::-1][::-1])
    assert index_checksum(indices) != index_checksum(np.array([1, 3, 2]))


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(WeftError, match="batch: 9, samples: 8"):
        BatchSampler(8, 9, seed=0)
