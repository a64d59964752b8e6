from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
from rasters import gdal, plain_read, read_all, valid_all

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Window
from otbtf_lite.raster import RasterSource, gdal_open

ROTATED = (100.0, 17.320508075688775, 4.999999999999999, 200.0, 9.999999999999998, -8.660254037844387)

READABLE = [
    "cog/cog.tif",
    "cog/cog_fullearth.tif",
    "cog/cog_scale.tif",
    "cog/cogeo.tif",
    "cog/green.tif",
    "cog/image_webp.tif",
    "cog/seams-16.tif",
    "dtypes/cfloat32.tif",
    "dtypes/cint16.tif",
    "dtypes/int10.tif",
    "dtypes/int12.tif",
    "dtypes/int24.tif",
    "dtypes/int64.tif",
    "dtypes/oddsize1bit.tif",
    "dtypes/planar-rgb-u8.tif",
    "dtypes/random-fp16-pred2.tiff",
    "dtypes/s2_ndvi_float16.tif",
    "dtypes/float16.tif",
    "dtypes/uint16.tif",
    "dtypes/uint64.tif",
    "hires_misc/3857.tif",
    "l8_elkton_labels/L8-B4_3_2-Elkton-VA.tiff",
    "l8_elkton_labels/L8-Labels-Elkton-VA.tiff",
    "l8_marburg_tiny/DEM.TIF",
    "landcover/cdl_2016_crop.tif",
    "landcover/cog_cmap.tif",
    "layouts/contig_strip.tif",
    "layouts/contig_tiled.tif",
    "layouts/separate_tiled.tif",
    "masks_nodata/RGB.byte.gcp.vrt",
    "masks_nodata/RGB.byte.rpc.vrt",
    "masks_nodata/RGB.byte.tif",
    "masks_nodata/RGB2.byte.tif",
    "masks_nodata/all-nodata.tif",
    "masks_nodata/cog_rgb_mask.tif",
    "masks_nodata/float_nan.tif",
    "masks_nodata/image_nodata.tif",
    "masks_nodata/nan32_nodata.tif",
    "masks_nodata/pix4d_alpha_nodata.tif",
    "masks_nodata/propval_bg_01_01.tif",
    "masks_nodata/test3_with_mask_1bit_and_ovr.tif",
    "odd_georef/FIXED_HEIGHT_DM2.tif",
    "odd_georef/byte_nogeoref.tif",
    "odd_georef/cog_nonearth.tif",
    "odd_georef/float.tif",
    "odd_georef/gcps.tif",
    "odd_georef/geomatrix.tif",
    "odd_georef/inverted_lat.tif",
    "odd_georef/nodata-row.tif",
    "odd_georef/rotated.tif",
    "s2_jp2/s2_band.jp2",
    "s2_l2a_scl/S2A_33TWL_20230818_0_L2A/SCL.tif",
    "sar_misc/cog_gcps.tif",
    "sar_s1/s1b-iw-grd-vv-20210401t052623-20210401t052648-026269-032297-001.tiff",
    "spacenet_rotterdam_sar/rgb_unmasked.tif",
    "spacenet_rotterdam_sar/sar_masked.tif",
    "spacenet_rotterdam_sar/sar_vv.tif",
]


