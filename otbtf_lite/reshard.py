"""Records moved between shards without decoding: other shard sizes, another order, several directories into one.

Every record's checksum is compared on the way, so that nothing damaged is carried on.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from otbtf_lite import sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import POSITIONS_FILE, Manifest
from otbtf_lite.records import Record, iter_records, read_record, record_offsets
from otbtf_lite.shards import Finished, open_finished, open_shard
from otbtf_lite.storage import Directory
from otbtf_lite.writing import Pass, write_records

if TYPE_CHECKING:
    from otbtf_lite.grid import Positions

_SHARD_BYTES = 100 << 20
_OPEN_FILES = 64


def reshard(
    directories: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    n_shards: int | None = None,
    n_samples_per_shard: int | None = None,
    seed: int | None = None,
    shuffle: bool = False,
    compression: str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Manifest:
    """Writes the records of one or several directories into another, all of them.

    Args:
        directories: finished directories of equal schemas, ours or OTBTF's.
        output_dir: where to write; not one of them.
        n_shards: how many shards, as equal as can be; or
        n_samples_per_shard: records a shard, the last one with the rest.
        seed: of the new order; None draws one.
        shuffle: write in an order drawn from the seed; else in the order there is.
        compression: None, ``"GZIP"`` or ``"ZLIB"``, of the new shards.
        overwrite: replace what ``output_dir`` holds.
        progress: show a progress bar; None does so on a terminal.

    Returns:
        The manifest of the new directory.

    Raises:
        InputError: schemas that differ, both or none of the sizes, more shards than samples, or a new order of
            compressed shards, which can't be read at random.
        DataError: a directory that is unfinished or damaged, or an output that can't be written.
    """
    opened = [open_finished(Directory(directory)) for directory in directories]
    if not opened:
        raise InputError("There must be at least one directory to reshard.")
    for other in opened[1:]:
        if other.schema != opened[0].schema:
            raise InputError(
                f"{opened[0].directory.url} and {other.directory.url} have different schemas: {opened[0].schema} and"
                f" {other.schema}."
            )
    target = Directory(output_dir)
    if any(_same_place(target, each.directory) for each in opened):
        raise InputError(f"{target.url} is read and can't be written at once: write elsewhere.")
    for each in opened:
        each.check()
    total = sum(sum(each.counts) for each in opened)
    counts = _counts(total, n_shards, n_samples_per_shard)
    drawn = sharding.check_seed(seed)
    order = sharding.permutation(total, drawn) if shuffle else None
    if order is None:

        def samples(start: int) -> Iterator[Record]:
            return itertools.islice(_in_order(opened), start, None)

    else:
        if any(any(each.compressions) for each in opened):
            raise InputError(
                "Compressed shards can't be read in another order: reshard them uncompressed in their order first."
            )

        def samples(start: int) -> Iterator[Record]:
            return _at_random(opened, order[start:])

    details, previous_seed = _details(opened)
    source = Pass(
        opened[0].schema, total, samples, drawn if shuffle else previous_seed, repeatable=True, details=details,
        dropped=_dropped(opened), positions=_positions(opened, order), raw=True,
    )  # fmt: skip
    return write_records(target, source, counts, overwrite=overwrite, compression=compression, progress=progress)


def replace_directory(old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
    """Puts a new local directory in an old one's place. At each moment both are there whole, under one name or another.

    Raises:
        DataError: they can't be renamed.
    """
    aside = f"{os.fspath(old).rstrip(os.sep)}.old"
    if Path(aside).exists():
        raise DataError(f"{aside} is there already: remove it first.")
    try:
        Path(old).rename(aside)
        Path(new).rename(old)
    except OSError as error:
        raise DataError(
            f"Could not put {os.fspath(new)} in the place of {os.fspath(old)}: {error.strerror}."
        ) from error
    shutil.rmtree(aside)


def suggest_shards(n_samples: int, sample_bytes: int, n_workers: int) -> int:
    """A number of shards that ``n_workers`` share evenly: a multiple of it, each of at most about 100 MB.

    Of the multiples in reach it takes the first that divides the samples, so that none is lost in trimming; else the
    smallest.

    Args:
        n_samples: records in all.
        sample_bytes: bytes of one.
        n_workers: how many workers will share them.

    Raises:
        InputError: fewer samples than workers.
    """
    workers = sharding.check_workers(n_workers)
    if n_samples < workers:
        raise InputError(f"{n_samples} samples can't be shared out among {workers} workers.")
    least = -(-max(1, n_samples * sample_bytes // _SHARD_BYTES) // workers)
    candidates = [k * workers for k in range(least, min(4 * least, n_samples // workers) + 1)]
    return next((n for n in candidates if n_samples % n == 0), candidates[0] if candidates else workers)


def _counts(total: int, n_shards: int | None, n_samples_per_shard: int | None) -> sharding.ShardPlan:
    if (n_shards is None) == (n_samples_per_shard is None):
        raise InputError("Give either the number of shards or the samples a shard.")
    if n_samples_per_shard is not None:
        return sharding.plan_shards(total, n_samples_per_shard, drop_remainder=False)
    return sharding.plan_equal_shards(total, n_shards or 0)


def _same_place(a: Directory, b: Directory) -> bool:
    return a.url == b.url if a.remote or b.remote else os.path.realpath(a.url) == os.path.realpath(b.url)


def _in_order(opened: Sequence[Finished]) -> Iterator[Record]:
    for each in opened:
        for name, count, compression in zip(each.names, each.counts, each.compressions, strict=True):
            path = each.directory.path(name)
            number = 0
            with open_shard(each.directory, name, compression) as file:
                for record in iter_records(file, path):
                    yield record
                    number += 1
            if number != count:
                raise DataError(f"{path} has {number} records where {count} were promised.")


def _at_random(opened: Sequence[Finished], order: Iterable[int]) -> Iterator[Record]:
    """Records in any order, by an index of where they start; few files are open at a time."""
    files = [(each.directory, name) for each in opened for name in each.names]
    starts = [0, *itertools.accumulate(count for each in opened for count in each.counts)]
    offsets = [_offsets(directory, name) for directory, name in files]
    handles: dict[int, tuple[ExitStack, BinaryIO]] = {}
    try:
        for index in order:
            shard = int(np.searchsorted(starts, index, "right")) - 1
            directory, name = files[shard]
            if shard not in handles:
                if len(handles) == _OPEN_FILES:
                    handles.pop(next(iter(handles)))[0].close()
                stack = ExitStack()
                handles[shard] = stack, stack.enter_context(directory.open(name))
            number = int(index) - starts[shard]
            yield read_record(
                handles[shard][1], int(offsets[shard][number]), f"{directory.path(name)}: record {number}"
            )
    finally:
        for stack, _ in handles.values():
            stack.close()


def _offsets(directory: Directory, name: str) -> npt.NDArray[np.int64]:
    with directory.open(name) as file:
        return np.array(record_offsets(file, directory.path(name), directory.size(name)), np.int64)


def _details(opened: Sequence[Finished]) -> tuple[dict[str, Any], int | None]:
    manifests = [each.manifest for each in opened]
    if len(manifests) == 1:
        only = manifests[0]
        return ({}, None) if only is None else (absolute_paths(only.details, opened[0].directory.url), only.seed)
    return {
        "parts": [
            absolute_paths(m.details, each.directory.url) if m else {}
            for m, each in zip(manifests, opened, strict=True)
        ]
    }, None


def absolute_paths(details: Any, base: str) -> Any:
    """The manifest's relative paths, made absolute again, since the new directory lies elsewhere."""
    if isinstance(details, Mapping):
        return {
            key: [str(p) if "://" in str(p) or str(p).startswith("/vsi") else str(Path(base, str(p))) for p in value]
            if key == "paths" and isinstance(value, list)
            else absolute_paths(value, base)
            for key, value in details.items()
        }
    return [absolute_paths(value, base) for value in details] if isinstance(details, list) else details


def _dropped(opened: Sequence[Finished]) -> dict[str, Any]:
    kept = [dict(each.manifest.dropped) for each in opened if each.manifest is not None and each.manifest.dropped]
    return kept[0] if len(opened) == 1 and kept else {"parts": kept} if kept else {}


def _positions(opened: Sequence[Finished], order: Any) -> Positions | None:
    if not all(each.directory.exists(POSITIONS_FILE) for each in opened):
        return None
    from otbtf_lite.vector import concat_positions, read_positions  # only what has places needs GDAL

    joined = concat_positions([read_positions(each.directory.path(POSITIONS_FILE)) for each in opened])
    return joined if order is None or joined is None else joined[order]
