from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Positions
from otbtf_lite.vector import concat_positions, read_positions, transform_points, write_positions

gdal = pytest.importorskip("osgeo.gdal")
ogr = pytest.importorskip("osgeo.ogr")
osr = pytest.importorskip("osgeo.osr")
gdal.DontUseExceptions()


def example(n: int = 20, crs: str = "EPSG:32631") -> Positions:
    rng = np.random.default_rng(5)
    return Positions(
        rng.uniform(4e5, 6e5, n),
        rng.uniform(0, 5e6, n),
        crs,
        label=rng.integers(0, 3, n),
        split=np.array(["train", "", "prüfung"])[rng.integers(0, 3, n)],
        weight=rng.random(n),
        classes=("water", "wood", "town", "none here"),
    )


def points_file(path: Path, rows: list[dict[str, Any]], fields: dict[str, int], crs: str = "EPSG:4326") -> Path:
    """A GPKG by plain OGR calls; each row has its WKT under ``wkt``."""
    dataset = gdal.GetDriverByName("GPKG").Create(str(path), 0, 0, 0, gdal.GDT_Unknown)
    reference = osr.SpatialReference()
    reference.SetFromUserInput(crs)
    layer = dataset.CreateLayer("anything", reference, ogr.wkbUnknown)
    for name, kind in fields.items():
        layer.CreateField(ogr.FieldDefn(name, kind))
    for row in rows:
        feature = ogr.Feature(layer.GetLayerDefn())
        if row["wkt"]:
            feature.SetGeometry(ogr.CreateGeometryFromWkt(row["wkt"]))
        for name in fields:
            if row.get(name) is not None:
                feature.SetField(name, row[name])
        layer.CreateFeature(feature)
    del layer, dataset
    return path


def test_gpkg_there_and_back(tmp_path: Path) -> None:
    positions = example()
    write_positions(positions, tmp_path / "p.gpkg")
    assert read_positions(tmp_path / "p.gpkg") == positions
    assert [file.name for file in tmp_path.iterdir()] == ["p.gpkg"]


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.floats(-1e7, 1e7), st.floats(-1e7, 1e7)), max_size=5),
    st.sets(st.sampled_from(["label", "split", "weight", "classes"])),
    st.sampled_from(["", "EPSG:4326", "EPSG:2154"]),
)
def test_any_columns_there_and_back(
    tmp_path: Path, places: list[tuple[float, float]], columns: set[str], crs: str
) -> None:
    x, y = np.array(places).reshape(-1, 2).T
    n = len(x)
    values = {"label": np.arange(n) % 2, "split": ["train"] * n, "weight": np.arange(n) / 7, "classes": ("a", "b")}
    columns -= {"classes"} if "label" not in columns else set()
    positions = Positions(x, y, crs, **{key: values[key] for key in columns})
    write_positions(positions, tmp_path / "p.gpkg")
    assert read_positions(tmp_path / "p.gpkg") == positions


@pytest.mark.parametrize("suffix", [".geojson", ".shp", ".sqlite", ".fgb", ".GPKG"])
def test_other_formats(tmp_path: Path, suffix: str) -> None:
    positions = example()
    if suffix == ".fgb" and gdal.GetDriverByName("FlatGeobuf") is None:
        with pytest.raises(InputError, match=r"no FlatGeobuf driver.*gpkg"):
            write_positions(positions, tmp_path / f"p{suffix}")
        return
    write_positions(positions, tmp_path / f"p{suffix}")
    found = read_positions(tmp_path / f"p{suffix}")
    # Only GPKG keeps the name of a class that no position has; a shapefile's numbers are text of 15 decimals.
    assert found.weight == pytest.approx(positions.weight, abs=1e-15)
    assert found.classes is not None
    assert found.classes[:3] == ("water", "wood", "town")
    assert found == Positions(
        positions.x, positions.y, positions.crs, positions.label, positions.split, found.weight, found.classes
    )


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    write_positions(example(), tmp_path / "a.gpkg")
    time.sleep(1.1)  # the format's clock ticks in seconds
    write_positions(example(), tmp_path / "b.gpkg")
    assert (tmp_path / "a.gpkg").read_bytes() == (tmp_path / "b.gpkg").read_bytes()
    assert gdal.GetConfigOption("OGR_CURRENT_DATE") is None


def test_what_is_written_as_plain_ogr_reads_it(tmp_path: Path) -> None:
    positions = example(3)
    write_positions(positions, tmp_path / "p.gpkg")
    dataset = gdal.OpenEx(str(tmp_path / "p.gpkg"), gdal.OF_VECTOR)
    layer = dataset.GetLayer(0)
    assert layer.GetName() == "positions"
    assert layer.GetSpatialRef().GetAuthorityCode(None) == "32631"
    rows = [
        (f.GetGeometryRef().GetX(), f.GetGeometryRef().GetY(), f["label"], f["class"], f["split"], f["weight"])
        for f in layer
    ]
    names = [positions.classes[label] for label in positions.label]
    expected = zip(positions.x, positions.y, positions.label, names, positions.split, positions.weight, strict=True)
    assert rows == list(expected)


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    write_positions(example(), tmp_path / "p.gpkg")
    before = (tmp_path / "p.gpkg").read_bytes()
    with pytest.raises(InputError, match="EPSG:1"):
        write_positions(example(crs="EPSG:1"), tmp_path / "p.gpkg")
    assert [file.name for file in tmp_path.iterdir()] == ["p.gpkg"]
    assert (tmp_path / "p.gpkg").read_bytes() == before


