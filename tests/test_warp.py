from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rasters import REFERENCES, MakeRaster, read_all, unique, valid_all

from otbtf_lite import raster
from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid
from otbtf_lite.raster import RasterSource


def test_grids_that_meet_are_not_warped(make_raster: MakeRaster) -> None:
    ten = RasterSource(make_raster("ten.tif", unique()), 8)
    twenty = RasterSource(make_raster("twenty.tif", unique(), (500000.0, 20.0, 0.0, 4000000.0, 0.0, -20.0)), 4)
    assert twenty.aligned_to(ten) is twenty
    assert ten.aligned_to(twenty) is ten
    assert RasterSource(twenty.paths[0], 4, resampling="cubic").aligned_to(ten).grid == twenty.grid


@pytest.mark.parametrize(
    "other",
    [{"geotransform": (500005.0, 10.0, 0.0, 4000000.0, 0.0, -10.0)}, {"crs": "EPSG:32632"}, {"crs": ""}],
    ids=["half a pixel", "another CRS", "no CRS"],
)
def test_what_does_not_meet_is_never_taken_silently(make_raster: MakeRaster, other: dict[str, Any]) -> None:
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    source = RasterSource(make_raster("other.tif", unique(), **other), 8)
    with pytest.raises(InputError, match=r"other\.tif \(.*\) do not meet those of .*reference\.tif \(.*resampling="):
        source.aligned_to(reference)


def test_a_source_without_crs_can_not_be_warped_to_one_with(make_raster: MakeRaster) -> None:
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    source = RasterSource(make_raster("other.tif", unique(), crs=""), 8, resampling="nearest")
    with pytest.raises(InputError, match=r"other\.tif has no CRS.*a_srs"):
        source.aligned_to(reference)


def test_patch_sizes_must_fit(make_raster: MakeRaster) -> None:
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    source = RasterSource(make_raster("other.tif", unique(), crs="EPSG:32632"), (8, 5), resampling="nearest")
    with pytest.raises(InputError, match=r"other\.tif .*reference\.tif.*\(8, 5\) and \(8, 8\).*5 and 8 columns"):
        source.aligned_to(reference)


def test_sources_apart(make_raster: MakeRaster) -> None:
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    far = make_raster("far.tif", unique(), (700000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0), "EPSG:32632")
    with pytest.raises(InputError, match=r"far\.tif .*reference\.tif .*do not overlap"):
        RasterSource(far, 8, resampling="nearest").aligned_to(reference)


@pytest.mark.parametrize("geotransform", REFERENCES.values(), ids=REFERENCES)
@pytest.mark.parametrize(("crs", "step"), [("EPSG:32632", 3.0), ("EPSG:4326", 3e-5), ("EPSG:32631", 3.3)])
def test_a_view_shows_the_nearest_pixel(
    make_raster: MakeRaster, geotransform: tuple[float, ...], crs: str, step: float
) -> None:
    reference = RasterSource(make_raster("reference.tif", unique(), geotransform), 8)
    # A finer raster around the reference, whose pixels say where they are.
    middle = reference.grid.xy(15, 20, "ul")
    x, y = raster.transform_points([middle[0]], [middle[1]], "EPSG:32631", crs)
    fine = unique(280, 260, 1, "int32")
    corner = (float(x[0]) - 130 * step, step, 0.0, float(y[0]) + 140 * step, 0.0, -step)
    source = RasterSource(make_raster("fine.tif", fine, corner, crs), 8, categorical=True)
    view = source.aligned_to(reference)
    assert view.grid.meets(reference.grid)
    assert view.grid.pixel_size == pytest.approx(reference.grid.pixel_size)
    pixels, valid = read_all(view)[:, :, 0], valid_all(view)
    assert valid.mean() > 0.5
    rows, cols = np.nonzero(valid)
    there = raster.transform_points(*view.grid.xy(rows, cols), "EPSG:32631", crs)
    row, col = source.grid.rowcol(*there)
    np.testing.assert_array_equal(pixels[valid], fine[row, col, 0])


