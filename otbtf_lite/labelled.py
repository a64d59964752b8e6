"""Positions with classes, from vectors and from label images; reached through :mod:`otbtf_lite.sampling`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from otbtf_lite import classdraw
from otbtf_lite._features import Burner, Features, read_features
from otbtf_lite.classdraw import ClassPixels, ClassStrategy
from otbtf_lite.errors import InputError
from otbtf_lite.footprints import locate
from otbtf_lite.grid import Grid, Positions, Window, rows_cols
from otbtf_lite.lookup import Lookup
from otbtf_lite.raster import RasterSource
from otbtf_lite.sharding import generator

_log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Labels = str | os.PathLike[str] | RasterSource

_VECTOR_STREAM = 0x766563746F72  # keeps these draws apart from other uses of one seed
_LABEL_STREAM = 0x6C6162656C73


@dataclass(frozen=True)
class ClassStatistics:
    """What there is of one class in a vector's polygons."""

    label: int
    """The class."""
    name: str
    """Its name; the number as text where the field holds numbers."""
    pixels: int
    """Pixels of the raster whose centre lies in a polygon of the class; where polygons overlap, in the last one."""
    objects: int
    """Polygons of the class, wherever they lie."""
    objects_with_pixels: int
    """Those of them that have pixels."""


def class_statistics(
    source: RasterSource, vector: str | os.PathLike[str], field: str, *, layer: str | int | None = None
) -> dict[int, ClassStatistics]:
    """Count pixels and objects of each class of a vector's polygons.

    Args:
        source: the raster whose pixels count.
        vector: polygons, in any CRS.
        field: the field of the class, as in :func:`from_vector`.
        layer: the layer's name or number from 0; None: the only one.

    Returns:
        Statistics by class, in the order of classes.

    Raises:
        InputError: no polygons, no such layer or field, or a field of another type.
        DataError: a file that can't be read.
    """
    features = read_features(vector, field, source.grid, layer=layer)
    if features.labels is None or not features.polygons:
        raise InputError(f"{os.fspath(vector)} holds points: class statistics are those of polygons.")
    burner = Burner(features, source.grid)
    pixels = np.zeros(len(features), np.int64)
    for tile in classdraw.tiles(source.grid.window):
        numbers = burner.numbers(tile)
        pixels += np.bincount(numbers[numbers >= 0], minlength=len(features))
    out = {}
    for label in np.unique(features.labels).tolist():
        own = pixels[features.labels == label]
        name = features.class_name(label)
        out[label] = ClassStatistics(label, name, int(own.sum()), len(own), int(np.count_nonzero(own)))
    return out


def from_vector(
    source: RasterSource,
    vector: str | os.PathLike[str],
    field: str | None = None,
    *,
    layer: str | int | None = None,
    strategy: ClassStrategy = "all",
    n: int | None = None,
    seed: int | None = None,
) -> Positions:
    """Positions at a vector's points, or at pixels inside its polygons.

    Points are taken where they are, in their order, also those outside the raster (``select`` says so of them).
    Polygons give pixel centres of the source, row by row: pixels whose centre lies in a polygon and whose patch lies
    inside the raster, none twice; where polygons overlap, the last one in the file says the class.

    What each class was asked for and what there was is logged; :func:`class_statistics` and :func:`class_quotas`
    give the same in numbers.

    Args:
        source: the raster.
        vector: a file, or any name that OGR knows; another CRS than the source's is transformed.
        field: the field of the class. Integers are the labels; text is sorted and numbered from 0, and the names are
            the positions' ``classes``. Features without a value are left out. None: no labels, and the strategies
            take all as one class.
        layer: the layer's name or number from 0; None: the only one.
        strategy: how many of each class, see :func:`class_quotas`; also of points.
        n: positions of each class for ``"constant"``, positions overall for ``"total"``.
        seed: decides which; needed by every strategy but ``"all"``.

    Returns:
        Positions in the source's CRS.

    Raises:
        InputError: no such layer or field, a field of another type, no point or no pixel in a polygon, only one of
            vector and source has a CRS, or a wrong strategy or ``n``.
        DataError: a file that can't be read.
    """
    classdraw.class_quotas({}, strategy, n)  # wrong arguments are noticed before files are read
    if strategy != "all":
        given_seed(seed)
    rng = generator(0 if seed is None else seed, _VECTOR_STREAM)
    features = read_features(vector, field, source.grid, layer=layer)
    if features.polygons:
        area = patch_area(source.grid, source.patch_size, source_name(source))
        rows, cols, labels = _from_pixels(
            Burner(features, source.grid), area, strategy, n, rng, f"the polygons of {features.name}", features
        )
        x, y = source.grid.xy(rows, cols)
    else:
        x, y, labels = _from_points(features, strategy, n, rng)
    return Positions(x, y, source.grid.crs, label=None if field is None else labels, classes=features.classes)


