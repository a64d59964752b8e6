"""Points and polygons of a vector file, with classes, in the CRS of a raster; polygons burned window by window."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite._gdal import (
    GdalError,
    call,
    crs_text,
    module,
    open_dataset,
    same_crs,
    sentence,
    session,
    spatial_reference,
    transform_points,
    version,
)
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Window
from otbtf_lite.schema import nearest

_log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_EDGES = 64  # edges of polygons are cut into this many parts for each length of the raster before they are moved
_PROBES = 21  # points a side, with which a raster's extent is looked up in another CRS


@dataclass(frozen=True, eq=False)
class Features:
    """What a layer holds, in its order. Either points or polygons; the other is empty."""

    name: str
    """The file, for messages."""
    labels: Ints | None
    """The class of each point or polygon, shape (n,); None without a field."""
    classes: tuple[str, ...] | None
    """The names of the classes where the field is text: label i is ``classes[i]``."""
    x: Floats
    """Of points: map coordinates in the CRS asked for, shape (n,); infinite where a point has no place in it."""
    y: Floats
    """Likewise."""
    polygons: tuple[bytes | None, ...]
    """Polygons in the CRS asked for, as WKB; None for one that lies away from the raster."""

    def __len__(self) -> int:
        """How many points or polygons there are."""
        return len(self.x) or len(self.polygons)

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where it has none."""
        return str(label) if self.classes is None else self.classes[label]


def read_features(
    path: str | os.PathLike[str], field: str | None, grid: Grid, *, layer: str | int | None = None
) -> Features:
    """Read a layer's points or polygons.

    Features without a geometry or whose class is null are left out, and their number is logged as a warning.

    Args:
        path: a file, or any name that OGR knows.
        field: the field of the class: integers (also stored as reals), which are kept, or text, which is sorted and
            numbered from 0. The name may be that of the feature identifiers (``fid`` in GPKG). None: no classes.
        grid: says in which CRS the geometries are wanted, and where.
        layer: name or number from 0; None: the only one with geometries.

    Raises:
        InputError: no such layer or field, a field of another type, geometries that are neither points nor polygons, or
            only one of the vector and the grid has a CRS.
        DataError: the file can't be read, or a polygon can't be moved into the CRS.
    """
    name = os.fspath(path)
    dataset = open_dataset(name, vector=True)
    try:
        with session():
            return _Reader(name, dataset, layer, field, grid).read()
    except GdalError as error:
        raise DataError(f"{name} can't be read: {error}.") from error
    except RuntimeError as error:
        raise DataError(f"{name} can't be read: {sentence(str(error))}.") from error


