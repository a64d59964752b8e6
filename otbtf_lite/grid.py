"""Where pixels and patches lie: pure arithmetic, no I/O.

A :class:`Grid` ties pixels to map coordinates, a :class:`Window` is a box of whole pixels, and :class:`Positions` are
the places where patches are taken. Sampling, inference and the Earth Engine mixer all use them.

Geotransforms are in GDAL's order (x0, dx/dcol, dx/drow, y0, dy/dcol, dy/drow), from the outer corner of pixel (0, 0);
see https://gdal.org/en/stable/tutorials/geotransforms_tut.html.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.positions import Positions, concat_positions

__all__ = ["Edges", "Grid", "Positions", "Window", "concat_positions", "rows_cols"]

Edges = Literal["drop", "shift", "clip"]
"""What becomes of the last partial tile: left out, moved inward, or cut at the edge."""

MEETS_TOLERANCE = 1e-3
"""How far, in pixels of the finer grid, edges may be apart and still count as the same edge."""

_FURTHEST_PIXEL = 2.0**53  # beyond it float64 skips integers; no raster is that large


def rows_cols(size: int | Sequence[int], what: str = "size", least: int = 1) -> tuple[int, int]:
    """A size given as one integer or as (rows, cols), as (rows, cols).

    Args:
        size: the size.
        what: the argument's name, for the message.
        least: the smallest value allowed.

    Raises:
        InputError: no integers, another number of them, or one below ``least``.
    """
    try:
        pair = (size, size) if not isinstance(size, Sequence) and np.ndim(size) == 0 else tuple(size)  # type: ignore[arg-type]
        rows, cols = (operator.index(n) for n in pair)
    except (TypeError, ValueError):
        rows = cols = least - 1
    if min(rows, cols) < least:
        raise InputError(f"{what} must be an integer or (rows, cols), at least {least}, got {size!r}.")
    return rows, cols


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A box of whole pixels; it may reach beyond the raster.

    Raises:
        InputError: a value that is no integer, or a width or height below 1.
    """

    col_off: int
    """First column, counted from 0."""
    row_off: int
    """First row, counted from 0."""
    width: int
    """Number of columns."""
    height: int
    """Number of rows."""

    def __post_init__(self) -> None:
        try:
            for name in ("col_off", "row_off", "width", "height"):
                object.__setattr__(self, name, operator.index(getattr(self, name)))
        except TypeError as error:
            raise InputError(f"A window is made of integers, got {self}.") from error
        if self.width < 1 or self.height < 1:
            raise InputError(f"A window is at least one pixel wide and high, got {self}.")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.height, self.width

    @property
    def slices(self) -> tuple[slice, slice]:
        """The row slice and the column slice of the window in an array of the whole raster.

        Raises:
            InputError: a negative offset, which NumPy would count from the end.
        """
        if self.col_off < 0 or self.row_off < 0:
            raise InputError(f"{self} starts outside the raster: it can't slice an array.")
        return slice(self.row_off, self.row_off + self.height), slice(self.col_off, self.col_off + self.width)

    def intersection(self, other: Window) -> Window | None:
        """The pixels that both have, or None where there are none."""
        left, top = max(self.col_off, other.col_off), max(self.row_off, other.row_off)
        width = min(self.col_off + self.width, other.col_off + other.width) - left
        height = min(self.row_off + self.height, other.row_off + other.height) - top
        return Window(left, top, width, height) if width > 0 and height > 0 else None

    def is_inside(self, width: int, height: int) -> bool:
        """Whether every pixel lies in a raster of that width and height."""
        return (
            self.col_off >= 0
            and self.row_off >= 0
            and self.col_off + self.width <= width
            and self.row_off + self.height <= height
        )

    def padded(self, rows: int, cols: int) -> Window:
        """The window grown by so many rows above and below and columns left and right (negative: shrunk)."""
        return Window(self.col_off - cols, self.row_off - rows, self.width + 2 * cols, self.height + 2 * rows)


