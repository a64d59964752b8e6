"""Where patches are taken: on a grid, at random, by class; which positions can be used, and how they are split.

Positions are centres of pixels of a source, chosen so that the footprint rule (a patch starts ``size // 2`` before the
position's pixel, see :meth:`otbtf_lite.grid.Grid.footprint_window`) gives the wanted patch back exactly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from otbtf_lite.balance import balanced
from otbtf_lite.classdraw import CLASS_STRATEGIES, ClassStrategy, Quota, class_quotas, tiles
from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid, Positions, Window, rows_cols
from otbtf_lite.labelled import (
    ClassStatistics,
    class_statistics,
    from_labels,
    from_vector,
    given_seed,
    groups_of,
    patch_area,
    source_name,
)
from otbtf_lite.lookup import Lookup
from otbtf_lite.raster import RasterSource
from otbtf_lite.selection import REASONS, Reason, Rejections, select
from otbtf_lite.sharding import generator
from otbtf_lite.splits import split

__all__ = [
    "CLASS_STRATEGIES",
    "REASONS",
    "ClassStatistics",
    "ClassStrategy",
    "Quota",
    "Reason",
    "Rejections",
    "at_random",
    "balanced",
    "class_quotas",
    "class_statistics",
    "from_labels",
    "from_vector",
    "groups_of",
    "on_grid",
    "select",
    "split",
]

Ints = npt.NDArray[np.int64]
Draw = Callable[[Ints], tuple[Ints, Ints]]
"""Rows and columns of the allowed pixels of those numbers."""

_RANDOM_STREAM = 0x72616E646F6D  # keeps these draws apart from other uses of one seed
_TRIES = 64  # candidates drawn for each position wanted before a minimum distance counts as impossible


def on_grid(
    source: RasterSource,
    patch_size: int | Sequence[int] | None = None,
    stride: int | Sequence[int] | None = None,
    *,
    offset: int | Sequence[int] = (0, 0),
    edges: Literal["drop", "shift"] = "drop",
) -> Positions:
    """Positions of patches on a regular grid, row by row.

    Args:
        source: the raster.
        patch_size: pixels, one integer or (rows, cols); None: the source's.
        stride: pixels from one patch's start to the next's, likewise; None: the patch size.
        offset: first row and column of the first patch.
        edges: ``"drop"`` leaves out the last patch where it reaches beyond the raster; ``"shift"`` moves it inward.

    Raises:
        InputError: a patch larger than the raster, no patch left behind the offset, or a value that is out of range.
        DataError: the raster can't be opened.
    """
    if edges not in ("drop", "shift"):
        raise InputError(f'edges must be "drop" or "shift", got {edges!r}.')
    rows, cols = _patch_size(source, patch_size)
    patch_area(source.grid, (rows, cols), source_name(source))
    windows = list(source.grid.tiles((rows, cols), stride, offset=offset, edges=edges))
    if not windows:
        raise InputError(
            f"No patch of {rows} x {cols} pixels (rows x cols) starts at or behind the offset {offset!r} in "
            f"{source_name(source)}, which has {source.grid.height} x {source.grid.width}."
        )
    starts = np.array([(window.row_off, window.col_off) for window in windows])
    return _positions(source.grid, starts[:, 0] + rows // 2, starts[:, 1] + cols // 2)


def at_random(
    source: RasterSource,
    n: int,
    *,
    seed: int,
    patch_size: int | Sequence[int] | None = None,
    min_distance: float | None = None,
    mask: str | os.PathLike[str] | RasterSource | None = None,
) -> Positions:
    """Positions at random pixels, none twice; every pixel whose patch lies inside the raster is as likely as any other.

    Args:
        source: the raster.
        n: how many.
        seed: decides which; the same on every machine.
        patch_size: pixels, one integer or (rows, cols); None: the source's.
        min_distance: the least distance between two positions, in map units of the source's CRS.
        mask: a raster, of any CRS and resolution, that allows positions where its pixels are valid and not zero in
            all bands.

    Raises:
        InputError: fewer than ``n`` positions can be had (the message says how many), a patch larger than the raster,
            or a value that is out of range.
        DataError: a raster that can't be opened or read.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise InputError(f"n must be an integer, at least 1, got {n!r}.")
    if min_distance is not None and not (math.isfinite(min_distance) and min_distance > 0):
        raise InputError(f"min_distance must be a positive number of map units or None, got {min_distance!r}.")
    rng = generator(given_seed(seed), _RANDOM_STREAM)
    rows, cols = _patch_size(source, patch_size)
    area = patch_area(source.grid, (rows, cols), source_name(source))
    if mask is None:
        available, draw = area.width * area.height, _all_of(area)
    else:
        raster = mask if isinstance(mask, RasterSource) else RasterSource(mask, 1)
        available, draw = _allowed_of(area, source.grid, raster)
    if n > available:
        raise InputError(
            f"{n} positions are wanted, but only {available} pixels of {source_name(source)} are allowed: those whose "
            f"patch of {rows} x {cols} pixels (rows x cols) lies inside"
            f"{'' if mask is None else ' and that the mask allows'}."
        )
    if min_distance is None:
        return _positions(source.grid, *draw(rng.choice(available, n, replace=False)))
    return _spread(source.grid, draw, available, int(n), min_distance, rng)


