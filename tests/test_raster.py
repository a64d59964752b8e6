from __future__ import annotations

import gc
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rasters import GMF_PER_DATASET, NORTH_UP, Array, MakeRaster, gdal, read_all, unique, valid_all

from otbtf_lite import raster
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Window
from otbtf_lite.raster import RasterReader, RasterSource, gdal_open, read_as_np_arr, same_crs


@pytest.mark.parametrize("interleave", ["PIXEL", "BAND"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "float32", "float64", "complex64"])
def test_any_window(make_raster: MakeRaster, interleave: str, dtype: str) -> None:
    image = unique(dtype=dtype)
    source = RasterSource(make_raster("a.tif", image, INTERLEAVE=interleave), 8)
    assert source.dtype == dtype
    with source.open() as reader:
        for window in (Window(0, 0, 40, 30), Window(5, 7, 3, 2), Window(39, 29, 1, 1), Window(0, 29, 40, 1)):
            np.testing.assert_array_equal(reader.read(window), image[window.slices])


def test_what_a_source_says_of_itself(make_raster: MakeRaster) -> None:
    path = make_raster("a.tif", unique(64, 80), TILED="YES", BLOCKXSIZE="32", BLOCKYSIZE="16", nodata=7)
    source = RasterSource(path, (5, 6), bands=[3, 1])
    assert source.paths == (str(path),)
    assert source.grid == Grid("EPSG:32631", NORTH_UP, 80, 64)
    assert source.shape == (64, 80, 2)
    assert source.count == 2
    assert source.patch_shape == (5, 6, 2)
    assert source.block_shape == (16, 32)
    assert source.nodata_values == (7, 7)
    assert RasterSource(make_raster("b.tif", unique()), 5).nodata_values is None


def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    source = RasterSource(tmp_path / "missing.tif", 8)
    reader = source.open()
    assert repr(source) == f"RasterSource({str(tmp_path / 'missing.tif')!r}, (8, 8))"
    with pytest.raises(DataError, match=r"missing\.tif does not exist"):
        reader.read(Window(0, 0, 1, 1))
    assert not list(tmp_path.iterdir())


def test_text_is_no_raster(tmp_path: Path, gdal_exceptions: bool) -> None:
    (tmp_path / "text.tif").write_text("hello")
    with pytest.raises(DataError, match=r"text\.tif can't be read as a raster"):
        _ = RasterSource(tmp_path / "text.tif", 8).grid
    with pytest.raises(DataError, match=r"text\.tif can't be read as a raster"):
        gdal_open(tmp_path / "text.tif")


def memory_layouts(shape: tuple[int, int, int], dtype: str) -> dict[str, Array]:
    rows, cols, bands = shape
    size = np.dtype(dtype).itemsize
    raw = np.zeros(rows * cols * bands * size + 1, np.uint8)
    return {
        "contiguous": np.zeros(shape, dtype),
        "slot of a batch": np.zeros((3, *shape), dtype)[1],
        "bands first": np.zeros((bands, rows, cols), dtype).transpose(1, 2, 0),
        "Fortran": np.zeros(shape, dtype, order="F"),
        "inside a larger array": np.zeros((rows + 2, cols + 3, bands + 1), dtype)[1:-1, 2:-1, 1:],
        "every other": np.zeros((rows * 2, cols * 2, bands * 2), dtype)[::2, ::2, ::2],
        "backwards": np.zeros(shape, dtype)[::-1, ::-1, ::-1],
        "unaligned": raw[1:].view(np.uint8).reshape(rows, cols, bands, size).view(dtype)[..., 0],
    }


