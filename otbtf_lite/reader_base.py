"""What every reader of samples is, and what their implementations share; part of `readers`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Positions
from otbtf_lite.schema import Sample
from otbtf_lite.stats import BandStats, Summary


class SampleIndexError(InputError, IndexError):
    """There is no sample of that number."""


class PatchesReaderBase(ABC):
    """Random access to samples.

    The contract: samples have numbers from 0 to ``get_size() - 1``; one number gives the same sample at any time,
    from any
    thread, in any process. Readers can be pickled. Files are opened when they are first needed, and :meth:`close`
    closes them. All samples have the same keys, types and shapes.
    """

    gathers = False
    """Whether :meth:`get_batch` is faster than reading samples and stacking them."""

    @property
    def summarises(self) -> bool:
        """Whether :meth:`get_summarised` knows what is missing and what is categorical, and costs little."""
        return False

    @abstractmethod
    def get_sample(self, index: int) -> Sample:
        """The sample of that number: arrays by name.

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file that can't be read.
        """

    @abstractmethod
    def get_stats(self) -> Mapping[str, Mapping[str, npt.NDArray[np.float64]]]:
        """Statistics over all samples: for each key ``min``, ``max``, ``mean`` and ``std``, each of shape (bands,)."""

    @abstractmethod
    def get_size(self) -> int:
        """The number of samples."""

    def get_samples(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of those numbers, in the order asked; a number may come twice.

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file that can't be read.
        """
        return [self.get_sample(index) for index in indices]

    def get_batch(self, indices: Sequence[int]) -> Sample:
        """The samples of those numbers, stacked: each key has an array of shape (len(indices), ...).

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file that can't be read.
        """
        return stack_samples(self.get_samples(indices))

    def get_summarised(self, indices: Sequence[int]) -> tuple[list[Sample], Summary]:
        """What :meth:`get_samples` gives, and its statistics and class counts.

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file that can't be read.
        """
        samples, summary = self.get_samples(indices), Summary()
        for sample in samples:
            for key, array in sample.items():
                summary.update(key, array)
        return samples, summary

    def block_order(self) -> npt.NDArray[np.int64]:
        """All indices in the order in which what they need lies in the files, shape (n,): one after another is fast."""
        return np.arange(self.get_size())

    def band_stats(self) -> dict[str, BandStats]:
        """What :meth:`get_stats` is made of, which can be merged with another reader's.

        The last axis of an array counts as its bands; an array without axes has one band. What is no number is left
        out.
        """
        stats: dict[str, BandStats] = {}
        for index in range(self.get_size()):
            for key, array in self.get_sample(index).items():
                values = np.atleast_1d(array)
                if has_stats(values):
                    stats.setdefault(key, BandStats(values.shape[-1])).update(values)
        return stats

    @property
    def positions(self) -> Positions | None:
        """Where each sample lies, in order; None where they come from no place."""
        return None

    def provenance(self) -> dict[str, Any]:
        """What the samples were made from, for the manifest: JSON-ready."""
        return {}

    def close(self) -> None:  # noqa: B027  # most readers hold nothing open
        """Close files and end threads. Reading again opens them again."""

    def __len__(self) -> int:
        """The number of samples."""
        return self.get_size()

    def __getitem__(self, index: int) -> Sample:
        """The sample of that number; negative ones count from the end, as in any sequence."""
        number, size = operator.index(index), self.get_size()
        return self.get_sample(number + size if -size <= number < 0 else number)

    def __iter__(self) -> Iterator[Sample]:
        """All samples in order, once."""
        return (self.get_sample(index) for index in range(self.get_size()))


def stack_samples(samples: Sequence[Sample]) -> Sample:
    """Samples as one batch: each key has an array of shape (len(samples), ...)."""
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]} if samples else {}


def check_index(index: int, size: int) -> int:
    """The number of a sample, as an int.

    Raises:
        SampleIndexError: there is no such sample.
    """
    number = operator.index(index)
    if not 0 <= number < size:
        raise SampleIndexError(f"There is no sample {number}: samples are numbered from 0 to {size - 1}.")
    return number


def has_stats(array: npt.NDArray[Any]) -> bool:
    """Whether an array (..., bands) holds real numbers."""
    return array.dtype.kind in "iufb" and array.shape[-1] > 0


def summarise(stats: Mapping[str, BandStats]) -> dict[str, dict[str, npt.NDArray[np.float64]]]:
    """Statistics in the form of :meth:`PatchesReaderBase.get_stats`."""
    return {
        key: {"min": each.minimum, "max": each.maximum, "mean": each.mean, "std": each.std}
        for key, each in stats.items()
    }
