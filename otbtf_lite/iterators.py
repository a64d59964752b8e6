"""The order in which samples are read, and reading them ahead: what a Dataset is made of."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from otbtf_lite import sharding
from otbtf_lite.errors import InputError
from otbtf_lite.readers import PatchesReaderBase
from otbtf_lite.schema import Sample
from otbtf_lite.stats import Summary

if TYPE_CHECKING:
    import numpy.typing as npt

T = TypeVar("T")
_REGION_STREAM = 0x726567696F6E  # keeps the orders within regions apart from other uses of one seed
_CHUNK_BYTES = 16 << 20
_USUAL_BYTES = 32 << 10  # of a sample whose reader does not say


class Buffer:
    """A list of bounded length.

    Args:
        max_length: the most elements it takes.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.container: list[Any] = []
        """The elements."""

    def size(self) -> int:
        """The number of elements."""
        return len(self.container)

    def add(self, new_element: Any) -> None:
        """Adds an element.

        Raises:
            InputError: the buffer is full.
        """
        if self.is_complete():
            raise InputError(f"The buffer is full: it holds {self.max_length} elements.")
        self.container.append(new_element)

    def is_complete(self) -> bool:
        """Whether the buffer is full."""
        return self.size() >= self.max_length


class IteratorBase(ABC):
    """Gives the indices of the samples to read, pass after pass.

    Subclasses define ``__next__``, or ``__iter__`` as a generator. One that ends after a pass is started again by
    ``iter()``.

    Args:
        patches_reader: the reader; indices go from 0 to ``patches_reader.get_size() - 1``.
    """

    repeatable = False
    """Whether a new iterator over the same reader, with the same seed, gives the same indices."""

    order: str | None = None
    """What the order is called in the manifest of what is written in it."""

    @abstractmethod
    def __init__(self, patches_reader: PatchesReaderBase) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        """The next index."""
        raise NotImplementedError(f"{type(self).__name__} defines neither __next__ nor __iter__.")


class RandomIterator(IteratorBase):
    """Every index once in each pass, each pass in an order of its own (Philox, from the seed and the pass).

    Args:
        patches_reader: the reader.
        seed: None draws one.
    """

    repeatable = True
    order = "random"

    def __init__(self, patches_reader: PatchesReaderBase, seed: int | None = None) -> None:
        self._size = patches_reader.get_size()
        self.seed = sharding.check_seed(seed)
        """The seed of the orders."""
        self._epoch = 0
        self._at = 0
        self.indices = sharding.permutation(self._size, self.seed, 0)
        """The order of the present pass."""

    def __next__(self) -> int:
        if self._at == self._size:
            self._epoch += 1
            self._at = 0
            self.indices = sharding.permutation(self._size, self.seed, self._epoch)
        self._at += 1
        return int(self.indices[self._at - 1])


class SequentialIterator(IteratorBase):
    """Every index once in each pass, in the reader's order.

    Args:
        patches_reader: the reader.
    """

    repeatable = True
    order = "sequential"

    def __init__(self, patches_reader: PatchesReaderBase) -> None:
        self._indices = itertools.cycle(range(patches_reader.get_size()))

    def __next__(self) -> int:
        return next(self._indices)


class BlockIterator(IteratorBase):
    """Every index once in each pass: regions of the rasters in a random order, and each region's samples in one.

    A region is a run of samples that follow each other in the files (:meth:`PatchesReaderBase.block_order`). Read
    together, they share most of the blocks that must be decoded, which samples from all over a scene do not. Orders
    follow from the seed, the pass and the region.

    Args:
        patches_reader: the reader.
        seed: None draws one.
        chunk: samples of a region; None: of :func:`chunk_length`.

    Raises:
        InputError: a chunk below 1.
    """

    repeatable = True
    order = "regions"

    def __init__(self, patches_reader: PatchesReaderBase, seed: int | None = None, chunk: int | None = None) -> None:
        self.seed = sharding.check_seed(seed)
        """The seed of the orders."""
        self.chunk = chunk_length(patches_reader) if chunk is None else chunk
        """Samples of a region."""
        if self.chunk < 1:
            raise InputError(f"chunk must be at least 1, got {chunk}.")
        self._sorted = patches_reader.block_order()
        self._epoch = 0
        self._indices = self._pass()

    def _pass(self) -> Iterator[int]:
        # The last region may be smaller and stays last, so that all others are read whole, a buffer each. It lies
        # anywhere: samples that fill no shard are not always those of one corner.
        full, epoch = len(self._sorted) // self.chunk, self._epoch
        turn = int(sharding.generator(self.seed, _REGION_STREAM, epoch).integers(len(self._sorted)))
        ordered = np.roll(self._sorted, turn)
        for region in [*sharding.permutation(full, self.seed, epoch).tolist(), full]:
            own = ordered[region * self.chunk : (region + 1) * self.chunk]
            draw = sharding.generator(self.seed, _REGION_STREAM, epoch, region)
            yield from own[draw.permutation(len(own))].tolist()

    def __next__(self) -> int:
        index = next(self._indices, None)
        if index is None:
            self._epoch += 1
            self._indices = self._pass()
            index = next(self._indices)
        return index


