"""Directories of every version of the format that there has been, whatever is written today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import golden
import numpy as np
import pytest

from otbtf_lite.manifest import VERSION
from otbtf_lite.records import decode_example
from otbtf_lite.reshard import reshard
from otbtf_lite.salvage import salvage
from otbtf_lite.schema import Feature, Sample, Schema
from otbtf_lite.sharding import plan_shards
from otbtf_lite.shards import open_finished, shard_records
from otbtf_lite.storage import Directory
from otbtf_lite.tfrecords import TFRecords
from otbtf_lite.writing import Pass, write_records

SCHEMA = Schema({"count": Feature("int64", ()), "name": Feature("string", ()), "patch": Feature("uint16", (1, 2, 1))})
DIGESTS = [
    "83f9a3f26af2198681185fb37460ae9c1699e75a07f6e7ab4575c5f0ed38631a",
    "0a91b5ed469c5a01709b7363b355f2ee9a66edc93fb9949abeaf5b20759b7c0a",
]


def sample(number: int) -> Sample:
    return {
        "count": np.array(number), "name": np.array(b"x" * number, object),
        "patch": np.array([[[number], [number + 1]]], np.uint16),
    }  # fmt: skip


def counts(folder: Path) -> list[int]:
    found = open_finished(Directory(folder))
    out = []
    for name, compression in zip(found.names, found.compressions, strict=True):
        for record in shard_records(found.directory, name, compression, found.schema):
            got = decode_example(found.schema, record.data)
            number = int(got["count"])
            assert all(got[key].tolist() == value.tolist() for key, value in sample(number).items())
            out.append(number)
    return out


def test_every_version_has_its_golden_directory() -> None:
    assert VERSION == 1, "write golden directories of the new version too, and leave those of the old ones as they are"


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_version_1_is_read(tmp_path: Path, compression: str | None) -> None:
    folder = golden.write(tmp_path / "a", compression)
    records = TFRecords(folder)
    records.verify()
    assert records.schema == SCHEMA
    assert (len(records), records.shards) == (5, ["0.records", "1.records"])
    manifest = records.manifest
    assert manifest is not None
    assert (manifest.seed, manifest.n_samples_per_shard, manifest.compression) == (4, 3, compression)
    assert manifest.dropped == {"rejected": {"nodata": 2}}
    assert manifest.details == {"sources": {"patch": {"paths": ["../x.tif"]}}}
    assert [shard.digest for shard in manifest.shards] == DIGESTS
    assert counts(folder) == [0, 1, 2, 3, 4]
    reshard([folder], tmp_path / "b", n_shards=3)
    assert counts(tmp_path / "b") == [0, 1, 2, 3, 4]
    assert salvage(folder, tmp_path / "c").lost == ()
    assert counts(tmp_path / "c") == [0, 1, 2, 3, 4]


def test_version_1_is_read_by_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    batches = list(TFRecords(golden.write(tmp_path)).read(2, ["count"], drop_remainder=False))
    assert [targets["count"].numpy().tolist() for _, targets in batches] == [[0, 1], [2, 3], [4]]


def test_version_1_is_resumed(tmp_path: Path) -> None:
    folder = golden.write_journal(tmp_path / "a")
    started: list[int] = []

    def samples(start: int) -> Iterator[Sample]:
        started.append(start)
        return map(sample, range(start, 5))

    given = Pass(
        SCHEMA, 5, samples, 4, repeatable=True, details={"sources": {"patch": {"paths": [str(tmp_path / "x.tif")]}}}
    )
    write_records(Directory(folder), given, plan_shards(5, 3, drop_remainder=False), resume=True)
    assert started == [3]
    golden.write(tmp_path / "b")
    for name in ("0.records", "1.records"):
        assert (folder / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    old, new = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ba")
    assert old["shards"] == new["shards"]
