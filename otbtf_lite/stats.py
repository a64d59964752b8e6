"""Statistics of bands and counts of classes that can be merged: per part, per shard, per file. NumPy alone.

Merging is exact, so that no result depends on the order of the parts nor on how they were shared out among threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError

PERCENTILES = (1, 2, 5, 25, 50, 75, 95, 98, 99)
"""The percentiles that :meth:`BandStats.to_json` gives."""

_UNIT_BITS = 1074  # every finite float64 is a whole multiple of 2**-1074, so sums of them are kept as integers
# Bins of values that are no small integers: sign, exponent and 9 bits of the mantissa of the float32.
_DROPPED_BITS = 14
_ZERO_BIN = int(np.array(2.0**-32, np.float32).view(np.int32)) >> _DROPPED_BITS  # what is smaller shares one bin
_MAGNITUDE = 0x7FFFFFFF
_COUNTED_SPAN = 1 << 16  # classes that lie so close together are counted without sorting them


class _Tally:
    """Counts of integers, in an array that grows to span them."""

    def __init__(self) -> None:
        self.first = 0
        self.counts = np.zeros(0, np.int64)

    def add(self, first: int, counts: npt.NDArray[np.int64]) -> None:
        """Add the counts of ``first``, ``first + 1``, ..."""
        if not len(counts):
            return
        if not len(self.counts):
            self.first, self.counts = first, counts.copy()
            return
        low, high = min(self.first, first), max(self.first + len(self.counts), first + len(counts))
        if high - low > len(self.counts):
            grown = np.zeros(high - low, np.int64)
            grown[self.first - low : self.first - low + len(self.counts)] = self.counts
            self.first, self.counts = low, grown
        self.counts[first - self.first : first - self.first + len(counts)] += counts

    def found(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The integers that occur, in order, and how often."""
        places = np.flatnonzero(self.counts)
        return places + self.first, self.counts[places]


