"""Whether records still are what was written: framing, checksums, schema, counts, digests, missing and stray shards."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from otbtf_lite import sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import SHAPES_FILE, TYPES_FILE, Shard
from otbtf_lite.progress import bar
from otbtf_lite.records import ShardDigest, decode_example, example_values
from otbtf_lite.schema import Schema
from otbtf_lite.shards import Finished, load_json, open_finished, shard_records, sniff_compression
from otbtf_lite.storage import Directory


def directory_faults(directory: Directory, *, threads: int | None = None, progress: bool | None = None) -> list[str]:
    """Every fault of a directory of records, ours or OTBTF's, one sentence each; none when all is well.

    Args:
        directory: where it lies.
        threads: how many shards are read at once; None: one a processor.
        progress: show a progress bar; None does so on a terminal.

    Raises:
        InputError: a number of threads below 1.
    """
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InputError(f"threads must be an integer of at least 1, got {threads!r}.")
    try:
        found = open_finished(directory)
        faults = _side_faults(found)
    except DataError as error:
        return [str(error)]

    def check(number: int) -> list[str]:
        if found.manifest is not None:
            return shard_faults(directory, found.manifest.shards[number], found.schema, found.manifest.compression)
        return _unlisted_faults(directory, found.names[number], found.schema)

    with (
        bar(len(found.names), "verifying", "shard", progress) as shown,
        ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="otbtf-lite-verify") as pool,
    ):
        for own in pool.map(check, range(len(found.names))):
            faults += own
            shown.update()
    return faults


def file_faults(path: str | os.PathLike[str]) -> list[str]:
    """Every fault of any one TFRecord file, whatever wrote it: framing, checksums, and that records are Examples."""
    folder, name = os.path.split(os.fspath(path))
    return _unlisted_faults(Directory(folder or "."), name, None)


def _unlisted_faults(directory: Directory, name: str, schema: Schema | None) -> list[str]:
    """Every fault of a file of which no manifest says anything."""
    digest = ShardDigest()
    try:
        faults = list(_record_faults(directory, name, sniff_compression(directory, name), schema, digest))
    except DataError as error:
        return [str(error)]
    return faults or ([] if digest.records else [f"{directory.path(name)} is empty: it has no records."])


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
        faults = [] if size == shard.bytes else [f"{path} has {size} bytes where the manifest says {shard.bytes}."]
        faults += _record_faults(directory, shard.name, compression, schema, digest, only_bytes=not parse)
    except DataError as error:
        return [str(error)]
    if faults:
        return faults
    if digest.records != shard.records:
        return [f"{path} has {digest.records} records where the manifest says {shard.records}."]
    if digest.hexdigest() != shard.digest or digest.first_crc != shard.first_crc:
        return [f"{path} holds other records than those that were written: its digest differs from the manifest's."]
    return []


def _record_faults(
    directory: Directory,
    name: str,
    compression: str | None,
    schema: Schema | None,
    digest: ShardDigest,
    *,
    only_bytes: bool = False,
) -> Iterator[str]:
    """The faults of a shard's records; after one in the framing the rest can't be found."""
    corrupt: list[str] = []
    try:
        records = shard_records(directory, name, compression, schema, on_corrupt=corrupt.append)
        for number, record in enumerate(records):
            if corrupt:
                yield corrupt.pop()
                continue
            digest.add(struct.pack("<QI", len(record.data), record.crc))
            if only_bytes:
                continue
            try:
                if schema is None:
                    example_values(memoryview(record.data))
                else:
                    decode_example(schema, record.data)
            except DataError as error:
                yield f"{directory.path(name)}: record {number} at byte {record.offset} {error}."
    except DataError as error:
        yield str(error)


def _side_faults(found: Finished) -> list[str]:
    """Faults of what lies beside the shards: JSON files that say something else, shards that nobody knows."""
    directory = found.directory
    if found.manifest is None:
        # Not counted one by one: a stray file's number may be a billion.
        numbers = [-1, *(number for name in found.names if (number := sharding.shard_number(name)) is not None)]
        gaps = ((before + 1, after - 1) for before, after in itertools.pairwise(numbers) if after - before > 1)
        return [
            f"{directory.path(sharding.shard_name(first))} is missing{_up_to(last) if last > first else ''}: shards"
            " have numbers without gaps."
            for first, last in gaps
        ]
    faults = [
        f"{directory.path(name)} is not in the manifest: remove it, or OTBTF reads it too."
        for name in directory.names()
        if name.endswith(".records") and not name.startswith(".") and name not in found.names
    ]
    if all(feature.codec == "tensor" for feature in found.schema.values()):
        for name, right in ((TYPES_FILE, found.schema.types_json()), (SHAPES_FILE, found.schema.shapes_json())):
            faults += _json_faults(directory, name, right)
    return faults


def _up_to(last: int) -> str:
    return f", and so is all up to {sharding.shard_name(last)}"


def _json_faults(directory: Directory, name: str, right: Mapping[str, object]) -> list[str]:
    try:
        said = load_json(directory, name)
    except DataError as error:
        return [str(error)]
    return [] if said == right else [f"{directory.path(name)} says something else than the manifest."]
