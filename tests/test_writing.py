from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otbtf_lite import writing
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import JOURNAL, MANIFEST, Journal, load_journal, load_manifest
from otbtf_lite.records import decode_example, iter_records
from otbtf_lite.schema import Feature, Sample, Schema
from otbtf_lite.sharding import plan_shards
from otbtf_lite.shards import open_shard
from otbtf_lite.storage import Directory, WriteLock
from otbtf_lite.verify import shard_faults
from otbtf_lite.writing import Pass, pass_over, write_records

SCHEMA = Schema({"x": Feature("float32", (3, 3, 2)), "n": Feature("int64", ())})
PLAN = plan_shards(23, 5, drop_remainder=False)
PROJECT = Path(__file__).resolve().parents[1]


def sample(number: int) -> Sample:
    return {"x": np.full((3, 3, 2), number, np.float32), "n": np.array(number)}


def source(
    size: int = 23,
    *,
    make: Callable[[int], Any] = sample,
    started: list[int] | None = None,
    ended: list[int] | None = None,
    **options: Any,
) -> Pass:
    """Numbered samples from any place on; notes where it was started, and that it was closed."""

    def samples(start: int) -> Iterator[Sample]:
        if started is not None:
            started.append(start)
        try:
            yield from map(make, range(start, size))
        finally:
            if ended is not None:
                ended.append(start)

    return Pass(SCHEMA, size, samples, **{"seed": 4, "repeatable": True, **options})


def failing(at: int, error: BaseException) -> Callable[[int], Sample]:
    def make(number: int) -> Sample:
        if number == at:
            raise error
        return sample(number)

    return make


