"""Sources held open together, and the threads that read them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from otbtf_lite.errors import InputError
from otbtf_lite.raster import RasterReader, RasterSource

T = TypeVar("T")
P = TypeVar("P")

_MOST_THREADS = 8  # the default stops here: each thread opens the files for itself and decodes its own blocks


def thread_count(threads: int | None) -> int:
    """The number of threads to read with; None gives one for each processor this process may use, at most 8.

    Raises:
        InputError: no integer, or below 1.
    """
    if threads is None:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(usable, _MOST_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InputError(f"threads must be an integer, at least 1, or None, got {threads!r}.")
    return threads


class _Open:
    """What one process has open. A reader opens its files anew in each thread, at the thread's first read."""

    def __init__(self, sources: Mapping[str, RasterSource]) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.readers: dict[str, RasterReader] = {key: source.open() for key, source in sources.items()}


class Handles:
    """Open sources and a pool of threads, both started at first use and again after :meth:`close`.

    It can be used from several threads at once. A child process starts with nothing open: threads do not survive a
    fork, and GDAL's handles must not be used, nor closed, after one.

    Args:
        sources: what to open, by key.
        threads: as for :func:`thread_count`.
    """

    def __init__(self, sources: Mapping[str, RasterSource], threads: int | None = None) -> None:
        self._sources = dict(sources)
        self.threads = thread_count(threads)
        """How many threads :meth:`map` uses."""
        self._open = _Open(self._sources)

    def _here(self) -> _Open:
        if self._open.pid != os.getpid():
            self._open = _Open(self._sources)
        return self._open

    @property
    def readers(self) -> dict[str, RasterReader]:
        """A reader of each source by key, which any thread may use."""
        return self._here().readers

    def map(self, function: Callable[[P], T], parts: Sequence[P]) -> list[T]:
        """``function(part)`` for each part, on all threads.

        Returns:
            The results, in the order of ``parts``.

        Raises:
            Exception: what ``function`` raised first, in the order of ``parts``, once all threads have come to rest.
        """
        if self.threads == 1 or len(parts) < 2:
            return [function(part) for part in parts]
        here = self._here()
        with here.lock:
            if here.pool is None:
                here.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="otbtf-lite-read")
            futures = [here.pool.submit(function, part) for part in parts]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Stop the threads and close the files; no other thread may be reading. Harmless if nothing is open."""
        here = self._here()
        if here.pool is not None:
            here.pool.shutdown()
        for reader in here.readers.values():
            reader.close()
        self._open = _Open(self._sources)
