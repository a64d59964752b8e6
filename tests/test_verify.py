"""Reading compressed shards, and the faults of a shard; what the writer leaves is looked at in test_writing."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import numpy as np
import pytest

from otbtf_lite.errors import DataError
from otbtf_lite.manifest import Shard
from otbtf_lite.records import RecordEncoder, ShardDigest
from otbtf_lite.schema import Feature, Schema
from otbtf_lite.storage import Directory
from otbtf_lite.shards import Inflated
from otbtf_lite.verify import shard_faults

SCHEMA = Schema({"x": Feature("uint8", (5,))})
CHUNK = 1 << 20


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("random", [True, False], ids=["random", "zeros"])
def test_a_stream_is_inflated_whole(compress: object, size: int, random: bool) -> None:
    """Also where the last bytes are still in the decompressor when the file has ended."""
    data = np.random.default_rng(0).bytes(size) if random else bytes(size)
    stream = compress(data)  # type: ignore[operator]
    file = Inflated(io.BytesIO(stream), "0.records")
    pieces = iter(lambda: file.read(700_000), b"")
    assert b"".join(pieces) == data
    for cut in (1, 4, len(stream) // 2):
        short = Inflated(io.BytesIO(stream[:-cut]), "0.records")
        with pytest.raises(DataError, match=r"0.records is cut: its compressed stream does not end"):
            list(iter(lambda short=short: short.read(CHUNK), b""))  # type: ignore[misc]


def test_another_stream_is_told() -> None:
    with pytest.raises(DataError, match=r"0.records is corrupt: its compressed stream can't be read"):
        Inflated(io.BytesIO(b"no stream at all"), "0.records").read(5)


def written(folder: Path, n: int = 3) -> Shard:
    digest = ShardDigest()
    samples = ({"x": np.full(5, k, np.uint8)} for k in range(n))
    data = b"".join(map(bytes, RecordEncoder(SCHEMA).encode(samples, digest)))
    (folder / "0.records").write_bytes(data)
    return Shard("0.records", digest.records, len(data), digest.hexdigest(), digest.first_crc or 0)


def faults(folder: Path, shard: Shard, *, schema: Schema = SCHEMA, parse: bool = True) -> list[str]:
    return shard_faults(Directory(folder), shard, schema, None, parse=parse)


def test_a_sound_shard_has_no_faults(tmp_path: Path) -> None:
    assert faults(tmp_path, written(tmp_path)) == []


def test_every_flipped_bit_and_every_cut_is_a_fault(tmp_path: Path) -> None:
    shard = written(tmp_path)
    path = tmp_path / "0.records"
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        (fault,) = faults(tmp_path, shard, parse=False)
        assert fault.startswith(f"{path}: record {bit // 8 // (len(data) // 3)} at byte ")
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert faults(tmp_path, shard)[0] == (f"{path} has {size} bytes where the manifest says {len(data)}.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 4}, "has 3 records where the manifest says 4"),
        ({"digest": "0" * 64}, "holds other records than those that were written"),
        ({"name": "1.records"}, "1.records: No such file or directory."),
    ],
)
def test_what_the_manifest_says_otherwise_is_a_fault(tmp_path: Path, change: dict[str, object], message: str) -> None:
    shard = Shard(**{**written(tmp_path).to_json(), **change})
    (fault,) = faults(tmp_path, shard)
    assert message in fault


def test_records_of_another_schema_are_a_fault_where_they_are_parsed(tmp_path: Path) -> None:
    shard = written(tmp_path)
    other = Schema({"x": Feature("int8", (5,))})
    told = faults(tmp_path, shard, schema=other)
    assert [fault.split(" holds")[0].rpartition("/")[2] for fault in told] == [
        f"0.records: record {number} at byte {number * shard.bytes // 3} feature 'x'" for number in range(3)
    ]
    assert told[0].endswith("holds uint8[5] where the schema says int8[5].")
    assert faults(tmp_path, shard, schema=other, parse=False) == []
