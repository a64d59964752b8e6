"""Real files as GDAL's own programs read them: another build of GDAL, and none of its Python bindings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from rasters import gdal, plain_read
from test_real_rasters import BROKEN_AT_OPENING, BROKEN_AT_READING, READABLE

from otbtf_lite.errors import DataError
from otbtf_lite.grid import Window
from otbtf_lite.raster import RasterSource

ENVI_TYPES = {
    1: "u1", 2: "i2", 3: "i4", 4: "f4", 5: "f8", 6: "c8", 9: "c16", 12: "u2", 13: "u4", 14: "i8", 15: "u8",
}  # fmt: skip


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str) -> str | None:
    """What a program of GDAL prints; None where it fails. It leaves nothing beside the files."""
    # Without the Python package's PROJ and GDAL data, which are another version's.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PROJ", "GDAL"))}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment | {"GDAL_PAM_ENABLED": "NO"}
    )
    return None if done.returncode else done.stdout


@pytest.mark.parametrize("name", READABLE)
def test_windows_as_gdal_translate_cuts_them(shared_data: Path, tmp_path: Path, name: str) -> None:
    source = RasterSource(shared_data / name, 8)
    rows, cols, bands = source.shape
    window = Window(cols // 3, rows // 3, min(cols - cols // 3, 150), min(rows - rows // 3, 130))
    box = (window.col_off, window.row_off, window.width, window.height)
    raw = tmp_path / "window"
    arguments = ["-q", "-of", "ENVI", "-co", "INTERLEAVE=BSQ", "-srcwin", *map(str, box), source.paths[0], str(raw)]
    if run(program("gdal_translate"), *arguments) is None:
        pytest.skip("this gdal_translate has no driver for it")
    header = dict(
        part.split(" = ", 1) for part in raw.with_suffix(".hdr").read_text().splitlines() if part.count(" = ") == 1
    )
    dtype = np.dtype(ENVI_TYPES[int(header["data type"])])
    expected = np.fromfile(raw, dtype).reshape(-1, *window.shape).transpose(1, 2, 0)
    with source.open() as reader:
        pixels = reader.read(window)
    assert pixels.shape == (*window.shape, bands)
    if dtype.kind != "c":
        pixels = pixels.real  # the format has no complex integers: GDAL leaves the imaginary part out
    # Older versions of GDAL widen types that they do not have.
    np.testing.assert_array_equal(pixels.astype(dtype), expected[:, :, :bands])


@pytest.mark.parametrize(
    "name",
    [
        "masks_nodata/RGB.byte.tif",
        "odd_georef/geomatrix.tif",
        "odd_georef/inverted_lat.tif",
        "odd_georef/FIXED_HEIGHT_DM2.tif",
        "landcover/cdl_2016_crop.tif",
        "l8_gulf_30m_15m/l8_B4.tif",
    ],
)
def test_places_as_gdallocationinfo_finds_them(shared_data: Path, name: str) -> None:
    source = RasterSource(shared_data / name, 8)
    grid = source.grid
    rng = np.random.default_rng(0)
    for row, col in rng.uniform(0.05, 0.95, (5, 2)) * (grid.height, grid.width):
        x0, a, b, y0, d, e = grid.geotransform
        x, y = x0 + a * col + b * row, y0 + d * col + e * row
        found = run(program("gdallocationinfo"), "-xml", "-geoloc", source.paths[0], str(float(x)), str(float(y)))
        assert found is not None
        report = ET.fromstring(found)  # noqa: S314  # GDAL's own
        assert (int(report.attrib["line"]), int(report.attrib["pixel"])) == grid.rowcol(x, y)
        values = [float(each.text or "nan") for each in report.iter("Value")]
        with source.open() as reader:
            pixel = reader.read(Window(int(report.attrib["pixel"]), int(report.attrib["line"]), 1, 1))
        np.testing.assert_allclose(pixel[0, 0].astype(float), values, rtol=1e-6)


def test_every_raster_of_an_hdf_file(shared_data: Path) -> None:
    if gdal.GetDriverByName("HDF4") is None:
        pytest.skip("this GDAL has no HDF4 driver")
    file = shared_data / "hdf/MOD09GA.A2008296.h14v17.006.2015181011753.hdf"
    inside = [name for name, _ in gdal.OpenEx(str(file), gdal.OF_RASTER).GetSubDatasets()]
    assert len(inside) == 21
    for name in inside:
        source = RasterSource(name, 8)
        rows, cols, _ = source.shape
        window = Window(cols // 2, rows // 2, min(40, cols // 2), min(30, rows // 2))
        with source.open() as reader:
            np.testing.assert_array_equal(reader.read(window), plain_read(name, window)[0])


READ_BROKEN = """
import sys
from pathlib import Path
from otbtf_lite.errors import DataError
from otbtf_lite.grid import Window
from otbtf_lite.raster import RasterSource

for path in sys.argv[1:]:
    try:
        source = RasterSource(path, 1)
        rows, cols, _ = source.shape
        with source.open() as reader:
            reader.read(Window(0, 0, min(cols, 100), min(rows, 100)))
            reader.read(Window(max(0, cols - 100), max(0, rows - 100), min(cols, 100), min(rows, 100)))
    except DataError as error:
        if path not in str(error):
            raise
        print("refused")
    else:
        print("read")
# Not getrusage: what that tells is no less than what the parent had when it started this process.
(line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
print(line.split()[1])
"""


def test_broken_files_take_neither_the_process_nor_its_memory(shared_data: Path) -> None:
    """All in one child: a crash, a hang or a block of 2 GB in any of them would show."""
    names = [*BROKEN_AT_OPENING, *BROKEN_AT_READING]
    files = [str(shared_data / "broken" / name) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", READ_BROKEN, *files], capture_output=True, text=True, check=False, timeout=120
    )
    *outcomes, peak = done.stdout.split()
    assert done.returncode == 0
    assert done.stderr == ""
    assert dict(zip(names, outcomes, strict=True)) == dict.fromkeys(names, "refused")
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(peak) * unit < 1 << 30


def test_every_broken_file_is_in_one_of_the_lists(shared_data: Path) -> None:
    there = {path.name for path in (shared_data / "broken").iterdir()}
    assert there == {*BROKEN_AT_OPENING, *BROKEN_AT_READING, "minimum_tiff_tags_with_warning.tif"}


def test_the_largest_block_is_refused_by_its_size(shared_data: Path) -> None:
    with pytest.raises(DataError, match=r"1 x 2147483647 \(rows, cols\)"):
        _ = RasterSource(shared_data / "broken/scanline_more_than_2GB.tif", 8).shape
