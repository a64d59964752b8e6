"""Samples -> shards -> manifest: the one way that records are written.

:func:`write_records` takes a :class:`Pass`, which is one pass over any source of samples, and leaves a directory that
is either finished or says that it is not (see :mod:`otbtf_lite.manifest` for the commit protocol).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otbtf_lite import sharding
from otbtf_lite._version import __version__
from otbtf_lite.codecs import get_codec
from otbtf_lite.compression import MAX_INFLATED_RECORD_BYTES, Deflated
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import (
    COMPRESSIONS,
    JOURNAL,
    MANIFEST,
    POSITIONS_FILE,
    SHAPES_FILE,
    TYPES_FILE,
    Journal,
    Manifest,
    Shard,
    checked_details,
    commit,
    load_journal,
)
from otbtf_lite.progress import bar
from otbtf_lite.records import FRAME_BYTES, RawEncoder, RecordEncoder, ShardDigest
from otbtf_lite.schema import Schema, dtype_name
from otbtf_lite.shards import longest_record
from otbtf_lite.storage import Directory, WriteLock, temporary_name

if TYPE_CHECKING:
    from otbtf_lite.grid import Positions

_RESULTS = ("statistics", "class_counts")  # known at the end only, so no settings that a resumed run must share
_SHOWN = 60  # characters of a setting in a message
_MEMBERS = ("size", "output_types", "output_shapes", "read_one_sample")


@dataclass(frozen=True)
class Pass:
    """One pass over a source of samples, in the order in which it is to be written."""

    schema: Schema
    """What every sample looks like."""
    size: int
    """Number of samples."""
    samples: Callable[[int], Iterator[Any]]
    """The samples from a place in the order on; closing the iterator lets go of what it holds."""
    seed: int | None = None
    """The seed of the order; None where the source has an order of its own."""
    repeatable: bool = False
    """Whether ``samples`` gives the same ones again, also in another process."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the manifest: sources, sampling and so on, with absolute paths under ``paths``."""
    dropped: Mapping[str, Any] = field(default_factory=dict)
    """What was left out before and why: counts by reason."""
    positions: Positions | None = None
    """Where the samples are, in the same order, where they come from places."""
    with_seed: Callable[[int], Pass] | None = None
    """The same pass in the order of another seed, where the one there is was not asked for by anyone."""
    summary: Callable[[int], Mapping[str, Any]] | None = None
    """Statistics of the first so many samples, once these have been taken: further JSON values for the manifest."""
    raw: bool = False
    """Whether ``samples`` gives :class:`~otbtf_lite.records.Record`, which are written as they are."""


def pass_over(dataset: Any) -> Pass:
    """The pass that a dataset offers, or one made of the four members that OTBTF's datasets have.

    Args:
        dataset: a :class:`otbtf_lite.Dataset` (anything with ``one_pass()``), or an object with ``size``,
            ``output_types``, ``output_shapes`` and ``read_one_sample()``.

    Raises:
        InputError: the object is neither; the message names what it lacks.
    """
    if hasattr(dataset, "one_pass"):
        found = dataset.one_pass()
        if isinstance(found, Pass):
            return found
    missing = [name for name in _MEMBERS if not hasattr(dataset, name)]
    if missing:
        raise InputError(f"{type(dataset).__name__} is no dataset that can be written: it has no {', '.join(missing)}.")
    types = {key: _type_name(dtype) for key, dtype in dataset.output_types.items()}
    shapes = {key: list(shape) for key, shape in dataset.output_shapes.items()}
    schema = Schema.from_otbtf(types, shapes, type(dataset).__name__)

    def samples(start: int) -> Iterator[Any]:
        if start:
            raise InputError(f"{type(dataset).__name__} can only be read from its start, so it can't be resumed.")
        for _ in range(int(dataset.size)):
            yield dataset.read_one_sample()

    return Pass(schema, int(dataset.size), samples)


def _type_name(dtype: Any) -> str:
    """The name of an element type given as a name, a TensorFlow type, or a NumPy type or scalar class."""
    return dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or dtype_name(dtype)


