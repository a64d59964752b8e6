"""The manifest: what a directory of shards holds, and the journal that stands in for it while they are written.

Commit protocol: ``manifest.json.partial`` is there from before the first change to a directory until after the last.
While it is there the directory is unfinished, whatever else it holds. It is a journal: a line of settings, then a line
for each finished shard. At the end the complete manifest is renamed over it, and then it to ``manifest.json``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otbtf_lite.codecs import get_codec
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.schema import Schema, shown
from otbtf_lite.sharding import numeric_order, shard_name, shard_number
from otbtf_lite.storage import Directory

MANIFEST = "manifest.json"
JOURNAL = "manifest.json.partial"
TYPES_FILE = "output_types.json"
SHAPES_FILE = "output_shapes.json"
POSITIONS_FILE = "positions.gpkg"
VERSION = 1
"""The version of the manifest that is written; newer ones are refused, older ones are read."""

COMPRESSIONS = (None, "GZIP", "ZLIB")
"""How a whole shard may be compressed, by TensorFlow's names."""

_MAX_BYTES = 1 << 26
_MAX_VALUES = 2_000_000
_MAX_DEPTH = 100
_HEX = re.compile(r"[0-9a-f]{64}")
_LARGEST = (1 << 63) - 1
_LARGEST_CRC = (1 << 32) - 1
_OWN_KEYS = (
    "version", "schema", "n_samples", "n_samples_per_shard", "compression", "seed", "shards", "dropped", "versions",
)  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One finished shard."""

    name: str
    """File name in the directory, such as ``"0.records"``."""
    records: int
    """Records in it."""
    bytes: int
    """Size of the file."""
    digest: str
    """SHA-256 over each record's length and stored CRC, in order, in hexadecimal."""
    first_crc: int
    """Stored (masked) CRC of the first record's data."""

    def to_json(self) -> dict[str, Any]:
        """The manifest's form."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: object, where: str) -> Shard:
        """The shard that :meth:`to_json` wrote.

        Raises:
            DataError: data of another form, or a name that is not a plain shard name.
        """
        entry = _object(data, f"{where}: a shard")
        name, digest = entry.get("name"), entry.get("digest")
        if not isinstance(name, str) or shard_number(name) is None:
            msg = f"{where}: a shard is named {shown(name)}: only plain names such as {shard_name(0)!r} are allowed."
            raise DataError(msg)
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            msg = f"{where}: the digest of {name} is no SHA-256: {shown(digest)}."
            raise DataError(msg)
        place = f"{where}: {name}"
        records, size = (_integer(entry, key, place, 1) for key in ("records", "bytes"))
        return cls(name, records, size, digest, _integer(entry, "first_crc", place, most=_LARGEST_CRC))


@dataclass(frozen=True)
class Manifest:
    """What a finished directory holds."""

    schema: Schema
    """Features with their codecs."""
    shards: tuple[Shard, ...]
    """The shards in numeric order."""
    compression: str | None = None
    """One of :data:`COMPRESSIONS`."""
    seed: int | None = None
    """The seed of the samples' order; None where the source had an order of its own."""
    n_samples_per_shard: int | None = None
    """As asked for when it was written."""
    dropped: Mapping[str, Any] = field(default_factory=dict)
    """What is not there and why: counts by reason."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Where the samples come from: sources, sampling, classes, statistics and so on, of :func:`checked_details`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote it."""

    @property
    def n_samples(self) -> int:
        """Samples in all shards together."""
        return sum(shard.records for shard in self.shards)

    def to_bytes(self) -> bytes:
        """The file's bytes: JSON with two-space indentation, non-ASCII text escaped, a newline at the end."""
        data = {
            "version": VERSION,
            "schema": self.schema.to_json(),
            "n_samples": self.n_samples,
            "n_samples_per_shard": self.n_samples_per_shard,
            "compression": self.compression,
            "seed": self.seed,
            "shards": [shard.to_json() for shard in self.shards],
            "dropped": dict(self.dropped),
            **dict(self.details),
            "versions": dict(sorted(self.versions.items())),
        }
        return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """The manifest in a file's bytes.

        Args:
            data: the file's content.
            where: its path, for messages.

        Raises:
            DataError: content of another form, an unknown newer version, shard names that are no plain names or repeat.
        """
        entry = parse_object(data, where)
        version = entry.pop("version", None)
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            msg = f"{where} has no valid version number: {shown(version)}."
            raise DataError(msg)
        if version > VERSION:
            msg = f"{where} is of version {version}: this otbtf-lite reads up to version {VERSION}, get a newer one."
            raise DataError(msg)
        schema = _schema(entry.pop("schema", None), where)
        listed = entry.pop("shards", None)
        if not isinstance(listed, list) or not listed:
            msg = f"{where} lists no shards."
            raise DataError(msg)
        shards = tuple(Shard.from_json(item, where) for item in listed)
        names = [shard.name for shard in shards]
        if numeric_order(names) != names or len({shard_number(n) for n in names}) != len(names):
            msg = f"{where} does not list its shards once each in numeric order: {shown(names)}."
            raise DataError(msg)
        compression = entry.pop("compression", None)
        if compression not in COMPRESSIONS:
            msg = f"{where} names an unknown compression: {shown(compression)}."
            raise DataError(msg)
        seed, per_shard = (
            None if entry.get(key) is None else _integer(entry, key, where, least)
            for key, least in (("seed", 0), ("n_samples_per_shard", 1))
        )
        n_samples = _integer(entry, "n_samples", where)
        dropped, versions = (_object(entry.pop(key, {}), f"{where}: {key}") for key in ("dropped", "versions"))
        details = {key: value for key, value in entry.items() if key not in _OWN_KEYS}
        manifest = cls(schema, shards, compression, seed, per_shard, dropped, details, versions)
        if manifest.n_samples != n_samples:
            msg = f"{where} says {n_samples} samples, but its shards add up to {manifest.n_samples}."
            raise DataError(msg)
        return manifest


