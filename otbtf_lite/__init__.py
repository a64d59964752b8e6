"""GDAL rasters to training data for TensorFlow, and predictions back onto the map.

Importing this package imports neither TensorFlow nor GDAL: every name is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from otbtf_lite._version import __version__

_MODULES = (
    "codecs", "dataset", "errors", "grid", "inference", "layers", "manifest", "model", "ops", "parallel", "raster",
    "readers", "records", "sampling", "schema", "sharding", "stats", "testing", "tfrecords", "utils", "vector",
)  # fmt: skip

_NAMES = {
    "ArraysReader": "readers",
    "Buffer": "dataset",
    "ConcatReader": "readers",
    "DataError": "errors",
    "Dataset": "dataset",
    "DatasetFromPatchesImages": "dataset",
    "DatasetFromRasters": "dataset",
    "Error": "errors",
    "Grid": "grid",
    "InputError": "errors",
    "IteratorBase": "dataset",
    "MissingDependencyError": "errors",
    "ModelBase": "model",
    "PatchesImagesReader": "dataset",
    "PatchesReaderBase": "readers",
    "Positions": "grid",
    "RandomIterator": "dataset",
    "RasterPatchesReader": "readers",
    "RasterSource": "raster",
    "SequentialIterator": "dataset",
    "Schema": "schema",
    "TFRecords": "tfrecords",
    "Window": "grid",
    "gdal_open": "raster",
    "predict_raster": "inference",
    "read_as_np_arr": "raster",
}

__all__ = ["__version__", *_NAMES]  # noqa: PLE0604  # the names are text


def __getattr__(name: str) -> Any:
    """Loads a public name, or a module of the package, at first use."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    """The public names and modules."""
    return sorted({*globals(), *_NAMES, *_MODULES})
