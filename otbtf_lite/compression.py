"""Whole shards as gzip or zlib streams: written by several threads, read with bounded memory.

A stream is one header, runs of deflate blocks that each end on a byte, and one checksum (RFC 1950, 1951, 1952). Every
run is a fixed number of bytes compressed by itself, so threads can share them out, and the bytes do not depend on how
many threads there are.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol

from otbtf_lite.errors import DataError

MAX_INFLATED_RECORD_BYTES = 1 << 28
"""The longest record of a compressed shard, where its schema sets no limit: a thousandth of it on disk claims as much
memory."""

_RUN_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_LEVEL = 1
_MOST_THREADS = 4
_GZIP_MAGIC = b"\x1f\x8b\x08"  # the third byte is the method: deflate, the only one there is
_GZIP_HEADER = _GZIP_MAGIC + b"\0\0\0\0\0\x04\xff"  # no name, no time; the fastest method; from no system in particular
_ZLIB_HEADER = b"\x78\x01"
_LAST_BLOCK = b"\x03\0"  # an empty one
_EITHER = 47  # 32 + 15 bits: gzip or zlib, by the header


class _Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> object:
        """Takes bytes."""


class Deflated:
    """A gzip or zlib stream that goes to a file, by isal where it is installed, else zlib. A context manager.

    Args:
        file: takes the compressed bytes.
        compression: ``"GZIP"`` or ``"ZLIB"``.
        threads: how many threads compress; None: one a processor, four at most.
    """

    def __init__(self, file: _Sink, compression: str, threads: int | None = None) -> None:
        self._library: Any
        try:
            from isal import isal_zlib  # an extra

            self._library = isal_zlib
        except ImportError:
            self._library = zlib
        self._file = file
        self._gzip = compression == "GZIP"
        self._check = 0 if self._gzip else 1  # what a CRC-32 and an Adler-32 start with
        self._size = 0
        self._pending = bytearray()
        self._threads = threads or min(os.cpu_count() or 1, _MOST_THREADS)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="otbtf-lite-deflate")
        self._runs: deque[Future[bytes]] = deque()
        file.write(_GZIP_HEADER if self._gzip else _ZLIB_HEADER)

    def write(self, data: bytes | memoryview) -> None:
        """Takes bytes; they may be changed afterwards.

        Raises:
            Whatever the file raises.
        """
        self._check = (self._library.crc32 if self._gzip else self._library.adler32)(data, self._check)
        self._size += len(data)
        self._pending += data
        while len(self._pending) >= _RUN_BYTES:
            self._submit(bytes(memoryview(self._pending)[:_RUN_BYTES]))
            del self._pending[:_RUN_BYTES]

    def finish(self) -> None:
        """Ends the stream.

        Raises:
            Whatever the file raises.
        """
        if self._pending:
            self._submit(bytes(self._pending))
            self._pending.clear()
        while self._runs:
            self._file.write(self._runs.popleft().result())
        self._file.write(_LAST_BLOCK)
        if self._gzip:
            self._file.write(self._check.to_bytes(4, "little") + (self._size & 0xFFFFFFFF).to_bytes(4, "little"))
        else:
            self._file.write(self._check.to_bytes(4, "big"))

    def _submit(self, run: bytes) -> None:
        while len(self._runs) > self._threads:
            self._file.write(self._runs.popleft().result())
        self._runs.append(self._pool.submit(self._deflate, run))

    def _deflate(self, run: bytes) -> bytes:
        stream = self._library.compressobj(_LEVEL, zlib.DEFLATED, -15)  # no header of its own
        return bytes(stream.compress(run) + stream.flush(zlib.Z_SYNC_FLUSH))

    def __enter__(self) -> Deflated:  # noqa: PYI034  # typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the threads; what is not finished stays so."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Inflated:
    """The uncompressed bytes of a gzip or zlib stream, read forwards, about a megabyte of them in memory.

    Args:
        file: the compressed stream.
        name: what to call it in a message.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._inflate = zlib.decompressobj(_EITHER)
        self._ready = memoryview(b"")

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, none at the end.

        Raises:
            DataError: the stream is damaged, cut, or followed by other bytes.
        """
        while not self._ready:
            if not self._inflate.eof:
                data = self._inflate.unconsumed_tail or self._file.read(_READ_BYTES)
                self._step(data)
                # Without data the step above gives what zlib still held back.
                if not data and not self._ready and not self._inflate.eof:
                    raise DataError(f"{self._name} is cut: its compressed stream does not end.")
            elif not self._next_member():
                break
        out, self._ready = self._ready[:size], self._ready[size:]
        return bytes(out)

    def _step(self, data: bytes) -> None:
        try:
            self._ready = memoryview(self._inflate.decompress(data, _RUN_BYTES))
        except zlib.error as error:
            raise DataError(f"{self._name} is corrupt: its compressed stream can't be read ({error}).") from error

    def _next_member(self) -> bool:
        """Whether another stream follows: a gzip file may be several of them, as gzip and Beam write it."""
        rest = self._inflate.unused_data or self._file.read(_READ_BYTES)
        if not rest:
            return False
        if not rest.startswith(_GZIP_MAGIC[: len(rest)]):
            raise DataError(f"{self._name} has other bytes after its compressed stream.")
        self._inflate = zlib.decompressobj(_EITHER)
        self._step(rest)
        return True


def sniff(start: bytes) -> str | None:
    """How a stream that starts with these bytes is compressed: ``"GZIP"``, ``"ZLIB"`` or None."""
    if len(start) > 1 and start.startswith(_GZIP_MAGIC[: len(start)]):
        return "GZIP"
    # RFC 1950: deflate in the low four bits, a window of at most 32 KiB in the high ones, and the first two bytes are a
    # multiple of 31. One in 500 headers of plain records would fit too, so the stream must also begin to inflate.
    fits = len(start) > 1 and start[0] & 0x0F == 8 and start[0] >> 4 < 8 and int.from_bytes(start[:2], "big") % 31 == 0
    if not fits:
        return None
    try:
        zlib.decompressobj().decompress(start, 1)
    except zlib.error:
        return None
    return "ZLIB"
