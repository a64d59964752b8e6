"""Readers: random access to samples, whatever they come from."""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.footprints import Footprints
from otbtf_lite.grid import Positions, concat_positions
from otbtf_lite.handles import Handles, thread_count
from otbtf_lite.reader_base import (
    PatchesReaderBase,
    SampleIndexError,
    check_index,
    has_stats,
    stack_samples,
    summarise,
)
from otbtf_lite.schema import Sample, Schema
from otbtf_lite.stats import BandStats, Summary

if TYPE_CHECKING:
    from otbtf_lite.raster import RasterSource

__all__ = [
    "ArraysReader",
    "ConcatReader",
    "PatchesReaderBase",
    "RasterPatchesReader",
    "SampleIndexError",
    "check_index",
    "stack_samples",
    "summarise",
]

_STATS_CHUNK = 256  # samples summed up together, whatever the number of threads: sums are merged in one order


class RasterPatchesReader(PatchesReaderBase):
    """Patches of rasters around positions: sample i has one array (rows, cols, bands) of each source at position i.

    Patches are read on each source's own grid; the sources after the first are aligned to it, and positions in
    another CRS are transformed into its CRS. :func:`otbtf_lite.sampling.select` gives positions whose patches can be
    read.

    Args:
        sources: :class:`~otbtf_lite.RasterSource` by key; the first is the reference.
        positions: where the patches are.
        threads: how many threads read, each with its own open files; None: one a processor, at most 8.
        label_key: the key under which a position's label enters the sample, int64 of shape (1,); None: it doesn't.

    Raises:
        InputError: no sources, no positions, a label key without labels or equal to a source's key. At first use:
            sources that do not fit together.
    """

    def __init__(
        self,
        sources: Mapping[str, RasterSource],
        positions: Positions,
        *,
        threads: int | None = None,
        label_key: str | None = None,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise InputError(f"sources is a dict of RasterSource by key, with at least one, got {sources!r}.")
        if not isinstance(positions, Positions) or not len(positions):
            raise InputError(f"There must be at least one position to read patches at, got {positions!r}.")
        if label_key is not None and label_key in sources:
            raise InputError(f"label_key {label_key!r} is the key of a source: give the label another key.")
        if label_key is not None and positions.label is None:
            raise InputError(f"label_key is {label_key!r}, but these positions have no labels.")
        self.sources = dict(sources)
        """The sources, as given."""
        self.label_key = label_key
        """The key of the label."""
        self.threads = thread_count(threads)
        """How many threads read."""
        self._positions = positions
        self._set_up()

    def _set_up(self) -> None:
        self._lock = threading.Lock()
        self._ready: tuple[Footprints, Handles] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but open files, threads and locks."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_ready")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The same reader, with nothing open."""
        self.__dict__.update(state)
        self._set_up()

    def _prepare(self) -> tuple[Footprints, Handles]:
        """The footprints and the handles, made at first use."""
        if self._ready is None:
            with self._lock:
                if self._ready is None:
                    footprints = Footprints.of(self._positions, self.sources)
                    self._ready = footprints, Handles(footprints.sources, self.threads)
        return self._ready

    @property
    def positions(self) -> Positions:
        """Where each sample lies, as given."""
        return self._positions

    def get_size(self) -> int:
        """The number of positions."""
        return len(self._positions)

    def get_sample(self, index: int) -> Sample:
        """The patches at one position: (rows, cols, bands) by source, and the label under its key.

        Raises:
            SampleIndexError: there is no such position.
            InputError: a patch that reaches beyond its raster.
            DataError: a file that can't be opened or read.
        """
        return self._read(check_index(index, self.get_size()))

    def get_samples(self, indices: Sequence[int]) -> list[Sample]:
        """The samples at several positions, in the order asked.

        They are read in the order of the reference's blocks, on ``threads`` threads, so that each block is decoded
        about once. The result does not depend on the number of threads.

        Raises:
            SampleIndexError: there is no such position.
            InputError: a patch that reaches beyond its raster.
            DataError: a file that can't be opened or read.
        """
        return self._gather(indices, None)

    @property
    def summarises(self) -> bool:
        """Yes: from the nodata of the sources."""
        return True

    def get_summarised(self, indices: Sequence[int]) -> tuple[list[Sample], Summary]:
        """What :meth:`get_samples` gives, and statistics of it, made by the threads that read.

        Pixels without data are left out. Categorical sources and labels have class counts, all others statistics.

        Raises:
            SampleIndexError: there is no such position.
            InputError: a patch that reaches beyond its raster.
            DataError: a file that can't be opened or read.
        """
        summary = Summary()
        return self._gather(indices, summary), summary

    def block_order(self) -> npt.NDArray[np.int64]:
        """All indices in the order of the reference's blocks, shape (n,)."""
        order, _ = self._prepare()[0].block_order(np.arange(self.get_size()))
        return order

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample's patches in memory."""
        sources = self._prepare()[0].sources.values()
        return sum(math.prod(source.patch_shape) * source.dtype.itemsize for source in sources)

    def _gather(self, indices: Sequence[int], summary: Summary | None) -> list[Sample]:
        """The samples; what they come to is added to the summary, if there is one."""
        wanted = np.array([check_index(index, self.get_size()) for index in indices], np.int64)
        if not len(wanted):
            return []
        footprints, handles = self._prepare()
        order, blocks = footprints.block_order(wanted)
        parts = np.split(order, _cuts(blocks, handles.threads))
        samples: list[Sample] = [{}] * len(wanted)

        def read(part: npt.NDArray[np.int64]) -> Summary:
            own = Summary()
            for slot in part.tolist():
                index = int(wanted[slot])
                samples[slot] = self._read(index)
                if summary is not None:
                    self._sum_up(index, samples[slot], own)
            return own

        # Merging is exact, so that it does not matter which thread read what.
        for own in handles.map(read, [part for part in parts if len(part)]):
            if summary is not None:
                summary.merge(own)
        return samples

    def _sum_up(self, index: int, sample: Sample, summary: Summary) -> None:
        footprints, handles = self._prepare()
        for key, source in footprints.sources.items():
            valid = handles.readers[key].valid(footprints.window(key, index), sample[key])
            summary.update(key, sample[key], None if valid.all() else valid, categorical=source.categorical)
        if self.label_key is not None:
            summary.update(self.label_key, sample[self.label_key], categorical=True)

    def _read(self, index: int) -> Sample:
        footprints, handles = self._prepare()
        sample: Sample = {}
        key = ""
        try:
            for key, reader in handles.readers.items():
                sample[key] = reader.read(footprints.window(key, index))
        except (InputError, DataError) as error:
            raise type(error)(f"Position {index}, source {key!r}: {error}") from error
        if self.label_key is not None and self._positions.label is not None:
            sample[self.label_key] = self._positions.label[index : index + 1].copy()
        return sample

    def get_stats(self) -> Mapping[str, Mapping[str, npt.NDArray[np.float64]]]:
        """Statistics of each source's bands over all patches; pixels without data and complex values are left out.

        Returns:
            For each source's key ``min``, ``max``, ``mean`` and ``std``, each of shape (bands,).

        Raises:
            InputError: a patch that reaches beyond its raster.
            DataError: a file that can't be opened or read.
        """
        return summarise(self.band_stats())

    def band_stats(self) -> dict[str, BandStats]:
        """The statistics that :meth:`get_stats` gives, in a form that can be merged."""
        footprints, handles = self._prepare()
        order, _ = footprints.block_order(np.arange(self.get_size()))
        parts = [order[start : start + _STATS_CHUNK] for start in range(0, len(order), _STATS_CHUNK)]

        def add_up(part: npt.NDArray[np.int64]) -> dict[str, BandStats]:
            real = {key: source for key, source in footprints.sources.items() if source.dtype.kind in "iufb"}
            stats = {key: BandStats(source.count) for key, source in real.items()}
            for index in part.tolist():
                sample = self._read(index)
                for key, each in stats.items():
                    each.update(sample[key], handles.readers[key].valid(footprints.window(key, index), sample[key]))
            return stats

        return _merged(handles.map(add_up, parts))

    def provenance(self) -> dict[str, Any]:
        """The sources' descriptions by key, and the names of the classes where labels have names."""
        aligned = self._prepare()[0].sources
        found: dict[str, Any] = {"sources": {key: source.describe() for key, source in aligned.items()}}
        if self._positions.classes is not None:
            found["classes"] = list(self._positions.classes)
        return found

    def close(self) -> None:
        """Close the files and end the threads; no other thread may be reading. Reading again opens them again."""
        if self._ready is not None:
            self._ready[1].close()


