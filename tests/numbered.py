"""Directories of numbered samples, written by the package: what the tests of records take apart."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otbtf_lite.records import decode_example
from otbtf_lite.schema import Feature, Sample, Schema
from otbtf_lite.sharding import plan_shards
from otbtf_lite.shards import open_finished, shard_records
from otbtf_lite.storage import Directory
from otbtf_lite.writing import Pass, write_records

SCHEMA = Schema({"n": Feature("int64", ()), "x": Feature("uint16", (2, 2, 1))})
TEXTS = Schema({**SCHEMA, "text": Feature("string", ())})


def sample(number: int, schema: Schema = SCHEMA) -> Sample:
    """All of it says the number; texts have different lengths."""
    arrays: Sample = {"n": np.array(number), "x": np.full((2, 2, 1), number, np.uint16)}
    arrays["text"] = np.array(b"." * number, object)
    return {key: arrays[key] for key in schema}


def write(
    folder: str | Path, size: int = 10, per_shard: int = 4, *, schema: Schema = SCHEMA, start: int = 0, **options: Any
) -> Path:
    """A directory of ``size`` samples, numbered from ``start``; options are a Pass's, and compression."""

    def samples(first: int) -> Iterator[Sample]:
        return (sample(start + n, schema) for n in range(first, size))

    writing = {key: options.pop(key) for key in ("compression", "overwrite") if key in options}
    given = Pass(schema, size, samples, **{"seed": 4, "repeatable": True, **options})
    write_records(Directory(folder), given, plan_shards(size, per_shard, drop_remainder=False), **writing)
    return Path(folder)


def numbers(folder: str | Path) -> list[list[int]]:
    """The samples' numbers, shard by shard."""
    found = open_finished(Directory(folder))
    out: list[list[int]] = []
    for name, compression in zip(found.names, found.compressions, strict=True):
        records = shard_records(found.directory, name, compression, found.schema)
        samples = [decode_example(found.schema, record.data) for record in records]
        assert all((each["x"] == each["n"]).all() for each in samples)
        out.append([int(each["n"]) for each in samples])
    return out


def flat(shards: Sequence[Sequence[int]]) -> list[int]:
    return [number for shard in shards for number in shard]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change(path: Path, at: int, by: bytes | None = None) -> None:
    """Other bytes at a place; None flips the lowest bit of the one there."""
    data = bytearray(path.read_bytes())
    by = bytes([data[at] ^ 1]) if by is None else by
    data[at : at + len(by)] = by
    path.write_bytes(data)


def hearing_interrupts() -> None:
    """For ``preexec_fn``: a shell's background jobs ignore Ctrl-C, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
