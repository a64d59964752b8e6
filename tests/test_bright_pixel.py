"""One bright pixel lies at the same place of every source, whatever their CRS, resolution and origin."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rasters import gdal

from otbtf_lite import InputError, Positions, RasterPatchesReader, RasterSource, sampling
from otbtf_lite.raster import transform_points

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import MakeRaster

CRS = "EPSG:32631"
PIXEL = 10.0  # of the reference
LEFT, TOP = 500_000.0, 4_800_000.0
SIZE = 60  # pixels a side of the reference
_names = itertools.count()


@dataclass(frozen=True)
class Other:
    """A second source of the same ground."""

    ratio: int
    """Pixels of the reference in one of it, a side; negative: so many of it in one of the reference."""
    shift: tuple[int, int]
    """Where it begins, in pixels of the coarser of the two, right and down."""


others = st.builds(
    Other,
    st.sampled_from([1, 2, 3, 6, -2, -3]),
    st.tuples(st.integers(-3, 1), st.integers(-3, 1)),
)


def size_of(ratio: int) -> float:
    """The pixel size of the second source in map units of the reference."""
    return PIXEL * ratio if ratio > 0 else PIXEL / -ratio


def spot(rows: np.ndarray, cols: np.ndarray, row: int, col: int, width: int) -> np.ndarray:
    """1 in a square of pixels that begins at (row, col), else 0."""
    return (((rows >= row) & (rows < row + width))[:, None] & ((cols >= col) & (cols < col + width))[None, :]).astype(
        np.uint8
    )[:, :, None]


@settings(max_examples=40)
@given(other=others, at=st.tuples(st.integers(2, 7), st.integers(2, 7)), off=st.tuples(*[st.integers(-5, 5)] * 2))
def test_on_grids_that_meet(make_raster: MakeRaster, other: Other, at: tuple[int, int], off: tuple[int, int]) -> None:
    """Both sources are in one CRS and on grids that meet: every pixel must agree, exactly."""
    number, pixel = next(_names), size_of(other.ratio)
    coarse = max(pixel, PIXEL)
    # The bright ground is one pixel of the coarser source, in the reference's frame.
    x, y = LEFT + 30 * PIXEL + at[0] * coarse, TOP - 30 * PIXEL - at[1] * coarse
    files = {}
    for key, (left, top, step) in {
        "reference": (LEFT, TOP, PIXEL),
        "other": (LEFT + other.shift[0] * coarse, TOP - other.shift[1] * coarse, pixel),
    }.items():
        count = int(2 * SIZE * PIXEL / step) + 12
        row, col = round((top - y) / step), round((x - left) / step)
        image = spot(np.arange(count), np.arange(count), row, col, round(coarse / step))
        files[key] = make_raster(f"{number}-{key}.tif", image, (left, step, 0, top, 0, -step), CRS)
    # Patches of one ground size, around a point near the bright one.
    ground = 24 * PIXEL
    sources = {
        "reference": RasterSource(files["reference"], 24),
        "other": RasterSource(files["other"], int(ground / pixel)),
    }
    middle = x + coarse / 2 + off[0] * PIXEL, y - coarse / 2 + off[1] * PIXEL
    point = Positions(np.array([middle[0]]), np.array([middle[1]]), CRS)
    kept, _ = sampling.select(point, sources, snap="coarsest")
    sample = RasterPatchesReader(sources, kept).get_sample(0)
    finest = 24 * max(1, -other.ratio)
    fine = [np.kron(patch[:, :, 0], np.ones([finest // len(patch)] * 2)) for patch in sample.values()]
    assert fine[0].max() == 1
    np.testing.assert_array_equal(fine[0], fine[1])


@settings(max_examples=12)
@given(
    crs=st.sampled_from(["EPSG:32630", "EPSG:32632", "EPSG:3857", "EPSG:4326"]),
    ratio=st.sampled_from([1, 2, -2]),
    origin=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    at=st.tuples(st.integers(20, 40), st.integers(20, 40)),
)
def test_in_another_crs(
    make_raster: MakeRaster, crs: str, ratio: int, origin: tuple[float, float], at: tuple[int, int]
) -> None:
    """The second source is warped, by the nearest pixel: its bright spot has its middle where the reference's has."""
    number, pixel = next(_names), size_of(ratio)
    row, col = at
    wide = 4  # pixels of the reference: wide enough for the nearest pixel to find it
    reference = spot(np.arange(SIZE), np.arange(SIZE), row, col, wide)
    first = make_raster(f"{number}-first.tif", reference, (LEFT, PIXEL, 0, TOP, 0, -PIXEL), CRS)
    # The second is drawn by asking of each of its pixels whether its middle lies on the bright ground.
    corners = np.array([[LEFT, TOP], [LEFT + SIZE * PIXEL, TOP - SIZE * PIXEL]])
    (x0, x1), (y0, y1) = transform_points(*corners.T, CRS, crs)
    step_x, step_y = (abs(end - start) / (SIZE * PIXEL) * pixel / 3 for start, end in ((x0, x1), (y0, y1)))
    count = int(SIZE * PIXEL / pixel * 3) + 60
    left, top = min(x0, x1) - (30 + origin[0]) * step_x, max(y0, y1) + (30 + origin[1]) * step_y
    grid_x, grid_y = np.meshgrid(left + (np.arange(count) + 0.5) * step_x, top - (np.arange(count) + 0.5) * step_y)
    back_x, back_y = transform_points(grid_x.ravel(), grid_y.ravel(), crs, CRS)
    across, down = (back_x - LEFT) / PIXEL - col, (TOP - back_y) / PIXEL - row
    bright = ((across >= 0) & (across < wide) & (down >= 0) & (down < wide)).reshape(count, count, 1)
    second = make_raster(f"{number}-second.tif", bright.astype(np.uint8), (left, step_x, 0, top, 0, -step_y), crs)

    size = 12 * (1 if ratio == 1 else 2)
    own = size // ratio if ratio > 0 else size * -ratio
    sources = {"first": RasterSource(first, size), "second": RasterSource(second, own, categorical=True)}
    x, y = LEFT + (col + wide / 2) * PIXEL + 1, TOP - (row + wide / 2) * PIXEL - 1
    kept, _ = sampling.select(Positions(np.array([x]), np.array([y]), CRS), sources, snap="coarsest")
    sample = RasterPatchesReader(sources, kept).get_sample(0)
    middles = []
    for patch in sample.values():
        rows, cols = np.nonzero(patch[:, :, 0])
        middles.append(((rows.mean() + 0.5) / len(patch), (cols.mean() + 0.5) / len(patch)))
    # Within half a pixel of the coarser one: the nearest pixel may be the next at either edge, not at both.
    coarse = max(1 / size, 1 / own)
    assert np.abs(np.subtract(*middles)).max() <= coarse / 2 + 1e-9