def _patch_size(source: RasterSource, patch_size: int | Sequence[int] | None) -> tuple[int, int]:
    """The patch size as (rows, cols)."""
    return source.patch_size if patch_size is None else rows_cols(patch_size, "patch_size")


def _positions(grid: Grid, rows: Ints, cols: Ints) -> Positions:
    return Positions(*grid.xy(rows, cols), grid.crs)


def _all_of(area: Window) -> Draw:
    def draw(numbers: Ints) -> tuple[Ints, Ints]:
        rows, cols = np.divmod(numbers, area.width)
        return rows + area.row_off, cols + area.col_off

    return draw


def _allowed_of(area: Window, grid: Grid, mask: RasterSource) -> tuple[int, Draw]:
    """How many pixels of the area the mask allows, and how to draw among them.

    What the mask allows is kept as one bit a pixel: 15 MB for a Sentinel-2 scene.
    """
    parts, bits = list(tiles(area)), []
    with Lookup(mask, grid) as lookup:
        for part in parts:
            values, valid = lookup.read(part)
            bits.append(np.packbits((values != 0).all(-1) & valid))
    counts = [int(np.unpackbits(each).sum()) for each in bits]
    ends = np.cumsum(counts)

    def draw(numbers: Ints) -> tuple[Ints, Ints]:
        of_tile = np.searchsorted(ends, numbers, "right")
        rows, cols = np.empty_like(numbers), np.empty_like(numbers)
        for index in np.unique(of_tile):
            mine, tile = of_tile == index, parts[index]
            pixels = np.flatnonzero(np.unpackbits(bits[index]))[numbers[mine] - (ends[index] - counts[index])]
            rows[mine], cols[mine] = pixels // tile.width + tile.row_off, pixels % tile.width + tile.col_off
        return rows, cols

    return int(ends[-1]), draw


def _spread(grid: Grid, draw: Draw, available: int, n: int, distance: float, rng: np.random.Generator) -> Positions:
    """Take random pixels in turn, each if it is far enough from all those taken before.

    Squares whose diagonal is the distance hold one taken point at most, and what is nearer than the distance lies at
    most two squares away: so a look at 25 squares decides, however many points there are.
    """
    side = distance / math.sqrt(2)
    taken: dict[tuple[int, int], tuple[float, float]] = {}
    found: list[tuple[int, int]] = []
    batch = min(available, 4 * n)
    tried = 0
    while len(found) < n:
        rows, cols = draw(rng.choice(available, batch, replace=False))
        x, y = grid.xy(rows, cols)
        squares = np.floor(np.stack([x, y], axis=1) / side).astype(np.int64)
        for row, col, px, py, (a, b) in zip(*(v.tolist() for v in (rows, cols, x, y, squares)), strict=True):
            near = (taken.get((a + i, b + j)) for i in range(-2, 3) for j in range(-2, 3))
            if (a, b) not in taken and all(p is None or math.dist(p, (px, py)) >= distance for p in near):
                taken[a, b] = px, py
                found.append((row, col))
                if len(found) == n:
                    break
        tried += batch
        if len(found) < n and (batch == available or tried >= _TRIES * n):
            raise InputError(
                f"{n} positions at least {distance:.10g} map units apart are wanted, but only {len(found)} were found: "
                "ask for fewer, or for a smaller min_distance."
            )
        batch = min(available, 2 * batch)
    chosen = np.array(found, np.int64)
    return _positions(grid, chosen[:, 0], chosen[:, 1])