def _from_points(
    features: Features, strategy: ClassStrategy, n: int | None, rng: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], Ints]:
    placed = np.isfinite(features.x) & np.isfinite(features.y)
    if not placed.all():
        _log.warning(
            "%s: %d points have no place in the raster's CRS and are left out.", features.name, np.sum(~placed)
        )
    labels = np.zeros(len(features), np.int64) if features.labels is None else features.labels
    found, counts = np.unique(labels[placed], return_counts=True)
    if not len(found):
        raise InputError(f"{features.name} has no point that has a place in the raster's CRS.")
    quotas = classdraw.class_quotas(dict(zip(found.tolist(), counts.tolist(), strict=True)), strategy, n)
    _report(quotas, features, f"the points of {features.name}")
    chosen = [
        rng.choice(np.flatnonzero(placed & (labels == label)), quota.drawn, replace=False, shuffle=False)
        for label, quota in quotas.items()
    ]
    order = np.sort(np.concatenate(chosen))
    return features.x[order], features.y[order], labels[order]


def _report(quotas: dict[int, classdraw.Quota], features: Features | None, what: str) -> None:
    if features is None:
        classdraw.report(quotas, {}, what)
    elif features.labels is None:
        classdraw.report(quotas, dict.fromkeys(quotas, "(none)"), what)
    else:
        classdraw.report(quotas, {label: features.class_name(label) for label in quotas}, what)


def _from_pixels(
    pixels: ClassPixels, area: Window, strategy: ClassStrategy, n: int | None, rng: np.random.Generator, what: str,
    features: Features | None = None,
) -> tuple[Ints, Ints, Ints]:  # fmt: skip
    """Rows, columns and labels of the pixels drawn; what was asked for and what there was is logged."""
    counts = classdraw.count(pixels, area)
    available = classdraw.totals(counts)
    if not available:
        raise InputError(f"No pixel whose patch lies inside the raster lies in {what}.")
    quotas = classdraw.class_quotas(available, strategy, n)
    if features is not None and features.labels is not None:  # classes that vanish are named too
        for label in sorted(set(features.labels.tolist()) - set(quotas)):
            quotas[label] = classdraw.Quota(0, 0)
    _report(quotas, features, what)
    return classdraw.draw(pixels, area, counts, quotas, rng)


class LabelPixels:
    """The classes of a label image at the pixels of a grid: nearest neighbour, missing pixels left out.

    A context manager.

    Args:
        labels: the image, of one band of whole numbers.
        grid: whose pixels are asked for.
        nodata: the values to leave out, one or several, instead of what the file says; None: what it says.

    Raises:
        InputError: several bands, or only one of the two has a CRS.
        DataError: the image can't be opened.
    """

    def __init__(self, labels: Labels, grid: Grid, nodata: float | Sequence[float] | None = None) -> None:
        if not isinstance(labels, RasterSource):
            labels = RasterSource(labels, 1, categorical=True)
        if nodata is not None:
            labels = RasterSource(labels.paths, labels.patch_size, bands=labels.bands, nodata=(), categorical=True)
        self.name = source_name(labels)
        self._missing = np.atleast_1d(() if nodata is None else nodata)
        if labels.count != 1:
            raise InputError(f"{self.name} has {labels.count} bands: labels are one, choose it with bands=.")
        self._lookup = Lookup(labels, grid)

    def __enter__(self) -> LabelPixels:  # noqa: PYI034  # typing.Self needs Python 3.11
        """The pixels themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the image."""
        self._lookup.__exit__(None, None, None)

    def read(self, window: Window) -> tuple[Ints, Mask]:
        """Classes (0 where there is none), and where there are any; both (rows, cols).

        Raises:
            InputError: labels that are no whole numbers, or beyond int64.
            DataError: the image can't be read.
        """
        values, there = self._lookup.read(window)
        plane = values[..., 0]
        there &= ~np.isin(plane, self._missing)
        if plane.dtype.kind == "c":
            raise InputError(f"{self.name} holds complex numbers: labels are whole numbers.")
        with np.errstate(invalid="ignore"):
            labels: Ints = np.where(there, plane, 0).astype(np.int64)
        wrong = there & ((plane > np.iinfo(np.int64).max) if plane.dtype == np.uint64 else (labels != plane))
        if wrong.any():
            raise InputError(f"{self.name} holds {plane[wrong][0]}: labels are whole numbers within int64.")
        return labels, there


