"""Whether a shard still is what its manifest says: framing, checksums, schema, counts and digest."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from otbtf_lite.errors import DataError
from otbtf_lite.manifest import Shard
from otbtf_lite.records import ShardDigest, decode_example, iter_records
from otbtf_lite.schema import Schema
from otbtf_lite.storage import Directory

_CHUNK = 1 << 20


@contextlib.contextmanager
def open_shard(directory: Directory, name: str, compression: str | None) -> Iterator[BinaryIO]:
    """A shard opened as a stream of uncompressed bytes.

    Raises:
        DataError: it can't be opened.
    """
    with directory.open(name) as file:
        yield cast("BinaryIO", Inflated(file, directory.path(name))) if compression else file


class Inflated:
    """The uncompressed bytes of a gzip or zlib stream, read forwards.

    Args:
        file: the compressed stream.
        name: what to call it in a message.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._inflate = zlib.decompressobj(47)  # 32 + 15 bits: gzip or zlib, by the header
        self._ready = memoryview(b"")

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, none at the end.

        Raises:
            DataError: the stream is damaged or cut.
        """
        while not self._ready and not self._inflate.eof:
            data = self._inflate.unconsumed_tail or self._file.read(_CHUNK)
            try:
                self._ready = memoryview(self._inflate.decompress(data, _CHUNK))
            except zlib.error as error:
                msg = f"{self._name} is corrupt: its compressed stream can't be read ({error})."
                raise DataError(msg) from error
            # Without data the call above gives what zlib still held back.
            if not data and not self._ready and not self._inflate.eof:
                msg = f"{self._name} is cut: its compressed stream does not end."
                raise DataError(msg)
        out, self._ready = self._ready[:size], self._ready[size:]
        return bytes(out)


def shard_faults(
    directory: Directory, shard: Shard, schema: Schema, compression: str | None, *, parse: bool = True
) -> list[str]:
    """Every fault of a shard that its manifest lists, one sentence each; none when all is well.

    Args:
        directory: where it lies.
        shard: what the manifest says of it.
        schema: what each record must hold.
        compression: how it is compressed.
        parse: whether each record is decoded too.
    """
    path = directory.path(shard.name)
    digest = ShardDigest()
    try:
        size = directory.size(shard.name)
        if size != shard.bytes:
            return [f"{path} has {size} bytes where the manifest says {shard.bytes}."]
        with open_shard(directory, shard.name, compression) as file:
            for record in iter_records(file, path):
                digest.add(struct.pack("<QI", len(record.data), record.crc))
                if parse:
                    _parse(schema, record.data, f"{path}: record {digest.records - 1} at byte {record.offset}")
    except DataError as error:
        return [str(error)]
    if digest.records != shard.records:
        return [f"{path} has {digest.records} records where the manifest says {shard.records}."]
    if digest.hexdigest() != shard.digest:
        return [f"{path} holds other records than those that were written: its digest differs from the manifest's."]
    return []


def _parse(schema: Schema, data: bytes, place: str) -> None:
    try:
        decode_example(schema, data)
    except DataError as error:
        msg = f"{place} {error}."
        raise DataError(msg) from error
