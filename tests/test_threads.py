"""Many threads on one compressed file: what they read is what one reads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rasters import gdal

from otbtf_lite import Positions, RasterPatchesReader, RasterSource
from otbtf_lite.grid import Window
from otbtf_lite.raster import block_cache

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import MakeRaster

TIMES = 1000
THREADS = 8


@pytest.fixture
def file(make_raster: MakeRaster) -> Path:
    image = np.random.default_rng(0).integers(0, 9000, (512, 480, 3)).astype(np.uint16)
    layout = {"TILED": "YES", "BLOCKXSIZE": "64", "BLOCKYSIZE": "64", "COMPRESS": "DEFLATE", "PREDICTOR": "2"}
    return make_raster("tiled.tif", image, **layout)


def windows() -> list[Window]:
    rng = np.random.default_rng(1)
    return [Window(int(col), int(row), 48, 40) for col, row in rng.integers(0, [432, 472], (TIMES, 2))]


def test_a_reader_in_eight_threads_equals_serial_reads(file: Path) -> None:
    dataset = gdal.Open(str(file))
    start = threading.Barrier(THREADS)
    # A cache of few blocks, so that threads throw out each other's all the time.
    with block_cache(1 << 19), RasterSource(file, 8).open() as reader, ThreadPoolExecutor(THREADS) as pool:

        def read(part: list[Window]) -> list[np.ndarray]:
            start.wait(timeout=60)
            return [reader.read(window) for window in part]

        wanted = windows()
        found = list(pool.map(read, [wanted[number::THREADS] for number in range(THREADS)]))
        for number, part in enumerate(found):
            for window, pixels in zip(wanted[number::THREADS], part, strict=True):
                expected = dataset.ReadAsArray(window.col_off, window.row_off, window.width, window.height)
                np.testing.assert_array_equal(pixels, expected.transpose(1, 2, 0))


def test_get_samples_of_eight_threads_equals_serial_reads(file: Path) -> None:
    rng = np.random.default_rng(2)
    source = RasterSource(file, (40, 48))
    rows, cols = rng.integers(20, 492, TIMES), rng.integers(24, 456, TIMES)
    positions = Positions(*source.grid.xy(rows, cols), source.grid.crs)
    dataset = gdal.Open(str(file))
    with block_cache(1 << 19):
        reader = RasterPatchesReader({"x": source}, positions, threads=THREADS)
        order = rng.permutation(TIMES).tolist()
        samples = reader.get_samples(order)
        reader.close()
    for index, sample in zip(order, samples, strict=True):
        expected = dataset.ReadAsArray(int(cols[index]) - 24, int(rows[index]) - 20, 48, 40)
        np.testing.assert_array_equal(sample["x"], expected.transpose(1, 2, 0))
