"""Directories made to do harm, by chance or on purpose: refused in the project's own words, in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numbered
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otbtf_lite.errors import DataError, Error
from otbtf_lite.manifest import MANIFEST, load_journal, load_manifest
from otbtf_lite.records import decode_example, frame_header, iter_records, masked_crc
from otbtf_lite.reshard import reshard
from otbtf_lite.salvage import salvage
from otbtf_lite.schema import Feature, Schema
from otbtf_lite.sharding import plan_shards
from otbtf_lite.storage import Directory
from otbtf_lite.tfrecords import TFRecords
from otbtf_lite.verify import directory_faults, file_faults
from otbtf_lite.writing import Pass, write_records

MEGABYTE = 1 << 20
MOST = 500 * MEGABYTE


@contextlib.contextmanager
def bounded(most: int = MOST) -> Iterator[None]:
    """The process's memory may grow by so many bytes at most, at any moment."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        pytest.skip("this system does not tell the peak of a process's memory")
    clear.write_text("5")  # sets the peak to what there is now
    before = memory(status)["VmHWM"]
    yield
    grown = memory(status)["VmHWM"] - before
    assert grown < most, f"{grown // MEGABYTE} MB"


def memory(status: Path) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in status.read_text().splitlines() if line.startswith("Vm"))
    return {key: int(value.split()[0]) * 1024 for key, value in pairs}


def use(folder: Path, out: Path) -> list[str]:
    """All that can be done with a directory without TensorFlow. Only the project's own errors may come of it."""
    faults = directory_faults(Directory(folder))
    records = TFRecords(folder)
    tries: list[Callable[[], Any]] = [
        lambda: (records.schema, records.shards, len(records), records.output_types, records.output_shapes),
        lambda: load_journal(Directory(folder)),
        lambda: reshard([folder], out / "b", n_shards=1, overwrite=True),
        lambda: reshard([folder], out / "c", n_shards=1, shuffle=True, seed=1, overwrite=True),
        lambda: salvage(folder, out / "d", overwrite=True),
    ]
    for attempt in tries:
        with contextlib.suppress(Error):
            attempt()
    assert all(len(fault) < 5_000 for fault in faults)
    return faults


# What is laid down is what is read, so a mutation of any of the files may be anything.
leaves = (
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9)
    | st.sampled_from([-1, 0, 1 << 31, 1 << 63, 1 << 64, 10**400, "../0.records", "/etc/passwd", "0.records", "nan"])
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=9,
)  # fmt: skip


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = changed(data[path[0]], path[1:], value)
    return copy


def mutated_json(data: st.DataObject, text: bytes) -> bytes:
    if data.draw(st.booleans()):
        return mutated_bytes(data, text)
    tree = json.loads(text)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places(tree))))
        tree = changed(tree, path, data.draw(values))
    return json.dumps(tree).encode()


def mutated_bytes(data: st.DataObject, text: bytes) -> bytes:
    out = bytearray(text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(out)))
        end = min(len(out), at + data.draw(st.integers(0, 9)))
        out[at:end] = data.draw(st.binary(max_size=9))
    return bytes(out)


def framed(*records: bytes) -> bytes:
    return b"".join(frame_header(len(r)) + r + struct.pack("<I", masked_crc(r)) for r in records)


def mutated_shard(data: st.DataObject, shard: bytes) -> bytes:
    """Any bytes, or records that are changed and have right checksums nevertheless."""
    if data.draw(st.booleans()):
        return mutated_bytes(data, shard)
    with contextlib.closing(_records(shard)) as records:
        bodies = list(records)
    which = data.draw(st.integers(0, len(bodies) - 1))
    bodies[which] = mutated_bytes(data, bodies[which])
    return framed(*bodies)


def _records(shard: bytes) -> Iterator[bytes]:
    import io

    yield from (record.data for record in iter_records(io.BytesIO(shard), "sound"))


