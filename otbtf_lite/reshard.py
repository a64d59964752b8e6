"""Records moved between shards without decoding: other shard sizes, another order, several directories into one.

Every record's checksum is compared on the way, so that nothing damaged is carried on.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from otbtf_lite import sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import POSITIONS_FILE, Manifest, is_data_set_file
from otbtf_lite.records import FRAME_BYTES, Record, ShardDigest, read_exactly, read_record, record_offsets
from otbtf_lite.shards import Finished, longest_record, open_finished, shard_records
from otbtf_lite.storage import Directory
from otbtf_lite.writing import Pass, write_records

if TYPE_CHECKING:
    from otbtf_lite.grid import Positions

_log = logging.getLogger(__name__)
_SHARD_BYTES = 100 << 20
_CRC_BYTES = 4
_MOST_POSITIONS_BYTES = 1 << 32
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
    target = Directory(output_dir)
    opened = _open(directories, target)
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
    if shuffle and "order" in details:
        details["order"] = "random"
    source = Pass(
        opened[0].schema, total, samples, drawn if shuffle else previous_seed, repeatable=True, details=details,
        dropped=_dropped(opened), positions=_positions(opened, order), raw=True,
    )  # fmt: skip
    return write_records(target, source, counts, overwrite=overwrite, compression=compression, progress=progress)


def _open(directories: Sequence[str | os.PathLike[str]], target: Directory) -> list[Finished]:
    """The directories, which must be different ones of equal schemas, none of them the one to write."""
    opened = [open_finished(Directory(directory)) for directory in directories]
    if not opened:
        raise InputError("There must be at least one directory to reshard.")
    for other in opened[1:]:
        if other.schema != opened[0].schema:
            raise InputError(
                f"{opened[0].directory.url} and {other.directory.url} have different schemas: {opened[0].schema} and"
                f" {other.schema}."
            )
    for first, second in itertools.combinations([each.directory for each in opened], 2):
        if same_place(first, second):
            raise InputError(f"{first.url} is named twice: its records would be in the new directory twice.")
    if any(same_place(target, each.directory) for each in opened):
        raise InputError(f"{target.url} is read and can't be written at once: write elsewhere.")
    for each in opened:
        each.check()
    return opened


def reshard_in_place(directory: str | os.PathLike[str], **options: Any) -> Manifest:
    """Reshards a local directory and puts the result in its place.

    The new one is written beside it, under a name that ends in ``.resharding``; then the old one gets a name that ends
    in ``.old``, the new one its name, and the old one is removed. So whenever that breaks off, all the records are
    there, finished, under one of these names; a call after that says which.

    Args:
        directory: the directory; nothing else than a data set may lie in it.
        **options: those of :func:`reshard`, without ``output_dir`` and ``overwrite``.

    Raises:
        InputError: a remote directory, which can't be renamed, or as for :func:`reshard`.
        DataError: files in it that are not the data set's, leavings of a call that broke off, or as for
            :func:`reshard`.
    """
    given = Directory(directory)
    if given.remote:
        raise InputError(f"{given.url} can't be replaced in one step: write elsewhere.")
    path = Path(os.path.realpath(given.url))
    aside, new = path.with_name(f"{path.name}.old"), path.with_name(f"{path.name}.resharding")
    if aside.exists():
        whole = path if path.exists() else new
        raise DataError(
            f"Another resharding of {path} broke off: {whole} holds all records, so"
            f" {f'remove {aside}' if path.exists() else f'rename it to {path} and remove {aside}'}."
        )
    for each in (path, new):
        names = Directory(each).names()
        others = [name for name in names if not is_data_set_file(name) and not name.startswith(".")]
        if not others:
            continue
        raise DataError(
            f"{each} also holds {len(others)} files that are not the data set's ({others[0]} ...), which would be lost:"
            " write elsewhere."
        )
    try:
        manifest = reshard([path], new, overwrite=True, **options)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    try:
        path.rename(aside)
        new.rename(path)
        shutil.rmtree(aside)
    except OSError as error:
        raise DataError(f"Could not put {new} in the place of {path}: {error.strerror or error}.") from error
    return manifest


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


def same_place(a: Directory, b: Directory) -> bool:
    """Whether two directories are one, links followed."""
    return a.url == b.url if a.remote or b.remote else os.path.realpath(a.url) == os.path.realpath(b.url)


def _in_order(opened: Sequence[Finished]) -> Iterator[Record]:
    for each in opened:
        for number, name in enumerate(each.names):
            digest, held = ShardDigest(), None
            for record in shard_records(each.directory, name, each.compressions[number], each.schema):
                digest.add(struct.pack("<QI", len(record.data), record.crc))
                if held is not None:
                    yield held
                held = record
            _compare(each, number, digest)  # before the last one, as nobody asks for more after it
            if held is not None:
                yield held


def _compare(each: Finished, number: int, digest: ShardDigest) -> None:
    """Whether a shard's records are those that were written, as far as that is known."""
    path = each.directory.path(each.names[number])
    if digest.records != each.counts[number]:
        raise DataError(f"{path} has {digest.records} records where {each.counts[number]} were promised.")
    if each.manifest is not None and digest.hexdigest() != each.manifest.shards[number].digest:
        raise DataError(f"{path} holds other records than those that were written: its digest differs.")


