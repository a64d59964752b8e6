"""The statistics in a manifest are those of just the samples that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rasters import gdal

from otbtf_lite import (
    ArraysReader,
    ConcatReader,
    DatasetFromRasters,
    Positions,
    RasterPatchesReader,
    RasterSource,
    TFRecords,
    sampling,
    summaries,
)
from otbtf_lite.cli import main
from otbtf_lite.dataset import BlockIterator, Dataset
from otbtf_lite.grid import Window
from otbtf_lite.raster import block_cache
from otbtf_lite.records import decode_example
from otbtf_lite.shards import open_finished, shard_records
from otbtf_lite.storage import Directory

if TYPE_CHECKING:
    from conftest import MakeRaster

SIZE = 8
NODATA = -9999


@pytest.fixture
def sources(make_raster: MakeRaster) -> dict[str, RasterSource]:
    """Integers of which some are missing, floats of which some are NaN, and classes of which one means nothing."""
    rng = np.random.default_rng(3)
    whole = rng.integers(-50, 300, (96, 80, 2)).astype(np.int16)
    whole[::3, ::5, 1] = NODATA
    real = rng.normal(5, 2, (96, 80, 3)).astype(np.float32)
    real[::7, 1::9] = np.nan
    classes = rng.integers(0, 5, (96, 80, 1)).astype(np.uint8)
    files = {
        "whole": make_raster("whole.tif", whole, nodata=NODATA, TILED="YES", BLOCKXSIZE="16", BLOCKYSIZE="16"),
        "real": make_raster("real.tif", real),
        "classes": make_raster("classes.tif", classes, nodata=0),
    }
    return {key: RasterSource(file, SIZE, categorical=key == "classes") for key, file in files.items()}


@pytest.fixture
def positions(sources: dict[str, RasterSource]) -> Positions:
    drawn = sampling.on_grid(sources["whole"], SIZE)
    return Positions(drawn.x, drawn.y, drawn.crs, label=np.arange(len(drawn)) % 3)


def read_back(path: Path) -> list[dict[str, np.ndarray[Any, Any]]]:
    found = open_finished(Directory(path))
    return [
        decode_example(found.schema, record.data)
        for name in found.names
        for record in shard_records(found.directory, name, None, found.schema)
    ]


def details(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "manifest.json").read_text()))


def check_bands(found: dict[str, list[Any]], pixels: np.ndarray[Any, Any], valid: np.ndarray[Any, Any]) -> None:
    """Against NumPy's own, over values of shape (n, bands)."""
    for band, column in enumerate(pixels.T.astype(np.float64)):
        values = column[valid]
        assert found["count"][band] == len(values) > 0
        assert found["min"][band] == values.min()
        assert found["max"][band] == values.max()
        assert found["mean"][band] == pytest.approx(values.mean(), rel=1e-12)
        assert found["std"][band] == pytest.approx(values.std(), rel=1e-10)
        for percent, row in found["percentiles"].items():
            exact = np.percentile(values, int(percent), method="inverted_cdf")
            assert row[band] == pytest.approx(exact, rel=1.001e-3)


def test_they_equal_a_direct_computation(
    sources: dict[str, RasterSource], positions: Positions, tmp_path: Path
) -> None:
    with DatasetFromRasters(sources, positions, seed=2, buffer_length=7, label_key="label") as dataset:
        dataset.to_tfrecords(tmp_path, 16)  # of 120 samples 8 fill no shard
    samples, manifest = read_back(tmp_path), details(tmp_path)
    assert len(samples) == 112
    stacked = {key: np.concatenate([s[key].reshape(-1, s[key].shape[-1]) for s in samples]) for key in samples[0]}
    assert sorted(manifest["statistics"]) == ["real", "whole"]
    check_bands(manifest["statistics"]["whole"], stacked["whole"], (stacked["whole"] != NODATA).all(1))
    check_bands(manifest["statistics"]["real"], stacked["real"], ~np.isnan(stacked["real"]).any(1))
    for key in ("classes", "label"):
        kept = stacked[key][stacked[key] != 0] if key == "classes" else stacked[key]
        numbers, counts = np.unique(kept, return_counts=True)
        expected = dict(zip(map(str, numbers.tolist()), counts.tolist(), strict=True))
        assert manifest["class_counts"][key] == expected
    assert TFRecords(tmp_path).faults() == []


def test_half_the_pixels_are_missing(make_raster: MakeRaster, tmp_path: Path) -> None:
    image = np.full((16, 16, 1), 3.0, np.float32)
    image[:, ::2] = NODATA
    source = RasterSource(make_raster("half.tif", image, nodata=NODATA), 8)
    with DatasetFromRasters({"x": source}, sampling.on_grid(source, 8)) as dataset:
        dataset.to_tfrecords(tmp_path / "out", 4)
    found = details(tmp_path / "out")["statistics"]["x"]
    assert {key: found[key] for key in ("count", "min", "max", "mean", "std")} == {
        "count": [128], "min": [3.0], "max": [3.0], "mean": [3.0], "std": [0.0],
    }  # fmt: skip


