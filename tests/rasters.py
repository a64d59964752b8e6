"""Small images, and how the tests look at rasters."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from otbtf_lite.grid import Grid, Window
from otbtf_lite.raster import RasterSource

gdal = pytest.importorskip("osgeo.gdal")
gdal.DontUseExceptions()  # a choice, as GDAL warns where none is made; the library works with either

VERSION = int(gdal.VersionInfo()) // 10_000
"""GDAL's version: 306 is 3.6."""
GMF_PER_DATASET = 2  # of gdal.h; Python has the name from 3.7 on
NORTH_UP = (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0)
GRID = Grid("EPSG:32631", NORTH_UP, 40, 30)

TURN = math.radians(25)
REFERENCES = {
    "north up": (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0),
    "south up": (500000.0, 10.0, 0.0, 3999700.0, 0.0, 10.0),
    "rotated": (
        500000.0,
        10.0 * math.cos(TURN),
        10.0 * math.sin(TURN),
        4000000.0,
        10.0 * math.sin(TURN),
        -10.0 * math.cos(TURN),
    ),
}

MakeRaster = Callable[..., Path]
Array = npt.NDArray[Any]


def unique(rows: int = 30, cols: int = 40, bands: int = 3, dtype: str = "uint16") -> Array:
    """An image whose every value occurs once."""
    return np.arange(rows * cols * bands).reshape(rows, cols, bands).astype(dtype)


def read_all(source: RasterSource) -> Array:
    rows, cols, _ = source.shape
    with source.open() as reader:
        return reader.read(Window(0, 0, cols, rows))


def valid_all(source: RasterSource) -> npt.NDArray[np.bool_]:
    rows, cols, _ = source.shape
    with source.open() as reader:
        return reader.valid(Window(0, 0, cols, rows))


def plain_read(path: str, window: Window) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Pixels and validity by plain GDAL calls, band by band."""
    box = (window.col_off, window.row_off, window.width, window.height)
    dataset = gdal.OpenEx(path, gdal.OF_RASTER)
    bands = [dataset.GetRasterBand(index + 1) for index in range(dataset.RasterCount)]
    pixels = np.stack([band.ReadAsArray(*box) for band in bands], axis=2)
    masks = np.stack([band.GetMaskBand().ReadAsArray(*box) != 0 for band in bands], axis=2)
    return pixels, masks.all(axis=2)
