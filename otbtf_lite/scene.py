"""Rasters cut into tiles with margins, each source in its own pixels: what a model sees of a scene."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid, Window
from otbtf_lite.raster import RasterReader, RasterSource
from otbtf_lite.schema import Sample

_DEFAULT_KEY = "image"


def as_sources(sources: Any, names: tuple[str, ...] | None) -> dict[str, RasterSource]:
    """The sources by key, each on a grid that meets the first one's.

    Args:
        sources: :class:`RasterSource`, paths or lists of paths by key, or one of these alone.
        names: the inputs of the model; None: it takes any.

    Raises:
        InputError: no source, an input that has none, or grids that do not meet.
        DataError: a file that can't be read.
    """
    if isinstance(sources, Mapping):
        given = dict(sources)
    else:
        given = {names[0] if names and len(names) == 1 else _DEFAULT_KEY: sources}
    if not given:
        raise InputError("sources names no raster: give at least one.")
    if names is not None and len(names) == len(given) == 1:
        given = {names[0]: next(iter(given.values()))}  # one raster, one input: no choice to make
    if names is not None and not set(names) <= set(given):
        missing = sorted(set(names) - set(given))
        raise InputError(
            f"The model takes the inputs {sorted(names)}, sources has {sorted(given)}: {missing} is missing."
        )
    # A path says nothing about patches, and nothing here depends on their size: grids that meet are enough.
    known = {k: s if isinstance(s, RasterSource) else RasterSource(s, 1) for k, s in given.items()}
    reference = next(iter(known.values()))
    return {key: source.aligned_to(reference) for key, source in known.items()}


@dataclass(frozen=True)
class Axis:
    """How pixels of the reference count in pixels of a source, along rows or along columns; exact."""

    scale: Fraction
    """Pixels of the source per pixel of the reference: a whole number or one over a whole number."""
    shift: Fraction
    """Where the reference starts, in pixels of the source."""
    extent: int
    """Pixels of the reference."""
    size: int
    """Pixels of the source."""

    @classmethod
    def of(cls, per_pixel: float, start: float, extent: int, size: int) -> Axis:
        """The axis of two grids that meet.

        Args:
            per_pixel: pixels of the source per pixel of the reference, as floating point has it.
            start: where the reference starts, likewise.
            extent: pixels of the reference.
            size: pixels of the source.
        """
        scale = Fraction(round(per_pixel)) if per_pixel >= 1 else Fraction(1, round(1 / per_pixel))
        # Edges of the coarser grid are edges of the finer one: so they are whole numbers there.
        return cls(scale, Fraction(round(start * scale.denominator), scale.denominator), extent, size)

    def at(self, position: int) -> Fraction:
        """A pixel edge of the reference, in pixels of the source."""
        return position * self.scale + self.shift

    def plan(self, start: int, length: int) -> tuple[int, int, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """What to read for ``length`` pixels of the reference from ``start`` on.

        Returns:
            First pixel and number of pixels to read (0: none); for each pixel of the window the index among those, with
            what lies beyond the reference mirrored; and whether the source has that pixel at all.
        """
        pixels = np.arange(math.floor(self.at(start)), math.ceil(self.at(start + length)))
        first, last = math.floor(self.at(0)), math.ceil(self.at(self.extent)) - 1
        period = max(1, 2 * (last - first))
        folded = (pixels - first) % period
        mirrored = first + np.minimum(folded, period - folded) if last > first else np.full_like(pixels, first)
        # Inside a narrow window the mirror image may ask for pixels far off: those next to the edge are as good.
        mirrored = np.clip(mirrored, max(first, pixels[0]), min(last, pixels[-1]))
        has = (mirrored >= 0) & (mirrored < self.size)
        if not has.any():
            return 0, 0, np.zeros(len(pixels), np.intp), has
        begin, end = int(mirrored[has].min()), int(mirrored[has].max()) + 1
        return begin, end - begin, np.where(has, mirrored - begin, 0).astype(np.intp), has


@dataclass(frozen=True)
class Layer:
    """One source as the model sees it."""

    key: str
    source: RasterSource
    reader: RasterReader
    rows: Axis
    cols: Axis

    @classmethod
    def of(cls, key: str, source: RasterSource, reader: RasterReader, reference: Grid) -> Layer:
        """A source whose grid meets the reference's."""
        grid = source.grid
        x, y = reference.xy(np.array([0, 0, 1]), np.array([0, 1, 0]), "ul")
        row, col = grid.fractional_rowcol(x, y)
        return cls(
            key, source, reader,
            Axis.of(float(row[2] - row[0]), float(row[0]), reference.height, grid.height),
            Axis.of(float(col[1] - col[0]), float(col[0]), reference.width, grid.width),
        )  # fmt: skip

    @property
    def nodata(self) -> float | None:
        """The nodata value of the first band that has one, or None."""
        return next((value for value in self.source.nodata_values or () if value is not None), None)

    def shape_of(self, seen: tuple[int, int]) -> tuple[int, int, int]:
        """What (rows, cols) of the reference are here, with the bands."""
        rows, cols = (int(n * axis.scale) for n, axis in zip(seen, (self.rows, self.cols), strict=True))
        return rows, cols, self.source.count

    def read(self, window: Window) -> npt.NDArray[Any]:
        """The values in a window of the reference, (rows, cols, bands) in the source's own pixels."""
        fill = 0 if self.nodata is None else self.nodata
        return self._gather(window, self.reader.read, np.full(self.source.count, fill, self.source.dtype))

    def has_data(self, window: Window) -> npt.NDArray[np.bool_]:
        """Where any band has data, (rows, cols) in pixels of the reference."""
        found = self._gather(window, self._has_data, np.False_)
        for dim, (axis, start, length) in enumerate(
            ((self.rows, window.row_off, window.height), (self.cols, window.col_off, window.width))
        ):
            if axis.scale == 1:
                continue
            edges = np.array([math.floor(axis.at(start + i)) for i in range(length)])
            edges -= edges[0]
            found = found.take(edges, axis=dim) if axis.scale < 1 else np.logical_or.reduceat(found, edges, axis=dim)
        return found

    def _has_data(self, own: Window) -> npt.NDArray[np.bool_]:
        """As :meth:`has_data`, for a window of the source."""
        valid = self.reader.valid(own)
        if self.source.nodata_values is None or self.source.count == 1 or valid.all():
            return valid
        # `valid` asks for data in every band; a pixel with data in one band is not empty.
        values = self.reader.read(own)
        for band, nodata in enumerate(self.source.nodata_values):
            pixels = values[..., band]
            empty = np.isnan(pixels) if nodata != nodata else pixels == nodata  # noqa: PLR0124  # NaN
            valid |= ~empty & (pixels == pixels)  # noqa: PLR0124
        return valid

    def _gather(self, window: Window, read: Callable[[Window], npt.NDArray[Any]], fill: Any) -> npt.NDArray[Any]:
        """What ``read`` gives for a window of the reference, with the raster mirrored beyond it."""
        row, n_rows, row_of, has_row = self.rows.plan(window.row_off, window.height)
        col, n_cols, col_of, has_col = self.cols.plan(window.col_off, window.width)
        if not (n_rows and n_cols):
            return np.broadcast_to(fill, (len(row_of), len(col_of), *np.shape(fill))).copy()
        values = read(Window(col, row, n_cols, n_rows))
        if (n_rows, n_cols) == (len(row_of), len(col_of)):  # nothing is mirrored or missing
            return values
        values = values[np.ix_(row_of, col_of)]
        values[~(has_row[:, None] & has_col)] = fill
        return values