class BandStats:
    """Count, least, greatest, mean, standard deviation and percentiles of each band.

    One pass, in bounded memory: at most 0.5 MB a band for integers of up to 16 bits, 1.5 MB for other values.

    - Integers of up to 16 bits are counted value by value: everything is exact but for the last rounding to float64.
    - Of other values, each call of :meth:`update` gives a mean and a sum of squared deviations from it in float64; the
      sums of these are kept exactly: merging loses nothing, and nothing cancels (a mean of 10,000 with a deviation of
      0.1 is no problem). Their percentiles come from a histogram of logarithmic bins and are right to 0.1 % of the
      value, or to 2.4e-10 near zero.

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
        self._values = [_Tally() for _ in range(bands)]  # integers of up to 16 bits
        self._bins = [_Tally() for _ in range(bands)]  # all others
        # Of those: sums and sums of squares, in units of 2**-1074 and of its square; and the sum of infinite ones.
        self._sums = [0] * bands
        self._squares = [0] * bands
        self._infinite = np.zeros(bands)

    @property
    def bands(self) -> int:
        """How many bands."""
        return len(self.count)

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of each band; NaN where there is no value."""
        return np.array([self._moments(band)[0] for band in range(self.bands)])

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each band over all its values (divided by n); NaN where there is no value."""
        return np.array([self._moments(band)[1] for band in range(self.bands)])

    def _moments(self, band: int) -> tuple[float, float]:
        """Mean and standard deviation of one band."""
        count = int(self.count[band])
        if not count:
            return math.nan, math.nan
        if self._infinite[band]:  # or NaN, the sum of both infinities
            return float(self._infinite[band]), math.nan
        values, counts = (column.tolist() for column in self._values[band].found())
        weighted = [value * n for value, n in zip(values, counts, strict=True)]
        total = self._sums[band] + (sum(weighted) << _UNIT_BITS)
        squares = self._squares[band] + (sum(map(int.__mul__, values, weighted)) << 2 * _UNIT_BITS)
        mean = total / (count << _UNIT_BITS)
        try:
            return mean, math.sqrt((squares * count - total * total) / (count * count << 2 * _UNIT_BITS))
        except OverflowError:
            return mean, math.inf

    def percentiles(self, percents: Sequence[float]) -> npt.NDArray[np.float64]:
        """The least values that so many percent of a band's values do not exceed.

        Args:
            percents: from 0 to 100; 50 is the (lower) median.

        Returns:
            Shape (len(percents), bands); NaN where there is no value. See the class for how exact they are.

        Raises:
            InputError: a percentage outside that range.
        """
        if not all(0 <= percent <= 100 for percent in percents):
            raise InputError(f"Percentiles are numbers from 0 to 100, got {list(percents)}.")
        out = np.full((len(percents), self.bands), np.nan)
        for band in range(self.bands):
            whole, bins = self._values[band].found(), self._bins[band].found()
            values = np.concatenate([whole[0], _bin_centres(bins[0])])
            order = np.argsort(values, kind="stable")
            reached = np.cumsum(np.concatenate([whole[1], bins[1]])[order])
            if len(reached):
                # Rounded, as 7 % of 100 values is a hair above 7.
                ranks = [max(1, math.ceil(round(percent * int(reached[-1]) / 100, 6))) for percent in percents]
                found = values[order][np.searchsorted(reached, ranks)]
                out[:, band] = found.clip(self.minimum[band], self.maximum[band])
        return out

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
        count = self._count if array.dtype.kind != "f" and array.dtype.itemsize <= 2 else self._sum_up
        for band in range(self.bands):
            column = values[:, band] if chosen is None else values[chosen[:, band], band]
            if len(column):
                count(band, column)

    def _count(self, band: int, column: npt.NDArray[Any]) -> None:
        """Add integers of up to 16 bits."""
        keys = column.astype(np.intp)
        low = int(keys.min())
        counts = np.bincount(keys - low)
        self._values[band].add(low, counts)
        self._extend(band, len(column), low, low + len(counts) - 1)

    def _sum_up(self, band: int, column: npt.NDArray[Any]) -> None:
        """Add any values."""
        numbers = column.astype(np.float64)
        if column.dtype.kind == "f":
            numbers = numbers[~np.isnan(numbers)]
            if not len(numbers):
                return
        self._extend(band, len(numbers), float(numbers.min()), float(numbers.max()))
        keys = _bins_of(numbers)
        low = int(keys.min())
        self._bins[band].add(low, np.bincount(keys - low))
        finite = np.isfinite(numbers)
        if not finite.all():
            with np.errstate(invalid="ignore"):
                self._infinite[band] += numbers[~finite].sum()
            numbers = numbers[finite]
        self._add_moments(band, numbers)

    def _add_moments(self, band: int, numbers: npt.NDArray[np.float64]) -> None:
        """Add finite numbers to the sums."""
        if not len(numbers):
            return
        with np.errstate(over="ignore"):
            mean = float(numbers.mean())
            # No dot product: how BLAS sums up depends on the processor.
            deviation = float(np.square(numbers - mean).sum())
        if math.isfinite(deviation):
            whole = _whole(mean)
            self._sums[band] += whole * len(numbers)
            self._squares[band] += whole * whole * len(numbers) + (_whole(deviation) << _UNIT_BITS)
        else:  # squares of numbers beyond 1e154 are no float64, but one number has no deviation
            half = len(numbers) // 2
            self._add_moments(band, numbers[:half])
            self._add_moments(band, numbers[half:])

    def _extend(self, band: int, count: int, low: float, high: float) -> None:
        self.count[band] += count
        self.minimum[band] = min(self.minimum[band], low)
        self.maximum[band] = max(self.maximum[band], high)

    def merge(self, other: BandStats) -> None:
        """Add the values that other statistics were made of.

        Raises:
            InputError: another number of bands.
        """
        if other.bands != self.bands:
            raise InputError(f"Statistics of {self.bands} and of {other.bands} bands can't be merged.")
        self.count += other.count
        self.minimum = np.minimum(self.minimum, other.minimum)
        self.maximum = np.maximum(self.maximum, other.maximum)
        with np.errstate(invalid="ignore"):
            self._infinite += other._infinite
        for band in range(self.bands):
            self._values[band].add(other._values[band].first, other._values[band].counts)
            self._bins[band].add(other._bins[band].first, other._bins[band].counts)
            self._sums[band] += other._sums[band]
            self._squares[band] += other._squares[band]

    def to_json(self) -> dict[str, Any]:
        """``count``, ``min``, ``max``, ``mean`` and ``std``, each a list over bands, None where there is no number.

        And ``percentiles``: such a list for each of :data:`PERCENTILES`, under its number as text.
        """
        out: dict[str, Any] = {"count": [int(n) for n in self.count]}
        columns = {"min": self.minimum, "max": self.maximum, "mean": self.mean, "std": self.std}
        out |= {name: _json_numbers(column) for name, column in columns.items()}
        rows = self.percentiles(PERCENTILES)
        out["percentiles"] = {str(q): _json_numbers(row) for q, row in zip(PERCENTILES, rows, strict=True)}
        return out


def _json_numbers(column: npt.NDArray[np.float64]) -> list[float | None]:
    """A list in which None stands for NaN and infinity, which JSON does not have."""
    return [float(value) if math.isfinite(value) else None for value in column]


def _whole(value: float) -> int:
    """A finite number in units of 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << _UNIT_BITS) // denominator)