def write_records(
    directory: Directory,
    source: Pass,
    plan: sharding.ShardPlan,
    *,
    overwrite: bool = False,
    resume: bool = False,
    compression: str | None = None,
    codecs: Mapping[str, str] | None = None,
    progress: bool | None = None,
) -> Manifest:
    """Writes one pass over a source and commits it.

    Args:
        directory: where to write.
        source: what to write.
        plan: how many records each shard gets, as made for ``source.size``.
        overwrite: as for :meth:`otbtf_lite.TFRecords.ds2tfrecord`, like all that follow.
        resume: the same.
        compression: the same.
        codecs: the same.
        progress: the same.

    Returns:
        The manifest, as committed.

    Raises:
        InputError: as there.
        DataError: as there.
    """
    if overwrite and resume:
        raise InputError("overwrite and resume exclude each other: one throws away what the other goes on from.")
    if compression not in COMPRESSIONS:
        raise InputError(f"compression must be one of {', '.join(map(repr, COMPRESSIONS))}, got {compression!r}.")
    schema = source.schema.with_codecs(codecs)
    for name, feature in schema.items():
        get_codec(feature.codec).check(name, feature)
    if resume and not source.repeatable:
        raise InputError("This source can't be read again in the same order, so a run that broke off can't be resumed.")
    remainder = {"remainder": plan.dropped} if plan.dropped else {}
    dropped = checked_details({**source.dropped, **remainder}, directory.url)
    details = checked_details(source.details, directory.url)
    job = _Job(directory, source, schema, plan, compression, details, dropped, progress)
    return job.run(overwrite=overwrite, resume=resume)


def check_free(directory: Directory, *, overwrite: bool, resume: bool) -> None:
    """Whether a directory can be written to as asked.

    Raises:
        DataError: it holds a data set already, or nothing that can be resumed.
    """
    names = directory.names()
    taken = [name for name in _ours(names) if name in names]
    if taken and not overwrite and not resume:
        raise DataError(
            f"{directory.url} already holds {len(taken)} files of a data set ({taken[0]} ...): write elsewhere, or ask"
            " for overwrite (or, where a run broke off, resume)."
        )
    if resume and MANIFEST in names and JOURNAL not in names:
        raise DataError(f"{directory.url} is finished already: there is nothing to resume.")
    if resume and taken and JOURNAL not in names:
        raise DataError(f"{directory.url} has no journal ({JOURNAL}) to resume from: ask for overwrite.")


def _ours(names: Iterable[str]) -> list[str]:
    """The names that a data set may have in its directory, the journal's last; of shards those that are there."""
    return [MANIFEST, TYPES_FILE, SHAPES_FILE, POSITIONS_FILE, *sharding.numeric_order(names), JOURNAL]