@dataclass(frozen=True, slots=True)
class Grid:
    """A raster's pixels on the map.

    Raises:
        InputError: a geotransform that is not six finite numbers or that maps all pixels to a line, or no pixels.
    """

    crs: str
    """``"EPSG:32631"`` or WKT; empty where there is none."""
    geotransform: tuple[float, float, float, float, float, float]
    """GDAL's order, map units per pixel."""
    width: int
    """Columns."""
    height: int
    """Rows."""

    def __post_init__(self) -> None:
        try:
            gt = tuple(float(v) for v in self.geotransform)
            width, height = operator.index(self.width), operator.index(self.height)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"A grid takes a geotransform of six numbers and an integer width and height, got {self!r}."
            ) from error
        if len(gt) != 6 or not all(map(math.isfinite, gt)):  # an affine map has six numbers
            raise InputError(f"A geotransform is six finite numbers, got {self.geotransform!r}.")
        if gt[1] * gt[5] - gt[2] * gt[4] == 0:
            raise InputError(f"The geotransform {gt} maps all pixels to a line or a point: its pixel size is zero.")
        if width < 1 or height < 1:
            raise InputError(f"A grid has at least one column and one row, got {width} x {height}.")
        if not isinstance(self.crs, str):
            raise InputError(f'A CRS is text such as "EPSG:32631" or WKT (empty: none), got {self.crs!r}.')
        object.__setattr__(self, "geotransform", gt)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "height", height)

    def __str__(self) -> str:
        """One line for messages: size, pixel size, origin and CRS."""
        gt, (dx, dy) = self.geotransform, self.pixel_size
        turned = ", rotated" if self.is_rotated else ", south up" if gt[5] > 0 else ""
        crs = (self.crs if len(self.crs) <= 40 else self.crs[:37] + "...") or "no CRS"  # WKT is long
        pixels = f"{self.width} x {self.height} pixels of {dx:.10g} x {dy:.10g}"
        return f"{pixels} from ({gt[0]:.10g}, {gt[3]:.10g}){turned}, {crs}"

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.height, self.width

    @property
    def window(self) -> Window:
        """All pixels."""
        return Window(0, 0, self.width, self.height)

    @property
    def pixel_size(self) -> tuple[float, float]:
        """Length of a pixel's sides along a row and along a column, in map units; both positive."""
        _, a, b, _, d, e = self.geotransform
        return math.hypot(a, d), math.hypot(b, e)

    @property
    def is_rotated(self) -> bool:
        """Whether rows and columns do not run along the map's axes."""
        return self.geotransform[2] != 0 or self.geotransform[4] != 0

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """(least x, least y, greatest x, greatest y) of the four outer corners."""
        x, y = self.xy(np.array([0, 0, self.height, self.height]), np.array([0, self.width, 0, self.width]), "ul")
        return float(x.min()), float(y.min()), float(x.max()), float(y.max())

    @overload
    def xy(self, row: float, col: float, offset: str = ...) -> tuple[float, float]: ...
    @overload
    def xy(
        self, row: npt.NDArray[Any], col: npt.NDArray[Any], offset: str = ...
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]: ...
    def xy(self, row: Any, col: Any, offset: str = "center") -> tuple[Any, Any]:
        """Map coordinates of pixels.

        Args:
            row: rows, a number or an array; fractions are allowed.
            col: columns, likewise.
            offset: ``"center"`` of the pixel, or ``"ul"``: its corner next to pixel (row - 1, col - 1).

        Returns:
            x and y: floats for numbers, float64 arrays for arrays.

        Raises:
            InputError: an unknown offset.
        """
        if offset not in ("center", "ul"):
            raise InputError(f'offset must be "center" or "ul", got {offset!r}.')
        half = 0.5 if offset == "center" else 0.0
        x0, a, b, y0, d, e = self.geotransform
        r, c = np.asarray(row, np.float64) + half, np.asarray(col, np.float64) + half
        x, y = x0 + c * a + r * b, y0 + c * d + r * e
        return (float(x), float(y)) if np.ndim(x) == 0 else (x, y)

    def fractional_rowcol(self, x: Any, y: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Where map coordinates fall in pixel coordinates: (row, col) as float64, 0.0 at the outer edge of pixel 0."""
        x0, y0 = self.geotransform[0], self.geotransform[3]
        return self._steps_of(np.asarray(x, np.float64) - x0, np.asarray(y, np.float64) - y0)

    def _steps_of(self, u: Any, v: Any) -> tuple[Any, Any]:
        """How many rows and columns a move by (u, v) map units is."""
        _, a, b, _, d, e = self.geotransform
        if not self.is_rotated:  # a plain division rounds once: pixel edges that are exact in float64 stay exact
            return v / e, u / a
        det = a * e - b * d
        return (a * v - d * u) / det, (e * u - b * v) / det

    @overload
    def rowcol(self, x: float, y: float) -> tuple[int, int]: ...
    @overload
    def rowcol(
        self, x: npt.NDArray[Any], y: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...
    def rowcol(self, x: Any, y: Any) -> tuple[Any, Any]:
        """The pixel that contains each point; it may lie outside the grid.

        Args:
            x: map coordinates, a number or an array.
            y: likewise.

        Returns:
            row and col: ints for numbers, int64 arrays for arrays.

        Raises:
            InputError: a coordinate that is not finite.
        """
        row, col = self.fractional_rowcol(x, y)
        if not (np.isfinite(row).all() and np.isfinite(col).all()):
            raise InputError(f"Map coordinates must be finite to lie in a pixel of the grid ({self}).")
        r, c = (np.floor(v.clip(-_FURTHEST_PIXEL, _FURTHEST_PIXEL)).astype(np.int64) for v in (row, col))
        return (int(r), int(c)) if np.ndim(r) == 0 else (r, c)

    def window_grid(self, window: Window) -> Grid:
        """The grid of the window's pixels alone (it may reach beyond this grid)."""
        x, y = self.xy(window.row_off, window.col_off, "ul")
        _, a, b, _, d, e = self.geotransform
        return Grid(self.crs, (x, a, b, y, d, e), window.width, window.height)

    def footprint_starts(
        self, x: npt.ArrayLike, y: npt.ArrayLike, size: int | Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First rows and first columns of the patches at many points: :meth:`footprint_window` for arrays.

        Raises:
            InputError: a coordinate that is not finite, or a wrong size.
        """
        rows, cols = rows_cols(size)
        row, col = self.rowcol(np.asarray(x, np.float64), np.asarray(y, np.float64))
        return np.asarray(row - rows // 2), np.asarray(col - cols // 2)

    def footprint_window(self, x: float, y: float, size: int | Sequence[int]) -> Window:
        """The pixels of the patch at a point.

        The patch starts ``size // 2`` pixels before the pixel that contains the point, in both axes: an odd patch is
        centred on that pixel, an even one on the corner it shares with the previous row and column.

        Args:
            x: map coordinate.
            y: map coordinate.
            size: the patch's size, one integer or (rows, cols).

        Raises:
            InputError: a coordinate that is not finite, or a wrong size.
        """
        rows, cols = rows_cols(size)
        row, col = self.rowcol(float(x), float(y))
        return Window(col - cols // 2, row - rows // 2, cols, rows)

    def tiles(
        self,
        size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        *,
        offset: int | Sequence[int] = (0, 0),
        edges: Edges = "drop",
    ) -> Iterator[Window]:
        """Windows of one size over the grid, row by row.

        Args:
            size: tile size, one integer or (rows, cols).
            stride: from one tile's start to the next's, likewise; None: the size, so that tiles lie edge to edge.
            offset: where the first tile starts, likewise.
            edges: what becomes of a last tile that reaches beyond the grid: ``"drop"`` leaves it out, ``"shift"``
                moves it inward, ``"clip"`` cuts it; these two cover all pixels from ``offset`` on if stride <= size.

        Raises:
            InputError: a size, stride or offset that is no integer or is too small, an unknown ``edges``, or, for
                ``"shift"``, a tile larger than the grid.
        """
        rows, cols = rows_cols(size)
        down, right = (rows, cols) if stride is None else rows_cols(stride, "stride")
        top, left = rows_cols(offset, "offset", least=0)
        if edges not in ("drop", "shift", "clip"):
            raise InputError(f'edges must be "drop", "shift" or "clip", got {edges!r}.')
        if edges == "shift" and (rows > self.height or cols > self.width):
            raise InputError(
                f"A tile of {rows} x {cols} (rows, cols) can't be moved into a grid of {self.height} x {self.width}."
            )
        across = _steps(self.width, cols, right, left, edges)
        return (
            Window(col, row, width, height)
            for row, height in _steps(self.height, rows, down, top, edges)
            for col, width in across
        )

    def meets(self, other: Grid) -> bool:
        """Whether every pixel edge of the coarser grid is one of the finer grid; symmetric.

        The grids must run the same way (no turn, no flip) and on each axis one pixel size must be a whole multiple of
        the other, with edges no further apart than :data:`MEETS_TOLERANCE` anywhere on them. CRSs are not compared.
        """
        # Always seen from the finer one, ties broken by the numbers: so both orders do the very same arithmetic.
        fine, coarse = sorted((self, other), key=lambda g: (math.prod(g.pixel_size), g.geotransform, g.shape))
        x0, a, b, y0, d, e = coarse.geotransform
        # The coarse grid's origin and its two pixel sides, in (row, col) of the fine grid.
        row0, col0 = map(float, fine.fractional_rowcol(x0, y0))
        skew_row, ratio_col = fine._steps_of(a, d)  # noqa: SLF001  # another Grid's own arithmetic
        ratio_row, skew_col = fine._steps_of(b, e)  # noqa: SLF001
        return _axis_meets(col0, ratio_col, skew_row, coarse.width, fine.width) and _axis_meets(
            row0, ratio_row, skew_col, coarse.height, fine.height
        )


def _steps(total: int, size: int, stride: int, offset: int, edges: Edges) -> list[tuple[int, int]]:
    """Starts and lengths of the tiles along one axis of ``total`` pixels."""
    steps = [(start, size) for start in range(offset, total - size + 1, stride)]
    following = steps[-1][0] + stride if steps else offset
    covered = steps[-1][0] + size if steps else offset
    if edges == "drop" or max(covered, following) >= total:
        return steps
    steps.append((total - size, size) if edges == "shift" else (following, total - following))
    return steps


def _axis_meets(origin: float, ratio: float, skew: float, n_coarse: int, n_fine: int) -> bool:
    """The rule of :meth:`Grid.meets` on one axis.

    Args:
        origin: where the second grid starts, in pixels of the first.
        ratio: length of the second grid's pixel along this axis, in pixels of the first.
        skew: what one step along this axis of the second moves along the first's other axis.
        n_coarse: pixels of the second grid along the axis.
        n_fine: pixels of the first.
    """
    if not ratio > 0 or not math.isfinite(ratio):
        return False
    skew_drift = abs(skew) * n_coarse
    if ratio < 1 - MEETS_TOLERANCE:  # here the second grid is the finer one, although its pixels are larger in area
        origin, ratio, n_coarse, n_fine = -origin / ratio, 1 / ratio, n_fine, n_coarse
    whole = max(1, round(ratio))
    drift = abs(ratio - whole) * max(n_coarse, n_fine / whole)
    return abs(origin - round(origin)) <= MEETS_TOLERANCE and max(drift, skew_drift) <= MEETS_TOLERANCE
