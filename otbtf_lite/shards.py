"""Finished shards: opening one as a stream of records, and a whole directory of them, ours or OTBTF's."""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

from otbtf_lite import sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import SHAPES_FILE, TYPES_FILE, Manifest, load_manifest
from otbtf_lite.records import HEADER_BYTES, check_header, iter_records, read_exactly, record_offsets
from otbtf_lite.schema import Schema
from otbtf_lite.storage import Directory

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20
_MAX_JSON_BYTES = 1 << 24
_CRC_BYTES = 4


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
            DataError: the stream is damaged, cut, or followed by other bytes.
        """
        while not self._ready and not self._inflate.eof:
            data = self._inflate.unconsumed_tail or self._file.read(_CHUNK)
            try:
                self._ready = memoryview(self._inflate.decompress(data, _CHUNK))
            except zlib.error as error:
                raise DataError(f"{self._name} is corrupt: its compressed stream can't be read ({error}).") from error
            # Without data the call above gives what zlib still held back.
            if not data and not self._ready and not self._inflate.eof:
                raise DataError(f"{self._name} is cut: its compressed stream does not end.")
        if self._inflate.eof and not self._ready:
            self._next_member()
        out, self._ready = self._ready[:size], self._ready[size:]
        return bytes(out)

    def _next_member(self) -> None:
        """A gzip file may be several streams one after the other, as gzip and Beam write them."""
        rest = self._inflate.unused_data or self._file.read(_CHUNK)
        if not rest:
            return
        if not rest.startswith(b"\x1f\x8b"[: len(rest)]):
            raise DataError(f"{self._name} has other bytes after its compressed stream.")
        self._inflate = zlib.decompressobj(47)
        try:
            self._ready = memoryview(self._inflate.decompress(rest, _CHUNK))
        except zlib.error as error:
            raise DataError(f"{self._name} is corrupt: its compressed stream can't be read ({error}).") from error


@contextlib.contextmanager
def open_shard(directory: Directory, name: str, compression: str | None) -> Iterator[BinaryIO]:
    """A shard opened as a stream of uncompressed bytes.

    Raises:
        DataError: it can't be opened.
    """
    with directory.open(name) as file:
        yield cast("BinaryIO", Inflated(file, directory.path(name))) if compression else file


def sniff_compression(directory: Directory, name: str) -> str | None:
    """How a TFRecord file is compressed, by its first bytes and never by its name: None, ``"GZIP"`` or ``"ZLIB"``.

    Raises:
        DataError: it can't be read.
    """
    with directory.open(name) as file:
        start = read_exactly(file, HEADER_BYTES)
    try:
        check_header(start, name)
    except DataError:
        if start[:2] == b"\x1f\x8b":
            return "GZIP"
        # RFC 1950: deflate in the low four bits, and the first two bytes are a multiple of 31.
        if len(start) > 1 and start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0:
            return "ZLIB"
    return None


def stored_first_crc(directory: Directory, name: str, compression: str | None) -> int | None:
    """The stored (masked) CRC of a shard's first record, without reading the record; None where there is none.

    Raises:
        DataError: the shard can't be read, or does not begin with a record.
    """
    path = directory.path(name)
    with open_shard(directory, name, compression) as file:
        if compression:
            first = next(iter_records(file, path, check=False), None)
            return None if first is None else first.crc
        header = read_exactly(file, HEADER_BYTES)
        if not header:
            return None
        size = check_header(header, f"{path}: record 0 at byte 0")
        file.seek(HEADER_BYTES + size)
        crc = read_exactly(file, _CRC_BYTES)
    return int.from_bytes(crc, "little") if len(crc) == _CRC_BYTES else None


def first_fault(directory: Directory, name: str) -> str:
    """The first thing wrong with a shard that could not be read to its end, as a sentence."""
    path = directory.path(name)
    number = 0
    try:
        with open_shard(directory, name, sniff_compression(directory, name)) as file:
            for _ in iter_records(file, path):
                number += 1
    except DataError as error:
        return str(error)
    return f"{path} ends after {number} records, fewer than there were when the data set was opened."


@dataclass(frozen=True)
class Finished:
    """A finished directory."""

    directory: Directory
    """Where it lies."""
    schema: Schema
    """What every sample looks like."""
    manifest: Manifest | None
    """None where OTBTF wrote it."""

    @cached_property
    def names(self) -> list[str]:
        """The shards in numeric order: the manifest's, or those that are there."""
        if self.manifest is not None:
            return [shard.name for shard in self.manifest.shards]
        return sharding.numeric_order(self.directory.names())

    @cached_property
    def compressions(self) -> list[str | None]:
        """How each shard is compressed."""
        if self.manifest is not None:
            return [self.manifest.compression] * len(self.names)
        return [sniff_compression(self.directory, name) for name in self.names]

    @cached_property
    def counts(self) -> list[int]:
        """Records of each shard: the manifest's, or counted by their headers.

        Raises:
            DataError: without a manifest, a shard that is empty or damaged.
        """
        if self.manifest is not None:
            return [shard.records for shard in self.manifest.shards]
        _log.warning("%s has no manifest: a shard that is missing or short can't be noticed", self.directory.url)
        last = sharding.shard_number(self.names[-1])
        if last is not None and last >= len(self.names):
            _log.warning("%s has only %d shards of %d", self.directory.url, len(self.names), last + 1)
        counts = []
        for name, compression in zip(self.names, self.compressions, strict=True):
            path = self.directory.path(name)
            with open_shard(self.directory, name, compression) as file:
                counts.append(
                    sum(1 for _ in iter_records(file, path, check=False))
                    if compression
                    else len(record_offsets(file, path, self.directory.size(name)))
                )
            if not counts[-1]:
                raise DataError(f"{path} is empty: copy it again or write the data set again.")
        return counts

    @property
    def record_bytes(self) -> int:
        """Bytes of a sample's arrays."""
        return sum(feature.nbytes for feature in self.schema.values())

    def check(self, *, first_records: bool = True) -> None:
        """Compares what lies on disk with the manifest, at a cost that does not depend on the shards' sizes.

        Args:
            first_records: also the stored checksum of each shard's first record; sizes always are.

        Raises:
            DataError: a shard is missing, cut, swapped, or damaged at its start.
        """
        for shard in self.manifest.shards if self.manifest is not None else ():
            path = self.directory.path(shard.name)
            size = self.directory.size(shard.name)
            if size != shard.bytes:
                raise DataError(
                    f"{path} has {size} bytes where the manifest says {shard.bytes}: it was cut or replaced. Copy it"
                    " again or write the data set again."
                )
            compression = self.manifest.compression if self.manifest is not None else None
            if first_records and stored_first_crc(self.directory, shard.name, compression) != shard.first_crc:
                raise DataError(
                    f"{path} does not begin with the record that the manifest says: it was replaced or damaged. Copy it"
                    " again or write the data set again."
                )


def open_finished(directory: Directory) -> Finished:
    """A finished directory.

    Raises:
        DataError: there is no such directory, it is unfinished, holds no data set, or its JSON files are not valid.
    """
    if not directory.is_dir():
        raise DataError(f"There is no directory {directory.url}.")
    manifest = load_manifest(directory)
    if manifest is not None:
        return Finished(directory, manifest.schema, manifest)
    names = set(directory.names())
    if TYPES_FILE not in names or SHAPES_FILE not in names or not sharding.numeric_order(names):
        raise DataError(
            f"{directory.url} holds no data set: there is neither a manifest.json nor {TYPES_FILE}, {SHAPES_FILE}"
            " and shards such as 0.records."
        )
    types, shapes = (load_json(directory, name) for name in (TYPES_FILE, SHAPES_FILE))
    try:
        schema = Schema.from_otbtf(types, shapes, directory.url)
    except InputError as error:
        raise DataError(str(error)) from error
    return Finished(directory, schema, None)


def load_json(directory: Directory, name: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: the file can't be read or holds something else.
    """
    path = directory.path(name)
    try:
        data = json.loads(directory.read(name, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} must hold a JSON object, it holds a {type(data).__name__}.")
    return data