@pytest.fixture(scope="module", params=["fixed", "texts", "gzip"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    schema = numbered.SCHEMA if request.param == "fixed" else numbered.TEXTS
    compression = "GZIP" if request.param == "gzip" else None
    details = {"sources": {"x": {"paths": ["/data/x.tif"]}}}
    return numbered.write(folder, 3, 2, schema=schema, compression=compression, details=details, start=1)


def attack(data: st.DataObject, sound: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    folder = work / "a"
    shutil.copytree(sound, folder)
    name = data.draw(
        st.sampled_from(["0.records", "1.records", MANIFEST, MANIFEST, "output_types.json", "output_shapes.json"])
    )
    path = folder / name
    before = path.read_bytes()
    if name.endswith(".json"):
        path.write_bytes(mutated_json(data, before))
    elif before.startswith(b"\x1f\x8b"):
        inner = mutated_shard(data, gzip.decompress(before))
        path.write_bytes(gzip.compress(inner) if data.draw(st.booleans()) else mutated_bytes(data, before))
    else:
        path.write_bytes(mutated_shard(data, before))
    if data.draw(st.booleans()):  # as one of OTBTF's, or as one that is being written
        (folder / MANIFEST).rename(folder / data.draw(st.sampled_from([f"{MANIFEST}.partial", "away"])))
    same = path.exists() and path.read_bytes() == before
    faults = use(folder, work)
    if name.endswith(".records") and (folder / MANIFEST).exists():
        assert bool(faults) is not same


@settings(max_examples=100)
@given(data=st.data())
def test_any_change_of_any_file_is_refused_in_our_own_words(tmp_path: Path, sound: Path, data: st.DataObject) -> None:
    attack(data, sound, tmp_path / "work")


@pytest.mark.slow
@settings(max_examples=3400)
@given(data=st.data())
def test_ten_thousand_changes_are_refused_in_our_own_words(tmp_path: Path, sound: Path, data: st.DataObject) -> None:
    attack(data, sound, tmp_path / "work")


@pytest.fixture(autouse=True)
def memory_is_bounded() -> Iterator[None]:
    with bounded():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return numbered.write(tmp_path / "a", 3, 3)


NAMES = [
    "../0.records", "/etc/0.records", "a/0.records", "..\\0.records", "C:0.records", "0.records/", "./0.records", "",
    ".", "..", "0.records\0", "\uff10.records", "00.records", "-1.records", "1e3.records", "0.RECORDS", "~/0.records",
    "gs://x/0.records", "9" * 30 + ".records", "x" * 10**6, None, 0, ["0.records"], {"0.records": 1},
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_a_shards_name_stays_in_its_directory(folder: Path, tmp_path: Path, name: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"][0]["name"] = name
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "0.records").write_bytes((folder / "0.records").read_bytes())
    with pytest.raises(DataError, match=r"only plain names such as '0\.records' are allowed") as caught:
        load_manifest(Directory(folder))
    assert len(str(caught.value)) < 1000
    assert use(folder, tmp_path) == [str(caught.value)]


def test_a_shards_name_occurs_once(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"] *= 2
    manifest["n_samples"] *= 2
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="does not list its shards once each in numeric order"):
        load_manifest(Directory(folder))


BOMBS: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: b"[" * 1_000_000,
    "nested objects": lambda: b'{"a":' * 1_000_000,
    "nested in a detail": lambda: b'{"version": 1, "x": ' + b"[" * 400 + b"]" * 400 + b"}",
    "many objects": lambda: b'{"a": [' + b"{}," * 5_000_000 + b"{}]}",
    "many numbers": lambda: b'{"a": [' + b"1.5," * 4_000_000 + b"1]}",
    "many texts": lambda: b'{"a": [' + b'"ab",' * 3_000_000 + b"1]}",
    "many keys": lambda: b"{" + b",".join(b'"%d":1' % n for n in range(2_100_000)) + b"}",
    "a long text": lambda: b'{"version": "' + b"x" * 15_000_000 + b'"}',
    "a long number": lambda: b'{"version": ' + b"9" * 5_000_000 + b"}",
    "a large file": lambda: bytes(1 << 27),
    "many lines": lambda: b"\n" * 60_000_000,
    "not UTF-8": lambda: b'{"version": "\xff"}',
    "nothing": lambda: b"",
    "NaN": lambda: b'{"version": NaN}',
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.parametrize("name", [MANIFEST, f"{MANIFEST}.partial", "output_types.json"])
def test_json_of_absurd_size_or_depth_is_refused(
    folder: Path, tmp_path: Path, bomb: Callable[[], bytes], name: str
) -> None:
    if name != MANIFEST:
        (folder / MANIFEST).unlink()
    (folder / name).write_bytes(bomb())
    faults = use(folder, tmp_path)
    assert len(faults) == 1
    assert len(faults[0]) < 1000


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 40], [1 << 31, 1 << 31, 1 << 31], [(1 << 63) - 1] * 254, [1 << 62] * 300, [-1, 4], [2.0, 2, 1],
        [True, 4], ["2", 2], [None], [[2]], "22", {"0": 2}, 4, None, [int("9" * 4000)] * 200, [0] * 300, [1] * 10**5,
    ],
    ids=lambda shape: str(shape)[:20],
)  # fmt: skip
@pytest.mark.parametrize("where", [MANIFEST, "output_shapes.json"])
def test_shapes_that_no_memory_holds_are_refused(folder: Path, tmp_path: Path, shape: Any, where: str) -> None:
    data = json.loads((folder / where).read_text())
    if where == MANIFEST:
        data["schema"]["x"]["shape"] = shape
    else:
        data["x"] = shape
        (folder / MANIFEST).unlink()
    (folder / where).write_text(json.dumps(data))
    faults = use(folder, tmp_path)
    assert len(faults) == 1
    assert len(faults[0]) < 1000


def header(size: int) -> bytes:
    length = struct.pack("<Q", size)
    return length + struct.pack("<I", masked_crc(length))


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1, 1 << 40, 1 << 31, (1 << 31) - 1, 1 << 30])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("listed", [True, False], ids=["manifest", "no manifest"])
def test_an_absurd_length_is_refused(folder: Path, tmp_path: Path, size: int, first: bool, listed: bool) -> None:
    """Also where the file is long, which costs a disk nothing where it is a hole."""
    path = folder / "0.records"
    data = b"" if first else path.read_bytes()[:80]
    path.write_bytes(data + header(size))
    with path.open("r+b") as file:
        file.truncate(len(data) + 12 + (1 << 28 if size == 1 << 30 else 0))
    if not listed:
        (folder / MANIFEST).unlink()
    with bounded(100 * MEGABYTE):
        faults = use(folder, tmp_path)
        assert any(f"record {int(not first)} at byte {len(data)} claims {size} bytes" in fault for fault in faults)
        if size > 1 << 31:
            assert "claims" in file_faults(path)[0]