def _at_random(opened: Sequence[Finished], order: Iterable[int]) -> Iterator[Record]:
    """Records in any order, by an index of where they start; few files are open at a time."""
    files = [(each.directory, name) for each in opened for name in each.names]
    most = longest_record(opened[0].schema, None)
    starts = [0, *itertools.accumulate(count for each in opened for count in each.counts)]
    offsets = [_offsets(each, number) for each in opened for number in range(len(each.names))]
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
                handles[shard][1], int(offsets[shard][number]), f"{directory.path(name)}: record {number}", most
            )
    finally:
        for stack, _ in handles.values():
            stack.close()


def _offsets(each: Finished, number: int) -> npt.NDArray[np.int64]:
    """Where a shard's records start. Its digest is compared, for which lengths and stored checksums are enough."""
    name, digest = each.names[number], ShardDigest()
    with each.directory.open(name) as file:
        size = each.directory.size(name)
        starts = record_offsets(file, each.directory.path(name), size)
        for start, end in itertools.pairwise([*starts, size]):
            file.seek(end - _CRC_BYTES)
            digest.add(struct.pack("<Q", end - start - FRAME_BYTES) + read_exactly(file, _CRC_BYTES))
    _compare(each, number, digest)
    return np.array(starts, np.int64)


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
            key: [_absolute(str(path), base) for path in value]
            if key == "paths" and isinstance(value, list)
            else absolute_paths(value, base)
            for key, value in details.items()
        }
    return [absolute_paths(value, base) for value in details] if isinstance(details, list) else details


def _absolute(path: str, base: str) -> str:
    """A path as it was. Of a bare name the folder is not known: no raster lies among the shards."""
    known = "/" in path and "://" not in path and not path.startswith("/vsi")
    return str(Path(base, path)) if known else path


def _dropped(opened: Sequence[Finished]) -> dict[str, Any]:
    kept = [dict(each.manifest.dropped) for each in opened if each.manifest is not None and each.manifest.dropped]
    return kept[0] if len(opened) == 1 and kept else {"parts": kept} if kept else {}


def _positions(opened: Sequence[Finished], order: Any) -> Positions | None:
    parts = [places(each) for each in opened]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        if found:
            _log.warning("%s is left out: not all the directories have one", POSITIONS_FILE)
        return None
    from otbtf_lite.vector import concat_positions  # only what has places needs GDAL

    joined = concat_positions(found)
    if joined is None:
        _log.warning("%s is left out: the directories' have different CRSs", POSITIONS_FILE)
    return joined if order is None or joined is None else joined[order]


def places(found: Finished) -> Positions | None:
    """The positions that lie beside the records, one a record; None where there are none.

    Raises:
        DataError: they can't be read, or their number differs from the records'.
    """
    directory = found.directory
    if not directory.exists(POSITIONS_FILE):
        return None
    from otbtf_lite.vector import read_positions  # only what has places needs GDAL

    with tempfile.TemporaryDirectory() as folder:
        path = Path(directory.path(POSITIONS_FILE))
        if directory.remote:  # which GDAL can't read
            path = Path(folder, POSITIONS_FILE)
            path.write_bytes(directory.read(POSITIONS_FILE, _MOST_POSITIONS_BYTES))
        positions = read_positions(path)
    if found.manifest is not None and len(positions) != found.manifest.n_samples:
        raise DataError(
            f"{directory.path(POSITIONS_FILE)} has {len(positions)} positions where there are"
            f" {found.manifest.n_samples} records: remove it, or copy it again."
        )
    return positions