@dataclass
class _Job:
    directory: Directory
    source: Pass
    schema: Schema
    plan: sharding.ShardPlan
    compression: str | None
    details: Mapping[str, Any]
    dropped: Mapping[str, Any]
    progress: bool | None

    def run(self, *, overwrite: bool, resume: bool) -> Manifest:
        made = self.directory.make()
        try:
            with WriteLock(self.directory):
                check_free(self.directory, overwrite=overwrite, resume=resume)
                known = load_journal(self.directory) if resume else None
                if known is not None:
                    self._take_seed(known)
                if isinstance(known, Manifest):
                    # Everything was written; only the last rename is missing.
                    self._check_settings(self._settings_of(known))
                    self.directory.replace(JOURNAL, MANIFEST)
                    return known
                return self._write(known, overwrite=overwrite)
        finally:
            self.directory.unmake(made)

    def _write(self, known: Journal | None, *, overwrite: bool) -> Manifest:
        done = self._checked_shards(known) if known else {}
        with contextlib.closing(_Stream(self._checked)) as stream:
            missing = next((i for i in range(len(self.plan.counts)) if i not in done), None)
            if missing is not None:
                # The first sample is read before anything is touched: most mistakes show here, and nothing has changed.
                stream.seek(self._start(missing))
            journal = Journal(self._settings(), list(done.values()))
            self.directory.write(JOURNAL, journal.head() + b"".join(map(Journal.entry, journal.shards)))
            try:
                if overwrite:
                    self._clear(keep=JOURNAL)
                else:  # OTBTF's reader knows no journal: what it needs beside the shards comes after them
                    for name in (TYPES_FILE, SHAPES_FILE):
                        self.directory.remove(name)
                shards = self._write_shards(done, stream)
                self._write_side_files()
            except BaseException:
                # A run that finished no shard has nothing worth keeping, so it leaves nothing.
                if not sharding.numeric_order(self.directory.names()):
                    self._clear(keep=None)
                raise
        results = {} if self.source.summary is None else self.source.summary(self.plan.n_samples)
        manifest = Manifest(
            self.schema, tuple(shards), self.compression, self.source.seed, max(self.plan.counts), self.dropped,
            {**self.details, **checked_details(results, self.directory.url)}, _versions(self.compression),
        )  # fmt: skip
        commit(self.directory, manifest)
        return manifest

    def _start(self, shard: int) -> int:
        return sum(self.plan.counts[:shard])

    def _checked(self, start: int) -> Iterator[Any]:
        samples = self.source.samples(start)
        number = start
        try:
            for sample in itertools.islice(samples, self.plan.n_samples - start):
                yield sample if self.source.raw else self.schema.check(sample, f"sample {number}")
                number += 1
        finally:
            close = getattr(samples, "close", None)
            if close:
                close()
        if number != self.plan.n_samples:
            raise DataError(f"The source ended after {number} samples where it had promised {self.source.size}.")

    def _write_shards(self, done: dict[int, Shard], stream: _Stream) -> list[Shard]:
        encoder = RawEncoder() if self.source.raw else RecordEncoder(self.schema)
        shards = []
        with bar(self.plan.n_samples, "writing", "sample", self.progress) as shown:
            for index, count in enumerate(self.plan.counts):
                if index in done:
                    shards.append(done[index])
                    shown.update(count)
                    continue
                stream.seek(self._start(index))  # goes on, but after a shard that was already there
                shard = self._write_shard(index, count, encoder, stream, shown)
                self.directory.append(JOURNAL, Journal.entry(shard))
                shards.append(shard)
        return shards

    def _write_shard(
        self, index: int, count: int, encoder: RecordEncoder | RawEncoder, stream: Iterator[Any], shown: Any
    ) -> Shard:
        name = sharding.shard_name(index)
        digest = ShardDigest()
        most = longest_record(self.schema, self.compression) + FRAME_BYTES
        with (
            self.directory.create(temporary_name(name), name) as file,
            Deflated(file, self.compression) if self.compression else contextlib.nullcontext(file) as sink,
        ):
            seen = 0
            for data in encoder.encode(itertools.islice(stream, count), digest):
                self._check_length(len(data), most)
                sink.write(data)
                shown.update(digest.records - seen)
                seen = digest.records
            if isinstance(sink, Deflated):
                sink.finish()
        return Shard(name, digest.records, file.bytes, digest.hexdigest(), digest.first_crc or 0)

    def _check_length(self, size: int, most: int) -> None:
        """Readers refuse what could be a trap. Only records without a fixed size, which come singly, can be so long."""
        if size > max(most, MAX_INFLATED_RECORD_BYTES):
            raise InputError(
                f"A record of {size} bytes is too long for a compressed shard, whose readers take {most} at most: write"
                " it uncompressed."
            )

    def _write_side_files(self) -> None:
        if all(feature.codec == "tensor" for feature in self.schema.values()):
            self.directory.write(TYPES_FILE, _json(self.schema.types_json()))
            self.directory.write(SHAPES_FILE, _json(self.schema.shapes_json()))
        if self.source.positions is not None:
            from otbtf_lite.vector import write_positions  # only what comes from places needs GDAL

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / POSITIONS_FILE
                write_positions(self.source.positions[: self.plan.n_samples], path)
                self.directory.write(POSITIONS_FILE, path.read_bytes())

    def _clear(self, *, keep: str | None) -> None:
        """Removes what belongs to a data set. Where the journal is kept it was there first: no state looks complete."""
        names = self.directory.names()
        unfinished = [name[1:-4] for name in names if name == temporary_name(name[1:-4])]
        temporary = [temporary_name(name) for name in _ours(unfinished)]
        for name in [*temporary, *_ours(names)]:
            if name in names and name != keep:
                self.directory.remove(name)

    def _settings(self) -> dict[str, Any]:
        return {
            "schema": self.schema.to_json(),
            "n_samples": self.plan.n_samples,
            "n_samples_per_shard": max(self.plan.counts),
            "compression": self.compression,
            "seed": self.source.seed,
            **{key: value for key, value in self.details.items() if key not in _RESULTS},
        }

    @staticmethod
    def _settings_of(manifest: Manifest) -> dict[str, Any]:
        return {
            "schema": manifest.schema.to_json(),
            "n_samples": manifest.n_samples,
            "n_samples_per_shard": manifest.n_samples_per_shard,
            "compression": manifest.compression,
            "seed": manifest.seed,
            **{key: value for key, value in manifest.details.items() if key not in _RESULTS},
        }

    def _take_seed(self, known: Journal | Manifest) -> None:
        """Goes on with the seed that the run began with, where this one's was merely drawn."""
        begun = known.seed if isinstance(known, Manifest) else known.settings.get("seed")
        if self.source.with_seed is not None and isinstance(begun, int) and begun != self.source.seed:
            self.source = self.source.with_seed(begun)

    def _check_settings(self, known: Mapping[str, Any]) -> None:
        mine = self._settings()
        differing = [
            f"{key} (then {_short(known.get(key))}, now {_short(mine.get(key))})"
            for key in sorted(mine.keys() | known.keys())
            if mine.get(key) != known.get(key)
        ]
        if differing:
            raise InputError(
                f"{self.directory.url} was begun with other settings, so it can't be resumed: other"
                f" {', '.join(differing)}."
            )

    def _checked_shards(self, journal: Journal) -> dict[int, Shard]:
        """The finished shards that are still what the journal says; the others are written again."""
        self._check_settings(journal.settings)
        from otbtf_lite.verify import shard_faults  # it reads what this module writes

        planned = {sharding.shard_name(index): (index, count) for index, count in enumerate(self.plan.counts)}
        done: dict[int, Shard] = {}
        for shard in journal.shards:
            index, count = planned.get(shard.name, (-1, -1))
            if shard.records == count and not shard_faults(
                self.directory, shard, self.schema, self.compression, parse=False
            ):
                done[index] = shard
        return done


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Stream:
    """Samples from any place on. The first one is read at once, so that its errors come before anything is touched."""

    def __init__(self, open_at: Callable[[int], Iterator[Any]]) -> None:
        self._open_at = open_at
        self._samples: Iterator[Any] = iter(())
        self._first: Any = None
        self._at = -1

    def seek(self, start: int) -> None:
        if start != self._at:
            self.close()
            self._samples = self._open_at(start)
            self._first = next(self._samples, None)
            self._at = start

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        first, self._first = self._first, None
        sample = next(self._samples) if first is None else first
        self._at += 1
        return sample

    def close(self) -> None:
        close = getattr(self._samples, "close", None)  # a generator's
        if close is not None:
            close()


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=4).encode()


def _versions(compression: str | None) -> dict[str, str]:
    packages = [("numpy", "numpy"), ("gdal", "gdal"), ("gdal", "gdal-wheel")]
    if compression:
        packages.append(("isal", "isal"))
    found = [(name, _version(distribution)) for name, distribution in packages]
    own = {"otbtf-lite": __version__, "python": platform.python_version()}
    return {**own, **{name: number for name, number in found if number}}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