@dataclass
class Journal:
    """What is known of an unfinished directory."""

    settings: Mapping[str, Any]
    """What is being written, as JSON values: a resumed run must have the same."""
    shards: list[Shard] = field(default_factory=list)
    """The shards that are finished, in the order they were."""

    def head(self) -> bytes:
        """The journal's first line."""
        return _line({"journal": VERSION, "settings": dict(self.settings)})

    @staticmethod
    def entry(shard: Shard) -> bytes:
        """The line that says a shard is finished."""
        return _line(shard.to_json())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Journal | Manifest:
        """The journal in a file's bytes, or the complete manifest where a run got that far.

        A torn last line, as a crash leaves it, is passed over.

        Raises:
            DataError: content that is neither.
        """
        if data.count(b"\n") > _MAX_VALUES:
            msg = f"{where} has more than {_MAX_VALUES} lines: it is no journal."
            raise DataError(msg)
        lines = data.split(b"\n")[:-1]
        if lines and lines[0] == b"{":  # a manifest is indented, so its first line is the brace alone
            return Manifest.from_bytes(data, where)
        if not lines:
            msg = f"{where} is empty: nothing can be resumed. Write again with overwrite."
            raise DataError(msg)
        head = parse_object(lines[0], where)
        if head.get("journal") != VERSION:
            version = shown(head.get("journal"))
            msg = f"{where} is a journal of version {version}; this otbtf-lite resumes version {VERSION}."
            raise DataError(msg)
        shards = [Shard.from_json(parse_object(line, where), where) for line in lines[1:]]
        return cls(_object(head.get("settings"), where), shards)


def is_data_set_file(name: str) -> bool:
    """Whether a file of that name in a directory belongs to its data set."""
    return name in {MANIFEST, JOURNAL, TYPES_FILE, SHAPES_FILE, POSITIONS_FILE} or shard_number(name) is not None


def load_manifest(directory: Directory) -> Manifest | None:
    """The manifest of a finished directory; None where there is none.

    Raises:
        DataError: the directory is unfinished, or its manifest is not valid.
    """
    if directory.exists(JOURNAL):
        msg = f"{directory.url} is unfinished ({JOURNAL} is there): finish it with resume, or write it with overwrite."
        raise DataError(msg)
    if not directory.exists(MANIFEST):
        return None
    return Manifest.from_bytes(directory.read(MANIFEST, _MAX_BYTES), directory.path(MANIFEST))


