"""The open files of a raster source: what they hold, and reading windows of them; part of `raster`.

GDAL's bands become (rows, cols, bands) here and nowhere else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite._gdal import (
    band_dtype,
    call,
    crs_text,
    gdal_type,
    is_signed_byte,
    module,
    open_dataset,
    same_crs,
    sentence,
    session,
)
from otbtf_lite._spec import Number, RasterSpec, plain_numbers
from otbtf_lite._warp import warped
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import MEETS_TOLERANCE, Grid, Window

_IDENTITY = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
_MASK_ALL_VALID, _MASK_PER_DATASET, _MASK_BY_ALPHA, _MASK_BY_NODATA = 1, 2, 4, 8  # GMF_* of gdal.h


@dataclass(frozen=True, kw_only=True)
class RasterInfo:
    """What the files of a source say about themselves."""

    width: int
    height: int
    crs: str
    geotransform: tuple[float, float, float, float, float, float]
    georeferencing: str
    """``"geotransform"``, ``"none"``, or what there is instead: ``"gcps"``, ``"rpcs"``, ``"geolocation"``."""
    count: int
    dtype: np.dtype[Any]
    """What reading returns."""
    block_shape: tuple[int, int]
    """(rows, cols) of the blocks that the files are stored in."""
    nodata: tuple[Number | None, ...] | None
    """Per band the value that marks missing pixels; None where no band has one."""


@dataclass
class _Run:
    """Bands of one file and one type that lie side by side in the result: one GDAL call reads them."""

    path: str
    dataset: Any
    dtype: np.dtype[Any]
    signed_byte: bool
    start: int
    """Index of the first of them in the result."""
    bands: list[int] = field(default_factory=list)
    """GDAL's band numbers, from 1."""
    nodata: list[Number | None] = field(default_factory=list)
    scale: list[float] = field(default_factory=list)
    offset: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Files:
    """What is open. Whoever reads holds it meanwhile, so that closing in another thread takes nothing away."""

    runs: list[_Run]
    masks: list[tuple[str, Any]]
    """Bands that are 0 where pixels are missing, with the name of their file."""
    datasets: list[Any]
    """Kept because a GDAL band does not keep its dataset alive."""