def test_neither_threads_nor_buffers_nor_the_order_change_a_bit(
    sources: dict[str, RasterSource], positions: Positions, tmp_path: Path
) -> None:
    found = []
    for number, (threads, length, cls) in enumerate([(1, 128, None), (2, 5, None), (3, 16, BlockIterator)]):
        options: dict[str, Any] = {} if cls is None else {"iterator_cls": cls}
        with DatasetFromRasters(
            sources, positions, seed=number, buffer_length=length, threads=threads, **options
        ) as dataset:
            dataset.to_tfrecords(tmp_path / str(number), 40)
        found.append(details(tmp_path / str(number)))
    assert [each["order"] for each in found] == ["random", "random", "regions"]
    assert found[0]["statistics"] == found[1]["statistics"] == found[2]["statistics"]
    assert found[0]["class_counts"] == found[1]["class_counts"] == found[2]["class_counts"]


class Interrupted(Exception):  # noqa: N818  # not an error of the package
    pass


@pytest.mark.parametrize("breaks_at", [17, 60, 111])
def test_a_run_that_is_resumed_has_the_same_manifest(
    sources: dict[str, RasterSource],
    positions: Positions,
    tmp_path: Path,
    breaks_at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dataset() -> Dataset:
        reader = RasterPatchesReader(sources, positions, label_key="label")
        return Dataset(reader, 16, BlockIterator, seed=4)

    for name in ("at once", "resumed"):
        (tmp_path / name).mkdir()
    with dataset() as whole:
        whole.to_tfrecords(tmp_path / "at once" / "data", 16, progress=False)

    original, taken = RasterPatchesReader.get_summarised, 0

    def break_off(self: RasterPatchesReader, indices: Any) -> Any:
        nonlocal taken
        taken += len(indices)
        if taken > breaks_at:
            raise Interrupted
        return original(self, indices)

    monkeypatch.setattr(RasterPatchesReader, "get_summarised", break_off)
    with dataset() as broken, pytest.raises(Interrupted):
        broken.to_tfrecords(tmp_path / "resumed" / "data", 16, progress=False)
    monkeypatch.undo()
    with dataset() as again:
        again.to_tfrecords(tmp_path / "resumed" / "data", 16, progress=False, resume=True)
    manifests = [(tmp_path / name / "data" / "manifest.json").read_bytes() for name in ("at once", "resumed")]
    assert manifests[0] == manifests[1]


def test_the_last_rename_can_be_made_up_for(
    sources: dict[str, RasterSource], positions: Positions, tmp_path: Path
) -> None:
    with DatasetFromRasters(sources, positions, seed=4) as dataset:
        dataset.to_tfrecords(tmp_path, 40)
        written = (tmp_path / "manifest.json").read_bytes()
        (tmp_path / "manifest.json").rename(tmp_path / "manifest.json.partial")
        dataset.to_tfrecords(tmp_path, 40, resume=True)
    assert (tmp_path / "manifest.json").read_bytes() == written


def test_of_a_subset_only_its_samples_count(
    sources: dict[str, RasterSource], positions: Positions, tmp_path: Path
) -> None:
    with DatasetFromRasters(sources, positions, seed=1, max_nb_of_samples=9, iterator_cls=BlockIterator) as dataset:
        dataset.to_tfrecords(tmp_path, 9)
    samples = read_back(tmp_path)
    assert len(samples) == 9
    pixels = np.concatenate([s["whole"].reshape(-1, 2) for s in samples])
    check_bands(details(tmp_path)["statistics"]["whole"], pixels, (pixels != NODATA).all(1))


def test_joined_readers_add_up(sources: dict[str, RasterSource], positions: Positions) -> None:
    parts = [RasterPatchesReader(sources, positions[:50]), RasterPatchesReader(sources, positions[50:])]
    whole, joined = RasterPatchesReader(sources, positions), ConcatReader(parts)
    indices = np.random.default_rng(0).permutation(120).tolist()
    expected, summary = whole.get_summarised(indices)
    found, found_summary = joined.get_summarised(indices)
    assert joined.summarises
    assert found_summary.to_json() == summary.to_json()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_equal(one, other)
    assert sorted(joined.block_order().tolist()) == list(range(120))
    assert not ConcatReader([ArraysReader({"x": np.zeros((3, 2))})]).summarises


def test_scaled_and_converted_sources_leave_out_what_is_missing(
    sources: dict[str, RasterSource], positions: Positions
) -> None:
    plain = RasterPatchesReader({"x": sources["whole"]}, positions).get_summarised(range(120))[1].bands["x"]
    for change in ({"dtype": "float32"}, {"scaled": True}):
        source = RasterSource(sources["whole"].paths, SIZE, **change)
        found = RasterPatchesReader({"x": source}, positions).get_summarised(range(120))[1].bands["x"]
        assert found.count.tolist() == plain.count.tolist()
        np.testing.assert_allclose(found.mean, plain.mean, rtol=1e-12)


class TestBlockIterator:
    def test_each_index_once_a_pass_and_each_region_in_one_piece(
        self, sources: dict[str, RasterSource], positions: Positions
    ) -> None:
        reader = RasterPatchesReader(sources, positions)
        iterator = BlockIterator(reader, seed=5, chunk=32)
        passes = [[next(iterator) for _ in range(120)] for _ in range(2)]
        place = np.argsort(reader.block_order())
        for indices in passes:
            assert sorted(indices) == list(range(120))
            for start in range(0, 96, 32):
                region = np.sort(place[indices[start : start + 32]])
                gaps = np.diff(np.append(region, region[0] + 120))
                assert (gaps > 1).sum() == 1  # one run of the block order, which may go on from its end at its start
        assert passes[0] != passes[1]
        again = BlockIterator(reader, seed=5, chunk=32)
        assert [next(again) for _ in range(240)] == passes[0] + passes[1]
        other = BlockIterator(reader, seed=6, chunk=32)
        assert [next(other) for _ in range(120)] != passes[0]

    def test_few_samples_are_one_region_in_a_random_order(
        self, sources: dict[str, RasterSource], positions: Positions
    ) -> None:
        iterator = BlockIterator(RasterPatchesReader(sources, positions), seed=1)
        assert iterator.chunk == 1024
        indices = [next(iterator) for _ in range(120)]
        assert sorted(indices) == list(range(120)) != indices

    def test_a_reader_in_memory_has_its_own_order(self) -> None:
        iterator = BlockIterator(ArraysReader({"x": np.zeros((10, 2))}), seed=1, chunk=3)
        assert sorted(next(iterator) for _ in range(10)) == list(range(10))


def test_the_block_cache_is_bounded_and_given_back() -> None:
    before = gdal.GetCacheMax()

    @block_cache(1 << 22)
    def fail() -> None:
        assert gdal.GetCacheMax() == 1 << 22
        raise Interrupted

    with pytest.raises(Interrupted):
        fail()
    assert gdal.GetCacheMax() == before


def test_a_whole_raster_is_summed_up_in_windows(
    sources: dict[str, RasterSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "_WINDOW_BYTES", 3000)
    source = sources["whole"]
    with source.open() as reader:
        pixels = reader.read(Window(0, 0, 80, 96)).reshape(-1, 2)
    found = summaries.of_raster(source, "x").to_json()
    check_bands(found["statistics"]["x"], pixels, (pixels != NODATA).all(1))
    assert set(summaries.of_raster(sources["classes"], "y").to_json()["class_counts"]["y"]) == {"1", "2", "3", "4"}


def test_stats_prints_what_the_manifest_says(
    sources: dict[str, RasterSource], positions: Positions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DatasetFromRasters(sources, positions, seed=1, label_key="label") as dataset:
        dataset.to_tfrecords(tmp_path / "out", 120)
    assert main(["stats", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = details(tmp_path / "out")
    assert lines[0] == str(tmp_path / "out")
    assert lines[1].split() == ["key", "band", "count", "min", "p2", "p50", "p98", "max", "mean", "std"]
    assert lines[2].split()[:3] == ["real", "1", str(found["statistics"]["real"]["count"][0])]
    assert ["label", "0", "40", "33.33%"] in [line.split() for line in lines]
    tables = [line for line in lines if line.startswith("  real") or line.split()[:2] == ["key", "band"]]
    assert len(set(map(len, tables[:4]))) == 1  # aligned


def test_stats_of_records_without_a_manifest_count_every_value(
    sources: dict[str, RasterSource], positions: Positions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DatasetFromRasters({"x": sources["whole"]}, positions, seed=1) as dataset:
        dataset.to_tfrecords(tmp_path, 60)
    for name in ("manifest.json", "positions.gpkg"):
        (tmp_path / name).unlink()
    pixels = np.concatenate([s["x"].reshape(-1, 2) for s in read_back(tmp_path)])
    check_bands(summaries.of_records(tmp_path)["statistics"]["x"], pixels, np.ones(len(pixels), bool))
    assert main(["stats", str(tmp_path)]) == 0
    assert "-9999" in capsys.readouterr().out


def test_stats_of_rasters(sources: dict[str, RasterSource], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", sources["whole"].paths[0], sources["real"].paths[0]]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["whole.tif", "1"] in [row[:2] for row in rows]
    assert ["real.tif", "3"] in [row[:2] for row in rows]
    assert main(["stats", "--categorical", sources["classes"].paths[0]]) == 0
    assert "class" in capsys.readouterr().out
    assert main(["stats", "nowhere.tif"]) == 1
    assert "nowhere.tif does not exist" in capsys.readouterr().err


def test_a_digest_is_of_the_file_as_it_is_now(sources: dict[str, RasterSource]) -> None:
    source = sources["classes"]
    before = source.describe()["digests"]
    assert source.describe()["digests"] == before
    path = Path(source.paths[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert source.describe()["digests"] != before
