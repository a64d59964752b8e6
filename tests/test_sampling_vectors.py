"""Positions from points and polygons."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vectors import box, ogr, osr, write_vector

from otbtf_lite import RasterSource, classdraw
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Positions
from otbtf_lite.raster import transform_points, write_raster
from otbtf_lite.sampling import (
    ClassStatistics,
    Rejections,
    class_quotas,
    class_statistics,
    from_vector,
    groups_of,
    select,
    split,
)

GRID = Grid("EPSG:32631", (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0), 30, 20)
WEST = box(500000, 3999800, 500100, 4000000)  # the first ten columns
EAST = box(500200, 3999800, 500300, 4000000)  # the last ten
HILL = "POLYGON((500052 3999848, 500213 3999821, 500251 3999967, 500118 3999933, 500052 3999848))"


@pytest.fixture
def source(tmp_path: Path) -> RasterSource:
    write_raster(tmp_path / "image.tif", np.ones((20, 30, 1), np.uint8), GRID)
    return RasterSource(tmp_path / "image.tif", 5)


def pixels(positions: Positions) -> list[tuple[int, int]]:
    row, col = GRID.rowcol(positions.x, positions.y)
    return list(zip(row.tolist(), col.tolist(), strict=True))


def labels(positions: Positions) -> list[int]:
    assert positions.label is not None
    return [int(label) for label in positions.label]


# --------------------------------------------------------------------------------------------------------- points


def test_two_points_of_classes_a_and_b(source: RasterSource, tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [("POINT(500055.5 3999912.25)", "b"), ("POINT(500100 3999900)", "a")])
    positions = from_vector(source, path, "class")
    assert positions == Positions(
        [500055.5, 500100.0], [3999912.25, 3999900.0], "EPSG:32631", label=[1, 0], classes=("a", "b")
    )
    assert from_vector(source, path) == Positions([500055.5, 500100.0], [3999912.25, 3999900.0], "EPSG:32631")


@pytest.mark.parametrize("driver", ["GPKG", "GeoJSON", "ESRI Shapefile", "GML"])
def test_points_in_another_crs(source: RasterSource, tmp_path: Path, driver: str) -> None:
    """Longitude and latitude, whose axes the authority has the other way round."""
    path = tmp_path / {"GPKG": "p.gpkg", "GeoJSON": "p.geojson", "ESRI Shapefile": "p.shp", "GML": "p.gml"}[driver]
    if ogr.GetDriverByName(driver) is None:
        pytest.skip(f"this GDAL has no {driver} driver")
    write_vector(path, [("POINT(3.001 36.143)", 7), ("POINT(3.0002 36.1425)", 5)], "kind", "EPSG:4326", driver=driver)
    here, there = osr.SpatialReference(), osr.SpatialReference()
    here.ImportFromEPSG(4326)
    there.ImportFromEPSG(32631)
    way = osr.CoordinateTransformation(here, there)  # authority order: latitude first
    expected = np.array([way.TransformPoint(36.143, 3.001)[:2], way.TransformPoint(36.1425, 3.0002)[:2]])
    found = from_vector(source, path, "kind")
    assert np.allclose(np.column_stack([found.x, found.y]), expected, rtol=0, atol=1e-6)
    assert found.crs == "EPSG:32631"
    assert labels(found) == [7, 5]


def test_points_outside_are_left_to_select(source: RasterSource, tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [("POINT(500100 3999900)", 1), ("POINT(500001 3999999)", 2)])
    kept, rejections = select(from_vector(source, path, "class"), {"image": source})
    assert labels(kept) == [1]
    assert rejections.reasons == (("image", "outside"),)


def test_each_part_of_a_multipoint_is_a_position(source: RasterSource, tmp_path: Path) -> None:
    path = write_vector(
        tmp_path / "p.gpkg", [("MULTIPOINT(500010 3999900, 500020 3999900)", "x"), ("POINT Z (1 2 3)", "w")]
    )
    positions = from_vector(source, path, "class")
    assert positions.x.tolist() == [500010, 500020, 1]
    assert labels(positions) == [1, 1, 0]


@pytest.mark.parametrize(
    ("strategy", "n", "expected"),
    [("constant", 2, {0: 2, 1: 2}), ("constant", 5, {0: 5, 1: 3}), ("total", 4, {0: 3, 1: 1}),
     ("smallest", None, {0: 3, 1: 3})],
)  # fmt: skip
def test_points_drawn_per_class(
    source: RasterSource, tmp_path: Path, strategy: classdraw.ClassStrategy, n: int | None, expected: dict[int, int]
) -> None:
    rows = [(f"POINT({500000 + i} 3999900)", "many" if i < 9 else "rare") for i in range(12)]
    path = write_vector(tmp_path / "p.gpkg", rows)
    positions = from_vector(source, path, "class", strategy=strategy, n=n, seed=3)
    assert Counter(labels(positions)) == expected
    assert (np.diff(positions.x) > 0).all()  # in the file's order, none twice
    assert positions == from_vector(source, path, "class", strategy=strategy, n=n, seed=3)


# --------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize("name", ["id", "fid", "ID", "FID"])
def test_a_class_field_of_that_name(source: RasterSource, tmp_path: Path, name: str) -> None:
    rows = [("POINT(500010 3999900)", 8), ("POINT(500020 3999900)", 3)]
    path = write_vector(tmp_path / "p.gpkg", rows, name, options=["FID=number"])
    assert labels(from_vector(source, path, name)) == [8, 3]
    assert labels(from_vector(source, path, name.lower())) == [8, 3]
    assert labels(from_vector(source, path, "number")) == [1, 2]  # the identifiers


def test_the_identifiers_as_class(source: RasterSource, tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [("POINT(500010 3999900)", "x"), ("POINT(500020 3999900)", "y")])
    assert labels(from_vector(source, path, "fid")) == [1, 2]
    text = write_vector(tmp_path / "t.geojson", [("POINT(500010 3999900)", "x")], "id", driver="GeoJSON")
    assert from_vector(source, text, "id").classes == ("x",)


def test_types_of_fields(source: RasterSource, tmp_path: Path) -> None:
    rows = [("POINT(500010 3999900)", 2.0), ("POINT(500020 3999900)", -3.0)]
    assert labels(from_vector(source, write_vector(tmp_path / "real.gpkg", rows), "class")) == [2, -3]
    rows[1] = (rows[1][0], 2.5)
    with pytest.raises(InputError, match=r"class holds 2\.5: classes are integers or text"):
        from_vector(source, write_vector(tmp_path / "half.gpkg", rows), "class")
    date = write_vector(tmp_path / "date.gpkg", [(rows[0][0], "2020/01/01")], kind=ogr.OFTDate)
    with pytest.raises(InputError, match="class holds Date values"):
        from_vector(source, date, "class")
    with pytest.raises(InputError, match="no field 'clas'; did you mean 'class'"):
        from_vector(source, date, "clas")


def test_what_has_no_class_or_no_place_is_left_out_and_said(
    source: RasterSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [("POINT(500010 3999900)", "a"), ("POINT(500020 3999900)", None), ("", "b"), ("POINT EMPTY", "c")]
    positions = from_vector(source, write_vector(tmp_path / "p.gpkg", rows), "class")
    assert positions.classes == ("a",)
    assert "2 features have no geometry" in caplog.text
    assert "1 features have no class" in caplog.text


# --------------------------------------------------------------------------------------------------------- layers


def test_layers(source: RasterSource, tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [("POINT(500010 3999900)", 1)], layer="one")
    write_vector(path, [("POINT(500010 3999900)", 2)], layer="two")
    with pytest.raises(InputError, match=r"2 layers with geometries \(one, two\)"):
        from_vector(source, path, "class")
    assert labels(from_vector(source, path, "class", layer="two")) == [2]
    assert labels(from_vector(source, path, "class", layer=0)) == [1]
    for wrong in ("tow", 2):
        with pytest.raises(InputError, match=r"no layer .*one, two"):
            from_vector(source, path, "class", layer=wrong)


def test_what_is_no_place(source: RasterSource, tmp_path: Path, shared_data: Path) -> None:
    line = write_vector(tmp_path / "line.gpkg", [("LINESTRING(500010 3999900, 500020 3999900)", 1)])
    with pytest.raises(InputError, match="is a linestring"):
        from_vector(source, line)
    both = write_vector(tmp_path / "both.gpkg", [("POINT(500010 3999900)", 1), (WEST, 2)])
    with pytest.raises(InputError, match="points and polygons"):
        from_vector(source, both)
    with pytest.raises(InputError, match=r"empty\.gpkg holds neither"):
        from_vector(source, shared_data / "broken" / "empty.gpkg")
    with pytest.raises(DataError, match=r"none\.gpkg does not exist"):
        from_vector(source, tmp_path / "none.gpkg")
    nowhere = write_vector(tmp_path / "nowhere.shp", [("POINT(500010 3999900)", 1)], crs="", driver="ESRI Shapefile")
    with pytest.raises(InputError, match=r"nowhere\.shp has no CRS and the raster EPSG:32631"):
        from_vector(source, nowhere)


# ------------------------------------------------------------------------------------------------------- polygons


def inside(wkt: str, row: int, col: int) -> bool:
    """Whether a pixel's centre lies in a polygon: crossings of a ray with its edges."""
    x, y = GRID.xy(row, col)
    ring = [tuple(map(float, pair.split())) for pair in wkt.split("((")[1].rstrip(")").split(",")]
    crossed = False
    for (ax, ay), (bx, by) in pairwise(ring):
        if (ay > y) != (by > y) and x < ax + (y - ay) / (by - ay) * (bx - ax):
            crossed = not crossed
    return crossed


