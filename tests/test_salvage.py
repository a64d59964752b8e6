"""What is left of damaged directories, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numbered
import numpy as np
import pytest
from numbered import change, flat, numbers

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import load_manifest
from otbtf_lite.salvage import Salvaged, salvage
from otbtf_lite.schema import Schema
from otbtf_lite.storage import Directory
from otbtf_lite.verify import directory_faults

FRAME = 80  # bytes of a record of numbered.SCHEMA


def saved(folder: Path, out: Path, **options: Any) -> tuple[list[int], list[str]]:
    """The numbers that are left and what is said to be lost; the new directory is sound and says the same."""
    result = salvage(folder, out, **options)
    assert directory_faults(Directory(out)) == []
    manifest = load_manifest(Directory(out))
    assert manifest == result.manifest
    lost = [text.removeprefix(f"{folder}/") for text in result.lost]
    assert list(manifest.dropped.get("lost", [])) == lost
    assert str(folder) not in (out / "manifest.json").read_text()
    return flat(numbers(out)), lost


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_of_a_sound_directory_all_is_kept(tmp_path: Path, compression: str | None) -> None:
    folder = numbered.write(tmp_path / "a", 10, 4, compression=compression, details={"sources": {"x": {"bands": [1]}}})
    assert saved(folder, tmp_path / "b") == (list(range(10)), [])
    assert numbered.contents(folder) == numbered.contents(tmp_path / "b")


Damage = Callable[[Path], Any]
CORRUPT = "is corrupt: the checksum of its 64 bytes is wrong."


def cut(size: int, name: str = "1.records") -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def without(start: int, end: int) -> Damage:
    def take_out(folder: Path) -> None:
        data = (folder / "1.records").read_bytes()
        (folder / "1.records").write_bytes(data[:start] + data[end:])

    return take_out


CASES: dict[str, tuple[Damage, list[int], list[str]]] = {
    "data": (lambda f: change(f / "1.records", FRAME + 30), [5], [f"record 1 at byte 80 {CORRUPT}"]),
    "stored checksum": (lambda f: change(f / "1.records", FRAME - 1), [4], [f"record 0 at byte 0 {CORRUPT}"]),
    "length": (
        lambda f: change(f / "1.records", FRAME),
        [5],
        ["bytes 80 to 159 hold no sound record.", "record 1 is lost."],
    ),
    "length and data": (
        lambda f: (change(f / "1.records", FRAME), change(f / "1.records", 2 * FRAME + 40)),
        [5, 6],
        ["bytes 80 to 239 hold no sound record.", "records 1 to 2 are lost."],
    ),
    "last": (
        lambda f: change(f / "1.records", 3 * FRAME + 9),
        [7],
        ["bytes 240 to 319 hold no sound record.", "record 3 is lost."],
    ),
    "cut inside": (cut(2 * FRAME + 33), [6, 7], ["bytes 160 to 192 hold no sound record.", "records 2 to 3 are lost."]),
    "cut between": (cut(2 * FRAME), [6, 7], ["records 2 to 3 are lost."]),
    "empty": (cut(0), [4, 5, 6, 7], ["records 0 to 3 are lost."]),
    "missing": (
        lambda f: (f / "1.records").unlink(),
        [4, 5, 6, 7],
        ["Could not read 1.records: No such file or directory.", "records 0 to 3 are lost."],
    ),
    "bytes taken out": (
        without(FRAME + 20, FRAME + 33),
        [5],
        ["bytes 80 to 146 hold no sound record.", "1 of 4 records are lost in all."],
    ),
    "a record taken out": (without(FRAME, 2 * FRAME), [5], ["record 3 is lost."]),
}


@pytest.mark.parametrize(("damage", "gone", "said"), CASES.values(), ids=CASES.keys())
def test_what_is_lost_is_said_and_the_rest_is_kept(
    tmp_path: Path, damage: Damage, gone: list[int], said: list[str]
) -> None:
    folder = numbered.write(tmp_path / "a", 10, 4)
    damage(folder)
    left, lost = saved(folder, tmp_path / "b")
    assert left == [n for n in range(10) if n not in gone]
    assert lost == [f"1.records: {text}" for text in said]
    assert all(len(shard) == 4 for shard in numbers(tmp_path / "b")[:-1])


def test_each_shards_losses_are_said(tmp_path: Path) -> None:
    """Also of one that was cut between records, which alone shows no fault."""
    folder = numbered.write(tmp_path / "a", 12, 4)
    change(folder / "0.records", 30)
    cut(3 * FRAME, "2.records")(folder)
    assert saved(folder, tmp_path / "b") == (
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [f"0.records: record 0 at byte 0 {CORRUPT}", "2.records: record 3 is lost."],
    )


@pytest.mark.parametrize("position", range(0, 3 * FRAME, 7))
def test_records_of_any_length_are_found_again(tmp_path: Path, position: int) -> None:
    """Wherever a byte is wrong, one record is lost and no more."""
    folder = numbered.write(tmp_path / "a", 5, 5, schema=numbered.TEXTS)
    change(folder / "0.records", position)
    left, lost = saved(folder, tmp_path / "b")
    assert len(left) == 4
    assert left == sorted(set(left))
    assert lost


def test_a_compressed_shard_is_saved_up_to_the_damage(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a", 12, 4, compression="GZIP")
    data = (folder / "1.records").read_bytes()
    (folder / "1.records").write_bytes(data[:-9])
    left, lost = saved(folder, tmp_path / "b")
    assert left == list(range(12))  # the records are all there, only the stream's end is not
    assert lost == ["1.records: is cut: its compressed stream does not end."]
    (folder / "1.records").write_bytes(data[: len(data) // 2])
    left, lost = saved(folder, tmp_path / "b", overwrite=True)
    assert left == [n for n in left if n < 4] + [n for n in left if 4 <= n < 8] + [8, 9, 10, 11]
    assert len(left) < 12
    assert "cut" in lost[0]
    assert "lost" in lost[-1]


def test_records_of_another_schema_are_lost(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a", 4, 2)
    other = numbered.write(tmp_path / "other", 2, 2, schema=Schema({"n": numbered.SCHEMA["n"]}))
    (folder / "1.records").write_bytes((other / "0.records").read_bytes())
    left, lost = saved(folder, tmp_path / "b")
    assert left == [0, 1]
    assert [text.split(" at byte")[0] for text in lost] == ["1.records: record 0", "1.records: record 1"]
    assert "has no feature 'x': it has ['n']" in lost[0]


def test_of_otbtfs_directories_too(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    import otbtf_style

    samples = [{"n": tf.constant(n, tf.int64), "x": tf.fill((2, 2, 1), tf.cast(n, tf.uint16))} for n in range(10)]
    folder = otbtf_style.write(tmp_path / "a", samples, 4, seed=1)
    assert saved(folder, tmp_path / "b") == (list(range(10)), [])
    assert otbtf_style.same_samples(otbtf_style.read(tmp_path / "b"), otbtf_style.read(folder))
    change(folder / "1.records", 30)
    change(folder / "2.records", FRAME)
    assert saved(folder, tmp_path / "c") == (
        [0, 1, 2, 3, 5, 6, 7, 8],
        [f"1.records: record 0 at byte 0 {CORRUPT}", "2.records: bytes 80 to 159 hold no sound record."],
    )


@pytest.fixture
def placed(tmp_path: Path) -> Path:
    pytest.importorskip("osgeo")
    from otbtf_lite.grid import Positions

    x = np.arange(10) * 10.0
    return numbered.write(tmp_path / "a", 10, 4, positions=Positions(x, x + 1, "EPSG:32631", label=np.arange(10)))


def rows(folder: Path) -> list[int]:
    from otbtf_lite.vector import read_positions

    label = read_positions(folder / "positions.gpkg").label
    assert label is not None
    return label.tolist()


@pytest.mark.parametrize("name", ["data", "length", "length and data", "cut inside", "cut between", "missing", "last"])
def test_positions_stay_with_their_records(tmp_path: Path, placed: Path, name: str) -> None:
    CASES[name][0](placed)
    left, lost = saved(placed, tmp_path / "b")
    assert lost
    assert rows(tmp_path / "b") == left


def test_positions_are_left_out_where_they_would_be_a_guess(
    tmp_path: Path, placed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CASES["bytes taken out"][0](placed)
    saved(placed, tmp_path / "b")
    assert not (tmp_path / "b" / "positions.gpkg").exists()
    assert "positions.gpkg is left out" in caplog.text


def test_what_can_not_be_salvaged(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a", 4, 2)
    with pytest.raises(InputError, match="is read and can't be written at once"):
        salvage(folder, tmp_path / "b" / ".." / "a")
    with pytest.raises(DataError, match="There is no directory"):
        salvage(tmp_path / "none", tmp_path / "b")
    numbered.write(tmp_path / "full", 2, 2)
    with pytest.raises(DataError, match="already holds"):
        salvage(folder, tmp_path / "full")
    for name in ("0.records", "1.records"):
        (folder / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"No record of .* is sound"):
        salvage(folder, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_large_hole_is_searched_with_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    folder = numbered.write(tmp_path / "a", 10, 10)
    data = (folder / "0.records").read_bytes()
    hole = np.random.default_rng(0).bytes(10 << 20)
    (folder / "0.records").write_bytes(data[: 3 * FRAME] + hole + data[3 * FRAME :])
    tracemalloc.start()
    result: Salvaged = salvage(folder, tmp_path / "b")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.manifest.n_samples == 10
    assert result.lost[0].endswith(f"bytes {3 * FRAME} to {3 * FRAME + (10 << 20) - 1} hold no sound record.")
    assert peak < 8 << 20
