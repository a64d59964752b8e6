"""Writing GeoTIFFs window by window; reached as `raster.RasterWriter` and `raster.write_raster`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite._gdal import GdalError, call, gdal_type, module, options, session, spatial_reference, version
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Window

_IDENTITY = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
_SIDECARS = (".aux.xml", ".ovr", ".msk")
"""What GDAL keeps beside a raster: it belongs to the old file, and would be read with the new one."""


class RasterWriter:
    """Writes a tiled, DEFLATE-compressed GeoTIFF.

    The file is written under a temporary name in the same folder and gets its own on a clean exit of the ``with``
    block; on an exception it is removed and what was there before stays. Nothing is left beside it: no ``.aux.xml``.
    For one thread.

    Args:
        path: the file to write; one that is there is replaced.
        grid: size, geotransform and CRS.
        count: how many bands.
        dtype: element type of the file.
        nodata: the value that marks missing pixels; None: none does.
        colors: ``{value: (red, green, blue)}`` from 0 to 255, for one band of uint8 or uint16; alpha may follow, but
            the format keeps none.
        descriptions: a name for each band.
        categories: ``{value: name}``: written as metadata ``CATEGORY_<value>`` of the first band, since GDAL's own
            category names would need an ``.aux.xml``.

    Raises:
        InputError: a type that GDAL can't write, or nodata, colours or names that do not fit.
        DataError: the folder is missing or can't be written to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        grid: Grid,
        count: int,
        dtype: npt.DTypeLike,
        *,
        nodata: float | None = None,
        colors: Mapping[int, Sequence[int]] | None = None,
        descriptions: Sequence[str] | None = None,
        categories: Mapping[int, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.grid = grid
        self.count = int(count)
        self.dtype = np.dtype(np.uint8 if np.dtype(dtype) == np.bool_ else dtype).newbyteorder("=")
        if self.count < 1:
            raise InputError(f"{self.path}: a raster has at least one band, got {count}.")
        if descriptions is not None and len(descriptions) != self.count:
            raise InputError(f"{self.path}: {len(descriptions)} descriptions are given for {self.count} bands.")
        _check_nodata(self.path, self.dtype, nodata)
        _check_colors(self.path, self.dtype, self.count, colors)
        self._type = module("gdal").GDT_Byte if self._is_signed_byte else gdal_type(self.dtype)
        if self._type is None:
            raise InputError(f"{self.path}: this GDAL can't write {self.dtype}, convert the array (to float32, say).")
        if not self.path.parent.is_dir():
            raise DataError(f"{self.path} can't be written: the folder {self.path.parent} does not exist.")
        self._dataset: Any = self._create()
        try:
            self._set_up(nodata, colors or {}, descriptions or (), categories or {})
        except GdalError as error:
            self.abort()
            raise DataError(f"{self.path} can't be written: {error}.") from error
        except BaseException:
            self.abort()
            raise

    @property
    def _is_signed_byte(self) -> bool:
        return self.dtype == np.int8 and version() < (3, 7)

    def _create(self) -> Any:
        creation = ["TILED=YES", "COMPRESS=DEFLATE", "BIGTIFF=IF_SAFER", "INTERLEAVE=PIXEL"]
        if self.dtype.kind in "iu" and self.dtype.itemsize <= 4:
            creation.append("PREDICTOR=2")
        elif self.dtype.kind == "f" and self.dtype.itemsize >= 4:
            creation.append("PREDICTOR=3")
        if self._is_signed_byte:
            creation.append("PIXELTYPE=SIGNEDBYTE")
        try:
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".tmp", dir=self.path.parent)
            os.close(handle)
            mask = os.umask(0)  # mkstemp makes files private; this one shall be as any other
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
        except OSError as error:
            raise DataError(f"{self.path} can't be written: {error.strerror}.") from error
        self._temporary = Path(name)
        driver = module("gdal").GetDriverByName("GTiff")
        size = (self.grid.width, self.grid.height)
        try:
            with options(GDAL_PAM_ENABLED="NO"):
                return call(driver.Create, name, *size, self.count, self._type, creation)
        except GdalError as error:
            self._temporary.unlink(missing_ok=True)
            raise DataError(f"{self.path} can't be written: {error}.") from error

    def _set_up(
        self,
        nodata: float | None,
        colors: Mapping[int, Sequence[int]],
        descriptions: Sequence[str],
        categories: Mapping[int, str],
    ) -> None:
        gdal, dataset = module("gdal"), self._dataset
        with options(GDAL_PAM_ENABLED="NO"):
            # An identity geotransform is what a raster without any has.
            if self.grid.crs or self.grid.geotransform != _IDENTITY:
                call(dataset.SetGeoTransform, self.grid.geotransform)
            if self.grid.crs:
                call(dataset.SetSpatialRef, spatial_reference(self.grid.crs))
            first = dataset.GetRasterBand(1)
            if colors:
                table = gdal.ColorTable()
                for value, color in colors.items():
                    table.SetColorEntry(int(value), tuple(int(c) for c in color))
                call(first.SetColorTable, table)
            for number, text in enumerate(descriptions, start=1):
                dataset.GetRasterBand(number).SetDescription(str(text))
            for value, text in categories.items():
                first.SetMetadataItem(f"CATEGORY_{int(value)}", str(text))
            if nodata is not None:
                marker = int(nodata) if self.dtype.kind in "iu" else float(nodata)
                for number in range(1, self.count + 1):
                    call(dataset.GetRasterBand(number).SetNoDataValue, marker)

    def __enter__(self) -> RasterWriter:  # noqa: PYI034  # typing.Self needs Python 3.11
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the file, or remove it after an exception."""
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, window: Window, array: npt.NDArray[Any]) -> None:
        """Write the pixels of a window.

        Args:
            window: where; it must lie inside the grid.
            array: (rows, cols, bands). Another type is converted where that keeps the values (floats may lose digits).

        Raises:
            InputError: the window, the shape or a value does not fit, or the writer is closed.
            DataError: the file can't be written.
        """
        if self._dataset is None:
            raise InputError(f"{self.path} is closed: nothing more can be written to it.")
        if not window.is_inside(self.grid.width, self.grid.height):
            raise InputError(
                f"{window} reaches beyond {self.path}, which has {self.grid.width} columns and {self.grid.height} rows."
            )
        if array.shape != (*window.shape, self.count):
            raise InputError(
                f"{self.path}: an array for {window} has the shape {(*window.shape, self.count)}, got {array.shape}."
            )
        pixels = np.ascontiguousarray(self._converted(array))
        col_step, band_step = self.count * self.dtype.itemsize, self.dtype.itemsize
        box = (window.col_off, window.row_off, window.width, window.height)
        bands, steps = list(range(1, self.count + 1)), (col_step, window.width * col_step, band_step)
        buffer = pixels.reshape(-1).view(np.uint8)
        self._do(self._dataset.WriteRaster, *box, buffer, *box[2:], self._type, bands, *steps)

    def _do(self, function: Callable[..., Any], *args: Any) -> None:
        """Call GDAL where any failure that it reports is one of writing."""
        try:
            with options(GDAL_PAM_ENABLED="NO"):
                code = call(function, *args, strict=True)
        except GdalError as error:
            raise DataError(f"{self.path} can't be written: {error}.") from error
        if code:
            raise DataError(f"{self.path} can't be written: GDAL's error code is {code}.")

    def _let_go(self) -> None:
        """Close the file. GDAL before 3.8 does so only when the last reference goes."""
        dataset, self._dataset = self._dataset, None
        if hasattr(dataset, "Close"):
            dataset.Close()

    def _converted(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype == self.dtype or np.can_cast(
            array.dtype, self.dtype, "same_kind" if self.dtype.kind in "fc" else "safe"
        ):
            return array.astype(self.dtype, copy=False)
        with np.errstate(invalid="ignore", over="ignore"):
            converted = array.astype(self.dtype)
        lost = np.flatnonzero(converted != array)
        if lost.size:
            raise InputError(
                f"{self.path}: the value {array.flat[lost[0]]} of a {array.dtype} array does not fit {self.dtype}."
            )
        return converted

    def close(self) -> None:
        """Finish the file and give it its name; closing twice does nothing.

        Raises:
            DataError: the file can't be written; nothing is left.
        """
        if self._dataset is None:
            return
        try:
            self._do(self._dataset.FlushCache)
            self._do(self._let_go)
            self._temporary.replace(self.path)
        except OSError as error:
            self.abort()
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path} can't be written: {error.strerror}.") from error
        for suffix in _SIDECARS:
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def abort(self) -> None:
        """Give up: remove what was written; what was at ``path`` before stays."""
        # That closing fails is no news of a file that is given up.
        with options(GDAL_PAM_ENABLED="NO"), session(), contextlib.suppress(RuntimeError):
            self._let_go()
        self._temporary.unlink(missing_ok=True)


def _check_nodata(path: Path, dtype: np.dtype[Any], nodata: float | None) -> None:
    if nodata is None or dtype.kind not in "iu":
        return
    limits = np.iinfo(dtype)
    if nodata != nodata or not limits.min <= nodata <= limits.max or nodata != int(nodata):  # noqa: PLR0124  # NaN
        raise InputError(
            f"{path}: nodata={nodata} does not fit {dtype}, which holds integers from {limits.min} to {limits.max}."
        )


def _check_colors(path: Path, dtype: np.dtype[Any], count: int, colors: Mapping[int, Sequence[int]] | None) -> None:
    if not colors:
        return
    if count != 1 or dtype not in (np.uint8, np.uint16):
        raise InputError(f"{path}: colours are for one band of uint8 or uint16, not for {count} of {dtype}.")
    for value, color in colors.items():
        if not 0 <= value <= np.iinfo(dtype).max or len(color) not in (3, 4) or not all(0 <= c <= 255 for c in color):
            raise InputError(
                f"{path}: a colour is {{value: (red, green, blue)}} from 0 to 255, got {{{value}: {color!r}}}."
            )


def write_raster(
    path: str | os.PathLike[str],
    array: npt.NDArray[Any],
    grid: Grid,
    *,
    nodata: float | None = None,
    colors: Mapping[int, Sequence[int]] | None = None,
    descriptions: Sequence[str] | None = None,
    categories: Mapping[int, str] | None = None,
) -> None:
    """Write a whole array as a GeoTIFF: :class:`RasterWriter` in one call.

    Args:
        path: the file to write; one that is there is replaced.
        array: (rows, cols, bands), of the grid's size.
        grid: geotransform and CRS.
        nodata: as in :class:`RasterWriter`.
        colors: as in :class:`RasterWriter`.
        descriptions: as in :class:`RasterWriter`.
        categories: as in :class:`RasterWriter`.

    Raises:
        InputError: an array of another size, or as in :class:`RasterWriter`.
        DataError: the file can't be written.
    """
    if array.ndim != 3 or array.shape[:2] != grid.shape:
        raise InputError(
            f"{os.fspath(path)}: an array for {grid} has the shape (rows, cols, bands), got {array.shape}."
        )
    writer = RasterWriter(
        path,
        grid,
        array.shape[2],
        array.dtype,
        nodata=nodata,
        colors=colors,
        descriptions=descriptions,
        categories=categories,
    )
    with writer:
        writer.write(grid.window, array)