@pytest.mark.parametrize(
    ("kind", "schema", "listed"),
    [("GZIP", numbered.SCHEMA, True), ("GZIP", numbered.TEXTS, False), ("ZLIB", numbered.TEXTS, True)],
)
def test_a_gzip_bomb_is_read_in_little_memory(tmp_path: Path, kind: str, schema: Schema, listed: bool) -> None:
    """A megabyte that inflates to a record that claims a gigabyte, first or later."""
    folder = numbered.write(tmp_path / "a", 3, 3, schema=schema, compression=kind)
    path = folder / "0.records"
    plain = (gzip.decompress if kind == "GZIP" else zlib.decompress)(path.read_bytes())
    if not listed:
        (folder / MANIFEST).unlink()
    for start in (b"", plain):
        squeeze = zlib.compressobj(1, zlib.DEFLATED, 31 if kind == "GZIP" else 15)
        pieces = [squeeze.compress(start + header(1 << 30))]
        pieces += [squeeze.compress(bytes(MEGABYTE)) for _ in range(300)]
        path.write_bytes(b"".join([*pieces, squeeze.flush()]))
        with bounded(100 * MEGABYTE):
            assert any("claims 1073741824 bytes: no record is longer" in fault for fault in use(folder, tmp_path))
            assert "claims 1073741824 bytes" in file_faults(path)[0]


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(dtype: int, shape: list[int], content: bytes) -> bytes:
    dims = b"".join(field(2, b"\x08" + varint(n)) for n in shape)
    return b"\x08" + varint(dtype) + field(2, dims) + field(4, content)


def example(value: bytes, name: bytes = b"x") -> bytes:
    return field(1, field(1, field(1, name) + field(2, field(1, field(1, value)))))


ONE = Schema({"x": Feature("uint16", (2, 2, 1))})
TENSORS = {
    "another type": (tensor(5, [2, 2, 1], bytes(8)), "holds int16[2, 2, 1]"),
    "no type that there is": (tensor(99, [2, 2, 1], bytes(8)), "holds type 99[2, 2, 1]"),
    "another shape": (tensor(17, [4, 1, 1], bytes(8)), "holds uint16[4, 1, 1]"),
    "too little": (tensor(17, [2, 2, 1], bytes(7)), "holds 7 bytes of data where the schema says 8"),
    "too much": (tensor(17, [2, 2, 1], bytes(9)), "holds 9 bytes of data where the schema says 8"),
    "an overflow": (tensor(17, [1 << 62, 4, 1], bytes(8)), f"holds uint16[{1 << 62}, 4, 1]"),
    "an overflow to the right size": (tensor(17, [(1 << 63) + 2, 2, 1], bytes(8)), "holds uint16["),
    "a negative dimension": (tensor(17, [(1 << 64) - 1, 2, 1], bytes(8)), "holds uint16["),
    "a million dimensions": (b"\x08\x11" + field(2, field(2, b"\x08\x01") * 1_000_000), "holds uint16["),
    "nothing": (b"", "holds type -1[]"),
    "no message": (b"\xff" * 20, "does not end"),
    "a length of its own": (b"\x12\xff\xff\xff\xff\x0f", "claims 4294967295 bytes where 0 are left"),
}