class OpenedRaster:
    """The open files of a source; for one thread of one process.

    Args:
        spec: what to read.
        max_block_bytes: the largest block that may be decoded.
        datasets: the files, where they are open already.

    Raises:
        DataError: a file that can't be opened, has no bands, or declares a larger block.
        InputError: files on different grids, bands that are not there, a dtype that can't hold the values.
    """

    def __init__(self, spec: RasterSpec, max_block_bytes: int, datasets: Sequence[Any] | None = None) -> None:
        self.spec = spec
        self.pid = os.getpid()
        """The process that may use it."""
        self._files: _Files | None = None
        with session():
            try:
                self.info = self._open(datasets or [open_dataset(path) for path in spec.paths], max_block_bytes)
            except RuntimeError as error:  # damage that GDAL meets only when asked for details
                raise DataError(f"{spec.name} can't be read: {sentence(str(error))}.") from error
        self._type = gdal_type(self.info.dtype)

    def _open(self, datasets: Sequence[Any], max_block_bytes: int) -> RasterInfo:
        spec = self.spec
        for path, dataset in zip(spec.paths, datasets, strict=True):
            _check_file(path, dataset, max_block_bytes)
        grids = [_georeferencing(path, dataset) for path, dataset in zip(spec.paths, datasets, strict=True)]
        for path, other in zip(spec.paths[1:], grids[1:], strict=True):
            if not _same_grid(grids[0][0], other[0]):
                raise InputError(
                    f"{spec.paths[0]} ({grids[0][0]}) and {path} ({other[0]}) are on different grids, so they can't be "
                    "stacked as bands of one source: make them sources of their own."
                )
        runs = _runs(spec, datasets)
        masks = {} if spec.nodata is not None else {key: m for run in runs for key, m in _mask_bands(run).items()}
        self._files = files = _Files(runs, [(path, band) for (path, _), band in masks.items()], list(datasets))
        grid, how = grids[0]
        if spec.view is not None:
            self._files = files = _warped_files(spec, spec.view, files, grid.crs)
            grid, how = spec.view, "geotransform"
        nodata = tuple(value for run in runs for value in run.nodata)
        cols, rows = files.runs[0].dataset.GetRasterBand(runs[0].bands[0]).GetBlockSize()
        return RasterInfo(
            width=grid.width,
            height=grid.height,
            crs=grid.crs,
            geotransform=grid.geotransform,
            georeferencing=how,
            count=sum(len(run.bands) for run in runs),
            dtype=_result_dtype(spec, runs),
            block_shape=(min(rows, grid.height), min(cols, grid.width)),
            nodata=nodata if any(value is not None for value in nodata) else None,
        )

    def close(self) -> None:
        """Let go of the files. A read under way in another thread still ends well, or finds them closed."""
        self._files = None

    def _held(self) -> _Files:
        files = self._files
        if files is None:
            raise InputError(f"{self.spec.name} was closed while it was to be read.")
        return files

    def read(self, window: Window, out: npt.NDArray[Any]) -> None:
        """Read a window, which must lie inside, into an array of its shape (rows, cols, bands) and of the right dtype.

        Raises:
            DataError: the file can't be read there.
        """
        flat = None if self._type is None or self.spec.scaled else _flat(out)
        row_step, col_step, band_step = out.strides
        for run in self._held().runs:
            if flat is not None and (not run.signed_byte or out.dtype == np.int8):
                kind = module("gdal").GDT_Byte if run.signed_byte else self._type
                first = run.start * band_step // out.itemsize
                self._read(run, window, flat[first:], kind, (col_step, row_step, band_step))
                continue
            part = out[:, :, run.start : run.start + len(run.bands)]
            if self.spec.scaled:
                part[...] = self._scaled(run, window)
            else:
                part[...] = _convert(self._values(run, window), out.dtype)

    def valid(self, window: Window, pixels: npt.NDArray[Any] | None = None) -> npt.NDArray[np.bool_]:
        """Where a window, which must lie inside, has a value in every band: (rows, cols), True = valid.

        Args:
            window: which pixels.
            pixels: what :meth:`read` gave for it, which saves reading once more what they tell; None: not known.

        Raises:
            DataError: the file can't be read there.
        """
        valid, files = np.ones(window.shape, np.bool_), self._held()
        for run in files.runs:
            markers = _markers(run)
            if run.dtype.kind in "fc" or any(marker is not None for marker in markers):
                as_stored = pixels is not None and pixels.dtype == run.dtype and not self.spec.scaled
                values = (
                    pixels[:, :, run.start : run.start + len(run.bands)]
                    if pixels is not None and as_stored
                    else self._values(run, window)
                )
                valid &= ~_missing(values, markers).any(axis=2)
        for path, band in files.masks:
            mask = np.empty(window.shape, np.uint8 if band.DataType == module("gdal").GDT_Byte else np.float64)
            self._read_band(path, band, window, mask)
            valid &= mask != 0
        return valid

    def _scaled(self, run: _Run, window: Window) -> npt.NDArray[np.float64]:
        raw = self._values(run, window)
        values = raw * np.array(run.scale) + np.array(run.offset)
        values[_missing(raw, _markers(run))] = np.nan
        return np.asarray(values)

    def _values(self, run: _Run, window: Window) -> npt.NDArray[Any]:
        """The values as the file has them: (rows, cols, bands of the run), of the run's dtype."""
        values = np.empty((*window.shape, len(run.bands)), run.dtype)
        kind = module("gdal").GDT_Byte if run.signed_byte else gdal_type(run.dtype)
        row_step, col_step, band_step = values.strides
        self._read(run, window, values, kind, (col_step, row_step, band_step))
        return values

    def _read(
        self, run: _Run, window: Window, buffer: npt.NDArray[Any], kind: int | None, steps: tuple[int, int, int]
    ) -> None:
        col, row, width, height = window.col_off, window.row_off, window.width, window.height
        arguments = (col, row, width, height, width, height, kind, run.bands, *steps)
        _read_raster(run.dataset, arguments, buffer, run.path, window)

    def _read_band(self, path: str, band: Any, window: Window, out: npt.NDArray[Any]) -> None:
        col, row, width, height = window.col_off, window.row_off, window.width, window.height
        _read_raster(band, (col, row, width, height, width, height, gdal_type(out.dtype)), out, path, window)


def _read_raster(source: Any, arguments: tuple[Any, ...], buffer: npt.NDArray[Any], path: str, window: Window) -> None:
    """``ReadRaster`` of a dataset or band; the hot path, so less careful about side effects than `call`."""
    gdal = module("gdal")
    gdal.PushErrorHandler("CPLQuietErrorHandler")
    try:
        if source.ReadRaster(*arguments, buf_obj=buffer) is not None:
            return
        message = gdal.GetLastErrorMsg()
    except RuntimeError as error:
        message = str(error)
    finally:
        gdal.PopErrorHandler()
    rows = f"{window.row_off} to {window.row_off + window.height - 1}"
    cols = f"{window.col_off} to {window.col_off + window.width - 1}"
    raise DataError(f"{path} can't be read at rows {rows}, columns {cols}: {sentence(message)}.")


