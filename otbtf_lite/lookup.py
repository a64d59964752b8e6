"""The pixels of one raster at the pixel centres of another's grid: masks and label images of any CRS and resolution."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.footprints import locate
from otbtf_lite.grid import MEETS_TOLERANCE, Grid, Positions, Window
from otbtf_lite.raster import RasterSource, same_crs

Mask = npt.NDArray[np.bool_]

_MOST_PIXELS = 1 << 24  # of the raster looked up in, read at once


class Lookup:
    """Reads a raster at the pixel centres of a grid: the value of the pixel that contains each, never a mixture.

    A context manager, for one thread.

    Args:
        source: the raster to look up in.
        grid: whose pixels are asked for.

    Raises:
        InputError: only one of the two has a CRS.
        DataError: the raster can't be opened.
    """

    def __init__(self, source: RasterSource, grid: Grid) -> None:
        self.source = source
        self.grid = grid
        self._shift = _shift(grid, source.grid)
        self._reader = source.open()

    def __enter__(self) -> Lookup:  # noqa: PYI034  # typing.Self needs Python 3.11
        """The lookup itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the raster."""
        self._reader.close()

    def read(self, window: Window) -> tuple[npt.NDArray[Any], Mask]:
        """Look up the pixels of a window of the grid.

        Returns:
            Values, (rows, cols, bands), zeros where there are none; and which are there, (rows, cols): those that lie
            in the raster and are valid in all bands.

        Raises:
            DataError: the raster can't be read there.
        """
        values = np.zeros((*window.shape, self.source.count), self.source.dtype)
        valid = np.zeros(window.shape, bool)
        if self._shift is None:
            self._fill(window, values, valid)
            return values, valid
        down, right = self._shift
        moved = Window(window.col_off + right, window.row_off + down, window.width, window.height)
        common = moved.intersection(self.source.grid.window)
        if common is not None:
            rows, cols = Window(
                common.col_off - moved.col_off, common.row_off - moved.row_off, common.width, common.height
            ).slices
            values[rows, cols] = self._reader.read(common)
            valid[rows, cols] = self._reader.valid(common)
        return values, valid

    def _fill(self, window: Window, values: npt.NDArray[Any], valid: Mask) -> None:
        """Look up point by point; in halves where the raster is much finer than the grid."""
        other = self.source.grid
        rows, cols = np.mgrid[
            window.row_off : window.row_off + window.height, window.col_off : window.col_off + window.width
        ]
        x, y = self.grid.xy(rows.ravel(), cols.ravel())
        x, y = locate(Positions(x, y, self.grid.crs), other.crs)
        placed = np.isfinite(x) & np.isfinite(y)
        row, col = other.rowcol(np.where(placed, x, 0.0), np.where(placed, y, 0.0))
        placed &= (row >= 0) & (row < other.height) & (col >= 0) & (col < other.width)
        if not placed.any():
            return
        row, col = row[placed], col[placed]
        top, left = int(row.min()), int(col.min())
        needed = Window(left, top, int(col.max()) - left + 1, int(row.max()) - top + 1)
        if needed.width * needed.height > _MOST_PIXELS and window.width * window.height > 1:
            for half in _halves(window):
                part = Window(
                    half.col_off - window.col_off, half.row_off - window.row_off, half.width, half.height
                ).slices
                self._fill(half, values[part], valid[part])
            return
        place = np.flatnonzero(placed)
        at = place // window.width, place % window.width
        values[at] = self._reader.read(needed)[row - top, col - left]
        valid[at] = self._reader.valid(needed)[row - top, col - left]


def _shift(grid: Grid, other: Grid) -> tuple[int, int] | None:
    """How many rows and columns pixel (0, 0) of a grid lies down and right in another of the very same pixels."""
    if not (same_crs(grid.crs, other.crs) and grid.meets(other)):
        return None
    steps = np.array(other.fractional_rowcol(*grid.xy(np.array([0, 1]), np.array([0, 1]), "ul")))
    if np.abs(steps[:, 1] - steps[:, 0] - 1).max() > MEETS_TOLERANCE:
        return None
    row, col = steps[:, 0].round().astype(int).tolist()
    return row, col


def _halves(window: Window) -> tuple[Window, Window]:
    """A window of two pixels or more, cut across its longer side."""
    if window.height >= window.width:
        upper = window.height // 2
        return (
            Window(window.col_off, window.row_off, window.width, upper),
            Window(window.col_off, window.row_off + upper, window.width, window.height - upper),
        )
    left = window.width // 2
    return (
        Window(window.col_off, window.row_off, left, window.height),
        Window(window.col_off + left, window.row_off, window.width - left, window.height),
    )
