from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from otbtf_lite.errors import InputError
from otbtf_lite.stats import PERCENTILES, BandStats, ClassCounts, Summary

images = hnp.arrays(
    np.float64,
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.just(2)),
    elements=st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)),
)


def assert_same(stats: BandStats, values: list[np.ndarray[Any, Any]]) -> None:
    """Statistics against NumPy's own over all values of each band."""
    for band, column in enumerate(values):
        assert stats.count[band] == len(column)
        if not len(column):
            assert math.isnan(stats.mean[band])
            assert math.isnan(stats.std[band])
            continue
        assert stats.minimum[band] == column.min()
        assert stats.maximum[band] == column.max()
        assert stats.mean[band] == pytest.approx(column.mean(), rel=1e-12, abs=1e-9)
        assert stats.std[band] == pytest.approx(column.std(), rel=1e-9, abs=1e-7)


@settings(max_examples=40)
@given(st.lists(st.tuples(images, st.booleans(), st.integers(0, 2**32 - 1)), max_size=5))
def test_parts_merged_are_the_whole(parts: list[tuple[np.ndarray[Any, Any], bool, int]]) -> None:
    total, one_by_one = BandStats(2), BandStats(2)
    kept: list[list[np.ndarray[Any, Any]]] = [[], []]
    for image, has_mask, seed in parts:
        valid = (
            np.random.default_rng(seed).random(image.shape[:2]) < 0.7 if has_mask else np.ones(image.shape[:2], bool)
        )
        part = BandStats(2)
        part.update(image, valid if has_mask else None)
        total.merge(part)
        one_by_one.update(image, valid)
        for band in range(2):
            column = image[valid][:, band]
            kept[band].append(column[~np.isnan(column)])
    values = [np.concatenate([np.empty(0), *band]) for band in kept]
    assert_same(total, values)
    assert_same(one_by_one, values)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", "float16", "float32", "bool"])
def test_any_real_type(dtype: str) -> None:
    image = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (9, 8, 3)).astype(dtype)
    stats = BandStats(3)
    stats.update(image)
    assert_same(stats, list(image.reshape(-1, 3).T.astype(np.float64)))


def test_a_small_deviation_of_a_large_mean_survives() -> None:
    values = 1e9 + np.array([4.0, 7.0, 13.0, 16.0])
    stats = BandStats(1)
    for value in values:
        stats.update(value.reshape(1, 1))
    assert stats.mean[0] == 1e9 + 10
    assert stats.std[0] == pytest.approx(math.sqrt(22.5), rel=1e-12)


def test_float32_is_summed_in_float64() -> None:
    stats = BandStats(1)
    stats.update(np.full((3000, 1000, 1), 0.1, np.float32))
    assert stats.mean[0] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_half_missing() -> None:
    image = np.full((4, 4, 1), 3.0)
    image[:2] = -9999
    stats = BandStats(1)
    stats.update(image, image[:, :, 0] != -9999)
    found = stats.to_json()
    assert found.pop("percentiles") == {str(percent): [3.0] for percent in PERCENTILES}
    assert found == {"count": [8], "min": [3.0], "max": [3.0], "mean": [3.0], "std": [0.0]}


def test_a_mask_for_each_band() -> None:
    stats = BandStats(2)
    stats.update(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[True, False], [True, True]]))
    assert stats.count.tolist() == [2, 1]
    assert stats.mean.tolist() == [2, 4]


def test_nothing_at_all_is_json_too() -> None:
    found = json.loads(json.dumps(BandStats(2).to_json(), allow_nan=False))
    assert set(map(tuple, found.pop("percentiles").values())) == {(None, None)}
    assert found == {"count": [0, 0]} | {name: [None, None] for name in ("min", "max", "mean", "std")}


def test_infinity_is_json_too() -> None:
    stats = BandStats(1)
    for value in (1.0, math.inf, 2.0):
        stats.update(np.array([[value]]))
    assert stats.to_json()["max"] == [None]
    assert stats.to_json()["min"] == [1.0]


@pytest.mark.parametrize(
    ("array", "valid", "message"),
    [
        (np.zeros((4, 4, 3)), None, "2 bands"),
        (np.zeros(()), None, "2 bands"),
        (np.zeros((4, 2), complex), None, "complex128"),
        (np.zeros((4, 5, 2)), np.ones((5, 4), bool), r"\(4, 5\)"),
    ],
)
def test_wrong_arrays(array: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BandStats(2).update(array, valid)


def test_wrong_bands() -> None:
    with pytest.raises(InputError, match="at least one"):
        BandStats(0)
    with pytest.raises(InputError, match="2 and of 3"):
        BandStats(2).merge(BandStats(3))


labels = hnp.arrays(
    st.sampled_from([np.dtype(t) for t in ("uint8", "int8", "int16", "uint64", "bool")]),
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.just(1)),
)


@settings(max_examples=40)
@given(st.lists(st.tuples(labels, st.integers(0, 2**32 - 1))))
def test_classes_counted_one_by_one(parts: list[tuple[np.ndarray[Any, Any], int]]) -> None:
    total, merged, expected = ClassCounts(), ClassCounts(), Counter[int]()
    for array, seed in parts:
        valid = np.random.default_rng(seed).random(array.shape[:2]) < 0.7
        total.update(array, valid)
        part = ClassCounts()
        part.update(array[valid])
        merged.merge(part)
        expected.update(int(v) for v in array[valid].ravel())
    assert total.counts == merged.counts == dict(expected)
    assert list(total.counts) == sorted(expected)
    assert total.total == sum(expected.values())


