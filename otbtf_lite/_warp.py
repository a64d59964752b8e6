"""Sources seen through a warp onto the lattice of another grid; part of `raster`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

from otbtf_lite._gdal import GdalError, call, module, same_crs, session, transform_points
from otbtf_lite._spec import RESAMPLINGS
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid

_POINTS_PER_SIDE = (
    65  # of the outline that is moved to the other CRS: its bulge between two points is far below a pixel
)


def view_grid(
    source: Grid, patch: tuple[int, int], reference: Grid, reference_patch: tuple[int, int], names: tuple[str, str]
) -> Grid:
    """The grid onto which a source is warped so that its footprints coincide with the reference's.

    Its pixel is the reference's, times the reference's patch size, over the source's: both patches cover one ground.
    It starts at a pixel edge of the reference and covers what both have, with one patch more around.

    Args:
        source: the source's own grid.
        patch: its patch size, (rows, cols).
        reference: the reference's grid.
        reference_patch: the reference's patch size, (rows, cols).
        names: what to call the source and the reference in a message.

    Raises:
        InputError: patch sizes of which neither is a multiple of the other, only one of the two has a CRS, or the two
            do not overlap.
    """
    scale = []
    for own, theirs, axis in zip(patch, reference_patch, ("rows", "columns"), strict=True):
        if max(own, theirs) % min(own, theirs):
            raise InputError(
                f"{names[0]} can't be warped onto the grid of {names[1]}: of their patch sizes {patch} and "
                f"{reference_patch} (rows, cols) one must be a multiple of the other, which {own} and {theirs} "
                f"{axis} are not."
            )
        scale.append(theirs / own)
    if bool(source.crs) != bool(reference.crs):
        without = names[0] if not source.crs else names[1]
        raise InputError(f"{without} has no CRS, so it can't be warped: give it one with gdal_edit.py -a_srs.")
    down, right = scale
    x0, a, b, y0, d, e = reference.geotransform
    rows, cols = math.ceil(reference.height / down), math.ceil(reference.width / right)
    lattice = Grid(reference.crs, (x0, a * right, b * down, y0, d * right, e * down), cols, rows)
    first = np.array([-patch[0], -patch[1]])
    last = np.array([rows + patch[0], cols + patch[1]])
    covered = _coverage(source, lattice)
    if covered is not None:
        first, last = np.maximum(first, np.floor(covered[0])), np.minimum(last, np.ceil(covered[1]))
    if (first >= last).any():
        raise InputError(f"{names[0]} ({source}) and {names[1]} ({reference}) do not overlap.")
    (row, col), (height, width) = (int(v) for v in first), (int(v) for v in last - first)
    x, y = lattice.xy(row, col, "ul")
    return Grid(lattice.crs, (x, *lattice.geotransform[1:3], y, *lattice.geotransform[4:]), width, height)


def _coverage(source: Grid, lattice: Grid) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
    """Least and greatest (row, col) of the lattice that a source reaches; None where its outline has no image there."""
    t = np.linspace(0, 1, _POINTS_PER_SIDE)
    zero, one = np.zeros_like(t), np.ones_like(t)
    row = np.concatenate([zero, t, one, t]) * source.height
    col = np.concatenate([t, one, t, zero]) * source.width
    x, y = source.xy(row, col, "ul")
    u, v = transform_points(x, y, source.crs, lattice.crs)
    # A whole-earth raster has no outline in a UTM zone: what does not come back to where it was is no image.
    if not (np.isfinite(u).all() and np.isfinite(v).all()):
        return None
    back_row, back_col = source.fractional_rowcol(*transform_points(u, v, lattice.crs, source.crs))
    if not np.allclose(back_row, row, rtol=0, atol=0.5) or not np.allclose(back_col, col, rtol=0, atol=0.5):
        return None
    places = np.stack(lattice.fractional_rowcol(u, v))
    # Places that are whole pixels up to rounding must not claim one pixel more.
    return (places.min(axis=1) + 1e-6, places.max(axis=1) - 1e-6)


def warped(
    dataset: Any, path: str, grid: Grid, resampling: str, nodata: Sequence[float | None] | None, source_crs: str
) -> Any:
    """A dataset seen on a grid: exact to the pixel (no approximate transformer, no overviews), nothing read yet.

    Args:
        dataset: the source, open.
        path: the source's name, under which the view opens it again.
        grid: the grid wanted; it may be rotated or south up.
        resampling: a key of :data:`RESAMPLINGS`.
        nodata: per band of the source the value that marks missing pixels, or None.
        source_crs: the source's CRS; with none, the grid must have none either.

    Returns:
        A virtual ``gdal.Dataset``: bands as in the source, the last one (added unless the source's last band is one) an
        alpha band that is 0 where the source has nothing.

    Raises:
        DataError: GDAL can't warp it.
    """
    gdal = module("gdal")
    known = nodata if nodata and all(value is not None for value in nodata) else None
    values = "None" if known is None else " ".join(f"{value!r}" for value in known)
    srs = {} if same_crs(source_crs, grid.crs) else {"srcSRS": source_crs, "dstSRS": grid.crs}
    try:
        with session():
            settings = gdal.WarpOptions(
                format="VRT",
                # Any box of the right number of pixels: the exact geotransform, which may be rotated, comes below.
                outputBounds=(0, 0, grid.width, grid.height),
                width=grid.width,
                height=grid.height,
                resampleAlg=RESAMPLINGS[resampling],
                errorThreshold=0,
                overviewLevel="NONE",
                dstAlpha=True,
                srcNodata=values,
                dstNodata=None if known is None else values,
                warpOptions=["UNIFIED_SRC_NODATA=PARTIAL"],  # each band's nodata is its own; all of them: no pixel
                copyMetadata=False,
                **srs,
            )
        view = call(gdal.Warp, "", dataset, options=settings)
        root = ET.fromstring(view.GetMetadata("xml:VRT")[0])  # noqa: S314  # GDAL wrote it a line above
        _set(root, "GeoTransform", grid.geotransform)
        _set(root, "DstGeoTransform", grid.geotransform)
        _set(root, "DstInvGeoTransform", _inverse(grid.geotransform))
        for name in root.iter("SourceDataset"):
            name.text = path
        return call(gdal.OpenEx, ET.tostring(root, encoding="unicode"), gdal.OF_RASTER | gdal.OF_VERBOSE_ERROR)
    except GdalError as error:
        raise DataError(f"{path} can't be warped onto {grid}: {error}.") from error


def _set(root: ET.Element, tag: str, numbers: Sequence[float]) -> None:
    for element in root.iter(tag):
        element.text = ",".join(f"{number:.17g}" for number in numbers)


def _inverse(gt: Sequence[float]) -> tuple[float, ...]:
    """The affine map from (x, y) to (col, row), in GDAL's order."""
    x0, a, b, y0, d, e = gt
    det = a * e - b * d
    ia, ib, id_, ie = e / det, -b / det, -d / det, a / det
    return (-(ia * x0 + ib * y0), ia, ib, -(id_ * x0 + ie * y0), id_, ie)