@pytest.mark.parametrize("layout", memory_layouts((1, 1, 1), "uint8"))
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("stacked", [False, True])
def test_into_memory_of_any_layout(make_raster: MakeRaster, layout: str, dtype: str, stacked: bool) -> None:
    image = unique()
    paths = [make_raster("a.tif", image)]
    if stacked:
        paths = [make_raster(f"{band}.tif", image[:, :, band : band + 1]) for band in range(3)]
    out = memory_layouts((9, 11, 3), dtype)[layout]
    surroundings = out.base
    with RasterSource(paths, 8, dtype=dtype).open() as reader:
        assert reader.read(Window(4, 5, 11, 9), out) is out
    np.testing.assert_array_equal(out, image[5:14, 4:15])
    if layout == "inside a larger array":
        assert np.count_nonzero(surroundings) == np.count_nonzero(out)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((3, 3, 3), "uint8"),
        np.zeros((3, 3, 1), "uint16"),
        np.zeros((3, 3), "uint16"),
        np.broadcast_to(np.uint16(0), (3, 3, 3)),
    ],
    ids=["dtype", "bands", "dimensions", "read-only"],
)
def test_memory_that_does_not_fit(make_raster: MakeRaster, out: Array) -> None:
    with (
        RasterSource(make_raster("a.tif", unique()), 8).open() as reader,
        pytest.raises(InputError, match="out must be"),
    ):
        reader.read(Window(0, 0, 3, 3), out)


@pytest.mark.parametrize(
    "window", [Window(-1, 0, 2, 2), Window(39, 0, 2, 2), Window(0, 29, 1, 2), Window(100, 100, 1, 1)]
)
def test_outside(make_raster: MakeRaster, window: Window) -> None:
    with RasterSource(make_raster("a.tif", unique()), 8).open() as reader:
        for method in (reader.read, reader.valid):
            with pytest.raises(InputError, match=r"a\.tif.*40 columns and 30 rows"):
                method(window)


def test_absurd_arrays_are_refused(make_raster: MakeRaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raster, "MAX_ARRAY_BYTES", 600)
    with RasterSource(make_raster("a.tif", unique()), 8).open() as reader:
        assert reader.read(Window(0, 0, 10, 10)).nbytes == 600
        with pytest.raises(InputError, match=r"a\.tif takes 660 bytes.*MAX_ARRAY_BYTES"):
            reader.read(Window(0, 0, 10, 11))