def test_class_counts_through_json() -> None:
    counts = ClassCounts({3: 1, -1: 2})
    assert json.loads(json.dumps(counts.to_json())) == {"-1": 2, "3": 1}
    assert list(counts.to_json()) == ["-1", "3"]


def test_classes_are_integers() -> None:
    with pytest.raises(InputError, match="float64"):
        ClassCounts().update(np.zeros(3))
    with pytest.raises(InputError, match=r"\(3,\)"):
        ClassCounts().update(np.zeros(3, int), np.ones(4, bool))


def test_counts_of_the_largest_classes() -> None:
    counts = ClassCounts()
    counts.update(np.array([2**64 - 1, 2**64 - 3, 2**64 - 1], np.uint64))
    counts.update(np.array([0, 2**63], np.uint64))
    assert counts.counts == {0: 1, 2**63: 1, 2**64 - 3: 1, 2**64 - 1: 2}


@settings(max_examples=60)
@given(
    hnp.arrays(
        st.sampled_from([np.dtype(t) for t in ("uint8", "int8", "uint16", "int16", "bool")]),
        st.tuples(st.integers(1, 40), st.just(2)),
    ),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
)
def test_percentiles_of_small_integers_are_exact(array: np.ndarray[Any, Any], percents: list[float]) -> None:
    stats = BandStats(2)
    for row in array:
        stats.update(row)
    found = stats.percentiles(percents)
    for band in range(2):
        ranked = np.sort(array[:, band].astype(np.int64))
        for percent, value in zip(percents, found[:, band], strict=True):
            assert value in ranked
            # No more than that share lies below, and no more than the rest above.
            assert (ranked < value).mean() <= percent / 100 + 1e-9
            assert (ranked > value).mean() <= 1 - percent / 100 + 1e-9


@settings(max_examples=60)
@given(
    hnp.arrays(
        st.sampled_from([np.dtype(np.float32), np.dtype(np.float64)]),
        st.tuples(st.integers(1, 60), st.just(1)),
        elements=st.floats(-(2.0**70), 2.0**70, width=32),
    )
)
def test_percentiles_of_other_values_are_right_to_a_thousandth(array: np.ndarray[Any, Any]) -> None:
    stats = BandStats(1)
    stats.update(array)
    exact = np.percentile(array[:, 0].astype(np.float64), PERCENTILES, method="inverted_cdf")
    np.testing.assert_allclose(stats.percentiles(PERCENTILES)[:, 0], exact, rtol=1.001e-3, atol=2.4e-10)


def test_percentiles_of_integers_and_other_values_together() -> None:
    stats = BandStats(1)
    stats.update(np.arange(100, dtype=np.uint8)[:, None])
    stats.update(np.arange(100, 200, dtype=np.int32)[:, None])
    assert stats.percentiles([0, 25, 50]).ravel().tolist() == [0, 49, 99]
    assert stats.percentiles([75, 100]).ravel() == pytest.approx([149, 199], rel=1e-3)
    assert (stats.mean[0], stats.std[0]) == (99.5, pytest.approx(np.arange(200).std(), rel=1e-14))


def test_percentages_are_checked() -> None:
    with pytest.raises(InputError, match="from 0 to 100"):
        BandStats(1).percentiles([101])


@settings(max_examples=40)
@given(
    st.lists(hnp.arrays(np.float64, 5, elements=st.floats()), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_no_order_of_the_parts_changes_a_bit(parts: list[np.ndarray[Any, Any]], random: Any) -> None:
    def total(order: list[np.ndarray[Any, Any]], groups: int) -> dict[str, Any]:
        sums = [BandStats(1) for _ in range(groups)]
        for number, part in enumerate(order):
            sums[number % groups].update(part[:, None])
        for each in sums[1:]:
            sums[0].merge(each)
        return sums[0].to_json()

    expected = total(parts, 1)
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert total(shuffled, 3) == expected
    json.dumps(expected, allow_nan=False)


def test_huge_values_do_not_overflow() -> None:
    stats = BandStats(1)
    stats.update(np.array([[1e300], [-1e300]]))
    assert (stats.mean[0], stats.std[0]) == (0, math.inf)
    stats = BandStats(1)
    stats.update(np.array([[1e300], [1e300]]))
    assert (stats.mean[0], stats.std[0]) == (1e300, 0)


def test_memory_does_not_grow_with_the_values() -> None:
    stats = BandStats(1)
    rng = np.random.default_rng(0)
    for exponent in range(-300, 300, 3):
        stats.update(rng.normal(size=(1000, 1)) * 10.0**exponent)
    assert stats._bins[0].counts.nbytes <= 1_500_000
    for _ in range(3):
        stats.update(rng.integers(0, 2**16, (1000, 1)).astype(np.uint16))
    assert stats._values[0].counts.nbytes <= 8 << 16


def test_a_summary_tells_measurements_from_classes() -> None:
    parts = []
    for number in range(2):
        part = Summary()
        part.update("x", np.full((2, 2, 3), number, np.uint8))
        part.update("y", np.full((2, 2, 1), number, np.uint8), np.eye(2, dtype=bool), categorical=True)
        part.update("text", np.array(["a"]))
        part.update("z", np.ones((2, 2, 1), np.complex64))
        part.update("share", np.float32(number), categorical=True)
        parts.append(part)
    parts[0].merge(parts[1])
    found = parts[0].to_json()
    assert list(found) == ["statistics", "class_counts"]
    assert found["class_counts"] == {"y": {"0": 2, "1": 2}}
    assert list(found["statistics"]) == ["share", "x"]
    assert found["statistics"]["x"]["count"] == [8, 8, 8]
    assert found["statistics"]["x"]["mean"] == [0.5, 0.5, 0.5]
    assert Summary().to_json() == {}
