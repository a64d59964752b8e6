"""Vectors: positions to and from GPKG, or whatever else OGR writes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

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
from otbtf_lite.grid import Positions, concat_positions

__all__ = ["concat_positions", "read_positions", "transform_points", "write_positions"]

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


def write_positions(positions: Positions, path: str | os.PathLike[str]) -> None:
    """Write positions as points, one feature each, in their order.

    Columns, where the positions have them: ``label`` (integer), ``class`` (the label's name), ``split``, ``weight``.
    The file appears when it is complete; one that is there is replaced. The same positions give the same bytes (GPKG).

    Args:
        positions: the points.
        path: the file; its extension chooses the format: ``.gpkg``, ``.geojson``, ``.shp``, ``.sqlite``, ``.fgb`` or
            ``.parquet``.

    Raises:
        InputError: another extension, or a format whose driver this GDAL lacks.
        DataError: the file can't be written.
    """
    target = Path(path)
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
            _write(driver, folder / target.name, positions, _LAYER_OPTIONS.get(name, []))
        if failures:
            raise DataError(f"{target} can't be written: {sentence(failures[-1])}.")
        for file in sorted(folder.iterdir()):
            file.replace(target.parent / file.name)
    except RuntimeError as error:
        raise DataError(f"{target} can't be written: {sentence(str(error))}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(driver: Any, file: Path, positions: Positions, layer_options: list[str]) -> None:
    """Write and close one dataset; failures are exceptions, or reported to the session."""
    ogr = module("ogr")
    dataset = call(driver.Create, str(file), 0, 0, 0, module("gdal").GDT_Unknown)
    reference = spatial_reference(positions.crs) if positions.crs else None
    layer = call(dataset.CreateLayer, _LAYER, reference, ogr.wkbPoint, layer_options)
    if positions.classes is not None:  # all of them, where the format has metadata: some may have no position
        layer.SetMetadataItem(_CLASSES, json.dumps(positions.classes, ensure_ascii=False))
    columns = _columns(positions)
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