class _Reader:
    """One pass over a layer."""

    def __init__(self, name: str, dataset: Any, layer: str | int | None, field: str | None, grid: Grid) -> None:
        self.name = name
        self.dataset = dataset  # whose layers live as long as it does
        self.layer = _layer(name, dataset, layer)
        self.field = field
        self.grid = grid
        self.way, extent = self._way()
        self.left, self.bottom, self.right, self.top = extent

    def _way(self) -> tuple[Any, tuple[float, float, float, float]]:
        """How to transform the layer's geometries (None: not at all), and the raster's extent in the layer's CRS."""
        reference, crs = self.layer.GetSpatialRef(), self.grid.crs
        # GPKG has entries of this name for "no CRS".
        text = "" if reference is not None and reference.GetName().startswith("Undefined") else crs_text(reference)
        if bool(text) != bool(crs):
            named = [text or "no CRS", crs or "no CRS"]
            raise InputError(f"{self.name} has {named[0]} and the raster {named[1]}: give both the same CRS.")
        if not text:
            return None, self.grid.bounds
        # Most drivers give x before y whatever the authority says, but a layer can say that it does not.
        turned = list(reference.GetDataAxisToSRSAxisMapping()) != list(
            spatial_reference(text).GetDataAxisToSRSAxisMapping()
        )
        if same_crs(text, crs) and not turned:
            return None, self.grid.bounds
        rows, cols = np.meshgrid(*(np.linspace(0, size, _PROBES) for size in self.grid.shape))
        x, y = transform_points(*self.grid.xy(rows.ravel(), cols.ravel(), "ul"), crs, text)
        there = np.isfinite(x) & np.isfinite(y)
        if not there.any():
            raise InputError(f"{self.name} is in {text}, in which the raster ({self.grid}) has no place.")
        x, y = (y[there], x[there]) if turned else (x[there], y[there])
        margins = np.ptp(x) / (_PROBES - 1), np.ptp(y) / (_PROBES - 1)
        extent = (x.min() - margins[0], y.min() - margins[1], x.max() + margins[0], y.max() + margins[1])
        way = call(module("osr").CoordinateTransformation, reference, spatial_reference(crs))
        return way, (float(extent[0]), float(extent[1]), float(extent[2]), float(extent[3]))

    def read(self) -> Features:
        ogr = module("ogr")
        value = None if self.field is None else _field(self.name, self.layer, self.field)
        values: list[Any] = []
        points: list[tuple[float, float]] = []
        polygons: list[bytes | None] = []
        empty = unclassed = 0
        for feature in self.layer:
            geometry = feature.GetGeometryRef()
            own = None if value is None else value(feature)
            if geometry is None or geometry.IsEmpty():
                empty += 1
                continue
            if value is not None and own is None:
                unclassed += 1
                continue
            kind = ogr.GT_Flatten(geometry.GetGeometryType())
            if kind in (ogr.wkbPoint, ogr.wkbMultiPoint):
                parts = [geometry.GetGeometryRef(i) for i in range(geometry.GetGeometryCount())] or [geometry]
                points += [(part.GetX(), part.GetY()) for part in parts]
                values += [own] * len(parts)
            elif kind in (ogr.wkbPolygon, ogr.wkbMultiPolygon, ogr.wkbCurvePolygon, ogr.wkbMultiSurface):
                polygons.append(self._polygon(feature.GetFID(), geometry))
                values.append(own)
            else:
                raise InputError(
                    f"{self.name}: feature {feature.GetFID()} is a {geometry.GetGeometryName().lower()}: positions and "
                    "labels come from points or polygons."
                )
        self._report(empty, unclassed, points, polygons)
        x, y = self._moved(points)
        labels, classes = (None, None) if self.field is None else _classes(self.name, self.field, values)
        return Features(self.name, labels, classes, x, y, tuple(polygons))

    def _report(self, empty: int, unclassed: int, points: Sequence[Any], polygons: Sequence[Any]) -> None:
        if empty:
            _log.warning("%s: %d features have no geometry and are left out.", self.name, empty)
        if unclassed:
            _log.warning("%s: %d features have no %s and are left out.", self.name, unclassed, self.field)
        if points and polygons:
            raise InputError(f"{self.name} holds points and polygons: keep them in layers of their own.")
        if not points and not polygons:
            raise InputError(f"{self.name} holds neither a point nor a polygon that can be used.")

    def _polygon(self, number: int, geometry: Any) -> bytes | None:
        """A polygon in the raster's CRS; None if it lies away from the raster."""
        left, right, bottom, top = geometry.GetEnvelope()
        if left > self.right or right < self.left or bottom > self.top or top < self.bottom:
            return None
        if geometry.HasCurveGeometry():
            geometry = geometry.GetLinearGeometry()
        geometry = geometry.Clone()
        geometry.FlattenTo2D()
        if self.way is None:
            return bytes(geometry.ExportToWkb())
        # Only vertices are moved, so edges get more of them: one along a parallel bows by 100 m over 100 km in UTM.
        # What lies far off is cut away first, since projections fold there.
        width, height = self.right - self.left, self.top - self.bottom
        near = (self.left - width, self.bottom - height, self.right + width, self.top + height)
        try:
            if left < near[0] or bottom < near[1] or right > near[2] or top > near[3]:
                geometry = _clipped(geometry, near)
            geometry.Segmentize(max(width, height) / _EDGES)
            failed = call(geometry.Transform, self.way)
        except GdalError as error:
            failed = error
        if failed:
            raise DataError(
                f"{self.name}: feature {number} can't be moved into {self.grid.crs}: mend it, or clip it to the raster."
            )
        return bytes(geometry.ExportToWkb())

    def _moved(self, points: list[tuple[float, float]]) -> tuple[Floats, Floats]:
        plain = np.array(points, np.float64).reshape(-1, 2)
        if self.way is None or not points:
            return plain[:, 0], plain[:, 1]
        reference = self.layer.GetSpatialRef()
        text = crs_text(reference)
        if list(reference.GetDataAxisToSRSAxisMapping()) != list(spatial_reference(text).GetDataAxisToSRSAxisMapping()):
            plain = plain[:, ::-1]
        return transform_points(plain[:, 0], plain[:, 1], text, self.grid.crs)