def _cuts(blocks: npt.NDArray[np.int64], n_parts: int) -> npt.NDArray[np.int64]:
    """Where to cut an ordered list of block numbers into about equal parts, between blocks where that is near."""
    even = np.arange(1, n_parts) * len(blocks) // n_parts
    following = np.searchsorted(blocks, blocks[even], "right")
    return np.where(following - even <= len(blocks) // (4 * n_parts), following, even)


def _merged(parts: Iterable[Mapping[str, BandStats]]) -> dict[str, BandStats]:
    total: dict[str, BandStats] = {}
    for part in parts:
        for key, stats in part.items():
            if key in total:
                total[key].merge(stats)
            else:
                total[key] = stats
    return total


class ArraysReader(PatchesReaderBase):
    """Samples that lie in memory: sample i is row i of every array.

    Args:
        arrays: by key, shape (n, ...), all with the same n. They are not copied: leave them as they are. Samples are
            copies.

    Raises:
        InputError: no arrays, one without axes, or arrays of different lengths.
    """

    gathers = True

    def __init__(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        if not isinstance(arrays, Mapping) or not arrays:
            raise InputError(f"arrays is a dict of arrays by key, with at least one, got {type(arrays).__name__}.")
        self._arrays = {key: np.asarray(array) for key, array in arrays.items()}
        first = next(iter(self._arrays))
        for key, array in self._arrays.items():
            if not array.ndim:
                raise InputError(f"Array {key!r} holds a single value: its first axis must be the samples'.")
            if len(array) != len(self._arrays[first]):
                raise InputError(
                    f"Array {first!r} has {len(self._arrays[first])} samples and array {key!r} has {len(array)}: "
                    "all need the same number."
                )
        self._size = len(self._arrays[first])

    def get_size(self) -> int:
        """The length of the arrays' first axis."""
        return self._size

    def get_sample(self, index: int) -> Sample:
        """Row ``index`` of every array, copied."""
        row = check_index(index, self._size)
        return {key: np.array(array[row], dtype=array.dtype) for key, array in self._arrays.items()}

    def get_stats(self) -> Mapping[str, Mapping[str, npt.NDArray[np.float64]]]:
        """Statistics of each array of numbers, whose last axis is its bands, as :meth:`PatchesReaderBase.get_stats`."""
        return summarise(self.band_stats())

    def band_stats(self) -> dict[str, BandStats]:
        """The statistics that :meth:`get_stats` gives, in a form that can be merged."""
        stats: dict[str, BandStats] = {}
        for key, array in self._arrays.items():
            values = array[:, None] if array.ndim == 1 else array
            if has_stats(values):
                stats[key] = BandStats(values.shape[-1])
                for start in range(0, len(values), _STATS_CHUNK):
                    stats[key].update(values[start : start + _STATS_CHUNK])
        return stats


class ConcatReader(PatchesReaderBase):
    """Several readers one after the other.

    Args:
        readers: readers whose samples have the same keys, types and shapes.

    Raises:
        InputError: no readers, readers whose samples differ, or whose labels stand for different classes.
        DataError: the first sample of a reader can't be read.
    """

    def __init__(self, readers: Iterable[PatchesReaderBase]) -> None:
        self.readers = list(readers)
        """The readers, in order."""
        if not self.readers:
            raise InputError("ConcatReader needs at least one reader.")
        self._starts = [0, *itertools.accumulate(reader.get_size() for reader in self.readers)]
        self._check_schemas()
        self._positions = concat_positions([reader.positions for reader in self.readers])

    def _check_schemas(self) -> None:
        filled = [number for number, reader in enumerate(self.readers) if reader.get_size()]
        schemas = {number: Schema.of(self.readers[number].get_sample(0)) for number in filled}
        for number in filled[1:]:
            if schemas[number] != schemas[filled[0]]:
                raise InputError(
                    f"Samples of {self._name(filled[0])} have the {schemas[filled[0]]} and those of "
                    f"{self._name(number)} the {schemas[number]}: to be joined they must be the same."
                )

    def _name(self, number: int) -> str:
        return f"reader {number} ({type(self.readers[number]).__name__})"

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the reader and the index in it."""
        number = bisect.bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def get_size(self) -> int:
        """The number of samples of all readers."""
        return self._starts[-1]

    def get_sample(self, index: int) -> Sample:
        """The sample of the reader that the number falls in."""
        number, local = self._place(check_index(index, self.get_size()))
        return self.readers[number].get_sample(local)

    def get_samples(self, indices: Sequence[int]) -> list[Sample]:
        """The samples in the order asked; each reader is asked once, for all of its own."""
        return self._gather(indices, None)

    def _gather(self, indices: Sequence[int], summary: Summary | None) -> list[Sample]:
        slots: dict[int, list[tuple[int, int]]] = {}
        for slot, index in enumerate(indices):
            number, local = self._place(check_index(index, self.get_size()))
            slots.setdefault(number, []).append((slot, local))
        samples: list[Sample] = [{}] * len(indices)
        for number, wanted in slots.items():
            own = [local for _, local in wanted]
            if summary is None:
                found = self.readers[number].get_samples(own)
            else:
                found, part = self.readers[number].get_summarised(own)
                summary.merge(part)
            for (slot, _), sample in zip(wanted, found, strict=True):
                samples[slot] = sample
        return samples

    @property
    def summarises(self) -> bool:
        """Whether all readers do."""
        return all(reader.summarises for reader in self.readers)

    def get_summarised(self, indices: Sequence[int]) -> tuple[list[Sample], Summary]:
        """The samples in the order asked, and their statistics; each reader is asked once, for all of its own."""
        summary = Summary()
        return self._gather(indices, summary), summary

    def block_order(self) -> npt.NDArray[np.int64]:
        """All indices, reader by reader, each in its own order."""
        parts = zip(self._starts, self.readers, strict=False)
        return np.concatenate([start + reader.block_order() for start, reader in parts])

    def get_stats(self) -> Mapping[str, Mapping[str, npt.NDArray[np.float64]]]:
        """Statistics over the samples of all readers."""
        return summarise(self.band_stats())

    def band_stats(self) -> dict[str, BandStats]:
        """The readers' statistics, merged."""
        return _merged(reader.band_stats() for reader in self.readers)

    @property
    def positions(self) -> Positions | None:
        """The positions of all readers in order; None unless all have some, in the same CRS."""
        return self._positions

    def provenance(self) -> dict[str, Any]:
        """``{"parts": [what each reader says of itself]}``, and the names of the classes where labels have names."""
        found: dict[str, Any] = {"parts": [reader.provenance() for reader in self.readers]}
        if self._positions is not None and self._positions.classes is not None:
            found["classes"] = list(self._positions.classes)
        return found

    def close(self) -> None:
        """Close all readers."""
        for reader in self.readers:
            reader.close()