@pytest.mark.parametrize(("value", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_that_is_another_is_refused(tmp_path: Path, value: bytes, message: str) -> None:
    with pytest.raises(DataError) as caught, bounded(50 * MEGABYTE):
        decode_example(ONE, example(value))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 5000
    (tmp_path / "x").write_bytes(framed(example(value)))
    assert file_faults(tmp_path / "x") == []  # an Example it is


EXAMPLES = {
    "fields of two bytes": b"\x08\x01" * 100_000,
    "empty features": b"\x0a\x00" * 100_000,
    "empty entries": field(1, b"\x0a\x00" * 100_000),
    "empty values": example(b"")[:-2] + b"",
    "many values": field(1, field(1, field(1, b"x") + field(2, field(1, b"\x0a\x00" * 100_000)))),
    "one name again and again": field(1, field(1, field(1, b"x") + field(2, field(1, field(1, b"y")))) * 60_000),
    "a long name": example(b"y", b"n" * 8_000_000),
}


@pytest.mark.parametrize("record", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_record_of_many_small_parts_takes_little_memory(record: bytes) -> None:
    with pytest.raises(DataError) as caught, bounded(30 * MEGABYTE):
        decode_example(ONE, record)
    assert len(str(caught.value)) < 5000


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three records of few bits."""

    def samples(start: int) -> Iterator[dict[str, Any]]:
        return ({"n": np.array(number, np.uint8)} for number in range(start, 3))

    given = Pass(Schema({"n": Feature("uint8", ())}), 3, samples)
    write_records(Directory(tmp_path / "a"), given, plan_shards(3, 3, drop_remainder=False))
    return tmp_path / "a"


def flips(path: Path) -> int:
    return 8 * path.stat().st_size


def read_all(folder: Path) -> int:
    batches = TFRecords(folder).read(1, ["n"], num_parallel_calls=1, prefetch_buffer_size=0)
    return sum(1 for _ in batches)


def undetected(folder: Path, bits: Any, *, read: bool) -> list[int]:
    """The bits whose flip nobody tells of."""
    tf = pytest.importorskip("tensorflow") if read else None
    path = folder / "0.records"
    data, out = path.read_bytes(), []
    for bit in bits:
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        path.write_bytes(wrong)
        if not directory_faults(Directory(folder), threads=1):
            out.append(bit)
        if tf is not None:
            with contextlib.suppress(DataError, tf.errors.InvalidArgumentError, tf.errors.DataLossError):
                read_all(folder)
                out.append(bit)
    path.write_bytes(data)
    return out


def test_verify_finds_every_flipped_bit(small: Path) -> None:
    assert undetected(small, range(flips(small / "0.records")), read=False) == []
    assert directory_faults(Directory(small)) == []


def test_reading_finds_flipped_bits(small: Path) -> None:
    rng = np.random.default_rng(0)
    assert undetected(small, rng.choice(flips(small / "0.records"), 16, replace=False).tolist(), read=True) == []
    assert read_all(small) == 3


@pytest.mark.slow
def test_reading_finds_every_flipped_bit(small: Path) -> None:
    assert undetected(small, range(flips(small / "0.records")), read=True) == []
    assert read_all(small) == 3


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_every_cut_and_every_longer_file_is_found_when_it_is_opened(tmp_path: Path, compression: str | None) -> None:
    folder = numbered.write(tmp_path / "a", 3, 3, compression=compression)
    path = folder / "0.records"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert directory_faults(Directory(folder), threads=1)
        for verify in (True, False):
            with pytest.raises(DataError, match=f"has {size} bytes where the manifest says {len(data)}"):
                TFRecords(folder).read(1, ["n"], verify=verify)
    path.write_bytes(data + b"\0")
    with pytest.raises(DataError, match="bytes where the manifest says"):
        TFRecords(folder).read(1, ["n"])
    assert directory_faults(Directory(folder))


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_every_flipped_bit_of_a_compressed_shard_is_found(tmp_path: Path, compression: str) -> None:
    """But for those that say nothing: a time, bits of padding, another way to write the same data."""
    folder = numbered.write(tmp_path / "a", 3, 3, compression=compression)
    path = folder / "0.records"
    data = path.read_bytes()
    bits = undetected(folder, range(flips(path)), read=False)
    assert len(bits) < len(data)
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert numbered.numbers(folder) == [[0, 1, 2]]


def test_no_pickle_and_no_eval() -> None:
    """Nothing that is read may become code."""
    package = Path(__file__).resolve().parents[1] / "otbtf_lite"
    for path in package.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(
            word in text for word in ("import pickle", " eval(", " exec(", "allow_pickle", "import marshal")
        ), path