def test_absurd_blocks_are_refused(make_raster: MakeRaster, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_raster("a.tif", unique(64, 64), TILED="YES", BLOCKXSIZE="32", BLOCKYSIZE="16", INTERLEAVE="PIXEL")
    monkeypatch.setattr(raster, "MAX_BLOCK_BYTES", 32 * 16 * 3 * 2)
    assert RasterSource(path, 8).shape == (64, 64, 3)
    monkeypatch.setattr(raster, "MAX_BLOCK_BYTES", 32 * 16 * 3 * 2 - 1)
    with pytest.raises(DataError, match=r"a\.tif is stored in blocks of 16 x 32 .* 3,072 bytes.*MAX_BLOCK_BYTES"):
        _ = RasterSource(path, 8).shape


def test_bands_in_any_order(make_raster: MakeRaster) -> None:
    image = unique()
    path = make_raster("a.tif", image)
    for bands in ([1], [3, 1], [2, 2, 3]):
        np.testing.assert_array_equal(read_all(RasterSource(path, 8, bands=bands)), image[:, :, np.array(bands) - 1])
    np.testing.assert_array_equal(read_all(RasterSource(path, 8, bands=2)), image[:, :, 1:2])


def test_files_stacked_as_bands(make_raster: MakeRaster) -> None:
    image = unique(bands=4)
    parts = [
        make_raster("a.tif", image[:, :, :1]),
        make_raster("b.tif", image[:, :, 1:3]),
        make_raster("c.tif", image[:, :, 3:]),
    ]
    source = RasterSource(parts, 8)
    assert source.count == 4
    np.testing.assert_array_equal(read_all(source), image)
    np.testing.assert_array_equal(read_all(RasterSource(parts, 8, bands=[4, 2, 1])), image[:, :, [3, 1, 0]])
    with pytest.raises(InputError, match=r"Band 5 .*bands 1 to 4"):
        _ = RasterSource(parts, 8, bands=[1, 5]).shape


@pytest.mark.parametrize(
    "other",
    [
        {"geotransform": (500005.0, 10.0, 0.0, 4000000.0, 0.0, -10.0)},
        {"geotransform": (500000.0, 20.0, 0.0, 4000000.0, 0.0, -20.0)},
        {"crs": "EPSG:32632"},
        {"crs": ""},
        {"array": unique(20, 40, 1)},
    ],
    ids=["origin", "pixel size", "CRS", "no CRS", "size"],
)
def test_stacked_files_share_a_grid(make_raster: MakeRaster, other: dict[str, Any]) -> None:
    first = make_raster("first.tif", unique(bands=1))
    second = make_raster("second.tif", other.pop("array", unique(bands=1)), **other)
    with pytest.raises(InputError, match=r"first\.tif .*second\.tif .*different grids"):
        _ = RasterSource([first, second], 8).shape


def test_types_of_stacked_files_are_promoted(make_raster: MakeRaster) -> None:
    small, large = unique(bands=1, dtype="uint8"), unique(bands=1, dtype="int16")
    source = RasterSource([make_raster("a.tif", small), make_raster("b.tif", large)], 8)
    assert source.dtype == np.int16
    np.testing.assert_array_equal(read_all(source), np.concatenate([small, large], axis=2))


def test_types_that_no_type_holds_are_refused(make_raster: MakeRaster) -> None:
    big = np.full((5, 5, 1), 2**63, np.uint64)
    paths = [make_raster("a.tif", big), make_raster("b.tif", unique(5, 5, 1, dtype="int64"))]
    with pytest.raises(InputError, match="give dtype"):
        _ = RasterSource(paths, 4).dtype
    assert read_all(RasterSource(paths, 4, dtype="float64"))[0, 0, 0] == 2.0**63
    assert read_all(RasterSource(paths[0], 4))[0, 0, 0] == 2**63


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("uint8", [0, 0, 2, 3, 255]),
        ("int8", [-128, -1, 2, 3, 127]),
        ("int16", [-301, -1, 2, 3, 300]),
        ("float32", [-300.5, -1.4, 1.6, 2.5, 300.4]),
        ("float16", [-300.5, -1.4, 1.6, 2.5, 300.4]),
        ("bool", [True, True, True, True, True]),
        ("complex64", [-300.5, -1.4, 1.6, 2.5, 300.4]),
        (">f4", [-300.5, -1.4, 1.6, 2.5, 300.4]),
    ],
)
def test_conversion_rounds_and_clips(make_raster: MakeRaster, dtype: str, expected: list[Any]) -> None:
    values = np.array([-300.5, -1.4, 1.6, 2.5, 300.4], "float32").reshape(1, 5, 1)
    pixels = read_all(RasterSource(make_raster("a.tif", values), 1, dtype=dtype))
    assert pixels.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_allclose(pixels[0, :, 0], np.array(expected, dtype), rtol=1e-3 if dtype == "float16" else 1e-7)


def test_bfloat16(make_raster: MakeRaster) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    source = RasterSource(make_raster("a.tif", unique(bands=1)), 8, dtype="bfloat16")
    assert source.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read_all(source), unique(bands=1).astype("float32").astype(ml_dtypes.bfloat16))