def chunk_length(reader: PatchesReaderBase) -> int:
    """How many samples to read together in block order: about 16 MB of them, from 16 to 1024."""
    size = max(1, getattr(reader, "sample_bytes", _USUAL_BYTES))
    return min(max(_CHUNK_BYTES // size, 16), 1024)


class Subset(PatchesReaderBase):
    """Some samples of a reader, under new indices."""

    def __init__(self, reader: PatchesReaderBase, indices: npt.NDArray[np.int64]) -> None:
        self._reader = reader
        self._indices = indices
        self.gathers = getattr(reader, "gathers", False)

    def get_sample(self, index: int) -> Sample:
        """The sample of that number."""
        return self._reader.get_sample(int(self._indices[index]))

    def get_samples(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of those numbers, in the order asked."""
        return read_samples(self._reader, [int(self._indices[i]) for i in indices])

    @property
    def summarises(self) -> bool:
        """Whether the reader does."""
        return getattr(self._reader, "summarises", False)

    def get_summarised(self, indices: Sequence[int]) -> tuple[list[Sample], Summary]:
        """The samples of those numbers, in the order asked, and their statistics."""
        return self._reader.get_summarised([int(self._indices[i]) for i in indices])

    def block_order(self) -> npt.NDArray[np.int64]:
        """The chosen samples in the reader's order."""
        place = np.empty(self._reader.get_size(), np.int64)
        place[self._reader.block_order()] = np.arange(len(place))
        return np.argsort(place[self._indices], kind="stable")

    def get_batch(self, indices: Sequence[int]) -> Sample:
        """The samples of those numbers, stacked."""
        return self._reader.get_batch([int(self._indices[i]) for i in indices])

    def get_stats(self) -> Mapping[str, Any]:
        """Statistics of the whole reader."""
        return self._reader.get_stats()

    def get_size(self) -> int:
        """The number of samples chosen."""
        return len(self._indices)


class Chunks(Generic[T]):
    """Samples of an order, read a buffer ahead by one background thread that starts at first use.

    Args:
        fetch: reads the samples of some indices.
        indices: the order.
        buffer_length: how many samples are read together.
    """

    def __init__(self, fetch: Callable[[Sequence[int]], T], indices: Iterator[int], buffer_length: int) -> None:
        self._fetch = fetch
        self._indices = indices
        self._buffer_length = buffer_length
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: Future[T] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.wait = 0.0
        """Seconds that the caller has waited for samples."""

    def take(self) -> T | None:
        """The next buffer of samples, None at the end.

        Raises:
            InputError: the dataset was closed meanwhile.
            Whatever the reader raised, as itself, and again if asked again.
        """
        with self._lock:
            if self._closed:
                raise InputError("The dataset was closed in the middle of this pass: start another one.")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="otbtf-lite-dataset")
                self._ahead = self._submit()
            start = time.perf_counter()
            samples = self._ahead.result() if self._ahead is not None else None
            self.wait += time.perf_counter() - start
            self._ahead = self._submit()
            return samples

    def _submit(self) -> Future[T] | None:
        wanted = list(itertools.islice(self._indices, self._buffer_length))
        return self._pool.submit(self._fetch, wanted) if wanted and self._pool is not None else None

    def close(self) -> None:
        """Waits for the thread to end. Nothing can be taken after that."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = self._ahead = None


class Summed:
    """The samples of one order, of which statistics are kept.

    Args:
        reader: reads samples and sums them up.
        indices: the order.
        length: how many samples are read together.
    """

    def __init__(self, reader: PatchesReaderBase, indices: Sequence[int], length: int) -> None:
        self._reader = reader
        self._indices = indices
        self._length = length
        self._summary = Summary()
        self._counted = np.zeros(len(indices), np.bool_)

    def samples(self, start: int, chunks: Iterable[tuple[list[Sample], Summary]]) -> Iterator[Sample]:
        """The samples from a place in the order on.

        Args:
            start: that place.
            chunks: what the reader gives from there on, so many samples at a time.
        """
        stop = start
        for samples, summary in chunks:
            start, stop = stop, stop + len(samples)
            for place, sample in enumerate(samples, start + 1):
                # Chunks of which not all is taken are left to result().
                if place == stop and not self._counted[start:stop].any():
                    self._summary.merge(summary)
                    self._counted[start:stop] = True
                yield sample

    def result(self, n: int) -> Summary:
        """The summary of the first ``n`` samples. Those that were not taken in this run are read for it."""
        if self._counted[n:].any():
            self._summary = Summary()
            self._counted[:] = False
        missing = np.flatnonzero(~self._counted[:n])
        for first in range(0, len(missing), self._length):
            places = missing[first : first + self._length]
            self._summary.merge(self._reader.get_summarised([self._indices[place] for place in places])[1])
            self._counted[places] = True
        return self._summary


def new_iterator(cls: type[IteratorBase], reader: PatchesReaderBase, seed: int) -> IteratorBase:
    """An iterator over a reader. The seed reaches it only if its signature takes one: OTBTF's take the reader alone."""
    parameters = inspect.signature(cls).parameters.values()
    takes_seed = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
    return cls(reader, **({"seed": seed} if takes_seed else {}))


def read_samples(reader: PatchesReaderBase, indices: Sequence[int]) -> list[Sample]:
    """Samples of any reader, also one with OTBTF's three methods alone."""
    if hasattr(reader, "get_samples"):
        return list(reader.get_samples(indices))
    return [reader.get_sample(index) for index in indices]


def endless(iterator: IteratorBase) -> Iterator[int]:
    """Indices for ever: an iterator that ends is started again."""
    while True:
        empty = True
        for index in iterator:
            empty = False
            yield int(index)
        if empty:
            raise InputError(f"{type(iterator).__name__} gives no indices: its iter() must start again after a pass.")