def _bins_of(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """The number of each value's bin: 0 for zero, negative for negative values, in the order of the values."""
    with np.errstate(over="ignore"):  # beyond float32 there is one more bin
        bits = numbers.astype(np.float32).view(np.int32)
    keys: npt.NDArray[np.int32] = np.maximum(((bits & _MAGNITUDE) >> _DROPPED_BITS) - _ZERO_BIN, 0)
    np.negative(keys, out=keys, where=bits < 0)
    return keys


def _bin_centres(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The middle of each bin; infinite for what is beyond float32."""
    bits = ((np.abs(keys) + _ZERO_BIN) << _DROPPED_BITS) + (1 << _DROPPED_BITS - 1)
    with np.errstate(invalid="ignore"):
        centres = bits.astype(np.int32).view(np.float32).astype(np.float64)
    centres[np.isnan(centres)] = np.inf
    centres[keys == 0] = 0.0
    return np.copysign(centres, keys)


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
        if not labels.size:
            return
        low, high = int(labels.min()), int(labels.max())
        if high - low < _COUNTED_SPAN:  # sorting is ten times slower
            above = labels.reshape(-1).astype(np.intp) - np.asarray(labels.min()).astype(np.intp)
            counted = np.bincount(above)
            places = np.flatnonzero(counted)
            found = [low + place for place in places.tolist()]
            counts = counted[places].tolist()
        else:
            found, counts = (column.tolist() for column in np.unique(labels, return_counts=True))
        for value, count in zip(found, counts, strict=True):
            self._counts[value] = self._counts.get(value, 0) + count

    def merge(self, other: ClassCounts) -> None:
        """Add the counts of another."""
        for value, count in other._counts.items():
            self._counts[value] = self._counts.get(value, 0) + count

    def to_json(self) -> dict[str, int]:
        """Counts by class, whose numbers are text as JSON's keys must be."""
        return {str(value): count for value, count in self.counts.items()}


class Summary:
    """Statistics of samples by key: of the bands of measurements, and of the classes of what is categorical."""

    def __init__(self) -> None:
        self.bands: dict[str, BandStats] = {}
        """Statistics of the bands, by key."""
        self.classes: dict[str, ClassCounts] = {}
        """Counts of the classes, by key."""

    def update(
        self,
        key: str,
        array: npt.NDArray[Any],
        valid: npt.NDArray[np.bool_] | None = None,
        *,
        categorical: bool = False,
    ) -> None:
        """Add the array of one sample; complex values, text and arrays without elements are passed over.

        Args:
            key: its name.
            array: (..., bands), or a single value.
            valid: which places count, as for :meth:`BandStats.update`; None: all.
            categorical: its values are classes, if they are integers.

        Raises:
            InputError: another number of bands than before under that key.
        """
        array = np.atleast_1d(array)
        if array.dtype.kind not in "iufb" or not array.shape[-1]:
            return
        if categorical and array.dtype.kind != "f":
            self.classes.setdefault(key, ClassCounts()).update(array if valid is None else array[valid])
            return
        if key not in self.bands:
            self.bands[key] = BandStats(array.shape[-1])
        self.bands[key].update(array, valid)

    def merge(self, other: Summary) -> None:
        """Add what another was made of.

        Raises:
            InputError: another number of bands under the same key.
        """
        for key, stats in other.bands.items():
            self.bands.setdefault(key, BandStats(stats.bands)).merge(stats)
        for key, counts in other.classes.items():
            self.classes.setdefault(key, ClassCounts()).merge(counts)

    def to_json(self) -> dict[str, Any]:
        """``statistics`` (of :meth:`BandStats.to_json`) and ``class_counts`` by key, each where there are any."""
        parts: dict[str, Mapping[str, BandStats] | Mapping[str, ClassCounts]] = {
            "statistics": self.bands,
            "class_counts": self.classes,
        }
        return {name: {key: part[key].to_json() for key in sorted(part)} for name, part in parts.items() if part}