def usable() -> list[tuple[int, int]]:
    """Pixels whose patch of 5 x 5 lies inside, row by row."""
    return [(row, col) for row in range(2, 18) for col in range(2, 28)]


@pytest.mark.parametrize("tile", [1024, 7])
def test_all_pixels_of_polygons(
    source: RasterSource, tmp_path: Path, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classdraw, "_TILE", tile)
    path = write_vector(tmp_path / "p.gpkg", [(WEST, "field"), (HILL, "hill")])
    positions = from_vector(source, path, "class")
    expected = {}
    for row, col in usable():
        for number, wkt in enumerate([WEST, HILL]):  # the last one counts
            if inside(wkt, row, col):
                expected[row, col] = number
    assert dict(zip(pixels(positions), labels(positions), strict=True)) == expected
    assert positions.classes == ("field", "hill")
    x, y = GRID.xy(*np.array(pixels(positions)).T)
    assert positions.x.tolist() == x.tolist()  # pixel centres, to the last bit
    assert positions.y.tolist() == y.tolist()
    assert pixels(positions) == sorted(expected)


def test_strategies_in_polygons(source: RasterSource, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = write_vector(tmp_path / "p.gpkg", [(WEST, 4), (box(500200, 3999900, 500220, 3999920), 9)])
    available = {4: 8 * 16, 9: 4}
    everywhere = set(
        zip(pixels(from_vector(source, path, "class")), labels(from_vector(source, path, "class")), strict=True)
    )
    for strategy, n, drawn in [
        ("constant", 3, {4: 3, 9: 3}), ("constant", 10, {4: 10, 9: 4}), ("total", 33, {4: 32, 9: 1}),
        ("smallest", None, {4: 4, 9: 4}), ("all", None, available),
    ]:  # fmt: skip
        caplog.clear()
        quotas = class_quotas(available, strategy, n)  # type: ignore[arg-type]
        positions = from_vector(source, path, "class", strategy=strategy, n=n, seed=1)  # type: ignore[arg-type]
        assert {label: quota.drawn for label, quota in quotas.items()} == drawn == Counter(labels(positions))
        assert set(zip(pixels(positions), labels(positions), strict=True)) <= everywhere
        assert len(set(pixels(positions))) == len(positions)
        for label, quota in quotas.items():
            assert f"class {label}: {quota.asked} asked, {available[label]} available" in caplog.text
    other = from_vector(source, path, "class", strategy="constant", n=3, seed=2)
    assert other != from_vector(source, path, "class", strategy="constant", n=3, seed=1)
    with pytest.raises(InputError, match="needs a seed"):
        from_vector(source, path, "class", strategy="constant", n=3)


def test_a_class_that_vanishes_is_named(source: RasterSource, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    away = box(600000, 3999000, 600100, 3999100)
    path = write_vector(tmp_path / "p.gpkg", [(WEST, "b"), (away, "a"), (box(500001, 3999991, 500004, 3999994), "c")])
    positions = from_vector(source, path, "class")
    assert positions.classes == ("a", "b", "c")  # the table is the file's, wherever the raster lies
    assert set(labels(positions)) == {1}
    assert "class a: 0 asked, 0 available" in caplog.text
    assert "class c: 0 asked, 0 available" in caplog.text
    only = write_vector(tmp_path / "away.gpkg", [(away, "a")])
    with pytest.raises(InputError, match=r"No pixel whose patch lies inside the raster lies in the polygons of .*away"):
        from_vector(source, only, "class")


def test_holes_and_parts_and_curves(source: RasterSource, tmp_path: Path) -> None:
    outer, hole, island = (
        box(*corners).removeprefix("POLYGON(").removesuffix(")")
        for corners in (
            (500050, 3999850, 500100, 3999900),
            (500060, 3999860, 500090, 3999890),
            (500200, 3999900, 500210, 3999910),
        )
    )
    holed = f"MULTIPOLYGON(({outer},{hole}),({island}))"
    positions = from_vector(source, write_vector(tmp_path / "p.gpkg", [(holed, 1)]), "class")
    assert len(positions) == 25 - 9 + 1
    assert (7, 20 + 0) not in pixels(positions)
    assert (9, 20) in pixels(positions)
    circle = "CURVEPOLYGON(CIRCULARSTRING(500100 3999900, 500200 3999900, 500100 3999900))"
    positions = from_vector(source, write_vector(tmp_path / "c.gpkg", [(circle, 1)]), "class")
    expected = [(r, c) for r, c in usable() if np.hypot(GRID.xy(r, c)[0] - 500150, GRID.xy(r, c)[1] - 3999900) < 50]
    assert pixels(positions) == expected


def test_edges_are_straight_in_the_crs_of_the_vector(tmp_path: Path) -> None:
    """A parallel bows by 50 m in UTM within this scene of 70 km; the oracle asks where each centre's latitude is."""
    wide = Grid("EPSG:32631", (430000.0, 350.0, 0.0, 5_200_000.0, 0.0, -5.0), 200, 300)
    write_raster(tmp_path / "wide.tif", np.ones((300, 200, 1), np.uint8), wide)
    source = RasterSource(tmp_path / "wide.tif", 1)
    rows, cols = np.mgrid[0:300, 0:200]
    x, y = wide.xy(rows.ravel(), cols.ravel())
    _, lat = transform_points(x, y, "EPSG:32631", "EPSG:4326")
    parallel = float(np.median(lat))
    for reach in (3.0, 80.0, 179.0):  # degrees: from the scene's own size to where the projection folds
        path = tmp_path / f"{reach}.gpkg"
        write_vector(path, [(box(max(-180, 3 - reach), -89, 3 + min(reach, 177), parallel), 1)], crs="EPSG:4326")
        positions = from_vector(source, path, "class")
        found = np.zeros((300, 200), bool)
        found[wide.rowcol(positions.x, positions.y)] = True
        wrong = found.ravel() != (lat < parallel)
        # A centre nearer to the edge than a hundredth of a pixel may go either way.
        assert not wrong[np.abs(lat - parallel) > 0.05 / 111_000].any()
    assert np.ptp(np.argmax(found, axis=0)) > 0  # it does bow


def test_a_polygon_that_can_not_be_moved(source: RasterSource, tmp_path: Path) -> None:
    bow = "POLYGON((-170 -80, 170 80, 170 -80, -170 80, -170 -80))"
    world = write_vector(tmp_path / "w.gpkg", [(bow, 1)], crs="EPSG:4326")
    with pytest.raises(DataError, match="feature 1 can't be moved into EPSG:32631: mend it, or clip it"):
        from_vector(source, world, "class")


# ------------------------------------------------------------------------------------------------------ statistics


def test_statistics_of_classes(source: RasterSource, tmp_path: Path) -> None:
    away = box(600000, 3999000, 600100, 3999100)
    path = write_vector(tmp_path / "p.gpkg", [(WEST, "w"), (EAST, "e"), (away, "e"), (EAST, "w")])
    assert class_statistics(source, path, "class") == {
        0: ClassStatistics(0, "e", 0, 2, 0),  # under the last polygon
        1: ClassStatistics(1, "w", 400, 2, 2),
    }
    points = write_vector(tmp_path / "points.gpkg", [("POINT(500010 3999900)", 1)])
    with pytest.raises(InputError, match="holds points"):
        class_statistics(source, points, "class")


def test_statistics_of_slovenian_land_cover(shared_data: Path) -> None:
    folder = shared_data / "s2_slovenia_lulc"
    source = RasterSource(folder / "ndvi_12dates_10m.tif", 1)
    found = class_statistics(source, folder / "LULC.gpkg", "LULC_ID")
    layer_of = ogr.Open(str(folder / "LULC.gpkg"))
    objects = Counter(feature.GetField("LULC_ID") for feature in layer_of.GetLayer(0))
    with RasterSource(folder / "lulc.tif", 1).open() as reader:
        raster = reader.read(source.grid.window)
    values, counts = np.unique(raster, return_counts=True)
    assert {label: each.pixels for label, each in found.items()} == dict(
        zip(values.tolist(), counts.tolist(), strict=True)
    )
    assert {label: each.objects for label, each in found.items()} == dict(objects)
    by_name = class_statistics(source, folder / "LULC.gpkg", "LULC_NAME")
    assert {each.name: each.pixels for each in by_name.values()}["forest"] == found[2].pixels


# ---------------------------------------------------------------------------------------------------------- groups


def test_groups_are_what_lies_in_polygons_of_one_value(source: RasterSource, tmp_path: Path) -> None:
    path = write_vector(tmp_path / "p.gpkg", [(WEST, "w"), (EAST, "e")])
    positions = Positions(*GRID.xy(np.array([5, 5, 5, 9]), np.array([4, 15, 25, 8])), GRID.crs)
    assert groups_of(positions, source, path, "class").tolist() == [1, -2, 0, 1]
    kept = split(
        positions, {"image": source}, {"a": 0.5, "b": 0.5}, seed=0, strategy="groups",
        groups=groups_of(positions, source, path, "class"),
    )  # fmt: skip
    assert kept.split is not None
    assert kept.split[0] == kept.split[3]


# ---------------------------------------------------------------------------------------------------------- quotas


@given(
    st.dictionaries(st.integers(-5, 300), st.integers(0, 10**12), min_size=1, max_size=12),
    st.integers(1, 10**13),
)
def test_quotas_of_a_total(available: dict[int, int], n: int) -> None:
    there = {label: count for label, count in available.items() if count}
    quotas = class_quotas(available, "total", n)
    assert list(quotas) == sorted(there)
    if not there:
        return
    assert sum(quota.asked for quota in quotas.values()) == n
    if n >= len(there):
        assert all(quota.asked for quota in quotas.values())
    whole = sum(there.values())
    for label, quota in quotas.items():
        assert abs(quota.asked - n * there[label] / whole) <= len(there) + 1e-6 * n
        assert quota.drawn == min(quota.asked, quota.available)
    if n <= whole and len(there) == 1:
        assert sum(quota.drawn for quota in quotas.values()) == n


@pytest.mark.parametrize(
    ("strategy", "n", "message"),
    [
        ("every", None, "strategy must be one of"),
        ("constant", None, "takes n, positions of each class"),
        ("total", 0, "takes n, positions overall"),
        ("total", True, "takes n"),
        ("smallest", 4, "takes none, got 4"),
        ("all", 4, "takes none, got 4"),
    ],
)
def test_wrong_strategies(strategy: classdraw.ClassStrategy, n: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        class_quotas({1: 5}, strategy, n)


class Board:
    """An image of two classes, every third pixel without one."""

    def __init__(self) -> None:
        self.labels = np.arange(100).reshape(10, 10) % 3

    def read(self, window: classdraw.Window) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        part = self.labels[window.slices].astype(np.int64)
        return part, part > 0


def test_every_pixel_of_a_class_is_as_likely_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classdraw, "_TILE", 4)
    board, area = Board(), classdraw.Window(1, 1, 9, 8)
    counts = classdraw.count(board, area)
    available = classdraw.totals(counts)
    assert available == {value: int((board.labels[1:9, 1:10] == value).sum()) for value in (1, 2)}
    quotas = class_quotas(available, "constant", 6)
    hits = np.zeros((10, 10), int)
    rounds = 600
    for seed in range(rounds):
        rows, cols, drawn = classdraw.draw(board, area, counts, quotas, np.random.default_rng(seed))
        assert Counter(drawn.tolist()) == {1: 6, 2: 6}
        assert (board.labels[rows, cols] == drawn).all()
        hits[rows, cols] += 1  # a pixel drawn twice would count once
    assert hits.sum() == 12 * rounds
    for value in (1, 2):
        chance = 6 / available[value]
        found = hits[1:9, 1:10][board.labels[1:9, 1:10] == value]
        assert np.abs(found - chance * rounds).max() < 5 * np.sqrt(rounds * chance * (1 - chance))


# ------------------------------------------------------------------------------------------------------ rejections


def test_rejections_are_saved_with_source_and_reason(source: RasterSource, tmp_path: Path) -> None:
    rows = [("POINT(500100 3999900)", "a"), ("POINT(500001 3999999)", "b"), ("POINT(1 1)", "a")]
    positions = from_vector(source, write_vector(tmp_path / "p.gpkg", rows), "class")
    _, rejections = select(positions, {"image": source})
    rejections.write(tmp_path / "rejected.gpkg")
    layer_of = ogr.Open(str(tmp_path / "rejected.gpkg"))
    saved = [(f["class"], f["source"], f["reason"], f.GetGeometryRef().GetX()) for f in layer_of.GetLayer(0)]
    assert saved == [("b", "image", "outside", 500001.0), ("a", "image", "outside", 1.0)]
    none = Rejections(positions[:0], (), np.zeros(0, np.int64), 3)
    none.write(tmp_path / "none.gpkg")
    assert ogr.Open(str(tmp_path / "none.gpkg")).GetLayer(0).GetFeatureCount() == 0
