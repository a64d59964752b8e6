"""What all tests share: real data, small rasters, and how Hypothesis runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run and on every machine; deadlines would measure how busy it is. Function-scoped fixtures
# here are folders and makers, which examples may share.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("ci")

NORTH_UP = (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0)

MakeRaster = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real rasters that lies beside the project."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        message = f"the real test data is not at {folder}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture
def own_threads() -> Callable[[], list[str]]:
    """``own_threads()`` names the project's threads that began in the test: those of others may end at any moment."""
    before = set(threading.enumerate())

    def names() -> list[str]:
        begun = set(threading.enumerate()) - before
        return sorted(thread.name for thread in begun if thread.name.startswith("otbtf-lite"))

    return names


@pytest.fixture
def make_raster(tmp_path: Path) -> MakeRaster:
    """``make_raster(path, array, ...)`` writes a GeoTIFF by plain GDAL calls; relative paths are in ``tmp_path``."""
    gdal = pytest.importorskip("osgeo.gdal")
    osr = pytest.importorskip("osgeo.osr")
    types = {
        "uint8": "Byte", "int8": "Int8", "uint16": "UInt16", "int16": "Int16", "uint32": "UInt32", "int32": "Int32",
        "uint64": "UInt64", "int64": "Int64", "float16": "Float16", "float32": "Float32", "float64": "Float64",
        "complex64": "CFloat32", "complex128": "CFloat64",
    }  # fmt: skip

    def make(
        path: str | Path,
        array: npt.NDArray[Any],
        geotransform: tuple[float, ...] | None = NORTH_UP,
        crs: str = "EPSG:32631",
        nodata: float | None = None,
        **creation: str,
    ) -> Path:
        file = tmp_path / path
        rows, cols, bands = array.shape
        options = [f"{key}={value}" for key, value in creation.items()]
        kind = getattr(gdal, f"GDT_{types[array.dtype.name]}")
        dataset = gdal.GetDriverByName("GTiff").Create(str(file), cols, rows, bands, kind, options)
        if geotransform is not None:
            dataset.SetGeoTransform(geotransform)
        if crs:
            reference = osr.SpatialReference()
            reference.SetFromUserInput(crs)
            reference.SetAxisMappingStrategy(osr.OAMS_TRADITIONAL_GIS_ORDER)
            dataset.SetSpatialRef(reference)
        for index in range(bands):
            band = dataset.GetRasterBand(index + 1)
            if nodata is not None:
                band.SetNoDataValue(nodata)
            plane = np.ascontiguousarray(array[:, :, index])
            band.WriteRaster(0, 0, cols, rows, plane.tobytes())
        band = dataset = None
        return file

    return make


@pytest.fixture(params=[True, False], ids=["UseExceptions", "DontUseExceptions"])
def gdal_exceptions(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both of the ways in which a program may have asked GDAL to report failures."""
    gdal = pytest.importorskip("osgeo.gdal")
    before = gdal.GetUseExceptions()
    (gdal.UseExceptions if request.param else gdal.DontUseExceptions)()
    yield request.param
    (gdal.UseExceptions if before else gdal.DontUseExceptions)()