def from_labels(
    source: RasterSource,
    labels: Labels,
    *,
    seed: int,
    strategy: ClassStrategy = "smallest",
    n: int | None = None,
    nodata: float | Sequence[float] | None = None,
) -> Positions:
    """Positions at pixels drawn from a label image, with its classes.

    A pixel of the source can be drawn if its patch lies inside the raster and its centre in a valid pixel of the label
    image, which says the class: of any CRS and resolution, nearest neighbour. The image is read twice, tile by tile.
    What each class was asked for and what there was is logged.

    Args:
        source: the raster.
        labels: the label image, of one band of whole numbers.
        seed: decides which; the same on every machine.
        strategy: how many of each class, see :func:`class_quotas`.
        n: positions of each class for ``"constant"``, positions overall for ``"total"``.
        nodata: the value or values to leave out, instead of what the file says; ``()``: none. None: what it says.

    Returns:
        Positions at pixel centres, row by row, with labels.

    Raises:
        InputError: no labelled pixel, labels that are no whole numbers, a patch larger than the raster, or a wrong
            strategy or ``n``.
        DataError: a file that can't be read.
    """
    classdraw.class_quotas({}, strategy, n)
    rng = generator(given_seed(seed), _LABEL_STREAM)
    area = patch_area(source.grid, source.patch_size, source_name(source))
    with LabelPixels(labels, source.grid, nodata) as pixels:
        rows, cols, drawn = _from_pixels(pixels, area, strategy, n, rng, f"the labels of {pixels.name}")
    return Positions(*source.grid.xy(rows, cols), source.grid.crs, label=drawn)


def groups_of(
    positions: Positions,
    source: RasterSource,
    vector: str | os.PathLike[str],
    field: str,
    *,
    layer: str | int | None = None,
) -> Ints:
    """The group of each position, for ``split(..., strategy="groups", groups=...)``: an attribute of the polygon there.

    Args:
        positions: where.
        source: the raster; the polygon at the centre of a position's pixel counts.
        vector: polygons, in any CRS, such as the fields of a survey.
        field: the attribute: integers or text, as in :func:`from_vector`.
        layer: the layer's name or number from 0; None: the only one.

    Returns:
        (n,) int64: the attribute, or the number of its text; a position in no polygon is a group of its own, below all
        others.

    Raises:
        InputError: no polygons, no such layer or field, or a field of another type.
        DataError: a file that can't be read.
    """
    features = read_features(vector, field, source.grid, layer=layer)
    if features.labels is None or not features.polygons:
        raise InputError(f"{os.fspath(vector)} holds points: groups are those of polygons.")
    burner = Burner(features, source.grid)
    least = min(int(features.labels.min()), 0)
    groups = least - 1 - np.arange(len(positions), dtype=np.int64)
    x, y = locate(positions, source.grid.crs)
    placed = np.isfinite(x) & np.isfinite(y)
    row, col = source.grid.rowcol(np.where(placed, x, 0.0), np.where(placed, y, 0.0))
    for tile in classdraw.tiles(source.grid.window):
        below, right = row - tile.row_off, col - tile.col_off
        mine = np.flatnonzero(placed & (below >= 0) & (below < tile.height) & (right >= 0) & (right < tile.width))
        if len(mine):
            labels, inside = burner.read(tile)
            at = below[mine], right[mine]
            groups[mine] = np.where(inside[at], labels[at], groups[mine])
    return groups


def patch_area(grid: Grid, patch_size: int | Sequence[int], name: str) -> Window:
    """The pixels whose patch lies inside the raster.

    Raises:
        InputError: a patch larger than the raster.
    """
    rows, cols = rows_cols(patch_size, "patch_size")
    if rows > grid.height or cols > grid.width:
        raise InputError(
            f"A patch of {rows} x {cols} pixels (rows x cols) is larger than {name}, which has "
            f"{grid.height} x {grid.width}."
        )
    return Window(cols // 2, rows // 2, grid.width - cols + 1, grid.height - rows + 1)


def given_seed(seed: int | None) -> int:
    """The seed.

    Raises:
        InputError: there is none.
    """
    if seed is None:
        raise InputError("Sampling needs a seed, so that it can be repeated: give an integer.")
    return seed


def source_name(source: RasterSource) -> str:
    """What to call a source in a message: its files."""
    return ", ".join(map(str, source.paths))