def load_journal(directory: Directory) -> Journal | Manifest | None:
    """The journal of an unfinished directory, the complete manifest under its name, or None where there is neither.

    Raises:
        DataError: content of another form.
    """
    if not directory.exists(JOURNAL):
        return None
    return Journal.from_bytes(directory.read(JOURNAL, _MAX_BYTES), directory.path(JOURNAL))


def commit(directory: Directory, manifest: Manifest) -> None:
    """Makes a directory finished: the manifest over the journal, then that to its own name."""
    directory.write(JOURNAL, manifest.to_bytes())
    directory.replace(JOURNAL, MANIFEST)


def checked_details(details: Mapping[str, Any], base: str) -> dict[str, Any]:
    """What a source tells of itself as a manifest in ``base`` keeps it: exactly what is read back from there.

    Raises:
        InputError: what has no form in JSON, or a name that the manifest has itself.
    """
    taken = sorted(set(_OWN_KEYS) & set(details))
    if taken:
        msg = f"Details for a manifest can't be named {', '.join(map(repr, taken))}: it has that entry itself."
        raise InputError(msg)
    try:
        return dict(json.loads(json.dumps(relative_paths(details, base), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"Details for a manifest must be JSON values: {error}."
        raise InputError(msg) from error


def relative_paths(details: object, base: str) -> Any:  # JSON values
    """JSON values in which the absolute paths under a ``paths`` key are relative to ``base``, with forward slashes.

    A path that shares nothing but the file system's root with ``base``, or any local one where ``base`` is a URL, is
    cut down to its file name, so that no machine's layout enters a manifest.
    """
    if isinstance(details, Mapping):
        return {
            key: [_relative(str(p), base) for p in value]
            if key == "paths" and isinstance(value, Sequence) and not isinstance(value, str)
            else relative_paths(value, base)
            for key, value in details.items()
        }
    if isinstance(details, list | tuple):
        return [relative_paths(value, base) for value in details]
    return details


def _relative(path: str, base: str) -> str:
    if "://" in path or path.startswith("/vsi") or path == Path(path).name:  # a bare name was cut down before
        return path
    if "://" in base:
        return Path(path).name
    try:
        common = Path(os.path.commonpath([os.path.abspath(path), os.path.abspath(base)]))  # noqa: PTH100  # see below
    except ValueError:  # different drives
        return Path(path).name
    # By the names as they are given: resolve() would follow links, out of the folder that is moved around as a whole.
    return Path(path).name if common == Path(common.anchor) else Path(os.path.relpath(path, base)).as_posix()


def _line(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, allow_nan=False) + "\n").encode()


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a file's bytes.

    Args:
        data: the file's content.
        where: its path, for messages.

    Raises:
        DataError: it is no valid JSON, too much of it, or no object.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > _MAX_VALUES:  # each takes up to a hundred bytes of memory, and two in the file
        msg = f"{where} has about {values} values, more than the {_MAX_VALUES} that such a file may have."
        raise DataError(msg)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}."
        raise DataError(msg) from error
    level = [found]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    if level:  # what walks through it calls itself at each level
        msg = f"{where} is nested more than {_MAX_DEPTH} levels deep."
        raise DataError(msg)
    return _object(found, where)


def _object(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        msg = f"{where} must be a JSON object, got {type(data).__name__}."
        raise DataError(msg)
    return dict(data)


def _integer(entry: Mapping[str, Any], key: str, where: str, least: int = 0, most: int = _LARGEST) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        msg = f"{where}: {key} must be an integer from {least} to {most}, got {shown(value)}."
        raise DataError(msg)
    return value


def _schema(data: object, where: str) -> Schema:
    try:
        schema = Schema.from_json(data, where)
        for feature in schema.values():
            get_codec(feature.codec)
    except InputError as error:
        msg = str(error) if where in str(error) else f"{where}: {error}"
        raise DataError(msg) from error
    return schema