@pytest.mark.parametrize("name", READABLE)
def test_real_files_as_plain_gdal_reads_them(shared_data: Path, name: str) -> None:
    path = str(shared_data / name)
    source = RasterSource(path, 8)
    rows, cols, bands = source.shape
    window = Window(cols // 4, rows // 4, min(cols // 2 + 1, 300), min(rows // 2 + 1, 300))
    with source.open() as reader:
        pixels, valid = reader.read(window), reader.valid(window)
    expected, expected_valid = plain_read(path, window)
    assert pixels.dtype == expected.dtype == source.dtype
    assert pixels.shape == (*window.shape, bands)
    np.testing.assert_array_equal(pixels, expected)
    # Plain GDAL calls NaN valid where a file declares nothing.
    np.testing.assert_array_equal(valid, expected_valid & ~np.isnan(expected).any(axis=2))


@pytest.mark.parametrize("name", ["dtypes/int8.tif", "dtypes/s2_ndvi_int8.tif"])
def test_int8_is_signed_in_every_gdal(shared_data: Path, name: str) -> None:
    source = RasterSource(shared_data / name, 8)
    pixels = read_all(source)
    expected, _ = plain_read(str(shared_data / name), Window(0, 0, pixels.shape[1], pixels.shape[0]))
    assert pixels.dtype == np.int8
    assert pixels.min() < 0
    np.testing.assert_array_equal(pixels, expected.view(np.int8))
    np.testing.assert_array_equal(read_all(RasterSource(shared_data / name, 8, dtype="int32")), expected.view(np.int8))
    if source.nodata_values is not None:
        assert source.nodata_values == (-128,)
        np.testing.assert_array_equal(valid_all(source), pixels[:, :, 0] != -128)


def test_complex_integers_become_the_floats_that_hold_them(shared_data: Path) -> None:
    source = RasterSource(shared_data / "dtypes/cint32.tif", 8)
    assert source.dtype == np.complex128
    assert RasterSource(shared_data / "dtypes/cint16.tif", 8).dtype == np.complex64
    expected, _ = plain_read(str(shared_data / "dtypes/cint32.tif"), Window(0, 0, 20, 20))
    np.testing.assert_array_equal(read_all(source), expected)


def test_nodata_of_complex_values_is_the_whole_number(shared_data: Path) -> None:
    # Plain GDAL calls 0+5j missing when nodata is 0, since it looks at the real part alone.
    source = RasterSource(shared_data / "sar_misc/cint16.tif", 8)
    np.testing.assert_array_equal(valid_all(source), read_all(source)[:, :, 0] != 0)


def test_complex_values_are_not_cut_to_their_real_part(shared_data: Path) -> None:
    source = RasterSource(shared_data / "dtypes/cfloat32.tif", 8, dtype="float32")
    with pytest.raises(InputError, match=r"cfloat32\.tif holds complex values.*amplitude"):
        _ = source.dtype


def test_a_container_names_what_is_inside(shared_data: Path) -> None:
    file = shared_data / "hdf/MOD09GA.A2008296.h14v17.006.2015181011753.hdf"
    if gdal.GetDriverByName("HDF4") is None:
        pytest.skip("this GDAL has no HDF4 driver")
    with pytest.raises(DataError, match=r"container of 21 rasters.*HDF4_EOS"):
        _ = RasterSource(file, 8).shape
    inside = f'HDF4_EOS:EOS_GRID:"{file}":MODIS_Grid_1km_2D:state_1km_1'
    pixels = read_all(RasterSource(inside, 8))
    expected, _ = plain_read(inside, Window(0, 0, *pixels.shape[1::-1]))
    np.testing.assert_array_equal(pixels, expected)
    described = RasterSource(inside, 8).describe()
    assert (described["paths"], described["sizes"], described["digests"]) == ([inside], [None], [None])


@pytest.mark.parametrize("name", ["2bit_compressed.img", "envi_rgbsmall_bip.img", "envi_rgbsmall_bsq.img"])
def test_a_missing_driver_is_said(shared_data: Path, name: str) -> None:
    source = RasterSource(shared_data / "envi_hfa" / name, 8)
    if gdal.GetDriverByName("ENVI") is None:
        with pytest.raises(DataError, match=rf"{name} can't be read as a raster: none of the \d+ drivers"):
            _ = source.shape
    else:
        expected, _ = plain_read(source.paths[0], Window(0, 0, source.shape[1], source.shape[0]))
        np.testing.assert_array_equal(read_all(source), expected)


BROKEN_AT_OPENING = [
    "hugeblocksize.tif",
    "image_width_above_32bit.tif",
    "invalid.tif",
    "scanline_more_than_2GB.tif",
    "truncated.jp2",
    "uint33.tif",
    "unknown_compression.tif",
    "unsupported_codec_jp2000.tif",
    "unsupported_codec_unknown.tif",
    "invalid.geojson",
    "empty.gpkg",
    "graydepth-invert-overflow-5a0aad5024cc4ff3.tiff",
]
BROKEN_AT_READING = [
    "bigtiff_header_extract.tif",
    "byte_truncated.tif",
    "byte_zstd_corrupted.tif",
    "corrupted_deflate_singlestrip.tif",
    "excessive-memory-TIFFFillStrip.tif",
    "huge4GB.tif",
    "huge-number-strips.tif",
    "idontexist.vrt",
    "lzw_corrupted.tif",
    "missing_tilebytecounts_and_offsets.tif",
    "packbits-not-enough-data.tif",
    "s2_B8A_truncated.tif",
    "tiled_bad_offset.tif",
    "zackthecat_corrupted.tif",
]


@pytest.mark.parametrize("name", BROKEN_AT_OPENING)
def test_broken_files_that_do_not_open(
    shared_data: Path, name: str, gdal_exceptions: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=name):
        _ = RasterSource(shared_data / "broken" / name, 8).shape
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", BROKEN_AT_READING)
def test_broken_files_that_do_not_read(
    shared_data: Path, name: str, gdal_exceptions: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    source = RasterSource(shared_data / "broken" / name, 8)

    def read_the_end() -> None:
        rows, cols, _ = source.shape
        with source.open() as reader:
            reader.read(Window(max(0, cols - 100), max(0, rows - 100), min(cols, 100), min(rows, 100)))

    with pytest.raises(DataError, match=name):
        read_the_end()
    assert capfd.readouterr() == ("", "")


def test_a_tiny_file_with_warnings_reads(shared_data: Path) -> None:
    assert read_all(RasterSource(shared_data / "broken/minimum_tiff_tags_with_warning.tif", 1)).shape == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("odd_georef/gcps.tif", "ground control points"),
        ("sar_misc/cog_gcps.tif", "ground control points"),
        ("masks_nodata/RGB.byte.gcp.vrt", "ground control points"),
        ("masks_nodata/RGB.byte.rpc.vrt", r"a camera model \(RPC\)"),
    ],
)
def test_what_is_not_on_a_grid_says_how_to_get_there(shared_data: Path, name: str, how: str) -> None:
    with pytest.raises(InputError, match=rf"{name} has {how}.*gdalwarp"):
        _ = RasterSource(shared_data / name, 8).grid


