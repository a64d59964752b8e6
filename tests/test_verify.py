"""The faults of a shard and of a directory; what the writer leaves is looked at in test_writing."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numbered
import numpy as np
import pytest

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import Shard
from otbtf_lite.records import RecordEncoder, ShardDigest, frame_header, masked_crc
from otbtf_lite.schema import Feature, Schema
from otbtf_lite.storage import Directory
from otbtf_lite.tfrecords import TFRecords
from otbtf_lite.verify import directory_faults, file_faults, shard_faults

SCHEMA = Schema({"x": Feature("uint8", (5,))})


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


def own_faults(folder: Path | str, **options: Any) -> list[str]:
    """Without the path of the folder, which is in front of every sentence."""
    return [text.replace(f"{folder}/", "") for text in directory_faults(Directory(folder), **options)]


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
@pytest.mark.parametrize("schema", [numbered.SCHEMA, numbered.TEXTS], ids=["fixed", "texts"])
def test_a_sound_directory_has_no_faults(tmp_path: Path, compression: str | None, schema: Schema) -> None:
    numbered.write(tmp_path, schema=schema, compression=compression)
    for threads in (None, 1, 2, 7):
        assert directory_faults(Directory(tmp_path), threads=threads) == []
    TFRecords(tmp_path).verify()


@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2"])
def test_a_number_of_threads_is_checked(tmp_path: Path, threads: Any) -> None:
    with pytest.raises(InputError, match="threads must be an integer of at least 1"):
        directory_faults(Directory(numbered.write(tmp_path)), threads=threads)


def test_every_fault_of_every_shard_is_told_in_order(tmp_path: Path) -> None:
    numbered.write(tmp_path, 14, 4)
    frame = (tmp_path / "0.records").stat().st_size // 4
    numbered.change(tmp_path / "0.records", 30)
    numbered.change(tmp_path / "0.records", 2 * frame + 30)
    (tmp_path / "1.records").unlink()
    (tmp_path / "2.records").write_bytes((tmp_path / "3.records").read_bytes())
    (tmp_path / "7.records").touch()
    (tmp_path / "01.records").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden.records").touch()
    (tmp_path / "output_types.json").write_text('{"n": "int64", "x": "int16"}')
    (tmp_path / "output_shapes.json").unlink()
    data = frame - 16
    expected = [
        "01.records is not in the manifest: remove it, or OTBTF reads it too.",
        "7.records is not in the manifest: remove it, or OTBTF reads it too.",
        "output_types.json says something else than the manifest.",
        "Could not read output_shapes.json: No such file or directory.",
        f"0.records: record 0 at byte 0 is corrupt: the checksum of its {data} bytes of data is wrong.",
        f"0.records: record 2 at byte {2 * frame} is corrupt: the checksum of its {data} bytes of data is wrong.",
        "Could not read 1.records: No such file or directory.",
        f"2.records has {2 * frame} bytes where the manifest says {4 * frame}.",
    ]
    for threads in (1, 2, 5):
        assert own_faults(tmp_path, threads=threads) == expected
    with pytest.raises(DataError) as caught:
        TFRecords(tmp_path).verify()
    assert str(caught.value).replace(f"{tmp_path}/", "") == "\n".join(expected)


def test_shards_that_were_swapped_are_told(tmp_path: Path) -> None:
    numbered.write(tmp_path, 8, 4)
    one, two = ((tmp_path / name).read_bytes() for name in ("0.records", "1.records"))
    (tmp_path / "0.records").write_bytes(two)
    (tmp_path / "1.records").write_bytes(one)
    assert own_faults(tmp_path) == [
        f"{n}.records holds other records than those that were written: its digest differs from the manifest's."
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: folder.joinpath("manifest.json").unlink(), []),  # then it is like one of OTBTF's
        (lambda folder: folder.joinpath("manifest.json").write_text("{}"), ["has no valid version number: None"]),
        (lambda folder: folder.joinpath("manifest.json.partial").touch(), ["is unfinished"]),
        (shutil.rmtree, ["There is no directory"]),
    ],
)
def test_what_is_no_finished_directory_is_one_fault(
    tmp_path: Path, change: Callable[[Path], Any], told: list[str]
) -> None:
    folder = numbered.write(tmp_path / "a")
    change(folder)
    found = own_faults(folder)
    assert len(found) == len(told)
    assert all(text in fault for text, fault in zip(told, found, strict=True))


def otbtf_directory(folder: Path) -> Path:
    """As OTBTF leaves it: nothing says what must be there."""
    numbered.write(folder, 12, 4)
    (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: (f / "1.records").unlink(), ["1.records is missing: shards have numbers without gaps."]),
        (
            lambda f: (f / "2.records").rename(f / "999999999999999999.records"),
            ["2.records is missing, and so is all up to 999999999999999998.records: shards have numbers without gaps."],
        ),
        (lambda f: (f / "1.records").write_bytes(b""), ["1.records is empty: it has no records."]),
        (
            lambda f: ((f / "1.records").unlink(), (f / "1.records").mkdir()),
            ["Could not read 1.records: Is a directory."],
        ),
        (
            lambda f: (f / "output_types.json").write_text('{"n": "int64", "x": "int16"}'),
            [f"{n}.records: record {k} at byte {80 * k} feature 'x' holds uint16[2, 2, 1] where the schema says"
             " int16[2, 2, 1]." for n in range(3) for k in range(4)],
        ),
        (
            lambda f: (f / "2.records").write_bytes((f / "2.records").read_bytes()[:-50]),
            ["2.records: record 3 at byte 240 is cut: its header says 64 bytes, the file ends after 18 of 68."],
        ),
        (
            lambda f: (f / "2.records").write_bytes((f / "2.records").read_bytes()[:244]),
            ["2.records: record 3 at byte 240 is cut inside its length header: 4 of 12 bytes are there."],
        ),
        (
            lambda f: (f / "output_shapes.json").write_text("[]"),
            ["output_shapes.json must be a JSON object, got list."],
        ),
    ],
)  # fmt: skip
def test_otbtfs_directories_are_verified_too(tmp_path: Path, change: Callable[[Path], Any], told: list[str]) -> None:
    folder = otbtf_directory(tmp_path)
    assert own_faults(folder) == []
    change(folder)
    assert own_faults(folder) == told


def test_any_file_of_records_is_verified(tmp_path: Path) -> None:
    numbered.write(tmp_path / "a", compression="GZIP")
    foreign = tmp_path / "part-00000-of-00009"
    foreign.write_bytes((tmp_path / "a" / "0.records").read_bytes())
    assert file_faults(foreign) == []
    foreign.write_bytes(foreign.read_bytes()[:-3])
    assert file_faults(foreign) == [f"{foreign} is cut: its compressed stream does not end."]
    foreign.write_bytes(frame_header(3) + b"\x0a\x05x" + struct.pack("<I", masked_crc(b"\x0a\x05x")))
    assert file_faults(foreign) == [
        f"{foreign}: record 0 at byte 0 field 1 of the record claims 5 bytes where 1 are left."
    ]
    foreign.write_bytes(b"")
    assert file_faults(foreign) == [f"{foreign} is empty: it has no records."]
    foreign.write_bytes(b"no records at all")
    (fault,) = file_faults(foreign)
    assert fault.startswith(f"{foreign}: record 0 at byte 0 is corrupt: the checksum of its length is wrong")
    assert file_faults(tmp_path / "none") == [f"Could not read {tmp_path / 'none'}: No such file or directory."]


def test_progress_is_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbered.write(tmp_path)
    directory_faults(Directory(tmp_path))
    assert capsys.readouterr() == ("", "")
    directory_faults(Directory(tmp_path), progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_remote_directory_is_verified(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    url = f"ram://verify-{tmp_path.name}/a"
    numbered.write(url)
    directory = Directory(url)
    assert directory_faults(directory) == []
    data = directory.read("1.records", 1 << 20)
    directory.write("1.records", data[:40] + bytes([data[40] ^ 1]) + data[41:])
    (fault,) = directory_faults(directory)
    assert fault.startswith(f"{url}/1.records: record 0 at byte 0 is corrupt")
    directory.remove("1.records")
    (fault,) = directory_faults(directory)
    assert fault.startswith(f"Could not read {url}/1.records: ")