def write(folder: Path, given: Pass, per_shard: int = 5, drop: bool = False, **options: Any) -> None:
    write_records(Directory(folder), given, plan_shards(given.size, per_shard, drop), **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def numbers(folder: Path) -> list[list[int]]:
    """The samples' numbers, by shard, by the manifest."""
    manifest = load_manifest(Directory(folder))
    assert manifest is not None
    found: list[list[int]] = []
    for shard in manifest.shards:
        assert not shard_faults(Directory(folder), shard, manifest.schema, manifest.compression)
        with open_shard(Directory(folder), shard.name, manifest.compression) as file:
            samples = [decode_example(manifest.schema, record.data) for record in iter_records(file, shard.name)]
        assert all((each["x"] == each["n"]).all() for each in samples)
        found.append([int(each["n"]) for each in samples])
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed run over ``source()``."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, source())
    return contents(folder)


def test_a_pass_becomes_shards_two_json_files_and_a_manifest(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", source())
    folder = tmp_path / "a" / "b"
    shards = [f"{n}.records" for n in range(5)]
    assert set(contents(folder)) == {*shards, "output_types.json", "output_shapes.json", MANIFEST}
    assert numbers(folder) == [[*range(5)], [*range(5, 10)], [*range(10, 15)], [*range(15, 20)], [20, 21, 22]]
    assert json.loads((folder / "output_types.json").read_text()) == {"x": "float32", "n": "int64"}
    assert json.loads((folder / "output_shapes.json").read_text()) == {"x": [3, 3, 2], "n": []}
    manifest = load_manifest(Directory(folder))
    assert manifest is not None
    assert [(shard.name, shard.records) for shard in manifest.shards] == list(zip(shards, [5, 5, 5, 5, 3], strict=True))
    assert [shard.bytes for shard in manifest.shards] == [(folder / name).stat().st_size for name in shards]
    assert (manifest.seed, manifest.n_samples_per_shard, manifest.compression) == (4, 5, None)
    assert manifest.versions["numpy"] == np.__version__


def test_a_remainder_is_dropped_and_told(tmp_path: Path) -> None:
    write(tmp_path, source(dropped={"rejected": {"nodata": 2}}), drop=True)
    assert numbers(tmp_path) == [[*range(n, n + 5)] for n in (0, 5, 10, 15)]
    manifest = load_manifest(Directory(tmp_path))
    assert manifest is not None
    assert manifest.dropped == {"rejected": {"nodata": 2}, "remainder": 3}


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_the_same_pass_gives_the_same_bytes(tmp_path: Path, compression: str | None) -> None:
    details = {"sources": {"x": {"paths": ["/data/x.tif"], "nodata": None}}, "classes": {3: "water"}}
    for name in "ab":
        write(tmp_path / name, source(details=details), compression=compression)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    text = (tmp_path / "a" / MANIFEST).read_text()
    assert str(tmp_path) not in text
    assert "/data" not in text


@pytest.mark.parametrize(("compression", "magic"), [("GZIP", b"\x1f\x8b"), ("ZLIB", b"\x78")])
@pytest.mark.parametrize("isal", [True, False], ids=["isal", "zlib"])
def test_shards_are_compressed_by_the_faster_library_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, magic: bytes, isal: bool
) -> None:
    if isal:
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
    write(tmp_path, source(), compression=compression)
    assert (tmp_path / "0.records").read_bytes().startswith(magic)
    assert sum(numbers(tmp_path), []) == list(range(23))  # noqa: RUF017  # short


def test_a_damaged_compressed_shard_is_told(tmp_path: Path) -> None:
    write(tmp_path, source(), compression="ZLIB")
    data = (tmp_path / "1.records").read_bytes()
    manifest = load_manifest(Directory(tmp_path))
    assert manifest is not None
    for change, message in (
        (data[:-1] + bytes([data[-1] ^ 1]), "corrupt: its compressed stream can't be read"),
        (bytes(len(data)), "corrupt: its compressed stream can't be read"),
        (data[:-1], "bytes where the manifest says"),
        (b"", "bytes where the manifest says"),
    ):
        (tmp_path / "1.records").write_bytes(change)
        fault = shard_faults(Directory(tmp_path), manifest.shards[1], manifest.schema, "ZLIB")[0]
        assert message in fault


def test_other_codecs_than_tensors_leave_otbtfs_files_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from otbtf_lite import codecs

    monkeypatch.setattr(codecs, "CODECS", {**codecs.CODECS, "other": codecs.TensorCodec()})
    write(tmp_path, source(), codecs={"x": "other"})
    assert not {"output_types.json", "output_shapes.json"} & set(contents(tmp_path))
    manifest = load_manifest(Directory(tmp_path))
    assert manifest is not None
    assert {key: feature.codec for key, feature in manifest.schema.items()} == {"x": "other", "n": "tensor"}


def bare(size: int, **options: Any) -> Pass:
    return source(size, **options)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (bare(7), {"per_shard": 100, "drop": True}, InputError, "7 samples do not fill one shard"),
        (bare(0), {}, InputError, "nothing to write"),
        (bare(7), {"per_shard": 0}, InputError, "at least 1"),
        (bare(7), {"compression": "gzip"}, InputError, "one of None, 'GZIP', 'ZLIB', got 'gzip'"),
        (bare(7), {"codecs": {"y": "tensor"}}, InputError, "codecs names 'y'"),
        (bare(7), {"codecs": {"x": "tensors"}}, InputError, "Unknown codec 'tensors'"),
        (bare(7), {"overwrite": True, "resume": True}, InputError, "exclude each other"),
        (bare(7, repeatable=False), {"resume": True}, InputError, "can't be read again in the same order"),
        (bare(7, details={"x": {1, 2}}), {}, InputError, "must be JSON values"),
        (bare(7, details={"shards": 5}), {}, InputError, "can't be named 'shards'"),
        (bare(7, make=failing(0, ZeroDivisionError())), {}, ZeroDivisionError, None),
        (bare(7, make=failing(0, OSError("mine"))), {}, OSError, "^mine$"),
        (bare(7, make=failing(4, OSError("mine"))), {}, OSError, "^mine$"),
        (bare(7, make=failing(4, KeyboardInterrupt())), {}, KeyboardInterrupt, None),
        (bare(7, make=lambda _: {"x": 5}), {}, InputError, r"sample 0 .* missing \['n'\]"),
        (bare(7, make=lambda n: sample(n) if n < 4 else None), {}, InputError, "sample 4 must be a dict"),
        (bare(7, make=lambda n: {**sample(n), "n": n / 2}), {}, InputError, "sample 0, 'n': got float64"),
        (Pass(SCHEMA, 7, lambda _: iter(())), {}, DataError, "ended after 0 samples where it had promised 7"),
        (
            Pass(SCHEMA, 7, lambda _: map(sample, range(4))),
            {},
            DataError,
            "ended after 4 samples where it had promised 7",
        ),
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["in a directory", "in none"])
@pytest.mark.parametrize("overwrite", [True, False], ids=["overwrite", "write"])
def test_a_mistake_is_told_and_leaves_nothing(
    tmp_path: Path, there: bool, overwrite: bool, given: Pass, options: dict[str, Any], error: type, message: str
) -> None:
    folder = tmp_path / "a" / "b"
    if there:
        folder.mkdir(parents=True)
        (folder / "notes.txt").touch()
    with pytest.raises(error, match=message):
        write(folder, given, **{"overwrite": overwrite and not options.get("resume"), **options})
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["a", "b", "notes.txt"] if there else [])


