"""The sound records of a damaged directory, copied into a new one, and a list of those that were lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from otbtf_lite import sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import POSITIONS_FILE, Manifest
from otbtf_lite.records import FRAME_BYTES, HEADER_BYTES, Record, check_header, decode_example, iter_records, masked_crc
from otbtf_lite.reshard import absolute_paths
from otbtf_lite.schema import Schema
from otbtf_lite.shards import Finished, open_finished, open_shard
from otbtf_lite.storage import Directory
from otbtf_lite.writing import Pass, write_records

if TYPE_CHECKING:
    from otbtf_lite.grid import Positions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Salvaged:
    """What came of it."""

    manifest: Manifest
    """Of the new directory."""
    lost: tuple[str, ...]
    """What is not in it, one sentence for each place: file, record and byte offset."""


def salvage(
    directory: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Salvaged:
    """Copies every record that is sound, in order, into a new directory with shards of the same size.

    A record is sound where its framing and both checksums are right and it decodes to the schema. After damage to the
    framing the next sound record is searched for, byte by byte.

    Args:
        directory: a finished directory, ours or OTBTF's, damaged or not.
        output_dir: where to write.
        overwrite: replace what ``output_dir`` holds.
        progress: show a progress bar; None does so on a terminal.

    Raises:
        InputError: nothing is sound, or both directories are one.
        DataError: the manifest or the JSON files are damaged, or the output can't be written.
    """
    source, target = Directory(directory), Directory(output_dir)
    if os.path.realpath(source.url) == os.path.realpath(target.url):
        raise InputError(f"{source.url} is read and can't be written at once: write elsewhere.")
    found = open_finished(source)
    lost: list[str] = []
    counts = [sum(1 for _ in _sound(found, number, lost)) for number in range(len(found.names))]
    total = sum(counts)
    if not total:
        raise InputError(f"No record of {source.url} is sound: there is nothing to salvage.")
    per_shard = max(found.manifest.n_samples_per_shard or 1 if found.manifest else max(counts), 1)
    if not lost and found.manifest is not None:
        lost += _missing(found, counts)
    positions = _places(found, lost)

    def samples(start: int) -> Iterator[Record]:
        if start:
            raise InputError("A salvage can't be resumed: start it again.")
        for number in range(len(found.names)):
            yield from _sound(found, number, [])

    details, seed = {}, None
    dropped: dict[str, object] = {"lost": lost} if lost else {}
    if found.manifest is not None:
        details, seed = absolute_paths(found.manifest.details, source.url), found.manifest.seed
        dropped = {**found.manifest.dropped, **dropped}
    raw = Pass(found.schema, total, samples, seed, details=details, dropped=dropped, positions=positions, raw=True)
    plan = sharding.plan_shards(total, per_shard, drop_remainder=False)
    return Salvaged(write_records(target, raw, plan, overwrite=overwrite, progress=progress), tuple(lost))


def _missing(found: Finished, counts: list[int]) -> list[str]:
    """Shards that end early without a fault of their own, as one cut between records does."""
    return [
        f"{found.directory.path(name)} has {count} records where the manifest says {promised}."
        for name, count, promised in zip(found.names, counts, found.counts, strict=True)
        if count < promised
    ]


def _places(found: Finished, lost: list[str]) -> Positions | None:
    """The positions, where nothing is lost: else which of them belong to what is left can't always be told."""
    if not found.directory.exists(POSITIONS_FILE):
        return None
    if lost:
        _log.warning("%s is left out: records are missing, so its rows would not fit", POSITIONS_FILE)
        return None
    from otbtf_lite.vector import read_positions  # only what has places needs GDAL

    return read_positions(found.directory.path(POSITIONS_FILE))


def _sound(found: Finished, number: int, lost: list[str]) -> Iterator[Record]:
    """The sound records of a shard; what is not is added to ``lost``."""
    directory, name, compression = found.directory, found.names[number], found.compressions[number]
    path = directory.path(name)
    try:
        with open_shard(directory, name, compression) as file:
            records = _inflated(file, path, lost) if compression else _searched(file.read(), path, lost)
            for record in records:
                fault = _fault(found.schema, record)
                if fault:
                    lost.append(f"{path}: the record at byte {record.offset} {fault}.")
                else:
                    yield record
    except DataError as error:
        lost.append(str(error))


def _inflated(file: BinaryIO, path: str, lost: list[str]) -> Iterator[Record]:
    """The records of a compressed shard up to the first damage: behind it nothing can be inflated."""
    corrupt: list[str] = []
    try:
        for record in iter_records(file, path, on_corrupt=corrupt.append):
            if corrupt:
                lost.append(corrupt.pop())
            else:
                yield record
    except DataError as error:
        lost.append(f"{error} What follows is lost.")


def _searched(data: bytes, path: str, lost: list[str]) -> Iterator[Record]:
    """The records of an uncompressed shard, found again after each damage."""
    at = 0
    while at < len(data):
        record = _record_at(data, at)
        if record is not None:
            yield record
            at += FRAME_BYTES + len(record.data)
            continue
        following = _next_record(data, at + 1)
        end = following if following is not None else len(data)
        lost.append(f"{path}: bytes {at} to {end - 1} hold no sound record.")
        at = end


def _record_at(data: bytes, at: int) -> Record | None:
    """The record at a place, where its framing and both checksums are right."""
    try:
        size = check_header(data[at : at + HEADER_BYTES], "")
    except DataError:
        return None
    start = at + HEADER_BYTES
    body, stored = data[start : start + size], data[start + size : start + size + 4]
    crc = int.from_bytes(stored, "little")
    return Record(at, body, crc) if len(stored) == 4 and masked_crc(body) == crc else None


def _next_record(data: bytes, at: int) -> int | None:
    """Where the next sound record starts. A wrong guess would need a 32-bit checksum to fit by chance, twice."""
    return next(
        (place for place in range(at, len(data) - FRAME_BYTES + 1) if _record_at(data, place) is not None), None
    )


def _fault(schema: Schema, record: Record) -> str | None:
    try:
        decode_example(schema, record.data)
    except DataError as error:
        return str(error)
    return None
