"""Finished shards: opening one as a stream of records, and a whole directory of them, ours or OTBTF's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, cast

from otbtf_lite import sharding
from otbtf_lite.codecs import get_codec
from otbtf_lite.compression import MAX_INFLATED_RECORD_BYTES, Inflated, sniff
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import JOURNAL, MANIFEST, SHAPES_FILE, TYPES_FILE, Manifest, load_manifest, parse_object
from otbtf_lite.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    Record,
    check_header,
    iter_records,
    read_exactly,
    record_offsets,
)
from otbtf_lite.schema import STRING, Schema
from otbtf_lite.storage import Directory

_log = logging.getLogger(__name__)
_SNIFFED_BYTES = 1 << 12
_SLACK_BYTES = 1 << 20
_SLACK_PER_FEATURE = 1 << 12
_MOST_GROWTH = 12
_MAX_JSON_BYTES = 1 << 24
_CRC_BYTES = 4


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
        start = read_exactly(file, _SNIFFED_BYTES)
    try:
        check_header(start[:HEADER_BYTES], name)
    except DataError:
        return sniff(start)
    return None


def longest_record(schema: Schema | None, compression: str | None) -> int:
    """The most bytes that a record of a schema may claim, so that a false length can't claim the memory.

    Records of fixed types and shapes get twice their size and a megabyte, for keys that the schema lacks; what another
    codec than a tensor's makes of an element has at most the twelve bytes that an integer may take in a list.
    """
    if schema is None or any(feature.dtype == STRING for feature in schema.values()):
        return MAX_INFLATED_RECORD_BYTES if compression else MAX_RECORD_BYTES
    most = _SLACK_BYTES
    for name, feature in schema.items():
        fixed = get_codec(feature.codec).prefix(feature) is not None
        most += _SLACK_PER_FEATURE + len(name.encode()) + feature.nbytes * (2 if fixed else _MOST_GROWTH)
    return min(MAX_RECORD_BYTES, most)


def shard_records(
    directory: Directory,
    name: str,
    compression: str | None,
    schema: Schema | None,
    *,
    check: bool = True,
    on_corrupt: Callable[[str], object] | None = None,
) -> Generator[Record]:
    """Every record of a shard, one in memory at a time, as :func:`~otbtf_lite.records.iter_records` gives them.

    Args:
        directory: where it lies.
        name: its name.
        compression: how it is compressed.
        schema: what its records hold, which limits their lengths; None: any.
        check: as there.
        on_corrupt: as there.

    Raises:
        DataError: as there, or it can't be opened.
    """
    most = longest_record(schema, compression)
    with open_shard(directory, name, compression) as file:
        yield from iter_records(file, directory.path(name), check=check, on_corrupt=on_corrupt, most=most)


def stored_first_crc(directory: Directory, name: str, compression: str | None, schema: Schema) -> int | None:
    """The stored (masked) CRC of a shard's first record, without reading the record; None where there is none.

    Raises:
        DataError: the shard can't be read, or does not begin with a record.
    """
    if compression:
        with contextlib.closing(shard_records(directory, name, compression, schema, check=False)) as records:
            first = next(records, None)
        return None if first is None else first.crc
    with directory.open(name) as file:
        header = read_exactly(file, HEADER_BYTES)
        if not header:
            return None
        place = f"{directory.path(name)}: record 0 at byte 0"
        size = check_header(header, place, longest_record(schema, compression))
        file.seek(HEADER_BYTES + size)
        crc = read_exactly(file, _CRC_BYTES)
    return int.from_bytes(crc, "little") if len(crc) == _CRC_BYTES else None


def first_fault(directory: Directory, name: str) -> str:
    """The first thing wrong with a shard that could not be read to its end, as a sentence."""
    number = 0
    try:
        for _ in shard_records(directory, name, sniff_compression(directory, name), None):
            number += 1
    except DataError as error:
        return str(error)
    return (
        f"{directory.path(name)} ends after {number} records, fewer than there were when the data set was opened: copy"
        " it again or write the data set again."
    )


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
            if compression:
                counts.append(
                    sum(1 for _ in shard_records(self.directory, name, compression, self.schema, check=False))
                )
            else:
                with self.directory.open(name) as file:
                    counts.append(len(record_offsets(file, path, self.directory.size(name))))
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
            if (
                first_records
                and stored_first_crc(self.directory, shard.name, compression, self.schema) != shard.first_crc
            ):
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
    if MANIFEST in names or JOURNAL in names:  # someone has begun to write, or ended, since the look for a manifest
        raise DataError(f"{directory.url} is being written just now: wait until that is done.")
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
    return parse_object(directory.read(name, _MAX_JSON_BYTES), directory.path(name))