def _clipped(geometry: Any, extent: tuple[float, float, float, float]) -> Any:
    """What of a polygon lies in a rectangle: polygons alone, not the lines and points that it merely touches.

    Raises:
        GdalError: the polygon is not valid, or this GDAL is built without GEOS.
    """
    ogr = module("ogr")
    left, bottom, right, top = extent
    ring = ogr.Geometry(ogr.wkbLinearRing)
    for x, y in ((left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)):
        ring.AddPoint_2D(x, y)
    rectangle = ogr.Geometry(ogr.wkbPolygon)
    rectangle.AddGeometry(ring)
    found = call(geometry.Intersection, rectangle)
    if found is None:
        raise GdalError("polygons could not be intersected")
    if ogr.GT_Flatten(found.GetGeometryType()) != ogr.wkbGeometryCollection:
        return found
    polygons = ogr.Geometry(ogr.wkbMultiPolygon)
    for index in range(found.GetGeometryCount()):
        part = found.GetGeometryRef(index)
        if ogr.GT_Flatten(part.GetGeometryType()) == ogr.wkbPolygon:
            polygons.AddGeometry(part)
    return polygons


def _layer(name: str, dataset: Any, wanted: str | int | None) -> Any:
    ogr = module("ogr")
    layers = [dataset.GetLayer(i) for i in range(dataset.GetLayerCount())]
    names = [layer.GetName() for layer in layers]
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if not 0 <= wanted < len(layers):
            raise InputError(f"{name} has no layer number {wanted}: it has {len(layers)}, {', '.join(names)}.")
        return layers[wanted]
    if wanted is not None:
        if wanted not in names:
            raise InputError(f"{name} has no layer {wanted!r}{nearest(str(wanted), names)} It has {', '.join(names)}.")
        return layers[names.index(wanted)]
    drawn = [layer for layer in layers if layer.GetGeomType() != ogr.wkbNone]
    if len(drawn) != 1:
        found = ", ".join(layer.GetName() for layer in drawn) or "none"
        raise InputError(f"{name} has {len(drawn)} layers with geometries ({found}): name one with layer=.")
    return drawn[0]


def _field(name: str, layer: Any, field: str) -> Any:
    """A function that gives a feature's value: an integer, a float, text, or None for null."""
    ogr = module("ogr")
    definition = layer.GetLayerDefn()
    names = [definition.GetFieldDefn(i).GetName() for i in range(definition.GetFieldCount())]
    folded = [each.lower() for each in names]
    if field in names or field.lower() in folded:
        index = names.index(field) if field in names else folded.index(field.lower())
        kind = definition.GetFieldDefn(index).GetType()
        getters = {
            ogr.OFTInteger: "GetFieldAsInteger64",
            ogr.OFTInteger64: "GetFieldAsInteger64",
            ogr.OFTReal: "GetFieldAsDouble",
            ogr.OFTString: "GetFieldAsString",
        }
        if kind not in getters:
            raise InputError(
                f"{name}: the field {field} holds {ogr.GetFieldTypeName(kind)} values: classes are integers or text."
            )
        getter = getters[kind]
        return lambda feature: getattr(feature, getter)(index) if feature.IsFieldSetAndNotNull(index) else None
    # The identifiers are no field of OGR's, although GPKG keeps them in a column with a name.
    if layer.GetFIDColumn() and field.lower() == layer.GetFIDColumn().lower():
        return lambda feature: feature.GetFID()
    known = names + [each for each in [layer.GetFIDColumn()] if each]
    raise InputError(f"{name} has no field {field!r}{nearest(field, known)} It has {', '.join(known) or 'none'}.")