def test_scale_and_offset_are_applied_when_asked(make_raster: MakeRaster) -> None:
    path = make_raster("a.tif", np.array([[[10, 100], [0, 200]]], "int16"), nodata=0)
    dataset = gdal.Open(str(path), gdal.GA_Update)
    for band, (scale, offset) in enumerate([(0.5, 1000.0), (0.0001, -1.0)], start=1):
        dataset.GetRasterBand(band).SetScale(scale)
        dataset.GetRasterBand(band).SetOffset(offset)
    del dataset
    assert read_all(RasterSource(path, 1)).tolist() == [[[10, 100], [0, 200]]]
    source = RasterSource(path, 1, scaled=True)
    assert source.dtype == np.float32
    np.testing.assert_allclose(read_all(source), [[[1005, -0.99], [math.nan, -0.98]]], rtol=1e-6)
    assert all(math.isnan(value) for value in source.nodata_values or [0])
    assert valid_all(source).tolist() == [[True, False]]
    assert RasterSource(path, 1, scaled=True, dtype="float64").dtype == np.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paths": []}, "path"),
        ({"paths": ""}, "path"),
        ({"paths": [1]}, "path"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": (4, 4, 4)}, "patch_size"),
        ({"bands": [0]}, "count from 1"),
        ({"bands": []}, "count from 1"),
        ({"bands": ["B04"]}, "count from 1"),
        ({"nodata": "none"}, "nodata"),
        ({"dtype": "uint9"}, "uint9"),
        ({"dtype": "str"}, "numbers"),
        ({"dtype": "datetime64[s]"}, "datetime64"),
        ({"resampling": "bilinaer"}, "did you mean 'bilinear'"),
        ({"categorical": True, "resampling": "cubic"}, "mixed"),
        ({"categorical": True, "scaled": True}, "exclude"),
        ({"scaled": True, "dtype": "int16"}, "int16"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RasterSource(**({"paths": "a.tif", "patch_size": 8} | arguments))


def test_nodata_of_the_file_or_given(make_raster: MakeRaster) -> None:
    image = unique()
    image[2, 3, 1] = image[5, 6, 0] = 9999
    with_tag, without = make_raster("a.tif", image, nodata=9999), make_raster("b.tif", image)
    expected = np.ones((30, 40), bool)
    expected[2, 3] = expected[5, 6] = False
    np.testing.assert_array_equal(valid_all(RasterSource(with_tag, 8)), expected)
    np.testing.assert_array_equal(valid_all(RasterSource(without, 8, nodata=9999)), expected)
    assert valid_all(RasterSource(without, 8)).all()
    assert valid_all(RasterSource(with_tag, 8, nodata=12345)).all()
    assert valid_all(RasterSource(with_tag, 8, nodata=())).all()
    assert RasterSource(with_tag, 8, nodata=()).nodata_values is None
    # Each band its own value: band 1 counts from 0 in steps of 3.
    per_band = valid_all(RasterSource(without, 8, nodata=[9999, 0, 0]))
    assert np.argwhere(~per_band).tolist() == [[5, 6]]
    # Bands that are not read do not matter.
    assert np.argwhere(~valid_all(RasterSource(with_tag, 8, bands=[2, 3]))).tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("nodata", "message"), [(-1, "uint16"), (0.5, "uint16"), (math.nan, "uint16"), ([1, 2], "3 bands")]
)
def test_nodata_that_can_not_be(make_raster: MakeRaster, nodata: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _ = RasterSource(make_raster("a.tif", unique()), 8, nodata=nodata).shape


def test_nodata_beyond_the_type_of_the_file_is_no_pixel(shared_data: Path) -> None:
    # uint8 with nodata -10000 and an alpha band: the alpha band alone tells.
    path = shared_data / "masks_nodata/pix4d_alpha_nodata.tif"
    source = RasterSource(path, 8)
    assert source.nodata_values is None
    np.testing.assert_array_equal(valid_all(source), read_all(source)[:, :, 3] != 0)
    np.testing.assert_array_equal(valid_all(RasterSource(path, 8, bands=[1, 2, 3])), read_all(source)[:, :, 3] != 0)


def test_nodata_is_compared_as_the_file_holds_it(make_raster: MakeRaster) -> None:
    image = np.array([[[-3.4028234663852886e38], [0.1], [1.0]]], "float32")
    assert valid_all(RasterSource(make_raster("a.tif", image, nodata=-3.4028234663852886e38), 1)).tolist() == [
        [False, True, True]
    ]
    assert valid_all(RasterSource(make_raster("b.tif", image, nodata=0.1), 1)).tolist() == [[True, False, True]]


def test_nan_is_missing_declared_or_not(make_raster: MakeRaster) -> None:
    image = np.array([[[math.nan], [0.0], [math.inf]]], "float32")
    for options in ({}, {"nodata": math.nan}, {"nodata": 5.0}):
        source = RasterSource(make_raster("a.tif", image, **options), 1)
        assert valid_all(source).tolist() == [[False, True, True]]
    assert valid_all(RasterSource(make_raster("a.tif", image), 1, nodata=0)).tolist() == [[False, False, True]]


def test_nodata_of_64_bit_integers_is_exact(make_raster: MakeRaster) -> None:
    image = np.array([[[2**53 + 1], [2**53]]], "int64")
    path = make_raster("a.tif", image, nodata=2**53 + 1)
    assert RasterSource(path, 1).nodata_values == (2**53 + 1,)
    assert valid_all(RasterSource(path, 1)).tolist() == [[False, True]]


def test_mask_band_beside_the_file(make_raster: MakeRaster) -> None:
    path = make_raster("a.tif", unique())
    mask = np.zeros((30, 40), np.uint8)
    mask[10:20, 5:] = 255
    dataset = gdal.Open(str(path))
    dataset.CreateMaskBand(GMF_PER_DATASET)
    dataset.GetRasterBand(1).GetMaskBand().WriteRaster(0, 0, 40, 30, mask.tobytes())
    del dataset
    assert Path(f"{path}.msk").exists()
    np.testing.assert_array_equal(valid_all(RasterSource(path, 8)), mask != 0)
    assert valid_all(RasterSource(path, 8, nodata=())).all()


def test_nodata_and_mask_both_count(make_raster: MakeRaster) -> None:
    path = make_raster("a.tif", unique(), nodata=0)
    dataset = gdal.Open(str(path))
    dataset.CreateMaskBand(GMF_PER_DATASET)
    dataset.GetRasterBand(1).GetMaskBand().WriteRaster(
        0, 0, 40, 30, (unique(bands=1, dtype="int32") != 7).astype("u1").tobytes()
    )
    del dataset
    assert np.argwhere(~valid_all(RasterSource(path, 8))).tolist() == [[0, 0], [0, 7]]


def test_a_nearly_transparent_16_bit_pixel_is_there(make_raster: MakeRaster) -> None:
    # GDAL's mask of a 16-bit alpha band is in 8 bits, where the alpha 1 of 65535 becomes 0.
    image = np.array([[[9, 9, 9, 1], [9, 9, 9, 0], [9, 9, 9, 65535]]], "uint16")
    path = make_raster("a.tif", image, PHOTOMETRIC="RGB", ALPHA="YES")
    assert valid_all(RasterSource(path, 1)).tolist() == [[True, False, True]]


def test_sources_are_values(make_raster: MakeRaster) -> None:
    path = make_raster("a.tif", unique(), nodata=math.nan)
    arguments: list[dict[str, Any]] = [
        {}, {"bands": [1]}, {"nodata": math.nan}, {"nodata": 3}, {"dtype": "float32"}, {"resampling": "cubic"},
        {"categorical": True}, {"scaled": True},
    ]  # fmt: skip
    sources = [RasterSource(path, 8, **each) for each in arguments] + [
        RasterSource(path, 9),
        RasterSource([path, path], 8),
    ]
    for index, source in enumerate(sources):
        again = pickle.loads(pickle.dumps(source))  # noqa: S301
        assert again == source
        assert hash(again) == hash(source)
        assert [other == source for other in sources] == [index == k for k in range(len(sources))]
    assert len(set(sources)) == len(sources)
    assert sources[0] != "a.tif"
    with pytest.raises(AttributeError):
        sources[0].patch_size = (1, 1)


def test_a_pickle_is_the_arguments_alone(make_raster: MakeRaster) -> None:
    path = make_raster("a.tif", unique())
    source = RasterSource(path, 8)
    before = pickle.dumps(source)
    assert source.count == 3
    assert pickle.dumps(source) == before


def test_a_file_that_changes_meanwhile(make_raster: MakeRaster) -> None:
    source = RasterSource(make_raster("a.tif", unique()), 8)
    assert source.count == 3
    make_raster("a.tif", unique(20, 20))
    with pytest.raises(DataError, match=r"a\.tif has changed"):
        source.open().read(Window(0, 0, 1, 1))


def test_a_closed_reader_says_so(make_raster: MakeRaster) -> None:
    with RasterSource(make_raster("a.tif", unique()), 8).open() as reader:
        reader.read(Window(0, 0, 1, 1))
    reader.close()
    with pytest.raises(InputError, match="closed"):
        reader.read(Window(0, 0, 1, 1))


def random_windows(n: int, size: int, rows: int, cols: int) -> list[Window]:
    rng = np.random.default_rng(7)
    return [
        Window(int(c), int(r), size, size)
        for r, c in zip(rng.integers(0, rows - size, n), rng.integers(0, cols - size, n), strict=True)
    ]


def test_many_threads_read_what_one_reads(make_raster: MakeRaster) -> None:
    rng = np.random.default_rng(3)
    image = rng.integers(0, 1000, (300, 300, 3)).astype("uint16")
    path = make_raster("a.tif", image, TILED="YES", BLOCKXSIZE="64", BLOCKYSIZE="64", COMPRESS="DEFLATE")
    windows = random_windows(1000, 32, 300, 300)
    with RasterSource(path, 32).open() as reader:
        start = threading.Barrier(8)

        def read_share(k: int) -> list[Array]:
            start.wait()
            return [reader.read(window) for window in windows[k::8]]

        with ThreadPoolExecutor(8) as pool:
            shares = list(pool.map(read_share, range(8)))
        handles = {id(r) for r in reader._all}
    assert len(handles) <= 8
    for k, share in enumerate(shares):
        for window, patch in zip(windows[k::8], share, strict=True):
            np.testing.assert_array_equal(patch, image[window.slices])


def test_closing_while_others_read(make_raster: MakeRaster) -> None:
    image = unique()
    path = make_raster("a.tif", image, nodata=0)
    for _ in range(5):
        reader = RasterSource(path, 8).open()
        reading = threading.Barrier(3)

        def read_on(reader: RasterReader = reader, reading: threading.Barrier = reading) -> str:
            reading.wait()
            try:
                while True:
                    np.testing.assert_array_equal(reader.read(Window(0, 0, 40, 30)), image)
                    assert np.count_nonzero(~reader.valid(Window(0, 0, 40, 30))) == 1
            except InputError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(read_on) for _ in range(2)]
            reading.wait()
            time.sleep(0.02)
            reader.close()
            assert all("closed" in each.result() for each in done)


def test_handles_go_with_their_threads(make_raster: MakeRaster) -> None:
    reader = RasterSource(make_raster("a.tif", unique()), 8).open()
    for _ in range(3):
        thread = threading.Thread(target=reader.read, args=(Window(0, 0, 2, 2),))
        thread.start()
        thread.join()
    gc.collect()
    assert len(reader._all) == 0


def _read_in_child(reader: Any, queue: Any) -> None:
    inherited = [id(r) for r in reader._all]
    pixels = reader.read(Window(3, 4, 5, 6))
    own = reader._local.raster
    reader.close()
    queue.put((pixels, own.pid == os.getpid(), id(own) not in inherited))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_no_handle_crosses_a_fork(make_raster: MakeRaster) -> None:
    image = unique()
    reader = RasterSource(make_raster("a.tif", image), 8).open()
    window = Window(3, 4, 5, 6)
    expected = reader.read(window)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, queue))
    child.start()
    pixels, is_own, is_new = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(pixels, expected)
    assert is_own
    assert is_new
    np.testing.assert_array_equal(reader.read(window), image[window.slices])  # the child closed nothing of ours
    assert not raster._INHERITED