def test_an_error_passes_as_the_object_that_it_is(tmp_path: Path) -> None:
    error = FileNotFoundError(2, "No such file", "somewhere/else.tif")
    for at in (0, 3, 12):
        with pytest.raises(FileNotFoundError) as caught:
            write(tmp_path / str(at), source(make=failing(at, error)))
        assert caught.value is error


@pytest.mark.parametrize(
    "name", ["0.records", "12.records", MANIFEST, JOURNAL, "output_types.json", "output_shapes.json", "positions.gpkg"]
)
def test_a_directory_that_holds_a_data_set_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match=rf"already holds 1 files of a data set \({name} ...\): .* overwrite .* resume"):
        write(tmp_path, source())
    assert contents(tmp_path) == {name: b"mine"}


def test_a_directory_with_other_files_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, source())
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(numbers(tmp_path)) == 5


def test_overwrite_replaces_the_data_set_and_nothing_else(tmp_path: Path, whole: dict[str, bytes]) -> None:
    write(tmp_path, source(90, seed=5), 2)
    others = {"notes.txt": b"", "1.records.bak": b"", ".cache.tmp": b"", "01.records": b""}
    for name in [*others, "positions.gpkg", ".7.records.tmp", f".{MANIFEST}.tmp"]:
        (tmp_path / name).write_bytes(b"")
    write(tmp_path, source(), overwrite=True)
    assert contents(tmp_path) == {**whole, **others}


def test_a_first_sample_that_fails_leaves_the_old_data_set(tmp_path: Path, whole: dict[str, bytes]) -> None:
    write(tmp_path, source())
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, source(make=failing(0, ZeroDivisionError())), overwrite=True)
    assert contents(tmp_path) == whole


def test_while_it_is_overwritten_a_directory_never_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, source())
    seen: list[bool] = []
    remove = Directory.remove

    def watched(directory: Directory, name: str) -> None:
        seen.append((tmp_path / JOURNAL).exists())
        remove(directory, name)

    monkeypatch.setattr(Directory, "remove", watched)
    write(tmp_path, source(), overwrite=True)
    assert len(seen) == 8  # five shards and three JSON files
    assert all(seen)


def broken_off(folder: Path, at: int = 12) -> None:
    with pytest.raises(ZeroDivisionError):
        write(folder, source(make=failing(at, ZeroDivisionError())))


def test_a_run_that_breaks_off_leaves_its_shards_and_the_journal(tmp_path: Path, whole: dict[str, bytes]) -> None:
    broken_off(tmp_path)
    assert set(contents(tmp_path)) == {"0.records", "1.records", JOURNAL}
    with pytest.raises(DataError, match="is unfinished"):
        load_manifest(Directory(tmp_path))
    with pytest.raises(DataError, match="already holds 3 files"):
        write(tmp_path, source())
    write(tmp_path, source(), overwrite=True)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("at", [0, 4, 5, 12, 22])
