"""Other shards for the same records: ours and OTBTF's, in order and shuffled, merged, and in place."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numbered
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered import contents, flat, numbers

from otbtf_lite import reshard as module
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import load_manifest
from otbtf_lite.reshard import reshard, reshard_in_place, suggest_shards
from otbtf_lite.schema import Schema
from otbtf_lite.sharding import permutation
from otbtf_lite.shards import open_shard
from otbtf_lite.storage import Directory
from otbtf_lite.verify import directory_faults

PROJECT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("schema", [numbered.SCHEMA, numbered.TEXTS], ids=["fixed", "texts"])
@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        ({"n_shards": 1}, [23]),
        ({"n_shards": 4}, [6, 6, 6, 5]),
        ({"n_shards": 23}, [1] * 23),
        ({"n_samples_per_shard": 10}, [10, 10, 3]),
        ({"n_samples_per_shard": 100}, [23]),
    ],
)
def test_all_records_go_to_other_shards_in_their_order(
    tmp_path: Path, schema: Schema, size: dict[str, int], lengths: list[int]
) -> None:
    folder = numbered.write(tmp_path / "a", 23, 5, schema=schema)
    manifest = reshard([folder], tmp_path / "b", **size)
    assert directory_faults(Directory(tmp_path / "b")) == []
    found = numbers(tmp_path / "b")
    assert [len(shard) for shard in found] == lengths
    assert flat(found) == list(range(23))
    assert manifest == load_manifest(Directory(tmp_path / "b"))
    assert manifest.seed == 4
    # The bytes of the records are those that they were.
    old, new = (b"".join((d / f"{n}.records").read_bytes() for n in range(k)) for d, k in (
        (folder, 5), (tmp_path / "b", len(lengths)),
    ))  # fmt: skip
    assert old == new


def test_there_and_back_gives_the_same_files(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a", 23, 5)
    reshard([folder], tmp_path / "b", n_samples_per_shard=7)
    reshard([tmp_path / "b"], tmp_path / "c", n_samples_per_shard=5)
    assert contents(tmp_path / "c") == contents(folder)


@pytest.mark.parametrize("schema", [numbered.SCHEMA, numbered.TEXTS], ids=["fixed", "texts"])
def test_a_shuffled_order_is_the_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Schema) -> None:
    monkeypatch.setattr(module, "_OPEN_FILES", 2)
    folder = numbered.write(tmp_path / "a", 23, 5, schema=schema)
    for name in "bc":
        assert reshard([folder], tmp_path / name, n_shards=3, shuffle=True, seed=9).seed == 9
    assert flat(numbers(tmp_path / "b")) == permutation(23, 9).tolist()
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    drawn = reshard([folder], tmp_path / "d", n_shards=3, shuffle=True).seed
    assert drawn is not None
    assert flat(numbers(tmp_path / "d")) == permutation(23, drawn).tolist()


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_and_back(tmp_path: Path, compression: str) -> None:
    folder = numbered.write(tmp_path / "a", 23, 5)
    reshard([folder], tmp_path / "b", n_shards=3, compression=compression)
    assert directory_faults(Directory(tmp_path / "b")) == []
    with open_shard(Directory(tmp_path / "b"), "0.records", compression) as file:
        assert file.read(8) == (64).to_bytes(8, "little")
    with pytest.raises(InputError, match="Compressed shards can't be read in another order"):
        reshard([tmp_path / "b"], tmp_path / "c", n_shards=3, shuffle=True)
    reshard([tmp_path / "b"], tmp_path / "c", n_samples_per_shard=5)
    assert contents(tmp_path / "c") == contents(folder)


def test_directories_are_merged(tmp_path: Path) -> None:
    one = numbered.write(tmp_path / "a", 7, 5, details={"sources": {"x": {"paths": [str(tmp_path / "x.tif")]}}})
    two = numbered.write(tmp_path / "b", 6, 4, start=7, dropped={"rejected": {"nodata": 2}})
    manifest = reshard([one, two], tmp_path / "c" / "d", n_shards=2)
    assert numbers(tmp_path / "c" / "d") == [list(range(7)), list(range(7, 13))]
    assert manifest.details == {"parts": [{"sources": {"x": {"paths": ["../../x.tif"]}}}, {}]}
    assert manifest.dropped == {"parts": [{"rejected": {"nodata": 2}}]}
    assert manifest.seed is None
    reshard([one, two], tmp_path / "e", n_shards=2, shuffle=True, seed=1)
    assert flat(numbers(tmp_path / "e")) == permutation(13, 1).tolist()


def test_paths_that_were_cut_down_to_names_stay_so(tmp_path: Path) -> None:
    details = {"sources": {"x": {"paths": ["/elsewhere/x.tif", "gs://bucket/y.tif", "/vsizip/z.zip/z.tif"]}}}
    folder = numbered.write(tmp_path / "a", 4, 2, details=details)
    manifest = reshard([folder], tmp_path / "b" / "c", n_shards=1)
    assert manifest.details["sources"]["x"]["paths"] == ["x.tif", "gs://bucket/y.tif", "/vsizip/z.zip/z.tif"]


def test_otbtfs_directories_are_resharded_and_read_by_otbtfs_reader(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    import otbtf_style

    samples = [otbtf_style.all_kinds(seed) for seed in range(7)]
    folder = otbtf_style.write(tmp_path / "a", samples, 3, seed=2)
    reshard([folder], tmp_path / "b", n_shards=2)
    assert directory_faults(Directory(tmp_path / "b")) == []
    assert otbtf_style.same_samples(otbtf_style.read(tmp_path / "b"), samples)
    reshard([folder, tmp_path / "b"], tmp_path / "c", n_shards=4, shuffle=True, seed=3)
    shuffled = [(samples * 2)[n] for n in permutation(14, 3)]
    assert otbtf_style.same_samples(otbtf_style.read(tmp_path / "c"), shuffled)


def test_positions_follow_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("osgeo")
    from otbtf_lite.grid import Positions
    from otbtf_lite.vector import read_positions

    def placed(name: str, size: int, start: int, crs: str = "EPSG:32631") -> Path:
        label = np.arange(start, start + size)
        positions = Positions(label * 10.0, label + 1.0, crs, label=label)
        return numbered.write(tmp_path / name, size, 4, start=start, positions=positions)

    def rows(name: str) -> list[int]:
        label = read_positions(tmp_path / name / "positions.gpkg").label
        assert label is not None
        return label.tolist()

    parts = [placed("a", 10, 0), placed("b", 5, 10)]
    for name, options in (("c", {}), ("d", {"shuffle": True, "seed": 8})):
        reshard(parts, tmp_path / name, n_shards=4, **options)  # type: ignore[arg-type]
        assert rows(name) == flat(numbers(tmp_path / name))
    reshard([*parts, numbered.write(tmp_path / "e", 3, 3)], tmp_path / "f", n_shards=2)
    assert not (tmp_path / "f" / "positions.gpkg").exists()
    assert "not all the directories have one" in caplog.text
    reshard([*parts, placed("g", 3, 15, "EPSG:32632")], tmp_path / "h", n_shards=2)
    assert "different CRSs" in caplog.text
    (parts[0] / "positions.gpkg").write_bytes((parts[1] / "positions.gpkg").read_bytes())
    with pytest.raises(DataError, match="has 5 positions where there are 10 records"):
        reshard(parts[:1], tmp_path / "i", n_shards=2)
    assert not (tmp_path / "i").exists()


def damaged(name: str, at: int) -> Callable[[Path], Any]:
    return lambda folder: numbered.change(folder / name, at)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged("1.records", 2 * 80 + 30), r"1\.records: record 2 at byte 160 is corrupt"),
        (damaged("1.records", 2 * 80 + 2), r"1\.records: record 2 at byte 160 is corrupt"),
        (damaged("2.records", 20), r"2\.records: record 0 at byte 0 is corrupt"),
        (lambda f: (f / "0.records").write_bytes((f / "0.records").read_bytes()[:-80]), "has 320 bytes where"),
        (lambda f: (f / "1.records").unlink(), r"Could not read .*1\.records"),
        (lambda f: (f / "manifest.json.partial").touch(), "is unfinished"),
        (
            lambda f: (f / "2.records").write_bytes(
                (f / "2.records").read_bytes()[:80] + (f / "0.records").read_bytes()[80:240]
            ),
            r"2\.records holds other records than those that were written",
        ),
    ],
)
def test_nothing_damaged_is_carried_on(
    tmp_path: Path, damage: Callable[[Path], Any], message: str, shuffle: bool
) -> None:
    """Also in the last record, and where records are sound but are not those that were written."""
    folder = numbered.write(tmp_path / "a", 13, 5)
    damage(folder)
    with pytest.raises(DataError, match=message):
        reshard([folder], tmp_path / "b", n_shards=1, shuffle=shuffle, seed=1)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either the number of shards or the samples a shard"),
        ({"n_shards": 2, "n_samples_per_shard": 2}, "either the number of shards or the samples a shard"),
        ({"n_shards": 0}, "at least 1, got 0"),
        ({"n_shards": 11}, "10 samples can't fill 11 shards: ask for at most 10"),
        ({"n_samples_per_shard": 0}, "at least 1"),
        ({"n_shards": 2, "compression": "gzip"}, "compression must be one of"),
        ({"n_shards": 2, "seed": -1}, "A seed must be"),
    ],
)
def test_what_can_not_be_asked_for(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    folder = numbered.write(tmp_path / "a")
    with pytest.raises(InputError, match=message):
        reshard([folder], tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def test_directories_that_do_not_go_together(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a")
    (tmp_path / "link").symlink_to(folder)
    other = numbered.write(tmp_path / "o", schema=numbered.TEXTS)
    with pytest.raises(InputError, match="have different schemas"):
        reshard([folder, other], tmp_path / "b", n_shards=1)
    with pytest.raises(InputError, match="is named twice"):
        reshard([folder, tmp_path / "link"], tmp_path / "b", n_shards=1)
    with pytest.raises(InputError, match="is read and can't be written at once"):
        reshard([folder], tmp_path / "link", n_shards=1, overwrite=True)
    with pytest.raises(InputError, match="at least one directory"):
        reshard([], tmp_path / "b", n_shards=1)
    with pytest.raises(DataError, match="already holds"):
        reshard([folder], other, n_shards=1)
    reshard([folder], other, n_shards=1, overwrite=True)
    assert flat(numbers(other)) == list(range(10))


def test_a_remote_directory_is_resharded(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    base = f"ram://reshard-{tmp_path.name}"
    numbered.write(f"{base}/a", 10, 4)
    reshard([f"{base}/a"], f"{base}/b", n_shards=2)
    reshard([f"{base}/b"], tmp_path / "c", n_shards=3, shuffle=True, seed=2)
    assert directory_faults(Directory(f"{base}/b")) == []
    assert flat(numbers(f"{base}/b")) == list(range(10))
    assert flat(numbers(tmp_path / "c")) == permutation(10, 2).tolist()
    with pytest.raises(InputError, match="can't be replaced in one step"):
        reshard_in_place(f"{base}/a", n_shards=2)


def test_in_place(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a", 10, 4)
    (folder / ".hidden").touch()
    (tmp_path / "link").symlink_to(folder)
    reshard_in_place(tmp_path / "link", n_shards=2)
    assert numbers(folder) == [list(range(5)), list(range(5, 10))]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]
    reshard_in_place(f"{folder}{os.sep}", n_shards=1)
    assert len(numbers(folder)) == 1


def test_in_place_takes_nothing_away(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a")
    (folder / "notes").mkdir()
    before = numbers(folder)
    with pytest.raises(DataError, match=r"also holds 1 files that are not the data set's \(notes ...\)"):
        reshard_in_place(folder, n_shards=2)
    (folder / "notes").rmdir()
    numbered.change(folder / "2.records", 30)
    with pytest.raises(DataError, match="is corrupt"):
        reshard_in_place(folder, n_shards=2)
    numbered.change(folder / "2.records", 30)
    assert numbers(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


DIES = """
    import os, sys
    from pathlib import Path
    from otbtf_lite.reshard import reshard_in_place, shutil
    steps = 0
    def dying(function):
        def call(*args, **options):
            global steps
            steps += 1
            if steps == int(sys.argv[2]):
                os._exit(9)
            return function(*args, **options)
        return call
    Path.rename = dying(Path.rename)
    shutil.rmtree = dying(shutil.rmtree)
    reshard_in_place(sys.argv[1], n_shards=2)