def test_describe_is_for_json(make_raster: MakeRaster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = make_raster("a.tif", unique(dtype="float32"), nodata=math.nan)
    monkeypatch.chdir(tmp_path)
    found = RasterSource("a.tif", (4, 5), bands=[2], dtype="float64").describe()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == {
        "paths": [str(path)],
        "sizes": [path.stat().st_size],
        "digests": [hashlib.sha256(path.read_bytes()).hexdigest()],
        "crs": "EPSG:32631",
        "geotransform": list(NORTH_UP),
        "width": 40,
        "height": 30,
        "count": 1,
        "dtype": "float64",
        "bands": [2],
        "nodata": ["nan"],
        "patch_size": [4, 5],
        "resampling": None,
        "categorical": False,
        "scaled": False,
        "warped": False,
    }


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("EPSG:32631", "EPSG:32631", True),
        ("EPSG:32631", "epsg:32631", True),
        ("EPSG:4326", "WGS84", True),
        ("EPSG:32631", "+proj=utm +zone=31 +datum=WGS84", True),
        ("EPSG:32631", "EPSG:32632", False),
        ("EPSG:32631", "", False),
        ("", "", True),
    ],
)
def test_same_crs(a: str, b: str, same: bool) -> None:
    assert same_crs(a, b) is same
    assert same_crs(b, a) is same


