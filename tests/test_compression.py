"""Compressed streams, against Python's own gzip and zlib."""

from __future__ import annotations

import gzip
import io
import itertools
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otbtf_lite.compression import Deflated, Inflated, sniff
from otbtf_lite.errors import DataError

CHUNK = 1 << 20


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("random", [True, False], ids=["random", "zeros"])
def test_a_stream_is_inflated_whole(compress: object, size: int, random: bool) -> None:
    """Also where the last bytes are still in the decompressor when the file has ended."""
    data = np.random.default_rng(0).bytes(size) if random else bytes(size)
    stream = compress(data)  # type: ignore[operator]
    file = Inflated(io.BytesIO(stream), "0.records")
    pieces = iter(lambda: file.read(700_000), b"")
    assert b"".join(pieces) == data
    for cut in (1, 4, len(stream) // 2):
        short = Inflated(io.BytesIO(stream[:-cut]), "0.records")
        with pytest.raises(DataError, match=r"0.records is cut: its compressed stream does not end"):
            list(iter(lambda short=short: short.read(CHUNK), b""))  # type: ignore[misc]


def test_another_stream_is_told() -> None:
    with pytest.raises(DataError, match=r"0.records is corrupt: its compressed stream can't be read"):
        Inflated(io.BytesIO(b"no stream at all"), "0.records").read(5)


def inflated(stream: bytes, step: int = 700_000) -> bytes:
    file = Inflated(io.BytesIO(stream), "0.records")
    return b"".join(iter(lambda: file.read(step), b""))


@given(
    members=st.lists(st.binary(max_size=40) | st.sampled_from([b"", bytes(CHUNK), bytes(3 * CHUNK)]), min_size=1),
    reads=st.integers(1, 50),
)
def test_a_gzip_file_of_many_streams_is_read_whole(members: list[bytes], reads: int) -> None:
    """Also empty ones, and wherever the pieces end that are read."""

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, reads))

    stream = b"".join(map(gzip.compress, members))
    assert inflated(stream) == b"".join(members)
    if len(stream) < 5000:
        file = Inflated(Slow(stream), "0.records")
        assert b"".join(iter(lambda: file.read(CHUNK), b"")) == b"".join(members)


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("tail", [b"x", b"\x1f\x8c", b"\x1f\x8b\x07", bytes(5)])
def test_other_bytes_after_a_stream_are_told(compress: Callable[[bytes], bytes], tail: bytes) -> None:
    with pytest.raises(DataError, match=r"0.records has other bytes after its compressed stream"):
        inflated(compress(b"some data") + tail)


def deflated(pieces: list[bytes], compression: str, threads: int | None = None) -> bytes:
    file = io.BytesIO()
    with Deflated(file, compression, threads) as sink:
        for piece in pieces:
            buffer = bytearray(piece)
            sink.write(memoryview(buffer))
            buffer[:] = bytes(len(buffer))  # the writer's buffer is used again at once
        sink.finish()
    return file.getvalue()


PIECES = {
    "nothing": [],
    "empty": [b""],
    "a byte": [b"x"],
    "one run": [bytes(CHUNK)],
    "more": [np.random.default_rng(1).bytes(CHUNK + 1), bytes(2 * CHUNK), b"end"],
    "many": [bytes([n % 256]) * 9_000 for n in range(500)],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("isal", [True, False], ids=["isal", "zlib"])
def test_what_is_deflated_is_what_python_inflates(
    monkeypatch: pytest.MonkeyPatch, pieces: list[bytes], isal: bool
) -> None:
    if isal:
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
    data = b"".join(pieces)
    zipped, zlibbed = deflated(pieces, "GZIP"), deflated(pieces, "ZLIB")
    assert gzip.decompress(zipped) == data
    assert zlib.decompress(zlibbed) == data
    assert inflated(zipped) == inflated(zlibbed) == data
    assert zipped[4:8] == bytes(4)  # no time
    assert (sniff(zipped[:20]), sniff(zlibbed[:20])) == ("GZIP", "ZLIB")


def test_the_bytes_depend_neither_on_threads_nor_on_how_they_come() -> None:
    data = np.random.default_rng(2).integers(0, 9, 5 * CHUNK + 77, np.uint8).tobytes()
    whole = deflated([data], "GZIP", 1)
    for threads, step in itertools.product((1, 2, 5), (100_000, CHUNK, 2 * CHUNK + 3)):
        assert deflated([data[k : k + step] for k in range(0, len(data), step)], "GZIP", threads) == whole


def test_a_file_that_fails_is_told_and_no_thread_is_left() -> None:
    class Full(io.BytesIO):
        def write(self, data: object, /) -> int:
            if self.tell() > 100:
                raise OSError(28, "No space left on device")
            return super().write(data)  # type: ignore[arg-type]

    def fill() -> None:
        with Deflated(Full(), "GZIP", 2) as sink:
            for _ in range(20):
                sink.write(np.random.default_rng(3).bytes(CHUNK))

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert not [t for t in threading.enumerate() if t.name.startswith("otbtf-lite-deflate")]


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_neither_way_takes_memory_in_proportion(tmp_path: Path, compression: str) -> None:
    tracemalloc.start()
    with (tmp_path / "bomb").open("wb") as file, Deflated(file, compression) as sink:
        for _ in range(200):
            sink.write(bytes(CHUNK))
        sink.finish()
    size = 0
    with (tmp_path / "bomb").open("rb") as file:
        stream = Inflated(file, "bomb")
        while piece := stream.read(CHUNK):
            size += len(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 200 * CHUNK
    assert peak < 20 * CHUNK


@pytest.mark.parametrize(
    ("start", "compression"),
    [
        (b"", None),
        (b"\x78", None),
        (b"\x1f", None),
        (b"\x1f\x8b", "GZIP"),
        (b"\x1f\x8b\x07", None),
        (b"\x1f\x8b\x08", "GZIP"),
        (b"\x78\x9c", "ZLIB"),
        (b"\x78\x9c\xff\xff\xff\xff", None),  # the length header of a record of 40,056 bytes, damaged
        (b"\xf8\x1b", None),  # a window that no stream has
        (b"\x28\x15", "ZLIB"),
    ],
)
def test_a_stream_is_known_by_its_first_bytes(start: bytes, compression: str | None) -> None:
    assert sniff(start) == compression