"""


@pytest.mark.parametrize(
    ("step", "left"), [(1, {"a", "a.resharding"}), (2, {"a.old", "a.resharding"}), (3, {"a", "a.old"})]
)
def test_in_place_breaks_off_with_all_records_there(tmp_path: Path, step: int, left: set[str]) -> None:
    folder = numbered.write(tmp_path / "a", 10, 4)
    command = [sys.executable, "-c", textwrap.dedent(DIES), str(folder), str(step)]
    assert subprocess.run(command, cwd=PROJECT, check=False).returncode == 9
    assert {path.name for path in tmp_path.iterdir()} == left
    for name in left:
        assert flat(numbers(tmp_path / name)) == list(range(10))
    if step > 1:
        with pytest.raises(
            DataError, match=r"Another resharding of .* broke off: .* holds all records, so (rename|remove)"
        ):
            reshard_in_place(folder, n_shards=2)
        return
    reshard_in_place(folder, n_shards=2)
    assert len(numbers(folder)) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


@given(samples=st.integers(1, 10**6), size=st.integers(0, 10**7), workers=st.integers(1, 64))
def test_suggested_shards_are_shared_evenly(samples: int, size: int, workers: int) -> None:
    if samples < workers:
        with pytest.raises(InputError, match="can't be shared out"):
            suggest_shards(samples, size, workers)
        return
    shards = suggest_shards(samples, size, workers)
    assert shards % workers == 0
    assert workers <= shards <= samples
    per_shard = samples / shards
    if per_shard >= 2 and samples // workers >= 2 * shards // workers:
        assert per_shard * size <= 2 * (100 << 20)


@pytest.mark.parametrize(
    ("samples", "size", "workers", "shards"),
    [
        (100, 1000, 4, 4),
        (99, 1000, 4, 4),
        (90, 1000, 4, 4),
        (96, 100 << 20, 4, 96),
        (1000, 1 << 20, 3, 12),
        (3, 1, 3, 3),
    ],
)
def test_suggestions(samples: int, size: int, workers: int, shards: int) -> None:
    assert suggest_shards(samples, size, workers) == shards
