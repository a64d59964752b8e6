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
from otbtf_lite.stats import BandStats, ClassCounts

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
    assert stats.to_json() == {"count": [8], "min": [3.0], "max": [3.0], "mean": [3.0], "std": [0.0]}


def test_a_mask_for_each_band() -> None:
    stats = BandStats(2)
    stats.update(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[True, False], [True, True]]))
    assert stats.count.tolist() == [2, 1]
    assert stats.mean.tolist() == [2, 4]


def test_nothing_at_all_is_json_too() -> None:
    found = json.loads(json.dumps(BandStats(2).to_json(), allow_nan=False))
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
