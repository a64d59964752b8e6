"""Rasters: what to read (:class:`RasterSource`), reading (:class:`RasterReader`) and writing (:class:`RasterWriter`).

Arrays are (rows, cols, bands) everywhere, also for one band. Reading leaves nothing beside a file.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite._gdal import BLOCK_CACHE_BYTES, block_cache, open_dataset, same_crs, transform_points
from otbtf_lite._opened import OpenedRaster, RasterInfo
from otbtf_lite._spec import Number, RasterSpec, element_type, plain_numbers
from otbtf_lite._warp import view_grid
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.geotiff import RasterWriter, write_raster
from otbtf_lite.grid import Grid, Window
from otbtf_lite.schema import dtype_name

__all__ = [
    "BLOCK_CACHE_BYTES",
    "RasterReader",
    "RasterSource",
    "RasterWriter",
    "block_cache",
    "gdal_open",
    "read_as_np_arr",
    "same_crs",
    "transform_points",
    "write_raster",
]

MAX_BLOCK_BYTES = 256 << 20
"""The largest block of a file that is decoded, in bytes; set it to allow larger ones."""

MAX_ARRAY_BYTES = 1 << 30
"""The largest array that one call reads, in bytes; set it to allow larger ones."""

_HOW_TO_WARP = {
    "gcps": "has ground control points only: make a map of it first, gdalwarp -tps IN OUT",
    "rpcs": "has a camera model (RPC) only: make a map of it first, gdalwarp -rpc IN OUT",
    "geolocation": "has geolocation arrays only: make a map of it first, gdalwarp -geoloc IN OUT",
}


class RasterSource:
    """A raster to take patches from: one file, or several whose bands are stacked.

    Nothing is opened here: the first use of a property that needs the files opens them and keeps what it learnt.
    Sources are immutable, hashable, equal if made alike, and pickle as their arguments.

    Args:
        paths: a file, any name that GDAL knows, or a list of them: bands are stacked in this order, and all must be on
            one grid.
        patch_size: pixels of a patch, one integer or (rows, cols).
        bands: which bands to read in which order, counted from 1 over the whole stack; None: all.
        nodata: the value that marks missing pixels, or one for each band, instead of what the files say by value, mask
            or alpha band; ``()``: none is missing (NaN always is). None: what the files say.
        dtype: what to read as; GDAL converts, so that integers are rounded and clipped. None: the files' own.
        resampling: how to resample where the source must be warped to meet the reference's pixels: ``"bilinear"`` and
            others as gdalwarp calls them; None: the source is not warped, unless it is ``categorical``.
        categorical: pixels are classes, which are never mixed: the nearest is taken (or by ``"mode"`` the commonest).
        scaled: apply the scale and offset that the files give, missing pixels become NaN.

    Raises:
        InputError: no path, a size below 1, or another wrong argument.
    """

    __slots__ = ("__weakref__", "_info", "_spec")

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        patch_size: int | Sequence[int],
        *,
        bands: Sequence[int] | int | None = None,
        nodata: Number | Sequence[Number] | None = None,
        dtype: npt.DTypeLike | None = None,
        resampling: str | None = None,
        categorical: bool = False,
        scaled: bool = False,
    ) -> None:
        self._info: RasterInfo | None = None
        self._spec = RasterSpec.of(
            paths,
            patch_size,
            bands=bands,
            nodata=nodata,
            dtype=dtype,
            resampling=resampling,
            categorical=categorical,
            scaled=scaled,
        )

    def __repr__(self) -> str:
        """The arguments that are not left at their defaults."""
        spec = self._spec
        shown: list[str] = [repr(spec.paths[0] if len(spec.paths) == 1 else list(spec.paths)), repr(spec.patch_size)]
        for name in ("bands", "nodata", "resampling", "categorical", "scaled"):
            value = getattr(spec, name)
            shown += [f"{name}={value!r}"] if value not in (None, False) else []
        if spec.dtype is not None:
            shown.append(f"dtype={str(spec.dtype)!r}")
        return f"RasterSource({', '.join(shown)})" + (f" on {spec.view}" if spec.view else "")

    def __eq__(self, other: object) -> bool:
        """Whether both are made of the same arguments."""
        return self._spec == other._spec if isinstance(other, RasterSource) else NotImplemented

    def __hash__(self) -> int:
        """Of the arguments."""
        return hash(self._spec)

    def __getstate__(self) -> RasterSpec:
        """Pickled as the arguments alone: another process opens the files itself."""
        return self._spec

    def __setstate__(self, spec: RasterSpec) -> None:
        """Restore from the arguments."""
        # NaN equals itself only as the very same object, as which it does not come out of a pickle.
        self._spec = replace(spec, nodata=None if spec.nodata is None else plain_numbers(spec.nodata))
        self._info = None

    def _known(self) -> RasterInfo:
        if self._info is None:
            raster = OpenedRaster(self._spec, MAX_BLOCK_BYTES)
            self._info = raster.info
            raster.close()
        return self._info

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, as given."""
        return self._spec.paths

    @property
    def patch_size(self) -> tuple[int, int]:
        """(rows, cols) of a patch."""
        return self._spec.patch_size

    @property
    def bands(self) -> tuple[int, ...] | None:
        """The bands asked for, from 1; None: all."""
        return self._spec.bands

    @property
    def nodata(self) -> tuple[Number, ...] | None:
        """The nodata values asked for; None: what the files say."""
        return self._spec.nodata

    @property
    def resampling(self) -> str | None:
        """How to resample where the source must be warped."""
        return self._spec.resampling

    @property
    def categorical(self) -> bool:
        """Whether pixels are classes."""
        return self._spec.categorical

    @property
    def scaled(self) -> bool:
        """Whether the files' scale and offset are applied."""
        return self._spec.scaled

    @property
    def grid(self) -> Grid:
        """Where the pixels lie; a raster without any georeferencing has the identity geotransform and no CRS.

        Raises:
            InputError: the raster is tied to the map by control points, a camera model or geolocation arrays only: it
                can be read by pixel, but has no grid.
            DataError: a file can't be read.
        """
        info = self._known()
        if info.georeferencing in _HOW_TO_WARP:
            raise InputError(f"{self.paths[0]} {_HOW_TO_WARP[info.georeferencing]}.")
        return Grid(info.crs, info.geotransform, info.width, info.height)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, cols, bands) of the whole raster."""
        info = self._known()
        return info.height, info.width, info.count

    @property
    def count(self) -> int:
        """How many bands are read."""
        return self._known().count

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype that reading gives."""
        return self._known().dtype

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        """(rows, cols, bands) of a patch."""
        return (*self._spec.patch_size, self.count)

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, cols) of the blocks in which the (first) file is stored: what GDAL decodes at once."""
        return self._known().block_shape

    @property
    def nodata_values(self) -> tuple[Number | None, ...] | None:
        """Per band the value that marks missing pixels, as the file has it; None where no band has one.

        With ``scaled`` it is NaN. Masks and alpha bands are not in it: ask :meth:`RasterReader.valid`.
        """
        found = self._known().nodata
        if found is None or not self.scaled:
            return found
        return tuple(None if value is None else math.nan for value in found)

    def aligned_to(self, reference: RasterSource) -> RasterSource:
        """A source whose pixel edges meet the reference's.

        A view is exact to the pixel: no approximate transformer, no overviews. GDAL warps in float64: 64-bit integers
        beyond 2**53 are rounded in it.

        Returns:
            The source itself where CRSs are equal and the grids meet (:meth:`Grid.meets`). Else, where it has
            ``resampling`` or is ``categorical``, a source read through a warped view on the reference's lattice, with a
            pixel size with which both patches cover the same ground.

        Raises:
            InputError: the source must be warped but does not say how, or can't be; the message names both files.
            DataError: a file can't be read.
        """
        own, theirs = self.grid, reference.grid
        if same_crs(own.crs, theirs.crs) and own.meets(theirs):
            return self
        if self.resampling is None and not self.categorical:
            raise InputError(
                f"The pixels of {self.paths[0]} ({own}) do not meet those of {reference.paths[0]} ({theirs}): give the "
                'former resampling="bilinear" (or another method), or categorical=True, to have it warped.'
            )
        names = (self.paths[0], reference.paths[0])
        warped = RasterSource.__new__(RasterSource)
        view = view_grid(own, self.patch_size, theirs, reference.patch_size, names)
        warped.__setstate__(replace(self._spec, view=view))
        return warped

    def open(self) -> RasterReader:
        """A new reader; nothing is opened before it reads."""
        return RasterReader(self)

    def describe(self) -> dict[str, Any]:
        """What was read, for a manifest: JSON-ready, with absolute paths.

        Returns:
            paths, sizes (bytes; None for what is no file), digests (SHA-256 of each file), crs, geotransform, width,
            height, count, dtype, bands, nodata (per band), patch_size, resampling, categorical, scaled, warped.

        Raises:
            DataError: a file can't be read.
        """
        info, spec = self._known(), self._spec
        files = [Path(path) if Path(path).is_file() else None for path in spec.paths]
        return {
            "paths": [
                path if file is None else str(file.absolute()) for path, file in zip(spec.paths, files, strict=True)
            ],
            "sizes": [None if file is None else file.stat().st_size for file in files],
            "digests": [None if file is None else _digest(file) for file in files],
            "crs": info.crs,
            "geotransform": list(info.geotransform),
            "width": info.width,
            "height": info.height,
            "count": info.count,
            "dtype": dtype_name(info.dtype),
            "bands": None if spec.bands is None else list(spec.bands),
            # JSON has no NaN and no infinity
            "nodata": None
            if info.nodata is None
            else [v if v is None or math.isfinite(v) else str(v) for v in info.nodata],
            "patch_size": list(spec.patch_size),
            "resampling": spec.resampling,
            "categorical": spec.categorical,
            "scaled": spec.scaled,
            "warped": spec.view is not None,
        }


class RasterReader:
    """Reads windows of a source; made by :meth:`RasterSource.open`.

    It may be used from many threads: each gets its own GDAL handles at its first read, and so does a child process,
    which neither uses nor closes what it inherited. :meth:`close` it, or use it as a context manager.
    """

    def __init__(self, source: RasterSource) -> None:
        self.source = source
        self._local = threading.local()
        self._all: weakref.WeakSet[OpenedRaster] = weakref.WeakSet()
        self._closed = False

    def __enter__(self) -> RasterReader:  # noqa: PYI034  # typing.Self needs Python 3.11
        """The reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()

    def _raster(self, window: Window) -> OpenedRaster:
        """This thread's handles, after checking that the window can be read."""
        raster: OpenedRaster | None = getattr(self._local, "raster", None)
        if self._closed:
            raise InputError(f"The reader of {self.source.paths[0]} is closed: open() gives another.")
        if raster is None or self._local.pid != os.getpid():
            raster = OpenedRaster(self.source._spec, MAX_BLOCK_BYTES)  # noqa: SLF001  # the two classes are one unit
            known = self.source._known()  # noqa: SLF001
            if raster.info != known:
                raise DataError(
                    f"{self.source.paths[0]} has changed since it was first opened: make a new RasterSource."
                )
            self._local.raster, self._local.pid = raster, os.getpid()
            with _LIVE_LOCK:
                _LIVE.add(raster)
                self._all.add(raster)
        info = raster.info
        if not window.is_inside(info.width, info.height):
            raise InputError(
                f"{window} reaches beyond {self.source.paths[0]}: it has {info.width} columns and {info.height} rows."
            )
        _check_size(self.source._spec, info, window)  # noqa: SLF001
        return raster

    def read(self, window: Window, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """The pixels of a window.

        Args:
            window: which pixels.
            out: where to put them: (rows, cols, bands) of the source's dtype, of any memory layout; GDAL fills it in
                place where it is aligned. None: a new array.

        Returns:
            ``out``, or the new array.

        Raises:
            InputError: the window reaches beyond the raster or is too large, ``out`` has another shape or dtype, or the
                reader is closed.
            DataError: the file can't be read there; the message names file and window.
        """
        raster = self._raster(window)
        shape = (window.height, window.width, raster.info.count)
        if out is None:
            out = np.empty(shape, raster.info.dtype)
        elif out.shape != shape or out.dtype != raster.info.dtype or not out.flags.writeable:
            raise InputError(
                f"out must be a writable {raster.info.dtype} array of shape {shape}, got {out.dtype} {out.shape}."
            )
        raster.read(window, out)
        return out

    def valid(self, window: Window, pixels: npt.NDArray[Any] | None = None) -> npt.NDArray[np.bool_]:
        """Where the pixels of a window are there: (rows, cols), True = valid in every band read.

        Missing are: the nodata value, what a mask or alpha band says, NaN, and what a warped source does not cover.
        Where a source has none of these, nothing is read.

        Args:
            window: which pixels.
            pixels: what :meth:`read` gave for this window, which saves reading it once more; None: not known.

        Raises:
            InputError: as for :meth:`read`.
            DataError: as for :meth:`read`.
        """
        return self._raster(window).valid(window, pixels)

    def close(self) -> None:
        """Close the files of all threads; reading afterwards is an error. It can be called twice."""
        self._closed = True
        with _LIVE_LOCK:
            mine = [raster for raster in self._all if raster.pid == os.getpid()]
        for raster in mine:
            raster.close()


# GDAL handles must not be used, nor even closed, in a child process: another thread may have held a lock of theirs when
# the process forked. So whatever is open is kept for ever in the child, where it costs nothing.
_LIVE: weakref.WeakSet[OpenedRaster] = weakref.WeakSet()
_LIVE_LOCK = threading.Lock()
_INHERITED: list[list[OpenedRaster]] = []


def _before_fork() -> None:
    _LIVE_LOCK.acquire()  # until after the fork, so that the child does not inherit it locked by another thread
    _INHERITED.append(list(_LIVE))


def _after_fork_in_parent() -> None:
    _INHERITED.pop()
    _LIVE_LOCK.release()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_LIVE_LOCK.release)


