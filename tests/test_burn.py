"""Dense labels from polygons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from vectors import box, write_vector

from otbtf_lite import RasterSource, vector
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Window
from otbtf_lite.raster import write_raster

gdal = pytest.importorskip("osgeo.gdal")

GRID = Grid("EPSG:32631", (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0), 12, 8)
FIELD = box(500014, 3999926, 500066, 3999974)  # centres of columns 1 to 5 (1.4 to 6.6) and rows 3 to 6 (2.6 to 7.4)
ROAD = box(500000, 3999941, 500120, 3999943)  # between centres


def read(path: Path) -> np.ndarray:
    source = RasterSource(path, 1, categorical=True)
    with source.open() as reader:
        return reader.read(source.grid.window)[..., 0]


def centre_rule(boxes: list[tuple[float, float, float, float, int]], background: int) -> np.ndarray:
    expected = np.full(GRID.shape, background)
    rows, cols = np.mgrid[: GRID.height, : GRID.width]
    x, y = GRID.xy(rows, cols)
    for left, bottom, right, top, value in boxes:
        expected[(x > left) & (x < right) & (y > bottom) & (y < top)] = value
    return expected


@pytest.mark.parametrize("tile", [1024, 3])
def test_the_centre_decides(tmp_path: Path, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_BURN_TILE", tile)
    path = write_vector(tmp_path / "p.gpkg", [(FIELD, 3), (ROAD, 5)])
    out = vector.burn(path, GRID, tmp_path / "labels.tif", "class")
    assert out == tmp_path / "labels.tif"
    assert np.array_equal(read(out), centre_rule([(500014, 3999926, 500066, 3999974, 3)], 0))
    assert RasterSource(out, 1).grid == GRID
    assert RasterSource(out, 1).dtype == np.uint8
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".xml"] == []


@pytest.mark.parametrize("tile", [1024, 3])
def test_all_touched(tmp_path: Path, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_BURN_TILE", tile)
    path = write_vector(tmp_path / "p.gpkg", [(FIELD, 3), (ROAD, 5)])
    expected = np.zeros(GRID.shape, int)
    expected[2:8, 1:7] = 3
    expected[5] = 5  # the last one counts
    assert np.array_equal(read(vector.burn(path, GRID, tmp_path / "l.tif", "class", all_touched=True)), expected)


def test_names_and_backgrounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_vector(tmp_path / "p.gpkg", [(FIELD, "wheat"), (box(500080, 3999920, 500120, 4000000), "maize")])
    out = vector.burn(path, GRID, tmp_path / "l.tif", "class")
    boxes = [(500014, 3999926, 500066, 3999974, 1), (500080, 3999920, 500120, 4000000, 0)]
    assert np.array_equal(read(out), centre_rule(boxes, 2))  # 0 and 1 are classes
    dataset = gdal.Open(str(out))
    metadata = dataset.GetRasterBand(1).GetMetadata()
    assert metadata == {"CATEGORY_0": "maize", "CATEGORY_1": "wheat"}
    vector.burn(path, RasterSource(out, 1), out, "class", background=255, nodata=255)
    assert np.array_equal(read(out), centre_rule(boxes, 255))
    assert RasterSource(out, 1).nodata_values == (255,)
    assert not caplog.text
    vector.burn(path, GRID, out, "class", background=0)
    assert "the background 0 is also the class maize" in caplog.text
    assert np.array_equal(read(vector.burn(path, GRID, out)), centre_rule([(*b[:4], 1) for b in boxes], 0))


@pytest.mark.parametrize(
    ("values", "background", "dtype"),
    [((1, 255), None, "uint8"), ((1, 256), None, "uint16"), ((-1, 5), None, "int16"), ((-1, 200), None, "int16"),
     ((1, 2), -9999, "int16"), ((0, 70000), None, "uint32"), ((-1, 1 << 40), None, "int64")],
)  # fmt: skip
def test_the_type_holds_all_values(tmp_path: Path, values: tuple[int, int], background: int | None, dtype: str) -> None:
    east = box(500080, 3999920, 500120, 4000000)
    path = write_vector(tmp_path / "p.gpkg", [(FIELD, values[0]), (east, values[1])])
    out = vector.burn(path, GRID, tmp_path / "l.tif", "class", background=background)
    assert RasterSource(out, 1).dtype == dtype
    outside = background if background is not None else 70001 if 0 in values else 0
    assert set(read(out).ravel().tolist()) == {*values, outside}


def test_a_rotated_grid_and_one_without_crs(tmp_path: Path) -> None:
    rotated = Grid("EPSG:32631", (500000.0, 8.0, 6.0, 4000000.0, 6.0, -8.0), 40, 30)
    path = write_vector(tmp_path / "p.gpkg", [(box(500100, 3999900, 500250, 4000050), 1)])
    rows, cols = np.mgrid[:30, :40]
    x, y = rotated.xy(rows, cols)
    # No centre lies on an edge here.
    expected = (x > 500100) & (x < 500250) & (y > 3999900) & (y < 4000050)
    assert np.array_equal(read(vector.burn(path, rotated, tmp_path / "l.tif")), expected)
    plain = Grid("", (0.0, 1.0, 0.0, 0.0, 0.0, 1.0), 10, 10)
    path = write_vector(tmp_path / "p.shp", [(box(2, 3, 5, 5), 1)], crs="", driver="ESRI Shapefile")
    assert np.argwhere(read(vector.burn(path, plain, tmp_path / "m.tif"))).tolist() == [
        [r, c] for r in (3, 4) for c in (2, 3, 4)
    ]


def test_the_same_polygons_give_the_same_bytes_and_failures_leave_nothing(tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [(FIELD, 3)])
    first = vector.burn(path, GRID, tmp_path / "a.tif", "class").read_bytes()
    assert vector.burn(path, GRID, tmp_path / "b.tif", "class").read_bytes() == first
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="no field 'klass'"):
        vector.burn(path, GRID, tmp_path / "c.tif", "klass")
    with pytest.raises(InputError, match="no integer type holds"):
        vector.burn(path, GRID, tmp_path / "c.tif", "class", background=-1, nodata=(1 << 64) - 1)
    with pytest.raises(DataError, match="does not exist"):
        vector.burn(path, GRID, tmp_path / "no" / "c.tif", "class")
    points = write_vector(tmp_path / "points.gpkg", [("POINT(500010 3999900)", 1)])
    with pytest.raises(InputError, match="only polygons can be burned"):
        vector.burn(points, GRID, tmp_path / "c.tif", "class")
    assert sorted(tmp_path.iterdir()) == sorted([*before, points])


def test_what_was_burned_is_known(tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [(FIELD, 3)])
    assert vector.burned_classes(vector.burn(path, GRID, tmp_path / "a.tif", "class")) == {}
    named = write_vector(tmp_path / "n.gpkg", [(FIELD, f"{i:02}") for i in range(12)])
    table = vector.burned_classes(vector.burn(named, GRID, tmp_path / "a.tif", "class"))
    assert list((table or {}).items()) == [(i, f"{i:02}") for i in range(12)]
    write_raster(tmp_path / "image.tif", np.ones((*GRID.shape, 1), np.uint8), GRID)
    assert vector.burned_classes(tmp_path / "image.tif") is None


# ------------------------------------------------------------------------------------------------------- real data


def test_elkton_in_degrees_over_utm(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "l8_elkton_labels"
    source = RasterSource(folder / "L8-B4-Elkton-VA.tiff", 1)
    out = vector.burn(
        folder / "L8-Labels-Elkton-VA.geojson", source, tmp_path / "l.tif", "id", background=255, nodata=255
    )
    expected = gdal.Open(str(folder / "L8-Labels-Elkton-VA.tiff")).ReadAsArray()
    assert np.array_equal(read(out), expected)
    assert np.unique(expected, return_counts=True)[1][:3].tolist() == [419, 1108, 99]


@pytest.mark.parametrize("tile", [1024, 32])
def test_slovenian_land_cover(shared_data: Path, tmp_path: Path, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_BURN_TILE", tile)
    folder = shared_data / "s2_slovenia_lulc"
    source = RasterSource(folder / "ndvi_12dates_10m.tif", 1)
    out = vector.burn(folder / "LULC.gpkg", source, tmp_path / "l.tif", "LULC_ID", background=0)
    assert np.array_equal(read(out), gdal.Open(str(folder / "lulc.tif")).ReadAsArray())


def test_a_raster_and_its_burned_labels_are_read_together(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "s2_slovenia_lulc"
    source = RasterSource(folder / "ndvi_12dates_10m.tif", 16)
    labels = RasterSource(
        vector.burn(folder / "LULC.gpkg", source, tmp_path / "l.tif", "LULC_ID"), 16, categorical=True
    )
    assert labels.aligned_to(source) is labels
    with labels.open() as reader:
        assert reader.read(Window(20, 30, 16, 16)).shape == (16, 16, 1)