@pytest.mark.parametrize(
    ("name", "crs", "geotransform"),
    [  # byte_nogeoref has its own in an .aux.xml, l8_B4 says AREA_OR_POINT=Point
        ("masks_nodata/test3_with_mask_1bit_and_ovr.tif", "", (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)),
        ("odd_georef/byte_nogeoref.tif", None, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)),
        ("odd_georef/rotated.tif", "", ROTATED),
        ("odd_georef/inverted_lat.tif", "EPSG:4326", (-180.0, 0.5, 0.0, -90.0, 0.0, 0.5)),
        ("odd_georef/geomatrix.tif", "EPSG:32611", (1841001.75, 1.5, -5.0, 1144003.25, -5.0, -1.5)),
        ("l8_gulf_30m_15m/l8_B4.tif", "EPSG:32616", (452475.0, 30.0, 0.0, 3408645.0, 0.0, -30.0)),
    ],
)
def test_grids_of_real_files(shared_data: Path, name: str, crs: str | None, geotransform: tuple[float, ...]) -> None:
    grid = RasterSource(shared_data / name, 8).grid
    assert grid.geotransform == geotransform
    assert crs is None or grid.crs == crs


def test_reading_leaves_nothing_behind(shared_data: Path, tmp_path: Path) -> None:
    for name in ("masks_nodata/RGB.byte.tif", "cog/cog.tif", "landcover/cdl_2016_crop.tif", "s2_jp2/s2_band.jp2"):
        shutil.copy(shared_data / name, tmp_path)
    before = sorted(tmp_path.iterdir())
    for file in before:
        source = RasterSource(file, 8)
        with source.open() as reader:
            reader.read(Window(0, 0, 16, 16))
            reader.valid(Window(0, 0, 16, 16))
        dataset = gdal_open(file)
        dataset.GetRasterBand(1).ComputeStatistics(0)  # what a user may do next would leave an .aux.xml
        del dataset
        gc.collect()
    assert sorted(tmp_path.iterdir()) == before


def test_scale_of_a_real_file(shared_data: Path) -> None:
    path = shared_data / "cog/cog_scale.tif"
    raw, scaled = read_all(RasterSource(path, 8)), read_all(RasterSource(path, 8, scaled=True))
    expected = np.where(raw[:, :, 0] == 0, np.nan, raw[:, :, 0] * 0.0001 + 1000.0)
    np.testing.assert_allclose(scaled[:, :, 0], expected, rtol=1e-6)
