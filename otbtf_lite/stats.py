"""Statistics of bands and counts of classes that can be merged: per part, per shard, per file. NumPy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError


class BandStats:
    """Count, least, greatest, mean and standard deviation of each band, in float64.

    Parts are merged by the pairwise update of Chan, Golub and LeVeque (1983), which stays exact where sums of squares
    would cancel: a mean of 10,000 with a deviation of 0.1 is no problem.

    Args:
        bands: how many bands.

    Raises:
        InputError: fewer than one band.
    """

    def __init__(self, bands: int) -> None:
        if bands < 1:
            raise InputError(f"Statistics are of at least one band, got {bands}.")
        self.count = np.zeros(bands, np.int64)
        """Valid values of each band."""
        self.minimum = np.full(bands, np.inf)
        """Least value; infinite where there is none."""
        self.maximum = np.full(bands, -np.inf)
        """Greatest value; minus infinite where there is none."""
        self._mean = np.zeros(bands)
        self._squares = np.zeros(bands)  # sum of squared deviations from the mean

    @property
    def bands(self) -> int:
        """How many bands."""
        return len(self.count)

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of each band; NaN where there is no value."""
        return np.where(self.count > 0, self._mean, np.nan)

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each band over all its values (divided by n); NaN where there is no value."""
        return np.sqrt(np.where(self.count > 0, self._squares / np.maximum(self.count, 1), np.nan))

    def update(self, array: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> None:
        """Add the values of an array.

        Args:
            array: real values, (..., bands); NaN is left out.
            valid: which places count: the array's shape without the last axis, or with it; True = valid. None: all.

        Raises:
            InputError: another number of bands, another shape of ``valid``, or complex values.
        """
        array = np.asarray(array)
        if array.ndim < 1 or array.shape[-1] != self.bands or array.dtype.kind not in "iufb":
            raise InputError(
                f"Statistics of {self.bands} bands take real arrays (..., bands), not {array.dtype}{array.shape}."
            )
        if valid is not None and valid.shape not in (array.shape, array.shape[:-1]):
            raise InputError(f"valid must have the shape {array.shape[:-1]} or {array.shape}, got {valid.shape}.")
        values = array.reshape(-1, self.bands)
        if valid is None:
            chosen = None
        else:
            chosen = np.broadcast_to(valid.reshape(-1, self.bands if valid.shape == array.shape else 1), values.shape)
        part = BandStats(self.bands)
        for band in range(self.bands):
            column = values[:, band] if chosen is None else values[chosen[:, band], band]
            part._take(band, column)
        self.merge(part)

    def _take(self, band: int, column: npt.NDArray[Any]) -> None:
        """Set one band of empty statistics."""
        numbers = column.astype(np.float64)
        if column.dtype.kind == "f":
            numbers = numbers[~np.isnan(numbers)]
        if numbers.size:
            self.count[band] = numbers.size
            self.minimum[band], self.maximum[band] = numbers.min(), numbers.max()
            with np.errstate(invalid="ignore"):  # infinite values have no deviation
                self._mean[band] = numbers.mean()
                numbers -= self._mean[band]
                self._squares[band] = numbers @ numbers

    def merge(self, other: BandStats) -> None:
        """Add the values that other statistics were made of.

        Raises:
            InputError: another number of bands.
        """
        if other.bands != self.bands:
            raise InputError(f"Statistics of {self.bands} and of {other.bands} bands can't be merged.")
        total = self.count + other.count
        share = other.count / np.maximum(total, 1)
        with np.errstate(invalid="ignore"):  # as above
            delta = other._mean - self._mean
            self._squares = self._squares + other._squares + delta**2 * (self.count * share)
            self._mean = self._mean + delta * share
        self.count = total
        self.minimum = np.minimum(self.minimum, other.minimum)
        self.maximum = np.maximum(self.maximum, other.maximum)

    def to_json(self) -> dict[str, list[float | None]]:
        """``count``, ``min``, ``max``, ``mean`` and ``std``, each a list over bands, None where there is no number."""
        columns = {"min": self.minimum, "max": self.maximum, "mean": self.mean, "std": self.std}
        # JSON has neither NaN nor infinity.
        out: dict[str, list[float | None]] = {"count": [int(n) for n in self.count]}
        for name, column in columns.items():
            out[name] = [float(v) if math.isfinite(v) else None for v in column]
        return out


class ClassCounts:
    """How often each class occurs.

    Args:
        counts: counts to start from, by class.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts = {int(k): int(v) for k, v in (counts or {}).items()}

    @property
    def counts(self) -> dict[int, int]:
        """Counts by class, in the order of classes."""
        return dict(sorted(self._counts.items()))

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self._counts.values())

    def update(self, labels: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> None:
        """Count the values of an array of integers.

        Args:
            labels: classes, of any shape.
            valid: which of them count, of the same shape (without a last axis of length 1); True = valid. None: all.

        Raises:
            InputError: labels that are no integers, or another shape of ``valid``.
        """
        labels = np.asarray(labels)
        if labels.dtype.kind not in "iub":
            raise InputError(f"Classes are integers, got an array of {labels.dtype}.")
        if valid is not None:
            if labels.shape not in (valid.shape, (*valid.shape, 1)):
                raise InputError(f"valid must have the shape {labels.shape}, got {valid.shape}.")
            labels = labels[valid.reshape(labels.shape)]
        if labels.dtype.itemsize == 1 and labels.dtype.kind != "i":  # sorting is ten times slower
            counts = np.bincount(labels.reshape(-1).view(np.uint8), minlength=1)
            found = np.flatnonzero(counts)
            counts = counts[found]
        else:
            found, counts = np.unique(labels, return_counts=True)
        for value, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._counts[value] = self._counts.get(value, 0) + count

    def merge(self, other: ClassCounts) -> None:
        """Add the counts of another."""
        for value, count in other._counts.items():
            self._counts[value] = self._counts.get(value, 0) + count

    def to_json(self) -> dict[str, int]:
        """Counts by class, whose numbers are text as JSON's keys must be."""
        return {str(value): count for value, count in self.counts.items()}
