"""Statistics and class counts of what lies on disk: directories of records, and rasters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from otbtf_lite.errors import DataError
from otbtf_lite.grid import Window
from otbtf_lite.raster import RasterSource
from otbtf_lite.records import decode_example
from otbtf_lite.shards import Finished, open_finished, shard_records
from otbtf_lite.stats import Summary
from otbtf_lite.storage import Directory

_WINDOW_BYTES = 16 << 20


def of_records(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The statistics of a directory of records.

    Args:
        path: the directory.

    Returns:
        ``statistics`` and ``class_counts`` by key, each where there are any, as :meth:`Summary.to_json` gives them:
        from the manifest, which knows what was missing and what is categorical. Where it has none (OTBTF's directories
        have no manifest at all), all records are read and every value counts.

    Raises:
        DataError: there are no finished records, or one is damaged.
    """
    found = open_finished(Directory(path))
    known = {} if found.manifest is None else found.manifest.details
    kept = {name: known[name] for name in ("statistics", "class_counts") if isinstance(known.get(name), Mapping)}
    return kept or _computed(found).to_json()


def _computed(found: Finished) -> Summary:
    summary = Summary()
    for name, compression in zip(found.names, found.compressions, strict=True):
        for number, record in enumerate(shard_records(found.directory, name, compression, found.schema)):
            try:
                sample = decode_example(found.schema, record.data)
            except DataError as error:
                raise DataError(f"{found.directory.path(name)}: record {number} {error}.") from error
            for key, array in sample.items():
                summary.update(key, array)
    return summary


def of_raster(source: RasterSource, key: str = "raster") -> Summary:
    """The statistics of a whole raster, read once in windows of about 16 MB; pixels without data are left out.

    Args:
        source: the raster; one that is categorical has its classes counted.
        key: what it is called in the summary.

    Raises:
        DataError: it can't be read.
    """
    summary = Summary()
    with source.open() as reader:
        for window in _windows(source):
            pixels = reader.read(window)
            valid = reader.valid(window, pixels)
            summary.update(key, pixels, None if valid.all() else valid, categorical=source.categorical)
    return summary


def _windows(source: RasterSource) -> Iterator[Window]:
    """Windows that cover a raster, each of whole blocks where these are small."""
    rows, cols, bands = source.shape
    block_rows, block_cols = source.block_shape
    pixel = bands * source.dtype.itemsize
    width = min(cols, max(1, _WINDOW_BYTES // (block_rows * block_cols * pixel)) * block_cols)
    height = max(1, _WINDOW_BYTES // (width * pixel))
    height = min(rows, max(1, height // block_rows) * block_rows)
    for row in range(0, rows, height):
        for col in range(0, cols, width):
            yield Window(col, row, min(width, cols - col), min(height, rows - row))
