"""``python -m benchmarks.scene [FILE]``: makes the raster that sampling is measured on, once.

A Sentinel-2 tile in size and kind: 10980 x 10980 pixels, 4 bands of uint16, tiles of 256 x 256, DEFLATE with a
predictor. Its values are a smooth landscape, the edges of fields and the noise of a sensor, which together compress as
such tiles do: to about two thirds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from osgeo import gdal, osr

SIZE = 10980
BANDS = 4
TILE = 256
_FIELD = 37  # pixels a side
_NOISE = 30.0  # standard deviation, in the unit of the pixels


def scene(path: Path = Path("build") / "benchmark-scene.tif") -> Path:
    """The file, made where it is not there yet."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        try:
            _make(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _make(path: Path) -> None:
    options = ["TILED=YES", "COMPRESS=DEFLATE", "PREDICTOR=2", "NUM_THREADS=2", "INTERLEAVE=PIXEL", "ZLEVEL=1"]
    raster = gdal.GetDriverByName("GTiff").Create(str(path), SIZE, SIZE, BANDS, gdal.GDT_UInt16, options)
    raster.SetGeoTransform((600000.0, 10.0, 0.0, 4900020.0, 0.0, -10.0))
    reference = osr.SpatialReference()
    reference.ImportFromEPSG(32631)
    raster.SetSpatialRef(reference)
    rng = np.random.Generator(np.random.Philox(7))
    n_fields = SIZE // _FIELD + 1
    fields = rng.normal(0, 250, (n_fields, n_fields, BANDS)).astype(np.float32)
    across = np.arange(SIZE)
    for row in range(0, SIZE, TILE):
        down = np.arange(row, min(row + TILE, SIZE))
        hills = 1800 + 600 * np.sin(down[:, None] / 900) * np.cos(across[None, :] / 1300)
        strip = fields[down[:, None] // _FIELD, across[None, :] // _FIELD]
        strip += hills[..., None].astype(np.float32)
        strip += _NOISE * rng.standard_normal(strip.shape, np.float32)
        pixels = np.clip(strip, 1, 10000).astype(np.uint16)
        raster.WriteRaster(
            0, row, SIZE, len(down), pixels.tobytes(), band_list=[1, 2, 3, 4],
            buf_pixel_space=2 * BANDS, buf_line_space=2 * BANDS * SIZE, buf_band_space=2,
        )  # fmt: skip


def main() -> None:
    """Makes the file."""
    gdal.UseExceptions()
    print(scene(*map(Path, sys.argv[1:2])))


if __name__ == "__main__":
    main()
