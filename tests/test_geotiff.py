from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rasters import (
    GRID,
    NORTH_UP,
    REFERENCES,
    VERSION,
    Array,
    gdal,
    read_all,
    unique,
)

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Window
from otbtf_lite.raster import RasterSource, RasterWriter, write_raster


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int16", "int32", "int64", "uint64", "float32", "float64", "complex64"]
)
@pytest.mark.parametrize("geotransform", REFERENCES.values(), ids=REFERENCES)
def test_what_is_written_is_read_back(tmp_path: Path, dtype: str, geotransform: tuple[float, ...]) -> None:
    image = unique(dtype=dtype)
    grid = Grid("EPSG:32631", geotransform, 40, 30)
    write_raster(tmp_path / "a.tif", image, grid, descriptions=["r", "g", "b"], nodata=5)
    source = RasterSource(tmp_path / "a.tif", 8)
    np.testing.assert_array_equal(read_all(source), image)
    assert source.grid.crs == "EPSG:32631"
    assert source.grid.geotransform == pytest.approx(geotransform, rel=1e-14)
    assert source.nodata_values == (5, 5, 5)
    assert [file.name for file in tmp_path.iterdir()] == ["a.tif"]
    dataset = gdal.Open(str(tmp_path / "a.tif"))
    assert [dataset.GetRasterBand(b).GetDescription() for b in (1, 2, 3)] == ["r", "g", "b"]
    assert dataset.GetMetadataItem("COMPRESSION", "IMAGE_STRUCTURE") == "DEFLATE"
    assert dataset.GetRasterBand(1).GetBlockSize() == [256, 256]


def test_float16_is_written_where_gdal_has_it(tmp_path: Path) -> None:
    image = unique(dtype="float16")
    if VERSION >= 311:
        write_raster(tmp_path / "a.tif", image, GRID)
        np.testing.assert_array_equal(read_all(RasterSource(tmp_path / "a.tif", 8)), image)
    else:
        with pytest.raises(InputError, match="float32"):
            write_raster(tmp_path / "a.tif", image, GRID)
        assert not list(tmp_path.iterdir())


def test_no_georeferencing_stays_none(tmp_path: Path) -> None:
    grid = Grid("", (0.0, 1.0, 0.0, 0.0, 0.0, 1.0), 40, 30)
    write_raster(tmp_path / "a.tif", unique(), grid)
    assert RasterSource(tmp_path / "a.tif", 8).grid == grid
    assert gdal.Open(str(tmp_path / "a.tif")).GetGeoTransform(can_return_null=True) is None


def test_a_class_map_has_colours_and_names(tmp_path: Path) -> None:
    labels = (unique(bands=1) % 3).astype("uint8")
    colors = {0: (0, 0, 255), 1: (0, 200, 0), 2: (255, 255, 255, 255)}
    write_raster(tmp_path / "a.tif", labels, GRID, colors=colors, categories={0: "water", 1: "wood"}, nodata=255)
    dataset = gdal.Open(str(tmp_path / "a.tif"))
    band = dataset.GetRasterBand(1)
    table = band.GetRasterColorTable()
    assert [table.GetColorEntry(i)[:3] for i in range(3)] == [(0, 0, 255), (0, 200, 0), (255, 255, 255)]
    assert band.GetMetadata()["CATEGORY_1"] == "wood"
    np.testing.assert_array_equal(read_all(RasterSource(tmp_path / "a.tif", 8)), labels)  # indices, not colours
    assert [file.name for file in tmp_path.iterdir()] == ["a.tif"]


def test_window_by_window_in_any_order(tmp_path: Path) -> None:
    image = unique(300, 310, 2, "float32")
    grid = Grid("EPSG:32631", NORTH_UP, 310, 300)
    with RasterWriter(tmp_path / "a.tif", grid, 2, "float32") as writer:
        for window in reversed(list(grid.tiles(64, edges="clip"))):
            writer.write(window, image[window.slices])
            assert not (tmp_path / "a.tif").exists()
    np.testing.assert_array_equal(read_all(RasterSource(tmp_path / "a.tif", 8)), image)


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    class BangError(Exception):
        pass

    def fail() -> None:
        with RasterWriter(tmp_path / "a.tif", GRID, 3, "uint16") as writer:
            writer.write(GRID.window, unique())
            raise BangError

    with pytest.raises(BangError):
        fail()
    assert not list(tmp_path.iterdir())
    # What was there before stays.
    write_raster(tmp_path / "a.tif", unique(), GRID)
    before = (tmp_path / "a.tif").read_bytes()
    with pytest.raises(BangError):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["a.tif"]
    assert (tmp_path / "a.tif").read_bytes() == before


