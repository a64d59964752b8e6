from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.footprints import Footprints
from otbtf_lite.grid import Grid, Positions, Window
from otbtf_lite.raster import RasterSource, write_raster
from otbtf_lite.readers import RasterPatchesReader
from otbtf_lite.sampling import Reason, at_random, on_grid, select

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    Make = Callable[..., str]

CRS = "EPSG:32631"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a raster and gives its path; the upper-left corner and the pixel size are in metres of UTM 31."""

    def raster(
        pixels: npt.NDArray[Any],
        pixel: float = 10.0,
        origin: tuple[float, float] = (500000.0, 4000000.0),
        nodata: float | None = None,
    ) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.tif"
        array = pixels if pixels.ndim == 3 else pixels[..., None]
        grid = Grid(CRS, (origin[0], pixel, 0.0, origin[1], 0.0, -pixel), array.shape[1], array.shape[0])
        write_raster(path, array, grid, nodata=nodata)
        return str(path)

    return raster


def unique(rows: int, cols: int) -> npt.NDArray[np.uint16]:
    """Pixels that are all different, from 1."""
    return np.arange(1, rows * cols + 1, dtype=np.uint16).reshape(rows, cols)


def windows(positions: Positions, source: RasterSource) -> list[tuple[int, int]]:
    """First row and first column of each patch, one position at a time."""
    found = (
        source.grid.footprint_window(x, y, source.patch_size) for x, y in zip(positions.x, positions.y, strict=True)
    )
    return [(window.row_off, window.col_off) for window in found]


# ------------------------------------------------------------------------------------------------------- on_grid


@pytest.mark.parametrize(
    ("edges", "starts"),
    [("drop", [0, 4]), ("shift", [0, 4, 6])],
)
def test_a_10x10_raster_in_tiles_of_4(make: Make, edges: Any, starts: list[int]) -> None:
    source = RasterSource(make(unique(10, 10)), 4)
    positions = on_grid(source, edges=edges)
    assert windows(positions, source) == [(row, col) for row in starts for col in starts]
    assert positions.crs == source.grid.crs


@pytest.mark.parametrize("size", [3, 4, (2, 5)])
def test_positions_give_the_tiles_back(make: Make, size: Any) -> None:
    source = RasterSource(make(unique(11, 13)), size)
    positions = on_grid(source, stride=(2, 3), offset=(1, 2))
    rows, cols = source.patch_size
    expected = [(row, col) for row in range(1, 11 - rows + 1, 2) for col in range(2, 13 - cols + 1, 3)]
    assert windows(positions, source) == expected
    assert windows(on_grid(RasterSource(source.paths, 1), size, (2, 3), offset=(1, 2)), source) == expected


@pytest.mark.parametrize("sample", [on_grid, functools.partial(at_random, n=1, seed=0)])
def test_a_patch_larger_than_the_raster_names_both(make: Make, sample: Callable[[RasterSource], Positions]) -> None:
    path = make(unique(67, 56))
    with pytest.raises(InputError, match=f"128 x 128 .* larger than {re.escape(path)}, which has 67 x 56"):
        sample(RasterSource(path, 128))


def test_an_offset_beyond_the_last_tile_is_an_error(make: Make) -> None:
    with pytest.raises(InputError, match="No patch of 4 x 4"):
        on_grid(RasterSource(make(unique(8, 8)), 4), offset=(5, 0))
    with pytest.raises(InputError, match='"drop" or "shift"'):
        on_grid(RasterSource(make(unique(8, 8)), 4), edges="clip")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- at_random


def test_random_positions_are_all_different_and_inside(make: Make) -> None:
    source = RasterSource(make(unique(20, 30)), (5, 4))
    positions = at_random(source, 16 * 27, seed=1)  # as many as there are
    expected = {(row, col) for row in range(16) for col in range(27)}
    assert set(windows(positions, source)) == expected
    assert windows(positions, source) != sorted(expected)
    with pytest.raises(InputError, match="only 432 pixels"):
        at_random(source, 16 * 27 + 1, seed=1)


def test_the_seed_decides(make: Make) -> None:
    source = RasterSource(make(unique(40, 40)), 4)
    assert at_random(source, 9, seed=5) == at_random(source, 9, seed=5)
    assert at_random(source, 9, seed=5) != at_random(source, 9, seed=6)
    with pytest.raises(InputError, match="seed"):
        at_random(source, 9, seed=None)  # type: ignore[arg-type]


def test_a_minimum_distance_is_kept(make: Make) -> None:
    source = RasterSource(make(unique(100, 100)), 1)
    positions = at_random(source, 100, seed=2, min_distance=65.0)
    apart = np.hypot(positions.x[:, None] - positions.x, positions.y[:, None] - positions.y)
    assert apart[~np.eye(100, dtype=bool)].min() >= 65
    with pytest.raises(InputError, match=r"10000 positions at least 65 map units apart .* only \d+ were found"):
        at_random(source, 10000, seed=2, min_distance=65.0)
    # One pixel apart is what all positions are.
    assert len(at_random(source, 10000, seed=2, min_distance=10.0)) == 10000


@pytest.mark.parametrize("pixel", [10.0, 20.0, 5.0, 7.0])
def test_a_mask_allows_positions(make: Make, pixel: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otbtf_lite.classdraw._TILE", 7)
    monkeypatch.setattr("otbtf_lite.lookup._MOST_PIXELS", 60)
    source = RasterSource(make(unique(30, 30)), 3)
    side = round(200 / pixel)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 3, (side, side)).astype(np.uint8)  # 0: not allowed, 2: nodata
    mask = make(pixels, pixel, (500040.0, 3999950.0), nodata=2)
    # By brute force: the centre of each pixel whose patch lies inside.
    expected = set()
    for row in range(1, 29):
        for col in range(1, 29):
            mask_row, mask_col = ((row + 0.5) * 10 - 50) // pixel, ((col + 0.5) * 10 - 40) // pixel
            if 0 <= mask_row < side and 0 <= mask_col < side and pixels[int(mask_row), int(mask_col)] == 1:
                expected.add((row - 1, col - 1))
    positions = at_random(source, len(expected), seed=0, mask=mask)
    assert set(windows(positions, source)) == expected
    assert at_random(source, 5, seed=0, mask=mask) == at_random(source, 5, seed=0, mask=RasterSource(mask, 4))
    with pytest.raises(InputError, match=f"only {len(expected)} pixels .* the mask allows"):
        at_random(source, len(expected) + 1, seed=0, mask=mask)


def test_a_mask_in_another_crs(make: Make, tmp_path: Path) -> None:
    source = RasterSource(make(unique(30, 30)), 1)
    path = str(tmp_path / "mask.tif")
    # UTM 31 (500000, 4000000) lies on 3 degrees east. The mask ends there: what is east of it is allowed, 100 m of it.
    pixels = np.ones((1, 1, 1), np.uint8)
    write_raster(path, pixels, Grid("EPSG:4326", (3.0011, 1.0, 0.0, 37.0, 0.0, -2.0), 1, 1))
    columns = {col for _, col in windows(at_random(source, 400, seed=0, mask=path), source)}
    assert columns == set(range(10, 30))


# -------------------------------------------------------------------------------------------------------- select


def test_the_8x8_raster_of_unique_values(make: Make) -> None:
    pixels = unique(8, 8)
    source = RasterSource(make(pixels), 4)
    point = Positions([500000 + 45.0], [4000000 - 35.0], CRS)  # row 3, column 4
    kept, rejections = select(point, {"xs": source})
    assert kept == point
    assert len(rejections) == 0
    assert str(rejections) == "none of 1 positions rejected"
    assert RasterPatchesReader({"xs": source}, kept)[0]["xs"][..., 0].tolist() == pixels[1:5, 2:6].tolist()
    odd = RasterPatchesReader({"xs": RasterSource(source.paths, 5)}, kept)[0]["xs"][..., 0]
    assert odd.tolist() == pixels[1:6, 2:7].tolist()


def test_points_in_another_crs(make: Make) -> None:
    source = RasterSource(make(unique(8, 8)), 1)
    # 3 degrees east is UTM 31's central meridian, x = 500000: the raster's left edge, and 5e-6 degrees are 0.45 m. On
    # it y is the length of the meridian from the equator (Snyder, Map Projections, 1987, equation 3-21) times 0.9996.
    x, y = 3 + 5e-6, 36.144
    e2, phi = 0.00669437999014, np.deg2rad(y)
    terms = [
        (1 - e2 / 4 - 3 * e2**2 / 64 - 5 * e2**3 / 256) * phi,
        -(3 * e2 / 8 + 3 * e2**2 / 32 + 45 * e2**3 / 1024) * np.sin(2 * phi),
        (15 * e2**2 / 256 + 45 * e2**3 / 1024) * np.sin(4 * phi),
        -(35 * e2**3 / 3072) * np.sin(6 * phi),
    ]
    north = 0.9996 * 6378137.0 * sum(terms)
    row = int((4000000 - north) // 10)
    moved = RasterSource(make(unique(8, 8), origin=(500000.0, 4000000.0 - 10 * (row - 5))), 1)
    kept, _ = select(Positions([x], [y], "EPSG:4326"), {"xs": moved})
    assert (kept.x[0], kept.crs) == (x, "EPSG:4326")  # positions stay as they are
    assert RasterPatchesReader({"xs": moved}, kept)[0]["xs"].item() == 5 * 8 + 1
    with pytest.raises(InputError, match=r"No position is left: 1 of 1 positions rejected: 1 outside \(xs 1\)"):
        select(Positions([x], [y + 89], "EPSG:4326"), {"xs": source})
    with pytest.raises(InputError, match="no CRS"):
        select(Positions([x], [y], ""), {"xs": source})


def test_a_point_that_fails_in_the_second_source_only(make: Make) -> None:
    sources = {"a": RasterSource(make(unique(20, 20)), 4), "b": RasterSource(make(unique(5, 20)), 4)}
    positions = on_grid(sources["a"])
    kept, rejections = select(positions, sources)
    assert windows(kept, sources["a"]) == [(0, col) for col in range(0, 20, 4)]
    assert set(rejections.reasons) == {Reason("b", "outside")}
    assert str(rejections) == "20 of 25 positions rejected: 20 outside (b 20)"
    assert rejections.indices.tolist() == list(range(5, 25))
    assert rejections.positions == positions[5:]


def test_one_nodata_pixel_in_the_finer_of_two_sources(make: Make) -> None:
    fine = unique(16, 16)
    fine[9, 2] = 0
    sources = {"coarse": RasterSource(make(unique(8, 8), 20.0), 2), "fine": RasterSource(make(fine, nodata=0), 4)}
    positions = on_grid(sources["coarse"])
    kept, rejections = select(positions, sources, snap="coarsest")
    assert len(kept) == 15
    assert rejections.reasons == (("fine", "nodata"),)
    assert rejections.indices.tolist() == [8]  # coarse rows 4 and 5, columns 0 and 1
    assert rejections.counts() == {"nodata": 1}
    kept, rejections = select(positions, sources, snap="coarsest", max_nodata=1 / 16)
    assert (len(kept), len(rejections)) == (16, 0)


def test_every_reason_and_their_summary(make: Make, tmp_path: Path) -> None:
    from osgeo import gdal

    values = unique(8, 16).astype(np.float32)
    values[0, 0] = np.nan
    values[0, 5] = -1
    path = make(values, nodata=-1)
    masked = make(unique(8, 16))
    dataset = gdal.Open(masked, gdal.GA_Update)
    dataset.CreateMaskBand(gdal.GMF_PER_DATASET)
    mask = np.full((8, 16), 255, np.uint8)
    mask[1, 9] = 0
    dataset.GetRasterBand(1).GetMaskBand().WriteArray(mask)
    del dataset
    sources = {"v": RasterSource(path, 4), "m": RasterSource(masked, 4)}
    labels = np.arange(9)
    grid = on_grid(sources["v"])
    positions = Positions([*grid.x, 0.0], [*grid.y, 0.0], CRS, label=labels)
    kept, rejections = select(positions, sources)
    assert kept.label is not None
    assert kept.label.tolist() == [3, 4, 5, 6, 7]
    assert rejections.reasons == (("v", "nodata"), ("v", "nodata"), ("m", "masked"), ("v", "outside"))
    assert str(rejections) == "4 of 9 positions rejected: 1 outside (v 1), 2 nodata (v 2), 1 masked (m 1)"
    assert rejections.positions.label is not None
    assert rejections.positions.label.tolist() == [0, 1, 2, 8]


def test_a_patch_that_does_not_read_is_unreadable(make: Make, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = make(rng.integers(0, 60000, (1024, 512)).astype(np.uint16))
    whole = on_grid(RasterSource(path, 256))
    with open(path, "r+b") as file:  # noqa: PTH123  # to cut it
        file.truncate(700_000)  # most of the tiles are gone
    kept, rejections = select(whole, {"xs": RasterSource(path, 256)})
    assert len(kept) > 0
    assert rejections.counts() == {"unreadable": len(rejections)}
    missing = str(tmp_path / "missing.tif")
    with pytest.raises(DataError, match=re.escape(missing)):
        select(whole, {"xs": RasterSource(path, 256), "gone": RasterSource(missing, 256)})


def test_positions_are_kept_in_order_whatever_the_reading_order(make: Make) -> None:
    source = RasterSource(make(unique(64, 64)), 4)
    positions = at_random(source, 700, seed=0)
    kept, _ = select(positions, {"xs": source})
    assert kept == positions


@pytest.mark.parametrize("arguments", [{"snap": "finest"}, {"max_nodata": 2.0}, {"max_nodata": float("nan")}])
def test_wrong_arguments_are_refused(make: Make, arguments: dict[str, Any]) -> None:
    source = RasterSource(make(unique(8, 8)), 4)
    with pytest.raises(InputError, match=next(iter(arguments))):
        select(on_grid(source), {"xs": source}, **arguments)


@pytest.mark.parametrize("sources", [{}, None, {"xs": "path.tif"}])
def test_sources_must_be_raster_sources(sources: Any) -> None:
    with pytest.raises(InputError, match="RasterSource"):
        select(Positions([0.0], [0.0], CRS), sources)


# ---------------------------------------------------------------------------------------------------------- snap


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float, float, float], str]:
    """2400 x 2400 m of ones, by pixel size and shift of the origin; each is written once."""
    folder = tmp_path_factory.mktemp("squares")

    @functools.cache
    def square(pixel: float, right: float, up: float) -> str:
        n = round(2400 / pixel)
        path = str(folder / f"{pixel}_{right}_{up}.tif")
        grid = Grid(CRS, (right, pixel, 0.0, 2400 + up, 0.0, -pixel), n, n)
        write_raster(path, np.ones((n, n, 1), np.uint8), grid)
        return path

    return square


def ground(source: RasterSource, window: Window) -> tuple[float, ...]:
    return source.grid.window_grid(window).bounds


@settings(max_examples=60, deadline=None)
@given(
    pixels=st.lists(st.sampled_from([5.0, 10.0, 15.0, 20.0, 30.0, 60.0]), min_size=2, max_size=3),
    patches=st.integers(1, 4),
    shift=st.sampled_from([(0, 0), (3, -2), (-1, 1)]),
    places=st.lists(st.tuples(st.floats(1000, 1400), st.floats(1000, 1400)), min_size=1, max_size=5),
)
def test_snapped_footprints_coincide(
    squares: Callable[[float, float, float], str],
    pixels: list[float],
    patches: int,
    shift: tuple[int, int],
    places: list[tuple[float, float]],
) -> None:
    # Every patch covers ``patches`` times 60 m; the reference's lattice starts elsewhere, by multiples of 60 m.
    pixels = [*pixels, 60.0]
    sources = {}
    for number, pixel in enumerate(pixels):
        right, up = (shift[0] * 60.0, shift[1] * 60.0) if number == 0 else (0.0, 0.0)
        sources[str(number)] = RasterSource(squares(pixel, right, up), round(60 * patches / pixel))
    meets = all(source.grid.meets(sources["0"].grid) for source in sources.values())
    positions = Positions(*zip(*places, strict=True), CRS)
    if not meets:  # 15 m pixels over 10 m ones
        with pytest.raises(InputError, match="do not meet"):
            select(positions, sources, snap="coarsest")
        return
    kept, _ = select(positions, sources, snap="coarsest")
    assert len(kept) == len(positions)
    coarse = sources[str(len(pixels) - 1)]
    for i in range(len(kept)):
        footprints = {
            ground(source, source.grid.footprint_window(kept.x[i], kept.y[i], source.patch_size))
            for source in sources.values()
        }
        assert len(footprints) == 1
        # And it is where the coarsest source's patch was asked for.
        x, y = places[i]
        assert footprints == {ground(coarse, coarse.grid.footprint_window(x, y, coarse.patch_size))}
    # The position is far from the edges of the finest pixel, where rounding in another CRS could move it across.
    finest = min(sources.values(), key=lambda source: source.grid.pixel_size)
    assert (abs(np.array(finest.grid.fractional_rowcol(kept.x, kept.y)) % 1 - 0.5) <= 0.25 + 1e-6).all()


def test_patches_that_cannot_coincide(make: Make) -> None:
    # 3 pixels of 20 m have their centre in the middle of a pixel, 5 pixels of 10 m as well: 5 m off.
    sources = {"a": RasterSource(make(unique(40, 40)), 5), "b": RasterSource(make(unique(20, 20), 20.0), 3)}
    with pytest.raises(InputError, match="'b' and 'a' can't have one centre: they stay 5 x 5 map units"):
        select(on_grid(sources["a"], stride=6), sources, snap="coarsest")


def test_how_far_apart_patches_are_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    sources = {"a": RasterSource(make(unique(40, 40)), 4), "b": RasterSource(make(unique(20, 20), 20.0), 2)}
    positions = on_grid(sources["a"], stride=(4, 5))  # every second column is odd
    with caplog.at_level(logging.WARNING, "otbtf_lite"):
        select(positions, sources)
    assert f"up to 10 x 0 map units (along rows x columns) apart, at 40 of {len(positions)} positions" in caplog.text
    caplog.clear()
    select(positions, sources, snap="coarsest")
    assert not caplog.records


def test_context_of_another_size_is_centred_and_reported(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    sources = {"near": RasterSource(make(unique(80, 80)), 8), "far": RasterSource(make(unique(40, 40), 20.0), 8)}
    positions = at_random(sources["near"], 40, seed=0)
    kept, _ = select(positions, sources, snap="coarsest")
    assert "'near' cover 80 x 80 map units and those of 'far' 160 x 160" in caplog.text
    footprints = Footprints.of(kept, sources)
    near, far = (footprints.boxes(key) for key in ("near", "far"))
    assert (near[:, :2] - far[:, :2] == 4).all()
    assert (far[:, 2:] - near[:, 2:] == 4).all()


def test_positions_that_snap_to_one_place_are_reported(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    sources = {"a": RasterSource(make(unique(8, 8)), 4), "b": RasterSource(make(unique(4, 4), 20.0), 2)}
    positions = Positions([500042.0, 500055.0], [3999955.0, 3999955.0], CRS)
    kept, _ = select(positions, sources, snap="coarsest")
    assert kept.x[0] == kept.x[1]
    assert "1 of 2 positions have the very same patches" in caplog.text


# ------------------------------------------------------------------------------------------------------ real data


def correlation(sources: dict[str, RasterSource], positions: Positions, fine: int, coarse: int) -> float:
    samples = RasterPatchesReader(sources, positions).get_samples(range(len(positions)))
    a = [s["a"][..., fine].reshape(16, 2, 16, 2).mean((1, 3)) for s in samples]
    b = [s["b"][..., coarse] for s in samples]
    return float(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


def test_virginia_in_10_and_20_m(shared_data: Path) -> None:
    folder = shared_data / "s2_virginia_10_20_60m"
    sources = {
        "a": RasterSource(folder / "s2_10m_B02_B03_B04_B08.tif", 32),
        "b": RasterSource(folder / "s2_20m_B05_B06_B07_B8A_B11_B12.tif", 16),
    }
    positions = at_random(sources["a"], 200, seed=0)
    snapped, _ = select(positions, sources, snap="coarsest")
    assert correlation(sources, snapped, 3, 3) > 0.99  # B08 and B8A
    asked, _ = select(positions, sources)
    assert correlation(sources, asked, 3, 3) < 0.99


def test_landsat_pan_half_a_pixel_off(shared_data: Path) -> None:
    folder = shared_data / "l8_gulf_30m_15m"
    red, pan = folder / "l8_B4.tif", folder / "l8_B8.tif"
    sources = {"red": RasterSource(red, 16), "pan": RasterSource(pan, 32)}
    positions = at_random(sources["red"], 50, seed=0)
    with pytest.raises(InputError) as error:
        select(positions, sources)
    assert str(red) in str(error.value)
    assert str(pan) in str(error.value)
    sources["pan"] = RasterSource(pan, 32, resampling="bilinear")
    kept, _ = select(positions, sources, snap="coarsest")
    footprints = Footprints.of(kept, sources)
    assert np.array_equal(footprints.boxes("red"), footprints.boxes("pan"))
    # Bilinear at a shift of half a pixel both ways is the mean of four; the pan's own pixels start 7.5 m up and left.
    from osgeo import gdal

    window = footprints.window("red", 0)
    raw = gdal.Open(str(pan)).ReadAsArray(2 * window.col_off, 2 * window.row_off, 33, 33).astype(float)
    expected = (raw[:-1, :-1] + raw[1:, :-1] + raw[:-1, 1:] + raw[1:, 1:]) / 4
    found = RasterPatchesReader(sources, kept)[0]["pan"][..., 0]
    assert np.abs(found - expected).max() <= 0.51  # rounded to whole numbers