def test_a_view_is_pickled_hashed_and_shared_by_threads(make_raster: MakeRaster) -> None:
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    warped = make_raster("other.tif", unique(), (500003.0, 10.0, 0.0, 4000002.0, 0.0, -10.0))
    view = RasterSource(warped, 8, resampling="bilinear").aligned_to(reference)
    again = pickle.loads(pickle.dumps(view))  # noqa: S301
    assert again == view
    assert hash(again) == hash(view)
    assert view != RasterSource(warped, 8, resampling="bilinear")
    assert again.grid == view.grid
    assert again.describe()["warped"] is True
    expected = read_all(view)
    with again.open() as reader, ThreadPoolExecutor(4) as pool:
        for pixels in pool.map(reader.read, [again.grid.window] * 8):
            np.testing.assert_array_equal(pixels, expected)


def test_classes_are_never_mixed(make_raster: MakeRaster) -> None:
    labels = np.where(np.indices((30, 40)).sum(axis=0) % 3 > 0, 1, 9).astype("uint8")[:, :, None]
    reference = RasterSource(make_raster("reference.tif", unique()), 16)
    path = make_raster("labels.tif", labels, (500003.0, 20.0, 0.0, 4000007.0, 0.0, -20.0))
    view = RasterSource(path, 8, categorical=True).aligned_to(reference)
    assert set(np.unique(read_all(view)[valid_all(view)]).tolist()) == {1, 9}
    mixed = RasterSource(path, 8, resampling="bilinear").aligned_to(reference)
    assert not set(np.unique(read_all(mixed)[valid_all(mixed)]).tolist()) <= {1, 9}


@pytest.mark.parametrize(("patch", "pixel"), [(16, 5.0), (8, 10.0), (4, 20.0), (2, 40.0)])
def test_footprints_of_a_view_cover_the_reference_s(make_raster: MakeRaster, patch: int, pixel: float) -> None:
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    other = make_raster("other.tif", unique(), (500003.0, 7.0, 0.0, 4000007.0, 0.0, -7.0))
    view = RasterSource(other, patch, resampling="average").aligned_to(reference)
    assert view.grid.pixel_size == (pixel, pixel)
    assert view.grid.meets(reference.grid)
    x, y = reference.grid.xy(8, 8, "ul")  # a corner of pixels in both
    a = reference.grid.window_grid(reference.grid.footprint_window(x + 1, y - 1, 8))
    b = view.grid.window_grid(view.grid.footprint_window(x + 1, y - 1, patch))
    assert a.bounds == b.bounds


def test_a_view_covers_what_the_source_covers(make_raster: MakeRaster) -> None:
    reference = RasterSource(make_raster("reference.tif", unique(100, 100)), 8)
    small = make_raster("small.tif", unique(), (500303.0, 10.0, 0.0, 3999703.0, 0.0, -10.0))
    view = RasterSource(small, 8, resampling="nearest").aligned_to(reference)
    assert view.grid == Grid("EPSG:32631", (500300.0, 10.0, 0.0, 3999710.0, 0.0, -10.0), 41, 31)
    # A raster of the whole earth: only what lies around the reference.
    world = unique(180, 360, 1, "int32")
    path = make_raster("world.tif", world, (-180.0, 1.0, 0.0, 90.0, 0.0, -1.0), "EPSG:4326")
    view = RasterSource(path, 8, categorical=True).aligned_to(reference)
    assert view.grid.bounds == pytest.approx((499920, 3998920, 501080, 4000080))
    lon, lat = raster.transform_points([500500.0], [3999500.0], "EPSG:32631", "EPSG:4326")
    assert set(np.unique(read_all(view)).tolist()) >= {int(world[int(90 - lat[0]), int(lon[0] + 180), 0])}