def test_landsat_with_its_panchromatic_band(shared_data: Path) -> None:
    """Its 15 m band begins half a 15 m pixel off the 30 m bands: on no lattice of theirs, so it must be asked for."""
    folder = shared_data / "l8_gulf_30m_15m"
    colour, pan = RasterSource(folder / "l8_B4.tif", 32), RasterSource(folder / "l8_B8.tif", 64)
    (x0, dx, *_), (x1, *_) = colour.grid.geotransform, pan.grid.geotransform
    assert (x1 - x0) / dx % 0.5 != 0
    with pytest.raises(InputError, match=r"l8_B8\.tif.*l8_B4\.tif"):
        RasterPatchesReader({"xs": colour, "pan": pan}, sampling.on_grid(colour, 32)).get_sample(0)
    sources = {"xs": colour, "pan": RasterSource(folder / "l8_B8.tif", 64, resampling="bilinear")}
    positions, _ = sampling.select(sampling.on_grid(colour, 32), sources, snap="coarsest")
    reader = RasterPatchesReader(sources, positions)
    samples = reader.get_samples(range(min(40, len(positions))))
    red = np.stack([s["xs"][..., 0] for s in samples]).astype(float)
    grey = np.stack([s["pan"][..., 0] for s in samples]).astype(float).reshape(len(samples), 32, 2, 32, 2).mean((2, 4))
    here = np.corrcoef(red.ravel(), grey.ravel())[0, 1]
    beside = [np.corrcoef(red.ravel(), np.roll(grey, 1, axis).ravel())[0, 1] for axis in (1, 2)]
    assert here > 0.9
    assert here > max(beside)


def test_naip_warped_to_the_next_zone_by_the_test(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "naip_va" / "NAIP-VA-b1.tiff"
    image = RasterSource(file, 32)
    code = int(image.grid.crs.removeprefix("EPSG:"))
    warped = tmp_path / "next zone.tif"
    gdal.Warp(str(warped), str(file), dstSRS=f"EPSG:{code + 1}", resampleAlg="cubic", dstNodata=0)
    with pytest.raises(InputError, match="next zone"):
        RasterPatchesReader({"a": image, "b": RasterSource(warped, 32)}, sampling.on_grid(image, 32)).get_sample(0)
    sources = {"a": image, "b": RasterSource(warped, 32, resampling="cubic")}
    positions, _ = sampling.select(sampling.at_random(image, 60, seed=1), sources)
    samples = RasterPatchesReader(sources, positions).get_samples(range(len(positions)))
    one, other = (np.stack([s[key][..., 0] for s in samples]).astype(float) for key in "ab")
    here = np.corrcoef(one.ravel(), other.ravel())[0, 1]
    assert here > 0.95
    for axis, step in ((1, 1), (1, -1), (2, 1), (2, -1)):
        assert np.corrcoef(one.ravel(), np.roll(other, step, axis).ravel())[0, 1] < here