@pytest.mark.parametrize("name", ["p.kml", "p.csv", "p", "p.tif"])
def test_formats_that_would_change_positions_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.gpkg"):
        write_positions(example(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"folder .*missing does not exist"):
        write_positions(example(), tmp_path / "missing" / "p.gpkg")


def test_class_names_without_numbers_are_sorted(tmp_path: Path) -> None:
    rows = [{"wkt": "POINT (2 49)", "class": "b"}, {"wkt": "POINT (3 50)", "class": "a"}]
    positions = read_positions(points_file(tmp_path / "p.gpkg", rows, {"class": ogr.OFTString}))
    assert positions == Positions([2, 3], [49, 50], "EPSG:4326", label=[1, 0], classes=("a", "b"))


def test_other_columns_are_left_alone(tmp_path: Path) -> None:
    rows = [{"wkt": "POINT Z (2 49 7)", "id": 5, "Label": 3, "weight": None, "split": None}]
    fields = {"id": ogr.OFTInteger, "Label": ogr.OFTInteger, "weight": ogr.OFTReal, "split": ogr.OFTString}
    positions = read_positions(points_file(tmp_path / "p.gpkg", rows, fields))
    assert positions == Positions([2], [49], "EPSG:4326", label=[3], split=[""], weight=[np.nan])


@pytest.mark.parametrize(
    ("wkt", "label", "message"),
    [
        ("POLYGON ((0 0, 1 0, 1 1, 0 0))", 1, "feature 2 is no point but polygon"),
        ("MULTIPOINT ((0 0))", 1, "feature 2 is no point but multipoint"),
        ("POINT EMPTY", 1, "feature 2 is no point"),
        (None, 1, "feature 2 is no point but none"),
        ("POINT (1 1)", None, "feature number 1 has no label"),
    ],
)
def test_what_are_no_positions(tmp_path: Path, wkt: str | None, label: int | None, message: str) -> None:
    rows = [{"wkt": "POINT (0 0)", "label": 0}, {"wkt": wkt, "label": label}]
    path = points_file(tmp_path / "p.gpkg", rows, {"label": ogr.OFTInteger})
    with pytest.raises(DataError, match=rf"p\.gpkg.*{message}"):
        read_positions(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken/invalid.geojson", "empty"),
        ("s2_slovenia_lulc/LULC.gpkg", "no point but polygon"),
        ("masks_nodata/RGB.byte.tif", "can't be read as a vector"),
        ("missing.gpkg", "does not exist"),
    ],
)
def test_real_files_that_hold_none(shared_data: Path, name: str, message: str, gdal_exceptions: bool) -> None:
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        read_positions(shared_data / name)


def test_a_layer_without_features(shared_data: Path) -> None:
    assert read_positions(shared_data / "broken/empty.gpkg") == Positions([], [], "EPSG:4326")


def test_points_move_to_another_crs() -> None:
    # The central meridian of zone 31 is 3 degrees east; there is no UTM at the pole of another planet.
    x, y = transform_points([3.0, 500.0, 3.0], [0.0, 95.0, 45.0], "EPSG:4326", "EPSG:32631")
    assert (x[0], y[0]) == pytest.approx((500000, 0), abs=1e-6)
    assert np.isinf(x[1])
    assert np.isinf(y[1])
    lon, lat = transform_points(x[[0, 2]], y[[0, 2]], "EPSG:32631", "EPSG:4326")
    assert lon == pytest.approx([3, 3])
    assert lat == pytest.approx([0, 45], abs=1e-9)
    assert transform_points([], [], "EPSG:4326", "EPSG:32631")[0].shape == (0,)


def test_points_that_can_not_move() -> None:
    with pytest.raises(InputError, match="can't be moved"):
        transform_points([0.0], [0.0], "EPSG:4326", 'LOCAL_CS["somewhere"]')


def test_parts_one_after_the_other() -> None:
    whole = example()
    assert concat_positions([whole[:7], whole[7:]]) == whole
    bare = Positions(whole.x, whole.y, whole.crs)
    joined = concat_positions([whole, bare])
    assert joined is not None
    assert len(joined) == 40
    assert joined.label is None
    assert concat_positions([whole, None]) is None
    assert concat_positions([]) is None
    assert concat_positions([whole, example(crs="EPSG:32632")]) is None
    other = Positions([1], [2], whole.crs, label=[0], classes=("elsewhere",))
    with pytest.raises(InputError, match="different classes"):
        concat_positions([whole, other])