def test_missing_pixels_stay_missing_in_a_view(make_raster: MakeRaster) -> None:
    image = np.full((30, 40, 2), 100, "int16")
    image[10:14, 10:14, 0] = -9999
    image[20:24, 20:24, :] = -9999
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    shifted = (500003.0, 10.0, 0.0, 4000002.0, 0.0, -10.0)
    tagged, plain = make_raster("a.tif", image, shifted, nodata=-9999), make_raster("b.tif", image, shifted)
    for source in (
        RasterSource(tagged, 8, resampling="bilinear"),
        RasterSource(plain, 8, resampling="bilinear", nodata=-9999),
    ):
        view = source.aligned_to(reference)
        pixels, valid = read_all(view), valid_all(view)
        assert set(np.unique(pixels[valid]).tolist()) == {100}  # nothing is mixed with -9999
        hole = view.grid.rowcol(*RasterSource(tagged, 8).grid.xy(11, 11))
        both = view.grid.rowcol(*RasterSource(tagged, 8).grid.xy(21, 21))
        assert not valid[hole]
        assert not valid[both]
        assert pixels[hole][1] == 100
        assert valid.sum() > 1000
        # One band alone: the other's holes do not matter.
        one = RasterSource(source.paths[0], 8, resampling="bilinear", nodata=source.nodata, bands=[2])
        assert valid_all(one.aligned_to(reference))[hole]


def test_a_view_of_a_masked_file(shared_data: Path, make_raster: MakeRaster) -> None:
    path = shared_data / "masks_nodata/RGB2.byte.tif"
    source = RasterSource(path, 8, resampling="nearest")
    grid = source.grid
    x0, a, _, y0, _, e = grid.geotransform
    reference = make_raster("r.tif", unique(200, 200), (x0 + 100.4 * a, a, 0.0, y0 + 100.3 * e, 0.0, e), grid.crs)
    view = source.aligned_to(RasterSource(reference, 8))
    valid = valid_all(source)
    rows, cols = np.indices(view.grid.shape)
    row, col = grid.rowcol(*view.grid.xy(rows, cols))
    np.testing.assert_array_equal(valid_all(view), valid[row, col])


def test_a_view_of_files_stacked(make_raster: MakeRaster) -> None:
    image = unique()
    shifted = (500004.0, 10.0, 0.0, 4000002.0, 0.0, -10.0)
    parts = [make_raster(f"{b}.tif", image[:, :, b : b + 1], shifted) for b in range(3)]
    whole = make_raster("whole.tif", image, shifted)
    reference = RasterSource(make_raster("reference.tif", unique()), 8)
    views = [RasterSource(p, 8, resampling="cubic", bands=[3, 1]).aligned_to(reference) for p in (parts, whole)]
    np.testing.assert_array_equal(read_all(views[0]), read_all(views[1]))
    np.testing.assert_array_equal(valid_all(views[0]), valid_all(views[1]))


@settings(max_examples=15)
@given(
    st.sampled_from(["EPSG:32631", "EPSG:32630", "EPSG:4326", "EPSG:3857"]),
    st.floats(0.1, 0.9),
    st.floats(0.1, 0.9),
    st.floats(2.0, 4.0),
    st.integers(0, 27),
    st.integers(0, 37),
)
def test_one_bright_place_stays_where_it_is(
    make_raster: MakeRaster, crs: str, down: float, right: float, step: float, row: int, col: int
) -> None:
    reference = RasterSource(make_raster("reference.tif", np.zeros((30, 40, 1), "uint8")), 8)
    x, y = reference.grid.xy(row, col)
    (u,), (v,) = raster.transform_points([x], [y], "EPSG:32631", crs)
    step *= 1e-5 if crs == "EPSG:4326" else 1.0
    bright = np.zeros((301, 301, 1), "uint8")
    bright[150, 150] = 255
    origin = (u - (150 + right) * step, step, 0.0, v + (150 + down) * step, 0.0, -step)
    source = RasterSource(make_raster("bright.tif", bright, origin, crs), 8, resampling="max")
    view = source.aligned_to(reference)
    if view is source:
        return
    found = np.argwhere(read_all(view)[:, :, 0] == 255)
    places = reference.grid.rowcol(*view.grid.xy(found[:, 0], found[:, 1]))
    # Within one pixel: `max` takes every pixel that it touches.
    assert len(found) >= 1
    assert max(abs(places[0] - row).max(), abs(places[1] - col).max()) <= 1
    assert (row, col) in set(zip(*(p.tolist() for p in places), strict=True))