def test_a_new_file_drops_what_belonged_to_the_old(tmp_path: Path) -> None:
    write_raster(tmp_path / "a.tif", unique(), GRID)
    (tmp_path / "a.tif.aux.xml").write_text("<PAMDataset><GeoTransform>1,1,0,1,0,1</GeoTransform></PAMDataset>")
    write_raster(tmp_path / "a.tif", unique(), GRID)
    assert [file.name for file in tmp_path.iterdir()] == ["a.tif"]


def test_permissions_are_those_of_any_file(tmp_path: Path) -> None:
    write_raster(tmp_path / "a.tif", unique(), GRID)
    (tmp_path / "b").touch()
    assert (tmp_path / "a.tif").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodata": -1}, "nodata=-1"),
        ({"nodata": math.nan}, "nodata=nan"),
        ({"nodata": 300}, "nodata=300"),
        ({"count": 0}, "at least one band"),
        ({"dtype": "datetime64[s]"}, "can't write"),
        ({"count": 2, "colors": {0: (0, 0, 0)}}, "colours"),
        ({"dtype": "float32", "colors": {0: (0, 0, 0)}}, "colours"),
        ({"colors": {256: (0, 0, 0)}}, "256"),
        ({"colors": {0: (0, 0)}}, r"\(0, 0\)"),
        ({"colors": {0: (0, 0, 300)}}, "300"),
        ({"descriptions": ["a", "b"]}, "2 descriptions"),
        ({"grid": Grid("EPSG:1", NORTH_UP, 4, 4)}, "EPSG:1"),
    ],
)
def test_wrong_arguments_of_the_writer(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"path": tmp_path / "a.tif", "grid": GRID, "count": 1, "dtype": "uint8"}
    with pytest.raises(InputError, match=message):
        RasterWriter(**(good | arguments))
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"folder .*missing does not exist"):
        write_raster(tmp_path / "missing" / "a.tif", unique(), GRID)


@pytest.mark.parametrize(
    ("window", "array", "message"),
    [
        (Window(35, 0, 10, 10), np.zeros((10, 10, 1), "uint8"), "beyond"),
        (Window(0, 0, 10, 10), np.zeros((10, 10), "uint8"), "shape"),
        (Window(0, 0, 10, 5), np.zeros((10, 5, 1), "uint8"), "shape"),
        (Window(0, 0, 1, 1), np.full((1, 1, 1), 256), "256"),
        (Window(0, 0, 1, 1), np.full((1, 1, 1), 0.5), "0.5"),
        (Window(0, 0, 1, 1), np.full((1, 1, 1), math.nan), "nan"),
    ],
)
def test_what_does_not_fit_is_not_written(tmp_path: Path, window: Window, array: Array, message: str) -> None:
    with pytest.raises(InputError, match=message), RasterWriter(tmp_path / "a.tif", GRID, 1, "uint8") as writer:
        writer.write(window, array)
    assert not list(tmp_path.iterdir())


def test_values_that_fit_are_converted(tmp_path: Path) -> None:
    with RasterWriter(tmp_path / "a.tif", GRID, 1, "uint8") as writer:
        writer.write(GRID.window, (unique(bands=1) % 7).astype("int64"))
        writer.write(Window(0, 0, 1, 1), np.full((1, 1, 1), 9.0))
    pixels = read_all(RasterSource(tmp_path / "a.tif", 8))
    assert pixels[0, 0, 0] == 9
    np.testing.assert_array_equal(pixels[1:], (unique(bands=1) % 7)[1:])
    with pytest.raises(InputError, match="closed"):
        writer.write(GRID.window, pixels)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of GDAL before 3.8, closing the file
def test_a_full_disk_leaves_nothing(tmp_path: Path, gdal_exceptions: bool) -> None:
    # A limit on the size of files does what a full disk does.
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    noise = np.random.default_rng(1).integers(0, 255, (512, 512, 1)).astype("uint8")
    try:
        with pytest.raises(DataError, match=r"a\.tif can't be written"):
            write_raster(tmp_path / "a.tif", noise, Grid("", NORTH_UP, 512, 512))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())