@dataclass(frozen=True)
class Scene:
    """The sources and how the reference is cut into tiles; all sizes are (rows, cols) in pixels of the reference."""

    grid: Grid
    layers: tuple[Layer, ...]
    tile: tuple[int, int]
    margin: tuple[int, int]
    seen: tuple[int, int]
    """What the model sees: a tile and its margins, and what has been added at the right and the bottom."""
    start: tuple[int, int]
    """Where the first tile starts: at 0, or before it where a coarser source has no pixel edge at the margin's."""
    steps: tuple[int, int]
    """Windows are multiples of these, so that they hold whole pixels of every source."""

    @property
    def nodata(self) -> float | None:
        """The nodata value of the reference, or None."""
        return self.layers[0].nodata

    @classmethod
    def open(
        cls, sources: Mapping[str, RasterSource], tile: tuple[int, int], margin: tuple[int, int], stack: ExitStack
    ) -> Scene:
        """Open the sources; ``stack`` closes them."""
        grid = next(iter(sources.values())).grid
        layers = tuple(Layer.of(k, s, stack.enter_context(s.open()), grid) for k, s in sources.items())
        steps, start = [], []
        for dim, what in enumerate(("rows", "cols")):
            axes = {layer.key: (layer.rows, layer.cols)[dim] for layer in layers}
            step = math.lcm(*(axis.scale.denominator for axis in axes.values()))
            if tile[dim] % step:
                coarser = {key: axis.scale.denominator for key, axis in axes.items() if axis.scale < 1}
                raise InputError(
                    f"A tile of {tile[dim]} {what} cuts pixels of coarser sources, which take up so many: {coarser}; "
                    f"take a multiple of {step}, such as {math.ceil(tile[dim] / step) * step}."
                )
            first = [
                begin
                for begin in range(0, -step, -1)
                if all(axis.at(begin - margin[dim]).denominator == 1 for axis in axes.values())
            ]
            if not first:
                raise InputError(
                    f"The {what} of the sources {sorted(axes)} have no common pixel edge: predict them on one grid, "
                    "by resampling= in one of them."
                )
            steps.append(step)
            start.append(first[0])
        scene = cls(grid, layers, tile, margin, (0, 0), (start[0], start[1]), (steps[0], steps[1]))
        return scene.grown(1)

    def grown(self, stride: int) -> Scene:
        """The scene whose windows are multiples of ``stride`` too."""
        rows, cols = (
            math.ceil((tile + 2 * margin) / math.lcm(step, stride)) * math.lcm(step, stride)
            for tile, margin, step in zip(self.tile, self.margin, self.steps, strict=True)
        )
        return replace(self, seen=(rows, cols))

    def cores(self) -> Iterator[Window]:
        """The tiles, row by row; the outermost reach beyond the raster."""
        (top, left), (rows, cols) = self.start, self.tile
        for row, col in itertools.product(range(top, self.grid.height, rows), range(left, self.grid.width, cols)):
            yield Window(col, row, cols, rows)

    def batch(self, cores: Sequence[Window]) -> Sample:
        """What the model sees of some tiles, (batch, rows, cols, bands) by key."""
        (above, left), (rows, cols) = self.margin, self.seen
        windows = [Window(core.col_off - left, core.row_off - above, cols, rows) for core in cores]
        return {layer.key: np.stack([layer.read(window) for window in windows]) for layer in self.layers}

    def void(self, core: Window) -> npt.NDArray[np.bool_]:
        """Where no source has data, (rows, cols) of the part of a tile that lies in the raster."""
        inside = core.intersection(self.grid.window)
        if inside is None:
            return np.zeros((0, 0), np.bool_)
        has_data = np.zeros(inside.shape, np.bool_)
        for layer in self.layers:
            has_data |= layer.has_data(inside)
        return ~has_data