def _classes(name: str, field: str, values: list[Any]) -> tuple[Ints, tuple[str, ...] | None]:
    if any(isinstance(value, str) for value in values):
        classes = tuple(sorted(set(values)))
        number = {text: i for i, text in enumerate(classes)}
        return np.array([number[value] for value in values], np.int64), classes
    broken = [value for value in values if value != value // 1]
    if broken:
        raise InputError(f"{name}: the field {field} holds {broken[0]}: classes are integers or text.")
    return np.array([int(value) for value in values], np.int64), None


class Burner:
    """Which polygon each pixel of a grid lies in, window by window: where several do, the last one in the file.

    Args:
        features: polygons in the grid's CRS, see :func:`read_features`.
        grid: the pixels.
        all_touched: a pixel belongs to every polygon that it touches; False: to those that its centre lies in.
    """

    def __init__(self, features: Features, grid: Grid, *, all_touched: bool = False) -> None:
        gdal, ogr = module("gdal"), module("ogr")
        self.grid = grid
        self.features = features
        self._options = ["ATTRIBUTE=number"] + ["ALL_TOUCHED=TRUE"] * all_touched
        driver = gdal.GetDriverByName("MEM" if version() >= (3, 11) else "Memory")
        self._dataset = call(driver.Create, "", 0, 0, 0, gdal.GDT_Unknown)
        self._layer = call(self._dataset.CreateLayer, "polygons", None, ogr.wkbUnknown)
        with session():
            self._layer.CreateField(ogr.FieldDefn("number", ogr.OFTInteger))
            for number, wkb in enumerate(features.polygons):
                if wkb is not None:
                    feature = ogr.Feature(self._layer.GetLayerDefn())
                    feature.SetGeometryDirectly(ogr.CreateGeometryFromWkb(wkb))
                    feature.SetField("number", number)
                    self._layer.CreateFeature(feature)

    def numbers(self, window: Window) -> npt.NDArray[np.int32]:
        """The number of the polygon at each pixel, -1 where there is none; shape (rows, cols)."""
        gdal = module("gdal")
        part = self.grid.window_grid(window)
        raster = call(gdal.GetDriverByName("MEM").Create, "", window.width, window.height, 1, gdal.GDT_Int32)
        call(raster.SetGeoTransform, part.geotransform)
        band = raster.GetRasterBand(1)
        call(band.Fill, -1)
        left, bottom, right, top = part.bounds
        margin = max(part.pixel_size)
        self._layer.SetSpatialFilterRect(left - margin, bottom - margin, right + margin, top + margin)
        try:
            failed = call(gdal.RasterizeLayer, raster, [1], self._layer, options=self._options)
        except GdalError as error:
            raise DataError(f"{self.features.name} can't be burned: {error}.") from error
        if failed:
            raise DataError(f"{self.features.name} can't be burned: GDAL's error code is {failed}.")
        pixels = band.ReadRaster(0, 0, window.width, window.height)
        return np.frombuffer(pixels, np.int32).reshape(window.height, window.width)

    def read(self, window: Window) -> tuple[Ints, Mask]:
        """The class of each pixel (0 without a field), and which pixels have one; both (rows, cols)."""
        numbers = self.numbers(window)
        labels = self.features.labels
        inside = numbers >= 0
        if labels is None:
            return np.zeros(numbers.shape, np.int64), inside
        return np.where(inside, labels[numbers], 0), inside