def test_same_crs_of_nonsense(gdal_exceptions: bool) -> None:
    with pytest.raises(InputError, match="EPSG:1"):
        same_crs("EPSG:32631", "EPSG:1")


def test_patches_images_as_arrays(make_raster: MakeRaster) -> None:
    image = unique(30, 10, 3)
    dataset = gdal_open(str(make_raster("a.tif", image)))
    patches = read_as_np_arr(dataset)
    np.testing.assert_array_equal(patches, image.reshape(3, 10, 10, 3))
    np.testing.assert_array_equal(read_as_np_arr(dataset, as_patches=False), image[None])
    assert patches.dtype == np.uint16
    assert read_as_np_arr(dataset, dtype=np.float32).dtype == np.float32
    np.testing.assert_array_equal(read_as_np_arr(dataset, True, np.float32), image.reshape(3, 10, 10, 3))  # noqa: FBT003  # as OTBTF scripts call it


def test_patches_images_are_columns_of_squares(make_raster: MakeRaster) -> None:
    dataset = gdal_open(make_raster("a.tif", unique(25, 10, 1)))
    with pytest.raises(InputError, match=r"a\.tif has 10 columns and 25 rows"):
        read_as_np_arr(dataset)
    assert read_as_np_arr(dataset, as_patches=False).shape == (1, 25, 10, 1)