def _flat(out: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The memory of an array as one row of elements for GDAL to step through, or None where GDAL would refuse it."""
    if not out.flags.aligned:
        return None
    if out.flags.c_contiguous:
        return out.reshape(-1)
    if any(step <= 0 or step % out.itemsize for step in out.strides):
        return None
    last = sum((n - 1) * step for n, step in zip(out.shape, out.strides, strict=True)) // out.itemsize
    return np.lib.stride_tricks.as_strided(out[0, 0], (last + 1,), (out.itemsize,))


# --------------------------------------------------------------------------------------------- what the files say


def _check_file(path: str, dataset: Any, max_block_bytes: int) -> None:
    if not dataset.RasterCount:
        inside = [name for name, _ in dataset.GetSubDatasets()]
        if inside:
            shown = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
            raise DataError(f"{path} is a container of {len(inside)} rasters: name one of them instead: {shown}.")
        raise DataError(f"{path} has no raster bands.")
    band = dataset.GetRasterBand(1)
    cols, rows = band.GetBlockSize()
    # Blocks of pixel-interleaved files hold all bands.
    bands = dataset.RasterCount if dataset.GetMetadataItem("INTERLEAVE", "IMAGE_STRUCTURE") == "PIXEL" else 1
    size = cols * rows * bands * math.ceil(module("gdal").GetDataTypeSize(band.DataType) / 8)
    if size > max_block_bytes:
        raise DataError(
            f"{path} is stored in blocks of {rows} x {cols} (rows, cols), {size:,} bytes each, of which the smallest "
            f"patch needs a whole one: more than the {max_block_bytes:,} bytes allowed. Rewrite it in tiles "
            "(gdal_translate -co TILED=YES) or raise otbtf_lite.raster.MAX_BLOCK_BYTES."
        )


def _georeferencing(path: str, dataset: Any) -> tuple[Grid, str]:
    """The grid of a file, and what ties it to the map."""
    geotransform = tuple(dataset.GetGeoTransform(can_return_null=True) or _IDENTITY)
    how = "geotransform"
    if geotransform == _IDENTITY:
        others = (
            (dataset.GetGCPCount(), "gcps"),
            (dataset.GetMetadata("RPC"), "rpcs"),
            (dataset.GetMetadata("GEOLOCATION"), "geolocation"),
        )
        how = next((name for there, name in others if there), "none")
    try:
        return Grid(crs_text(dataset.GetSpatialRef()), geotransform, dataset.RasterXSize, dataset.RasterYSize), how
    except InputError as error:
        raise DataError(f"{path}: {error}") from error


def _same_grid(a: Grid, b: Grid) -> bool:
    if a.shape != b.shape or not same_crs(a.crs, b.crs):
        return False
    corners = np.array([0, 0, a.height, a.height]), np.array([0, a.width, 0, a.width])
    row, col = a.fractional_rowcol(*b.xy(*corners, "ul"))
    return bool(max(abs(row - corners[0]).max(), abs(col - corners[1]).max()) <= MEETS_TOLERANCE)


def _runs(spec: RasterSpec, datasets: Sequence[Any]) -> list[_Run]:
    """The bands to read, in order, cut where the file or the type changes."""
    stacked = [(path, ds, b + 1) for path, ds in zip(spec.paths, datasets, strict=True) for b in range(ds.RasterCount)]
    chosen = spec.bands or tuple(range(1, len(stacked) + 1))
    missing = [b for b in chosen if b > len(stacked)]
    if missing:
        raise InputError(f"Band {missing[0]} is asked of {spec.name}, which has bands 1 to {len(stacked)}.")
    given = spec.nodata
    if given is not None and len(given) > 1 and len(given) != len(chosen):
        raise InputError(f"{spec.name} has {len(chosen)} bands but nodata has {len(given)} values: give one or each.")
    runs: list[_Run] = []
    for index, number in enumerate(chosen):
        path, dataset, band_number = stacked[number - 1]
        band = dataset.GetRasterBand(band_number)
        try:
            dtype = band_dtype(band)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        if not runs or runs[-1].dataset is not dataset or runs[-1].dtype != dtype:
            runs.append(_Run(path, dataset, dtype, is_signed_byte(band), index))
        run = runs[-1]
        run.bands.append(band_number)
        if given is None:
            run.nodata.append(_file_nodata(band))
        else:
            value = given[index if len(given) > 1 else 0] if given else None
            if value is not None and _marker(value, dtype) is None:
                raise InputError(f"nodata={value} is given for {path}, whose {dtype} bands can't hold it.")
            run.nodata.append(value)
        scale, offset = band.GetScale(), band.GetOffset()
        run.scale.append(1.0 if scale is None else scale)
        run.offset.append(0.0 if offset is None else offset)
    return runs


def _warped_files(spec: RasterSpec, view: Grid, files: _Files, crs: str) -> _Files:
    """Each file replaced by its view on a grid, whose last band tells where the file has something."""
    views: dict[str, Any] = {}
    for run in files.runs:
        if run.path in views:
            continue
        if run.signed_byte:
            raise InputError(f"{run.path} holds int8, which GDAL before 3.7 can't warp: a newer GDAL can.")
        dataset = run.dataset
        nodata = [_file_nodata(dataset.GetRasterBand(number + 1)) for number in range(dataset.RasterCount)]
        if spec.nodata is not None:
            nodata = [spec.nodata[0] if spec.nodata else None] * dataset.RasterCount
        for other in files.runs:
            if other.dataset is dataset:
                for number, value in zip(other.bands, other.nodata, strict=True):
                    nodata[number - 1] = value
        views[run.path] = warped(dataset, run.path, view, spec.method, nodata, crs)
    return _Files(
        [replace(run, dataset=views[run.path]) for run in files.runs],
        [(path, dataset.GetRasterBand(dataset.RasterCount)) for path, dataset in views.items()],
        list(views.values()),
    )


def _result_dtype(spec: RasterSpec, runs: Sequence[_Run]) -> np.dtype[Any]:
    kinds = [run.dtype for run in runs]
    is_complex = any(kind.kind == "c" for kind in kinds)
    if spec.scaled:
        if is_complex:
            raise InputError(f"scaled=True is for real values; {spec.name} holds complex ones: leave it out.")
        small = all(kind.itemsize <= 2 or kind == np.float32 for kind in kinds)
        return spec.dtype or np.dtype(np.float32 if small else np.float64)
    common = np.result_type(*kinds)
    if spec.dtype is None:
        if common.kind == "f" and any(kind.kind in "iu" and kind.itemsize == 8 for kind in kinds):
            raise InputError(
                f"{spec.name} has bands of {sorted(map(str, set(kinds)))}, which no one type holds: give dtype."
            )
        return common
    if is_complex and spec.dtype.kind != "c":
        raise InputError(
            f"{spec.name} holds complex values, which {spec.dtype} can't: read it as complex (leave dtype out) or make "
            "amplitude and phase rasters of it first."
        )
    return spec.dtype


# ------------------------------------------------------------------------------------------------- missing pixels


def _file_nodata(band: Any) -> Number | None:
    """The value that a band declares as missing; None where there is none, or where the band can't hold it."""
    value = band.GetNoDataValue()
    if value is None or _marker(value, band_dtype(band)) is None:
        return None
    return plain_numbers(value)[0]


def _markers(run: _Run) -> list[Any]:
    return [None if value is None else _marker(value, run.dtype) for value in run.nodata]


def _marker(value: Number, dtype: np.dtype[Any]) -> Any:
    """A nodata value as pixels of a dtype hold it, or None where they can't."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not math.isfinite(value) or value != int(value) or not limits.min <= value <= limits.max:
            return None
        return dtype.type(int(value))
    with np.errstate(over="ignore"):  # -1.8e308 in a float32 file: its pixels are infinite too
        return dtype.type(value)


def _missing(values: npt.NDArray[Any], markers: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Which values are NaN or their band's marker."""
    missing = np.isnan(values) if values.dtype.kind in "fc" else np.zeros(values.shape, np.bool_)
    for index, marker in enumerate(markers):
        if marker is not None:
            missing[..., index] |= values[..., index] == marker
    return missing


def _mask_bands(run: _Run) -> dict[tuple[str, int], Any]:
    """Alpha and mask bands that go with a run's bands, by file and number (a mask: minus its band's, or 0)."""
    dataset, masks = run.dataset, {}
    for number in range(1, dataset.RasterCount + 1):
        band = dataset.GetRasterBand(number)
        if band.GetColorInterpretation() == module("gdal").GCI_AlphaBand:
            masks[run.path, number] = band
    for number in run.bands:
        band = dataset.GetRasterBand(number)
        flags = band.GetMaskFlags()
        # A mask made of nodata values alone says no more than the values, nor one made of the alpha band.
        if flags != _MASK_BY_NODATA and not flags & (_MASK_ALL_VALID | _MASK_BY_ALPHA):
            # One mask of the whole file is the same for every band.
            masks[run.path, 0 if flags & _MASK_PER_DATASET else -number] = call(band.GetMaskBand)
    return masks


def _convert(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values as another dtype as GDAL does it: integers are rounded, half away from zero, and clipped to the range."""
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    # Only where GDAL has no int8, so one of the two is that: float64 holds all values that matter.
    whole = np.nan_to_num(values.astype(np.float64))
    limits = np.iinfo(dtype)
    return np.trunc(whole + np.copysign(0.5, whole)).clip(limits.min, limits.max).astype(dtype)
