"""Whether records still are what was written: framing, checksums, schema, counts, digests, missing and stray shards."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from otbtf_lite import sharding
from otbtf_lite.errors import DataError
from otbtf_lite.manifest import SHAPES_FILE, TYPES_FILE, Shard
from otbtf_lite.progress import bar
from otbtf_lite.records import ShardDigest, decode_example, example_values, iter_records
from otbtf_lite.schema import Schema
from otbtf_lite.shards import Finished, load_json, open_finished, open_shard, sniff_compression
from otbtf_lite.storage import Directory


def directory_faults(directory: Directory, *, threads: int | None = None, progress: bool | None = None) -> list[str]:
    """Every fault of a directory of records, ours or OTBTF's, one sentence each; none when all is well.

    Args:
        directory: where it lies.
        threads: how many shards are read at once; None: one a processor.
        progress: show a progress bar; None does so on a terminal.
    """
    try:
        found = open_finished(directory)
    except DataError as error:
        return [str(error)]
    faults = _side_faults(found)
    with (
        bar(len(found.names), "verifying", "shard", progress) as shown,
        ThreadPoolExecutor(threads or _cores()) as pool,
    ):

        def check(number: int) -> list[str]:
            shard = found.manifest.shards[number] if found.manifest is not None else found.names[number]
            own = (
                shard_faults(directory, shard, found.schema, found.compressions[number])
                if isinstance(shard, Shard)
                else list(_record_faults(directory, shard, found.compressions[number], found.schema, ShardDigest()))
            )
            shown.update()
            return own

        for own in pool.map(check, range(len(found.names))):
            faults += own
    return faults


def file_faults(path: str | os.PathLike[str]) -> list[str]:
    """Every fault of any one TFRecord file, whatever wrote it: framing, checksums, and that records are Examples."""
    folder, name = os.path.split(os.fspath(path))
    directory = Directory(folder or ".")
    try:
        compression = sniff_compression(directory, name)
        digest = ShardDigest()
        faults = list(_record_faults(directory, name, compression, None, digest))
        return faults or ([] if digest.records else [f"{os.fspath(path)} is empty: it has no records."])
    except DataError as error:
        return [str(error)]


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
        faults += _record_faults(
            directory, shard.name, compression, schema if parse else None, digest, only_bytes=not parse
        )
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
    path = directory.path(name)
    corrupt: list[str] = []
    try:
        with open_shard(directory, name, compression) as file:
            for number, record in enumerate(iter_records(file, path, on_corrupt=corrupt.append)):
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
                    yield f"{path}: record {number} at byte {record.offset} {error}."
    except DataError as error:
        yield str(error)


def _side_faults(found: Finished) -> list[str]:
    """Faults of what lies beside the shards: JSON files that say something else, shards that nobody knows."""
    directory, faults = found.directory, []
    if found.manifest is None:
        last = sharding.shard_number(found.names[-1])
        missing = [n for n in map(sharding.shard_name, range((last or 0) + 1)) if n not in found.names]
        return [f"{directory.path(name)} is missing: shards are numbered without gaps." for name in missing]
    names = directory.names()
    faults += [
        f"{directory.path(name)} is not in the manifest: remove it, or OTBTF reads it too."
        for name in sharding.numeric_order(names)
        if name not in found.names
    ]
    if all(feature.codec == "tensor" for feature in found.schema.values()):
        for name, right in ((TYPES_FILE, found.schema.types_json()), (SHAPES_FILE, found.schema.shapes_json())):
            faults += _json_faults(directory, name, right)
    return faults


def _json_faults(directory: Directory, name: str, right: Mapping[str, object]) -> list[str]:
    try:
        said = load_json(directory, name)
    except DataError as error:
        return [str(error)]
    return [] if said == right else [f"{directory.path(name)} says something else than the manifest."]


def _cores() -> int:
    return os.cpu_count() or 1
