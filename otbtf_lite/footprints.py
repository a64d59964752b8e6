"""Which pixels of every source the patches at given positions are made of.

Readers, selection and splits all start here, so that they can't disagree on where a patch lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid, Positions, Window
from otbtf_lite.raster import RasterSource, same_crs, transform_points

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_NOWHERE = -(1 << 31)  # first row and column of a patch that has no place in the reference's CRS: outside any raster


def align(sources: Mapping[str, RasterSource]) -> dict[str, RasterSource]:
    """The sources as they are read together: the first is the reference, to whose lattice the others are aligned.

    Raises:
        InputError: no source, one that is no RasterSource, or one whose grid does not meet the reference's.
        DataError: a file that can't be opened.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise InputError(f"sources is a dict of RasterSource by key, with at least one, got {sources!r}.")
    for key, source in sources.items():
        if not isinstance(key, str) or not key or not isinstance(source, RasterSource):
            raise InputError(f"sources[{key!r}] must be a RasterSource under a name, got {source!r}.")
    reference = next(iter(sources.values()))
    return {key: source if source is reference else source.aligned_to(reference) for key, source in sources.items()}


def locate(positions: Positions, crs: str) -> tuple[Floats, Floats]:
    """Map coordinates of the positions in another CRS, each (n,); infinite where a position has none there.

    Raises:
        InputError: one of the two has no CRS and the other has.
    """
    if same_crs(positions.crs, crs):
        return positions.x, positions.y
    if not positions.crs or not crs:
        named = [text or "no CRS" for text in (positions.crs, crs)]
        raise InputError(f"Positions in {named[0]} can't be placed on a raster in {named[1]}: give both the same CRS.")
    return transform_points(positions.x, positions.y, positions.crs, crs)


@dataclass(frozen=True, eq=False)
class Footprints:
    """The windows of all patches at all positions."""

    sources: dict[str, RasterSource]
    """Aligned sources by key; the first is the reference."""
    starts: dict[str, Ints]
    """By key, shape (n, 2): first row and first column of each patch on its source's own grid."""

    @classmethod
    def of(cls, positions: Positions, sources: Mapping[str, RasterSource]) -> Footprints:
        """The footprints at the positions, by the rule of :meth:`otbtf_lite.grid.Grid.footprint_window`.

        Raises:
            InputError: as :func:`align` and :func:`locate`.
            DataError: a file that can't be opened.
        """
        aligned = align(sources)
        x, y = locate(positions, next(iter(aligned.values())).grid.crs)
        return cls(aligned, {key: _starts(source, x, y) for key, source in aligned.items()})

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.starts[self.first])

    @property
    def first(self) -> str:
        """The reference's key."""
        return next(iter(self.sources))

    @property
    def reference(self) -> RasterSource:
        """The first source."""
        return self.sources[self.first]

    def window(self, key: str, index: int) -> Window:
        """The pixels of one patch in one source; it may reach beyond the raster."""
        rows, cols = self.sources[key].patch_size
        row, col = self.starts[key][index].tolist()
        return Window(col, row, cols, rows)

    def inside(self, key: str) -> Mask:
        """Which patches lie wholly in the source, shape (n,)."""
        grid, starts = self.sources[key].grid, self.starts[key]
        ends = starts + self.sources[key].patch_size
        return np.asarray((starts >= 0).all(1) & (ends <= (grid.height, grid.width)).all(1))

    def boxes(self, key: str) -> Floats:
        """Where the patches of a source lie, in pixels of the reference.

        Returns:
            (n, 4): top, left, bottom, right; fractions where the source's pixels are finer.
        """
        scale, shift = pixel_map(self.sources[key].grid, self.reference.grid)
        starts = self.starts[key]
        ends = starts + self.sources[key].patch_size
        return np.hstack([starts * scale + shift, ends * scale + shift])

    def ground_size(self, key: str) -> tuple[float, float]:
        """Height and width of a source's patches, in map units."""
        (rows, cols), (dx, dy) = self.sources[key].patch_size, self.sources[key].grid.pixel_size
        return rows * dy, cols * dx

    def block_order(self, indices: Ints) -> tuple[Ints, Ints]:
        """The positions in the order in which the reference's blocks lie in its file.

        Args:
            indices: positions, in any order.

        Returns:
            Where in ``indices`` to read first, second ..., and the number of the block in which each of those starts.
        """
        blocks = self.starts[self.first][indices] // np.array(self.reference.block_shape)
        across = -(-self.reference.grid.width // self.reference.block_shape[1])
        number = blocks[:, 0] * across + blocks[:, 1]
        order = np.argsort(number, kind="stable")
        return order, number[order]


def _starts(source: RasterSource, x: Floats, y: Floats) -> Ints:
    starts = np.full((len(x), 2), _NOWHERE, np.int64)
    placed = np.isfinite(x) & np.isfinite(y)
    starts[placed] = np.stack(source.grid.footprint_starts(x[placed], y[placed], source.patch_size), axis=1)
    return starts


def pixel_map(grid: Grid, reference: Grid) -> tuple[Floats, Floats]:
    """How pixel coordinates of a grid become those of a grid that it meets: (row, col) * scale + shift.

    Since the grids meet, a pixel of one is a whole number of the other's and edges coincide, up to a tolerance: the
    result is exact, so that equal edges compare as equal.
    """
    corners = np.array([[0, 0], [1, 1]])
    x, y = grid.xy(corners[:, 0], corners[:, 1], "ul")
    first, second = np.stack(reference.fractional_rowcol(x, y), axis=1)
    scale = second - first
    finer = np.maximum(1, (1 / scale).round())  # pixels of this grid in one of the reference
    return np.where(finer > 1, 1 / finer, scale.round()), (first * finer).round() / finer
