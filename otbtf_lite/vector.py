"""Vectors: positions to and from GPKG, or whatever else OGR writes; polygons to label rasters."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from otbtf_lite._features import Burner, read_features
from otbtf_lite._gdal import (
    call,
    crs_text,
    module,
    open_dataset,
    options,
    sentence,
    session,
    spatial_reference,
    transform_points,
)
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.geotiff import RasterWriter
from otbtf_lite.grid import Grid, Positions, concat_positions

__all__ = ["burn", "burned_classes", "concat_positions", "read_positions", "transform_points", "write_positions"]

_log = logging.getLogger(__name__)

_LAYER = "positions"
_CLASSES = "CLASSES"
_DATE = "1970-01-01T00:00:00.000Z"
"""Stored where a format keeps the time of writing: the same rows then always give the same bytes."""

_DRIVERS = {
    ".gpkg": "GPKG",
    ".geojson": "GeoJSON",
    ".json": "GeoJSON",
    ".shp": "ESRI Shapefile",
    ".sqlite": "SQLite",
    ".fgb": "FlatGeobuf",
    ".parquet": "Parquet",
}
"""Drivers, by file name extension, of the formats that keep coordinates and CRS as they are;
https://gdal.org/en/stable/drivers/vector/."""

_LAYER_OPTIONS = {
    "GPKG": ["SPATIAL_INDEX=NO"],  # nothing here searches by place, and not every GDAL can build one
    "GeoJSON": ["COORDINATE_PRECISION=15", "RFC7946=NO"],
    "FlatGeobuf": ["SPATIAL_INDEX=NO"],  # it would sort them
}

_LABEL_TYPES = (np.uint8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)
"""Types of label rasters, the first that fits; without int8, which GDAL before 3.7 takes for uint8."""
_CATEGORY = "CATEGORY_"  # as RasterWriter names them
_BURNED = "burned from "  # how the description of a burned band begins
_BURN_TILE = 1024  # pixels burned at once, on each side