def test_resume_ends_as_if_nothing_had_happened(tmp_path: Path, whole: dict[str, bytes], at: int) -> None:
    broken_off(tmp_path / "a", at)
    started: list[int] = []
    write(tmp_path / "a", source(started=started), resume=True)
    assert contents(tmp_path / "a") == whole
    assert started == [at // 5 * 5]


def damage(folder: Path) -> None:
    data = bytearray((folder / "0.records").read_bytes())
    data[40] ^= 1
    (folder / "0.records").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        (damage, [0, 10]),
        (lambda folder: (folder / "1.records").unlink(), [5]),
        (lambda folder: (folder / "0.records").write_bytes(b""), [0, 10]),
        (lambda folder: (folder / "0.records").replace(folder / "1.records"), [0]),
        (lambda folder: (folder / JOURNAL).write_bytes((folder / JOURNAL).read_bytes()[:-9]), [5]),
        (lambda folder: (folder / ".2.records.tmp").write_bytes(b"half"), [10]),
        (lambda folder: (folder / "4.records").write_bytes(b"left by something else"), [10]),
    ],
    ids=["bit", "missing", "cut", "swapped", "torn journal", "half", "stray"],
)
def test_resume_writes_what_is_damaged_again(
    tmp_path: Path, whole: dict[str, bytes], change: Callable[[Path], Any], starts: list[int]
) -> None:
    broken_off(tmp_path)
    change(tmp_path)
    started: list[int] = []
    ended: list[int] = []
    write(tmp_path, source(started=started, ended=ended), resume=True)
    assert contents(tmp_path) == whole
    assert started == ended == starts


def test_resume_of_a_second_failure_goes_on_from_there(tmp_path: Path, whole: dict[str, bytes]) -> None:
    broken_off(tmp_path)
    with pytest.raises(OSError, match="again"):
        write(tmp_path, source(make=failing(18, OSError("again"))), resume=True)
    started: list[int] = []
    write(tmp_path, source(started=started), resume=True)
    assert contents(tmp_path) == whole
    assert started == [15]


def test_resume_renames_a_complete_manifest(tmp_path: Path, whole: dict[str, bytes]) -> None:
    write(tmp_path, source())
    (tmp_path / MANIFEST).rename(tmp_path / JOURNAL)
    started: list[int] = []
    write(tmp_path, source(started=started), resume=True)
    assert contents(tmp_path) == whole
    assert started == []


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (source(seed=5), {}, "other seed"),
        (source(22), {}, "other n_samples"),
        (source(details={"from": "elsewhere"}), {}, "other from"),
        (source(), {"per_shard": 4}, "other n_samples_per_shard"),
        (source(), {"drop": True}, "other n_samples"),
        (source(), {"compression": "GZIP"}, "other compression"),
        (Pass(Schema({"x": SCHEMA["x"]}), 23, iter, 4, repeatable=True), {}, "other schema"),
    ],
)
@pytest.mark.parametrize("finished", [True, False], ids=["all but renamed", "broken off"])
def test_resume_with_other_settings_is_refused_by_name(
    tmp_path: Path, finished: bool, given: Pass, options: dict[str, Any], message: str
) -> None:
    broken_off(tmp_path)
    if finished:
        write(tmp_path, source(), resume=True)
        (tmp_path / MANIFEST).rename(tmp_path / JOURNAL)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=f"was begun with other settings, so it can't be resumed: .*{message}"):
        write(tmp_path, given, resume=True, **options)
    assert contents(tmp_path) == before


def test_resume_takes_what_json_makes_of_details_for_the_same(tmp_path: Path) -> None:
    details = {"classes": {1: "water"}, "size": (3, 4), "paths": [str(tmp_path / "x.tif")]}
    with pytest.raises(ZeroDivisionError):
        write(tmp_path, source(details=details, make=failing(12, ZeroDivisionError())))
    write(tmp_path, source(details=details), resume=True)
    assert len(numbers(tmp_path)) == 5