def _digest(file: Path) -> str:
    """SHA-256 of a file; each split's manifest names it, so it is kept for as long as the file is left alone."""
    now = file.stat()
    return _sha256(file.absolute(), now.st_ino, now.st_size, now.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256(file: Path, *_state: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def gdal_open(filename: str | os.PathLike[str]) -> Any:
    """Open a raster for reading.

    Returns:
        The ``gdal.Dataset``.

    Raises:
        DataError: it does not exist or no driver reads it; the message names the file.
    """
    return open_dataset(os.fspath(filename))


def read_as_np_arr(gdal_ds: Any, as_patches: bool = True, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """The pixels of a whole dataset.

    Args:
        gdal_ds: an open ``gdal.Dataset``.
        as_patches: the raster is a column of square patches, one below the other: as wide as the raster.
        dtype: what to read as; GDAL converts, so that integers are rounded and clipped. None: the raster's own.

    Returns:
        (patches, rows, cols, bands), with one patch, the whole raster, unless ``as_patches``.

    Raises:
        InputError: the height is no multiple of the width, or the array would be over :data:`MAX_ARRAY_BYTES`.
        DataError: the raster can't be read.
    """
    width, height = gdal_ds.RasterXSize, gdal_ds.RasterYSize
    if as_patches and height % width:
        raise InputError(
            f"{gdal_ds.GetDescription()} has {width} columns and {height} rows: it is no column of square patches, "
            "whose height would be a multiple of the width."
        )
    spec = RasterSpec(
        paths=(gdal_ds.GetDescription() or "the dataset",),
        patch_size=(1, 1),
        dtype=None if dtype is None else element_type(dtype),
    )
    raster = OpenedRaster(spec, MAX_BLOCK_BYTES, [gdal_ds])
    window = Window(0, 0, width, height)
    _check_size(spec, raster.info, window)
    pixels = np.empty((height, width, raster.info.count), raster.info.dtype)
    raster.read(window, pixels)
    rows = width if as_patches else height
    return pixels.reshape(height // rows, rows, width, raster.info.count)


def _check_size(spec: RasterSpec, info: RasterInfo, window: Window) -> None:
    size = window.width * window.height * info.count * info.dtype.itemsize
    if size > MAX_ARRAY_BYTES:
        raise InputError(
            f"{window} of {spec.paths[0]} takes {size:,} bytes in memory, over the {MAX_ARRAY_BYTES:,} allowed: "
            "read it in parts or raise otbtf_lite.raster.MAX_ARRAY_BYTES."
        )