# ------------------------------------------------------------------------------------------------ the caller's GDAL


def run_python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(raster.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.parametrize("choice", ["", "gdal.UseExceptions()", "gdal.DontUseExceptions()"])
def test_the_caller_s_choices_stay_and_nothing_is_printed(make_raster: MakeRaster, choice: str) -> None:
    path = str(make_raster("a.tif", unique()))
    code = f"""
from osgeo import gdal
{choice}
before = gdal.GetUseExceptions(), gdal.GetConfigOption("GDAL_PAM_ENABLED"), gdal.GetCacheMax()
from otbtf_lite.errors import DataError
from otbtf_lite.raster import RasterSource, write_raster
source = RasterSource({path!r}, 4)
with source.open() as reader:
    pixels = reader.read(source.grid.window)
    reader.valid(source.grid.window)
write_raster({path!r} + ".copy.tif", pixels, source.grid)
try:
    RasterSource({path!r} + ".missing", 4).shape
except DataError:
    pass
else:
    raise SystemExit("no error")
assert (gdal.GetUseExceptions(), gdal.GetConfigOption("GDAL_PAM_ENABLED"), gdal.GetCacheMax()) == before
"""
    done = run_python(code, "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_gdal_the_error_says_how_to_get_it() -> None:
    code = """
import sys
sys.modules["osgeo"] = None
from otbtf_lite.errors import MissingDependencyError
from otbtf_lite.raster import RasterSource
try:
    RasterSource("a.tif", 4).shape
except MissingDependencyError as error:
    print(error)
"""
    done = run_python(code)
    assert done.stderr == ""
    for way in ("gdal-wheel", "gdal-config", "conda"):
        assert way in done.stdout
