from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otbtf_lite import sharding
from otbtf_lite.errors import InputError

# What each worker gets under TensorFlow's sharding by file is shown with TensorFlow itself, in test_tfrecords.


def test_shards_come_in_numeric_order() -> None:
    names = ["10.records", "9.records", "manifest.json", "0.records", "1.records.tmp", "positions.gpkg"]
    assert sharding.numeric_order(names) == ["0.records", "9.records", "10.records"]
    assert [sharding.shard_number(sharding.shard_name(n)) for n in (0, 7, 12345)] == [0, 7, 12345]


@pytest.mark.parametrize(
    "name", ["", "records", ".records", "00.records", "01.records", "-1.records", "1.records\n", "../1.records",
             "a1.records", "1.RECORDS", "1_0.records", "\u0663.records", "9" * 5000 + ".records", ".1.records.tmp"]
)  # fmt: skip
def test_other_names_are_no_shards(name: str) -> None:
    assert sharding.shard_number(name) is None


@pytest.mark.parametrize(
    ("samples", "per_shard", "drop", "counts", "dropped"),
    [
        (10, 5, True, (5, 5), 0),
        (10, 5, False, (5, 5), 0),
        (11, 5, True, (5, 5), 1),
        (11, 5, False, (5, 5, 1), 0),
        (4, 5, False, (4,), 0),
        (5, 5, True, (5,), 0),
        (3, 1, True, (1, 1, 1), 0),
        (np.int64(7), np.int32(2), True, (2, 2, 2), 1),
    ],
)
def test_the_plan(samples: int, per_shard: int, drop: bool, counts: tuple[int, ...], dropped: int) -> None:
    assert sharding.plan_shards(samples, per_shard, drop) == sharding.ShardPlan(counts, dropped)


@given(st.integers(1, 500), st.integers(1, 100), st.booleans())
def test_a_plan_loses_less_than_a_shard(samples: int, per_shard: int, drop: bool) -> None:
    if drop and per_shard > samples:
        with pytest.raises(InputError):
            sharding.plan_shards(samples, per_shard, drop)
        return
    plan = sharding.plan_shards(samples, per_shard, drop)
    assert plan.n_samples + plan.dropped == samples
    assert plan.dropped < per_shard
    assert drop or not plan.dropped
    assert set(plan.counts[:-1]) <= {per_shard}
    assert 0 < plan.counts[-1] <= per_shard


@pytest.mark.parametrize(
    ("samples", "per_shard", "drop", "message"),
    [
        (
            7,
            100,
            True,
            "7 samples do not fill one shard of n_samples_per_shard=100, .*drop_remainder=True .* at most 7 a",
        ),
        (0, 5, False, "nothing to write: the data set has 0 samples"),
        (5, 0, False, "at least 1, got 0"),
        (5, -3, False, "at least 1, got -3"),
        (5, 2.0, False, "must be an integer, got 2.0"),
        (5, True, False, "must be an integer, got True"),
        (5, None, False, "must be an integer, got None"),
    ],
)
def test_what_can_not_be_planned(samples: int, per_shard: Any, drop: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sharding.plan_shards(samples, per_shard, drop)


@pytest.mark.parametrize(
    ("counts", "workers", "takes", "per_worker", "lost"),
    [
        ([5, 5, 5, 5], 1, (5, 5, 5, 5), 20, 0),
        ([5, 5, 5, 5], 2, (5, 5, 5, 5), 10, 0),
        ([5, 5, 5, 5], 3, (5, 5, 5), 5, 5),
        ([5, 5, 5, 5], 4, (5, 5, 5, 5), 5, 0),
        ([5, 5, 5, 3], 2, (5, 5, 3, 3), 8, 2),  # the first worker leaves two records, rather than both a shard
        ([5, 5, 5, 3], 4, (3, 3, 3, 3), 3, 6),
        ([1, 9, 9, 1], 2, (1, 9, 9, 1), 10, 0),
        ([9, 1, 9, 1], 2, (2, 1, 0, 1), 2, 16),
        ([2, 2, 9, 0], 2, (2, 2), 2, 9),  # two more shards would win nothing
    ],
)
def test_the_trimming(counts: list[int], workers: int, takes: tuple[int, ...], per_worker: int, lost: int) -> None:
    assert sharding.trim(counts, workers) == sharding.WorkerTrim(takes, per_worker, lost)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12))
def test_trimming_gives_equal_shares_and_the_largest_there_are(counts: list[int], workers: int) -> None:
    if len(counts) < workers:
        with pytest.raises(InputError):
            sharding.trim(counts, workers)
        return
    trimmed = sharding.trim(counts, workers)
    kept = len(trimmed.takes)
    assert kept % workers == 0
    assert all(0 <= take <= count for take, count in zip(trimmed.takes, counts, strict=False))
    assert {sum(trimmed.takes[worker::workers]) for worker in range(workers)} == {trimmed.per_worker}
    assert trimmed.lost == sum(counts) - sum(trimmed.takes)
    ends = range(workers, len(counts) + 1, workers)
    assert trimmed.per_worker == max(min(sum(counts[worker:end:workers]) for worker in range(workers)) for end in ends)


def test_fewer_shards_than_workers_is_an_error_that_says_how_to_go_on() -> None:
    with pytest.raises(InputError, match=r"^3 shards can't feed 4 workers: .*otbtf-lite reshard DIR --shards 4"):
        sharding.trim([5, 5, 5], 4)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "2"])
def test_workers_and_batches_are_counted_from_one(value: Any) -> None:
    with pytest.raises(InputError, match=f"n_workers must be an integer of at least 1, got {value!r}"):
        sharding.check_workers(value)
    with pytest.raises(InputError, match=f"batch_size must be an integer of at least 1, got {value!r}"):
        sharding.check_batch_size(value)


@pytest.mark.parametrize(
    ("samples", "size", "drop", "n"),
    [(10, 5, True, 2), (11, 5, True, 2), (11, 5, False, 3), (4, 5, True, 0), (4, 5, False, 1)],
)
def test_batches(samples: int, size: int, drop: bool, n: int) -> None:
    assert sharding.n_batches(samples, size, drop) == n


@given(st.integers(1, 200), st.integers(0, (1 << 63) - 1), st.integers(0, 9))
def test_an_order_has_each_sample_once_and_is_a_function_of_its_arguments(n: int, seed: int, epoch: int) -> None:
    order = sharding.permutation(n, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(n))
    assert (order == sharding.permutation(n, seed, epoch)).all()


def test_another_seed_or_epoch_is_another_order() -> None:
    orders = {tuple(sharding.permutation(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_orders_stay_what_they_are() -> None:
    """A data set is made again from its seed: another order in a later version would be another data set."""
    assert sharding.permutation(8, 4, 1).tolist() == [4, 0, 3, 2, 7, 1, 6, 5]


def test_other_keys_are_other_numbers() -> None:
    keys: list[tuple[int, ...]] = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (1 << 40,)]
    draws = {int(sharding.generator(3, *key).integers(1 << 62)) for key in keys}
    assert len(draws) == len(keys)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.0, True, "4"])
def test_a_seed_is_a_number_below_2_to_the_63(seed: Any) -> None:
    with pytest.raises(InputError, match="A seed must be an integer"):
        sharding.check_seed(seed)


def test_no_seed_is_a_new_one() -> None:
    drawn = {sharding.check_seed(None) for _ in range(20)}
    assert len(drawn) == 20
    assert all(sharding.check_seed(seed) == seed for seed in [*drawn, 0, (1 << 63) - 1, np.int64(5)])
