"""Small vector files, written by plain OGR calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ogr = pytest.importorskip("osgeo.ogr")
osr = pytest.importorskip("osgeo.osr")

TYPES = {str: "OFTString", int: "OFTInteger64", float: "OFTReal"}


def write_vector(
    path: Path, rows: Sequence[tuple[str, Any]], field: str = "class", crs: str = "EPSG:32631", *, kind: Any = None,
    layer: str = "things", driver: str = "GPKG", options: Sequence[str] = (),
) -> Path:  # fmt: skip
    """One layer of (WKT, value) rows; a None stays null. The field's type is that of the first value, or ``kind``."""
    reference = None
    if crs:
        reference = osr.SpatialReference()
        reference.SetFromUserInput(crs)
        reference.SetAxisMappingStrategy(osr.OAMS_TRADITIONAL_GIS_ORDER)
    maker = ogr.GetDriverByName(driver)
    dataset = ogr.Open(str(path), 1) if path.exists() else maker.CreateDataSource(str(path))
    made = dataset.CreateLayer(layer, reference, ogr.wkbUnknown, options=list(options))
    value = next((value for _, value in rows if value is not None), "")
    made.CreateField(ogr.FieldDefn(field, getattr(ogr, TYPES[type(value)]) if kind is None else kind))
    for wkt, value in rows:
        feature = ogr.Feature(made.GetLayerDefn())
        if value is not None:
            feature.SetField(made.GetLayerDefn().GetFieldIndex(field), value)
        if wkt:
            feature.SetGeometry(ogr.CreateGeometryFromWkt(wkt))
        made.CreateFeature(feature)
    del feature, made, dataset
    return path


def box(left: float, bottom: float, right: float, top: float) -> str:
    """A rectangle as WKT."""
    return f"POLYGON(({left} {bottom},{right} {bottom},{right} {top},{left} {top},{left} {bottom}))"
