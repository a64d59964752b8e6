"""The sound records of a damaged directory, copied into a new one, and a list of those that were lost."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from otbtf_lite import sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import Manifest
from otbtf_lite.records import (
    FRAME_BYTES,
    HEADER_BYTES,
    Record,
    RecordLayout,
    check_header,
    decode_example,
    masked_crc,
    read_exactly,
    read_record,
)
from otbtf_lite.reshard import absolute_paths, places, same_place
from otbtf_lite.shards import Finished, longest_record, open_finished, shard_records
from otbtf_lite.storage import Directory
from otbtf_lite.writing import Pass, write_records

if TYPE_CHECKING:
    from otbtf_lite.grid import Positions

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Salvaged:
    """What came of it."""

    manifest: Manifest
    """Of the new directory."""
    lost: tuple[str, ...]
    """What is not in it, one sentence for each place: file, record as far as it can be told, and byte offset."""


@dataclass
class _Shard:
    """What a shard still holds."""

    records: int
    """Sound records."""
    numbers: list[int] | None
    """Which of the records that were written these are; None where that can't be told."""
    lost: list[str]
    """What is not among them, without the file's name."""
    told: set[int]
    """Numbers of which ``lost`` says something already."""


def salvage(
    directory: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Salvaged:
    """Copies every record that is sound, in order, into a new directory with shards of the same size.

    A record is sound where its framing and both checksums are right and it decodes to the schema. After damage to the
    framing of an uncompressed shard the next sound record is searched for; a compressed one ends there. Positions are
    kept where it is known which records are left: by whole frames, by a fixed record length, or up to the damage.

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
    if same_place(source, target):
        raise InputError(f"{source.url} is read and can't be written at once: write elsewhere.")
    found = open_finished(source)
    shards = [_look(found, number) for number in range(len(found.names))]
    total = sum(shard.records for shard in shards)
    if not total:
        raise InputError(f"No record of {source.url} is sound: there is nothing to salvage.")

    def samples(start: int) -> Iterator[Record]:
        each = (_sound(found, number, _Shard(0, [], [], set())) for number in range(len(found.names)))
        return itertools.islice(itertools.chain.from_iterable(each), start, None)

    lost = [(name, text) for name, shard in zip(found.names, shards, strict=True) for text in shard.lost]
    dropped: dict[str, object] = {"lost": [f"{name}: {text}" for name, text in lost]} if lost else {}
    details, seed, compression, per_shard = {}, None, None, max(shard.records for shard in shards)
    if found.manifest is not None:
        old = found.manifest
        details, seed, compression = absolute_paths(old.details, source.url), old.seed, old.compression
        if lost:  # they were those of all records
            details = {key: value for key, value in details.items() if key not in ("statistics", "class_counts")}
        dropped = {**old.dropped, **dropped}
        per_shard = old.n_samples_per_shard or max(shard.records for shard in old.shards)
    raw = Pass(
        found.schema, total, samples, seed, repeatable=True, details=details, dropped=dropped,
        positions=_places(found, shards), raw=True,
    )  # fmt: skip
    plan = sharding.plan_shards(total, per_shard, drop_remainder=False)
    manifest = write_records(target, raw, plan, overwrite=overwrite, compression=compression, progress=progress)
    return Salvaged(manifest, tuple(f"{source.path(name)}: {text}" for name, text in lost))


def _look(found: Finished, number: int) -> _Shard:
    """What a shard still holds, and what it does not, by its manifest also where it ends too early."""
    shard = _Shard(0, [], [], set())
    shard.records = sum(1 for _ in _sound(found, number, shard))
    if found.manifest is None:
        return shard
    promised = found.manifest.shards[number].records
    if shard.numbers is None:
        if shard.records < promised:
            shard.lost.append(f"{promised - shard.records} of {promised} records are lost in all.")
        elif shard.records > promised:
            shard.lost.append(f"holds {shard.records} records where {promised} were written.")
        return shard
    if any(n >= promised for n in shard.numbers):
        shard.lost.append(f"holds {max(shard.numbers) + 1} records where {promised} were written.")
        shard.numbers = None
        return shard
    missing = sorted(set(range(promised)) - set(shard.numbers) - shard.told)
    for first, last in _runs(missing):
        which = f"record {first} is lost." if first == last else f"records {first} to {last} are lost."
        shard.lost.append(which)
    return shard


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of successive numbers."""
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield run[0], run[-1]


def _places(found: Finished, shards: list[_Shard]) -> Positions | None:
    """The positions of what is left, where that can be told."""
    try:
        positions = places(found)
    except DataError as error:
        _log.warning("positions.gpkg is left out: %s", error)
        return None
    if positions is None:
        return None
    starts = [0, *itertools.accumulate(found.counts)] if found.manifest is not None else [0]
    kept: list[int] = []
    for start, shard in zip(starts, shards, strict=False):
        if shard.numbers is None or found.manifest is None:
            _log.warning("positions.gpkg is left out: which of its rows belong to the records left can't be told")
            return None
        kept += [start + number for number in shard.numbers]
    return positions[np.array(kept, np.int64)]


def _sound(found: Finished, number: int, shard: _Shard) -> Iterator[Record]:
    """The sound records of a shard; notes their numbers, and what is lost."""
    directory, name = found.directory, found.names[number]
    try:
        compression = found.compressions[number]
        records = (
            _inflated(found, number, shard)
            if compression
            else _searched(directory, name, longest_record(found.schema, None), RecordLayout.of(found.schema), shard)
        )
        for index, record in records:
            fault = _fault(found, record)
            if fault:
                _lose(shard, index, record.offset, fault)
                continue
            if index is None:
                shard.numbers = None
            elif shard.numbers is not None:
                shard.numbers.append(index)
            yield record
    except DataError as error:
        shard.lost.append(_without(str(error), directory, name))


def _lose(shard: _Shard, number: int | None, at: int, fault: str) -> None:
    shard.lost.append(f"{'the record' if number is None else f'record {number}'} at byte {at} {fault}.")
    if number is not None:
        shard.told.add(number)


def _without(text: str, directory: Directory, name: str) -> str:
    """A message about a file without its path, which has no place in a manifest."""
    path = directory.path(name)
    return text.removeprefix(f"{path}: ").removeprefix(f"{path} ").replace(path, name)


def _inflated(found: Finished, number: int, shard: _Shard) -> Iterator[tuple[int, Record]]:
    """The numbered records of a compressed shard up to the first damage: behind it nothing can be inflated."""
    directory, name = found.directory, found.names[number]
    corrupt: list[str] = []
    records = shard_records(directory, name, found.compressions[number], found.schema, on_corrupt=corrupt.append)
    for index, record in enumerate(records):
        if corrupt:
            shard.lost.append(_without(corrupt.pop(), directory, name))
            shard.told.add(index)
        else:
            yield index, record


def _searched(
    directory: Directory, name: str, most: int, layout: RecordLayout | None, shard: _Shard
) -> Iterator[tuple[int | None, Record]]:
    """The records of an uncompressed shard, found again after each damage, with their numbers where those are known.

    They are known up to the first damage to the framing, and behind it where all records have one length, as those that
    otbtf-lite writes of fixed types and shapes do (OTBTF's too: only the keys' order changes).
    """
    size = directory.size(name)
    with directory.open(name) as file:
        at, number, known = 0, 0, True
        while at < size:
            length = _length(file, at, most)
            after = at + FRAME_BYTES + (length or 0)
            if length is not None and after <= size:
                record = _read(file, at, most)
                if record is not None:
                    yield (number if known else None), record
                # Only where a record follows is it this one's data that are wrong: else bytes are missing, or too many.
                elif after == size or _length(file, after, most) is not None:
                    _lose(
                        shard, number if known else None, at, f"is corrupt: the checksum of its {length} bytes is wrong"
                    )
                else:
                    after = 0
                if after:
                    at, number = after, number + 1
                    continue
            following = _next_record(file, at + 1, size, most)
            end = size if following is None else following
            shard.lost.append(f"bytes {at} to {end - 1} hold no sound record.")
            frame = len(layout.template) if layout is not None else 0
            if frame and at == number * frame and end % frame == 0:
                number = end // frame
            else:
                known = False
            at = end


def _length(file: BinaryIO, at: int, most: int) -> int | None:
    """The length in the header at a place, where its checksum is right."""
    file.seek(at)
    try:
        return check_header(read_exactly(file, HEADER_BYTES), "", most)
    except DataError:
        return None


def _read(file: BinaryIO, at: int, most: int) -> Record | None:
    try:
        return read_record(file, at, "", most)
    except DataError:
        return None


def _next_record(file: BinaryIO, at: int, size: int, most: int) -> int | None:
    """Where the next sound record starts. A wrong guess would need two 32-bit checksums to fit by chance."""
    while at + FRAME_BYTES <= size:
        file.seek(at)
        chunk = read_exactly(file, _CHUNK + HEADER_BYTES - 1)
        for place in _candidates(chunk, most):
            header = chunk[place : place + HEADER_BYTES]
            if masked_crc(header[:8]) == int.from_bytes(header[8:], "little") and _read(file, at + place, most):
                return at + place
        at += _CHUNK
    return None


def _candidates(chunk: bytes, most: int) -> list[int]:
    """Where a length stands that a record can have, and a checksum after it: few places, so that holes cost little."""
    count = len(chunk) - HEADER_BYTES + 1
    if count < 1 or not chunk.strip(b"\0"):
        return []
    low, high, crc = (np.ndarray(count, "<u4", chunk, offset, (1,)) for offset in (0, 4, 8))  # at every byte
    found: list[int] = np.flatnonzero((high == 0) & (low > 0) & (low <= most) & (crc != 0)).tolist()
    return found


def _fault(found: Finished, record: Record) -> str | None:
    try:
        decode_example(found.schema, record.data)
    except DataError as error:
        return str(error)
    return None