def test_there_must_be_something_to_resume(tmp_path: Path, whole: dict[str, bytes]) -> None:
    write(tmp_path / "new", source(), resume=True)
    assert contents(tmp_path / "new") == whole
    with pytest.raises(DataError, match="is finished already: there is nothing to resume"):
        write(tmp_path / "new", source(), resume=True)
    (tmp_path / "new" / MANIFEST).unlink()
    with pytest.raises(DataError, match=r"has no journal .* ask for overwrite"):
        write(tmp_path / "new", source(), resume=True)


def test_a_second_writer_is_refused_and_nothing_is_damaged(tmp_path: Path, whole: dict[str, bytes]) -> None:
    told: list[str] = []

    def make(number: int) -> Sample:
        if number in (0, 12):
            for options in ({}, {"overwrite": True}, {"resume": True}):
                with pytest.raises(DataError) as caught:
                    write(tmp_path, source(), **options)
                told.append(str(caught.value))
        return sample(number)

    write(tmp_path, source(make=make))
    assert contents(tmp_path) == whole
    assert len(told) == 6
    assert sum("is being written by someone else" in text for text in told) == 6


def test_a_lock_held_elsewhere_leaves_no_directory_behind(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with WriteLock(Directory(tmp_path / "a")), pytest.raises(DataError, match="someone else"):
        write(tmp_path / "a", source())
    assert contents(tmp_path / "a") == {}


def test_a_source_is_closed_when_all_is_done_and_when_it_fails(tmp_path: Path) -> None:
    ended: list[int] = []
    write(tmp_path / "a", source(ended=ended))
    assert ended == [0]
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "b", source(make=failing(12, ZeroDivisionError()), ended=ended))
    assert ended == [0, 0]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / f".{JOURNAL}.tmp").mkdir()
    with pytest.raises(DataError, match="Could not write"):
        write(tmp_path / "c", source(ended=ended))
    assert ended == [0, 0, 0]


def test_a_full_disk_leaves_what_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    append = Directory.append
    calls: list[str] = []

    def full(directory: Directory, name: str, data: bytes) -> None:
        calls.append(name)
        if len(calls) == 3:
            append(directory, name, data[:-7])
            raise DataError("No space left on device")
        append(directory, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "append", full)
        with pytest.raises(DataError, match="No space left"):
            write(tmp_path, source())
    started: list[int] = []
    write(tmp_path, source(started=started), resume=True)
    assert contents(tmp_path) == whole
    assert started == [10]


def test_no_state_on_the_way_is_taken_for_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every step on the disk: nothing, unfinished, or all there; and never what OTBTF's reader would take."""
    states: list[str] = []

    def watched(name: str) -> None:
        step = getattr(Directory, name)

        def note(directory: Directory, *args: Any) -> Any:
            try:
                found = load_manifest(directory)
                states.append("nothing" if found is None else "finished")
            except DataError:
                states.append("unfinished")
            if states[-1] != "unfinished":
                assert not list(tmp_path.glob("*.records"))
            return step(directory, *args)

        monkeypatch.setattr(Directory, name, note)

    for name in ("create", "replace", "append", "remove"):
        watched(name)
    write(tmp_path, source())
    assert len(states) > 15
    assert states == sorted(states)  # "nothing" comes before "unfinished", and finished was seen by none
    assert set(states) == {"nothing", "unfinished"}


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_writing as t
def slow(number):
    time.sleep(0.004)
    return t.sample(number)