def write_positions(
    positions: Positions, path: str | os.PathLike[str], *, columns: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Write positions as points, one feature each, in their order.

    Columns, where the positions have them: ``label`` (integer), ``class`` (the label's name), ``split``, ``weight``.
    The file appears when it is complete; one that is there is replaced. The same positions give the same bytes (GPKG).

    Args:
        positions: the points.
        path: the file; its extension chooses the format: ``.gpkg``, ``.geojson``, ``.shp``, ``.sqlite``, ``.fgb`` or
            ``.parquet``.
        columns: further columns of text by name, one value for each position.

    Raises:
        InputError: another extension, a format whose driver this GDAL lacks, or a column of another length.
        DataError: the file can't be written.
    """
    target = Path(path)
    extra = {key: [str(value) for value in values] for key, values in (columns or {}).items()}
    for key, values in extra.items():
        if len(values) != len(positions):
            raise InputError(f"The column {key!r} has {len(values)} values for {len(positions)} positions: one each.")
    name = _DRIVERS.get(target.suffix.lower())
    if name is None:
        raise InputError(f"{target} can't be written: positions are kept in files named {', '.join(_DRIVERS)}.")
    driver = module("gdal").GetDriverByName(name)
    if driver is None:
        raise InputError(f"{target} can't be written: this GDAL has no {name} driver, write a .gpkg instead.")
    if not target.parent.is_dir():
        raise DataError(f"{target} can't be written: the folder {target.parent} does not exist.")
    # In a folder of its own, since some formats are several files.
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as error:
        raise DataError(f"{target} can't be written: {error.strerror}.") from error
    try:
        with options(OGR_CURRENT_DATE=_DATE, GDAL_PAM_ENABLED="NO"), session() as failures:
            _write(driver, folder / target.name, positions, extra, _LAYER_OPTIONS.get(name, []))
        if failures:
            raise DataError(f"{target} can't be written: {sentence(failures[-1])}.")
        for file in sorted(folder.iterdir()):
            file.replace(target.parent / file.name)
    except RuntimeError as error:
        raise DataError(f"{target} can't be written: {sentence(str(error))}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(
    driver: Any, file: Path, positions: Positions, extra: Mapping[str, list[str]], layer_options: list[str]
) -> None:
    """Write and close one dataset; failures are exceptions, or reported to the session."""
    ogr = module("ogr")
    dataset = call(driver.Create, str(file), 0, 0, 0, module("gdal").GDT_Unknown)
    reference = spatial_reference(positions.crs) if positions.crs else None
    layer = call(dataset.CreateLayer, _LAYER, reference, ogr.wkbPoint, layer_options)
    if positions.classes is not None:  # all of them, where the format has metadata: some may have no position
        layer.SetMetadataItem(_CLASSES, json.dumps(positions.classes, ensure_ascii=False))
    columns = {**_columns(positions), **{key: (ogr.OFTString, values) for key, values in extra.items()}}
    for name, (kind, _) in columns.items():
        call(layer.CreateField, ogr.FieldDefn(name, kind))
    can_transact = bool(dataset.TestCapability(ogr.ODsCTransactions))
    if can_transact:
        dataset.StartTransaction()
    for index, (x, y) in enumerate(zip(positions.x.tolist(), positions.y.tolist(), strict=True)):
        feature = ogr.Feature(layer.GetLayerDefn())
        point = ogr.Geometry(ogr.wkbPoint)
        point.SetPoint_2D(0, x, y)
        feature.SetGeometryDirectly(point)
        for name, (_, values) in columns.items():
            feature.SetField(name, values[index])
        layer.CreateFeature(feature)
    if can_transact:
        dataset.CommitTransaction()
    del layer, dataset  # which closes the file, and reports what fails meanwhile


def _columns(positions: Positions) -> dict[str, tuple[int, list[Any]]]:
    """The fields to write: OGR's type and the values, by name."""
    ogr = module("ogr")
    columns: dict[str, tuple[int, list[Any]]] = {}
    if positions.label is not None:
        columns["label"] = (ogr.OFTInteger64, positions.label.tolist())
        if positions.classes is not None:
            columns["class"] = (ogr.OFTString, [positions.classes[i] for i in columns["label"][1]])
    if positions.split is not None:
        columns["split"] = (ogr.OFTString, positions.split.tolist())
    if positions.weight is not None:
        columns["weight"] = (ogr.OFTReal, positions.weight.tolist())
    return columns


def read_positions(path: str | os.PathLike[str]) -> Positions:
    """Read points: the first layer's, in its order.

    Columns that are there are taken: ``label``, ``split``, ``weight``, and ``class`` for the labels' names. Without a
    ``label``, the texts in ``class`` are sorted and numbered from 0.

    Args:
        path: a file, or any name that OGR knows.

    Raises:
        DataError: it can't be read, or has features that are no points.
    """
    name = os.fspath(path)
    dataset = open_dataset(name, vector=True)
    try:
        with session():
            return _read(name, dataset)
    except RuntimeError as error:
        raise DataError(f"{name} can't be read: {sentence(str(error))}.") from error
    except InputError as error:
        raise DataError(f"{name} holds no valid positions: {error}") from error


def _read(name: str, dataset: Any) -> Positions:
    ogr = module("ogr")
    layer = dataset.GetLayer(0)
    if layer is None:
        raise DataError(f"{name} has no layer.")
    definition = layer.GetLayerDefn()
    there = {definition.GetFieldDefn(i).GetName().lower(): i for i in range(definition.GetFieldCount())}
    x, y = [], []
    columns: dict[str, list[Any]] = {key: [] for key in ("label", "class", "split", "weight") if key in there}
    for feature in layer:
        point = feature.GetGeometryRef()
        if point is None or ogr.GT_Flatten(point.GetGeometryType()) != ogr.wkbPoint or point.IsEmpty():
            what = "none" if point is None else point.GetGeometryName().lower()
            raise DataError(f"{name}: feature {feature.GetFID()} is no point but {what}: positions are points.")
        x.append(point.GetX())
        y.append(point.GetY())
        for key, values in columns.items():
            values.append(_value(feature, there[key], key))
    labels, classes = _classes(name, columns.get("label"), columns.get("class"))
    table = layer.GetMetadataItem(_CLASSES)
    if labels is not None and table:
        classes = json.loads(table)
    return Positions(
        np.array(x, np.float64),
        np.array(y, np.float64),
        _crs(layer.GetSpatialRef()),
        label=labels,
        split=None if "split" not in columns else np.array(columns["split"], np.str_),
        weight=None if "weight" not in columns else np.array(columns["weight"], np.float64),
        classes=classes,
    )


def _crs(reference: Any) -> str:
    # GPKG has entries of this name for "no CRS".
    return "" if reference is not None and reference.GetName().startswith("Undefined") else crs_text(reference)


def _value(feature: Any, index: int, key: str) -> Any:
    if not feature.IsFieldSetAndNotNull(index):
        return {"label": None, "class": None, "split": "", "weight": np.nan}[key]
    if key == "label":
        return feature.GetFieldAsInteger64(index)
    return feature.GetFieldAsDouble(index) if key == "weight" else feature.GetFieldAsString(index)


def _classes(name: str, labels: list[Any] | None, texts: list[Any] | None) -> tuple[Any, tuple[str, ...] | None]:
    """The labels and the names of the classes, from two columns of which any may be missing."""
    for column, values in (("label", labels), ("class", texts)):
        if values is not None and None in values:
            raise DataError(f"{name}: feature number {values.index(None)} has no {column}: fill it or drop the column.")
    if labels is None:
        classes = tuple(sorted(set(texts))) if texts is not None else None
        return (
            (None, None) if classes is None else (np.array([classes.index(t) for t in texts or ()], np.int64), classes)
        )
    if texts is None:
        return np.array(labels, np.int64), None
    names = dict(zip(labels, texts, strict=True))
    # Classes that no position has leave a gap in the table: their number stands for the name.
    return np.array(labels, np.int64), tuple(names.get(i, str(i)) for i in range(max(names, default=-1) + 1))


class Gridded(Protocol):
    """What has a grid, such as a :class:`~otbtf_lite.RasterSource`."""

    @property
    def grid(self) -> Grid:
        """Where the pixels lie."""


def burn(
    vector: str | os.PathLike[str],
    reference: Grid | Gridded,
    out: str | os.PathLike[str],
    field: str | None = None,
    *,
    layer: str | int | None = None,
    all_touched: bool = False,
    background: int | None = None,
    nodata: int | None = None,
) -> Path:
    """Burn polygons into a label raster: a GeoTIFF on the reference's pixels, for ``RasterSource(categorical=True)``.

    A pixel gets the class of the polygon that its centre lies in, of the last one in the file where there are several.
    The vector's CRS may be another one: edges are straight in it. The raster is burned tile by tile and appears when it
    is complete; the polygons are held in memory. The same polygons give the same bytes.

    Args:
        vector: polygons: a file, or any name that OGR knows.
        reference: a grid, or a raster source, whose pixels the labels shall have.
        out: the file to write; one that is there is replaced.
        field: the field of the class. Integers are burned as they are; text is sorted and numbered from 0, and the
            names are kept in the file as metadata ``CATEGORY_<number>``. Features without a value are left out. None:
            every polygon is 1.
        layer: the layer's name or number from 0; None: the only one with geometries.
        all_touched: a pixel also belongs to the polygons that merely touch it.
        background: the value outside all polygons. None: 0, or where that is a class, one more than the greatest class.
            If it is that of a class, the two can't be told apart, which is logged.
        nodata: the value that the file marks as missing, such as the background's, so that patches without a label
            everywhere are rejected. None: none.

    Returns:
        ``out``. Its element type is the smallest that holds all values: uint8 to uint64, or int16 to int64 if one is
        negative.

    Raises:
        InputError: no polygons, no such layer or field, a field of another type, only one of vector and reference has
            a CRS, or a background or nodata value beyond the type.
        DataError: the vector can't be read or the file can't be written.
    """
    grid = reference if isinstance(reference, Grid) else reference.grid
    features = read_features(vector, field, grid, layer=layer)
    if not features.polygons:
        raise InputError(f"{os.fspath(vector)} holds points: only polygons can be burned.")
    burner = Burner(features, grid, all_touched=all_touched)
    classes = [1] if features.labels is None else np.unique(features.labels).tolist()
    if background is None:
        background = 0 if 0 not in classes else max(classes) + 1
    elif background in classes:
        _log.warning(
            "%s: the background %d is also the class %s: the two can't be told apart.",
            features.name, background, features.class_name(background),
        )  # fmt: skip
    values = [background, *classes] + ([] if nodata is None else [nodata])
    dtype = next((t for t in _LABEL_TYPES if np.iinfo(t).min <= min(values) and max(values) <= np.iinfo(t).max), None)
    if dtype is None:
        raise InputError(f"{os.fspath(out)}: no integer type holds {min(values)} and {max(values)}.")
    names = None if features.classes is None else dict(enumerate(features.classes))
    windows = list(grid.tiles(_BURN_TILE, edges="clip"))
    text = [f"{_BURNED}{Path(vector).name}{'' if field is None else f', {field}'}"]
    with RasterWriter(out, grid, 1, dtype, nodata=nodata, categories=names, descriptions=text) as writer:
        for window in windows:
            labels, inside = burner.read(window)
            burned = np.where(inside, 1 if features.labels is None else labels, background).astype(dtype)
            writer.write(window, burned[..., None])
    return Path(out)


def burned_classes(path: str | os.PathLike[str]) -> dict[int, str] | None:
    """The names of the classes in a raster that :func:`burn` made, by value; empty where they are numbers.

    Returns:
        None for a raster that :func:`burn` did not make.

    Raises:
        DataError: it can't be opened.
    """
    dataset = open_dataset(os.fspath(path))  # held: a band does not keep its dataset alive
    band = dataset.GetRasterBand(1)
    if not band.GetDescription().startswith(_BURNED):
        return None
    items = {key.removeprefix(_CATEGORY): name for key, name in band.GetMetadata().items() if key.startswith(_CATEGORY)}
    return {int(number): name for number, name in sorted(items.items(), key=lambda item: int(item[0]))}