print("begins", flush=True)
t.write(Path(sys.argv[1]), t.source(make=slow))
"""


@pytest.mark.parametrize("after", [0.02, 0.05, 0.08])
def test_a_killed_run_is_resumed_to_the_same_bytes(tmp_path: Path, whole: dict[str, bytes], after: float) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        time.sleep(after)
        process.kill()
    found = None
    with contextlib.suppress(DataError):
        found = load_manifest(Directory(tmp_path))
    if found is None:
        assert not (tmp_path / MANIFEST).exists()
        write(tmp_path, source(), resume=True)
    (tmp_path / ".lock").unlink(missing_ok=True)
    assert contents(tmp_path) == whole


def test_positions_are_kept_beside_the_records(tmp_path: Path) -> None:
    pytest.importorskip("osgeo")
    from otbtf_lite.grid import Positions
    from otbtf_lite.vector import read_positions

    x = np.arange(23) * 10.0
    positions = Positions(x, x + 1, "EPSG:32631", label=np.arange(23))
    for name in "ab":
        write(tmp_path / name, source(positions=positions), drop=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    read = read_positions(tmp_path / "a" / "positions.gpkg")
    assert read.x.tolist() == x[:20].tolist()
    assert (read.y == read.x + 1).all()


class Four:
    """OTBTF's four members, with NumPy's types."""

    size = 7
    output_types: dict[str, Any] = {"x": np.float32, "n": np.dtype("int64"), "s": "string", "b": "bfloat16"}  # noqa: RUF012
    output_shapes: dict[str, Any] = {"x": (3, 3, 2), "n": [], "s": (), "b": ()}  # noqa: RUF012

    def __init__(self) -> None:
        self.read = 0

    def read_one_sample(self) -> dict[str, Any]:
        self.read += 1
        return {**sample(self.read - 1), "s": "text", "b": np.zeros((), "bfloat16")}


def test_any_object_with_otbtfs_four_members_is_a_source(tmp_path: Path) -> None:
    given = pass_over(Four())
    assert given.schema == Schema({**SCHEMA, "s": Feature("string", ()), "b": Feature("bfloat16", ())})
    assert (given.size, given.seed, given.repeatable) == (7, None, False)
    write(tmp_path, given, 3)
    assert numbers(tmp_path) == [[0, 1, 2], [3, 4, 5], [6]]
    manifest = load_manifest(Directory(tmp_path))
    assert manifest is not None
    assert manifest.seed is None
    with pytest.raises(InputError, match="Four can only be read from its start"):
        next(given.samples(3))


def test_what_a_source_lacks_is_named() -> None:
    class Nearly:
        size = 3
        output_types: dict[str, Any] = {}  # noqa: RUF012

    with pytest.raises(InputError, match=r"Nearly is no dataset .* it has no output_shapes, read_one_sample"):
        pass_over(Nearly())
    with pytest.raises(InputError, match=r"list is no dataset .* it has no size, output_types"):
        pass_over([])


def test_the_journal_says_what_is_being_written(tmp_path: Path) -> None:
    broken_off(tmp_path)
    journal = load_journal(Directory(tmp_path))
    assert isinstance(journal, Journal)
    assert {"schema", "seed", "n_samples", "n_samples_per_shard", "compression"} <= journal.settings.keys()
    assert [shard.name for shard in journal.shards] == ["0.records", "1.records"]


@pytest.mark.parametrize("url", ["ram://writing-test/{}", "ram://writing-{}/deeper/"])
def test_remote_directories_are_written_read_and_resumed(
    tmp_path: Path, url: str, whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorflow")
    caplog.set_level(logging.INFO)
    directory = Directory(url.format(tmp_path.name))

    def found() -> dict[str, bytes]:
        return {name: directory.read(name, 1 << 20) for name in directory.names()}

    with pytest.raises(ZeroDivisionError):
        write_records(directory, source(make=failing(12, ZeroDivisionError())), PLAN)
    assert set(found()) == {"0.records", "1.records", JOURNAL}
    write_records(directory, source(), PLAN, resume=True)
    assert found() == whole
    write_records(directory, source(), PLAN, overwrite=True)
    assert found() == whole
    with pytest.raises(DataError, match="already holds 8 files"):
        write_records(directory, source(), PLAN)


def test_progress_is_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", source(), progress=False)
    assert capsys.readouterr().err == ""
    write(tmp_path / "b", source(), progress=True)
    assert "23/23" in capsys.readouterr().err


def test_no_thread_is_left(tmp_path: Path, own_threads: Callable[[], list[str]]) -> None:
    write(tmp_path / "a", source())
    write(tmp_path / "b", source(), compression="GZIP")
    assert own_threads() == []


def test_versions_are_those_of_what_makes_the_bytes() -> None:
    assert "isal" not in writing._versions(None)
    assert set(writing._versions("GZIP")) >= {"otbtf-lite", "python", "numpy"}
