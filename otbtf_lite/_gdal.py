"""GDAL itself, for `raster` and `vector`: loading it, calling it so that failures become sentences, types and CRSs.

GDAL reports failures in two ways, and which one is the caller's choice for the whole process (``gdal.UseExceptions``).
Nothing here changes that choice: :func:`call` works either way. Options are set for the calling thread alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import DataError, InputError, MissingDependencyError

_log = logging.getLogger("otbtf_lite")

BLOCK_CACHE_BYTES = 64 << 20
"""Decoded blocks that GDAL keeps during a conversion: some rows of a satellite image's tiles for each thread."""

_HOW_TO_INSTALL = (
    "Rasters and vectors need GDAL's Python package `osgeo`, which is not installed: `pip install gdal-wheel` (Python "
    "3.12 and later), or the system's GDAL with `pip install --no-build-isolation gdal==$(gdal-config --version)`, or "
    "`conda install -c conda-forge gdal`."
)


class GdalError(RuntimeError):
    """What GDAL said when a call failed; callers turn it into an error that names the file."""


@functools.cache
def module(name: str) -> Any:
    """The module ``osgeo.<name>``: ``gdal``, ``ogr`` or ``osr``; loaded at first use, which takes 0.2 s.

    Raises:
        MissingDependencyError: it is not installed; the message says the three ways to get it.
    """
    try:
        return importlib.import_module(f"osgeo.{name}")
    except ImportError as error:
        raise MissingDependencyError(_HOW_TO_INSTALL) from error


@functools.cache
def version() -> tuple[int, int]:
    """GDAL's (major, minor) version."""
    number = int(module("gdal").VersionInfo())
    return number // 1_000_000, number // 10_000 % 100


@contextmanager
def options(**values: str) -> Iterator[None]:
    """GDAL configuration options for this thread, until the end of the block."""
    gdal = module("gdal")
    before = {name: gdal.GetThreadLocalConfigOption(name) for name in values}
    for name, value in values.items():
        gdal.SetThreadLocalConfigOption(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            gdal.SetThreadLocalConfigOption(name, old)


@contextmanager
def block_cache(size: int = BLOCK_CACHE_BYTES) -> Iterator[None]:
    """Bounds the decoded blocks that GDAL keeps, for the whole process, until the end of the block.

    GDAL's own bound is 5 % of the memory, which grows with the machine and is more than reading in block order needs.

    Args:
        size: bytes.
    """
    gdal = module("gdal")
    before = gdal.GetCacheMax()
    gdal.SetCacheMax(size)
    try:
        yield
    finally:
        gdal.SetCacheMax(before)


@contextmanager
def session() -> Iterator[list[str]]:
    """Nothing is printed by GDAL in this thread; its failures raise RuntimeError where it knows how (3.7 and later).

    Yields:
        The failures that GDAL reports meanwhile, also those that make no call fail, such as a full disk's.
    """
    modules = [module(name) for name in ("gdal", "ogr", "osr")]
    failures: list[str] = []

    def record(severity: int, _number: int, message: str) -> None:
        if severity >= modules[0].CE_Failure:
            failures.append(message)
        _log.debug("GDAL: %s", message)

    modules[0].PushErrorHandler(record)
    # Exceptions of one thread only exist from 3.7 on; entering them also silences a warning about the choice not made.
    managers = [m.ExceptionMgr(useExceptions=True) for m in modules] if version() >= (3, 7) else []
    for manager in managers:
        manager.__enter__()
    try:
        yield failures
    finally:
        for manager in reversed(managers):
            manager.__exit__(None, None, None)
        modules[0].PopErrorHandler()


def call(function: Callable[..., Any], *args: Any, strict: bool = False, **kwargs: Any) -> Any:
    """Call a GDAL function quietly.

    Args:
        function: the function.
        args: its arguments.
        strict: any failure that GDAL reports meanwhile counts, also if the call gives a result.
        kwargs: its keyword arguments.

    Returns:
        What it returns.

    Raises:
        GdalError: it failed, whether it says so by an exception, by None or by an error code.
    """
    with session() as failures:
        try:
            result = function(*args, **kwargs)
        except RuntimeError as error:
            raise GdalError(sentence(str(error))) from error
    nothing = result is None or getattr(result, "this", result) is None  # a constructor gives an empty proxy
    if failures and (nothing or strict):
        raise GdalError(sentence(failures[-1]))
    return result


def sentence(message: str) -> str:
    """GDAL's message on one line, without the full stop; it can hold whole CRS definitions, so it is cut."""
    return textwrap.shorten(message, 300, placeholder=" ...").rstrip(".") or "GDAL gives no reason"


def open_dataset(path: str, *, vector: bool = False) -> Any:
    """Open a raster, or a vector, for reading; no ``.aux.xml`` is ever written beside it.

    Args:
        path: a file, or any name that GDAL knows (``/vsi...``, ``NETCDF:"file":variable``).
        vector: open a vector.

    Returns:
        The ``gdal.Dataset``.

    Raises:
        DataError: it does not exist, is empty, or no driver reads it.
    """
    gdal = module("gdal")
    flags = gdal.OF_READONLY | gdal.OF_VERBOSE_ERROR | (gdal.OF_VECTOR if vector else gdal.OF_RASTER)
    # Without "persistent auxiliary metadata" a dataset can't leave statistics behind; where such a file is there, it
    # may hold the CRS, so it is read.
    has_aux = any(Path(name).exists() for name in (f"{path}.aux.xml", f"{path.rpartition('.')[0]}.aux.xml"))
    try:
        with options(**({} if has_aux else {"GDAL_PAM_ENABLED": "NO"})):
            dataset = call(gdal.OpenEx, path, flags)
            if dataset is not None:
                call(dataset.GetMetadata)  # drivers look at the option when they are first asked, not when they open
    except GdalError as error:
        raise DataError(_why_not_open(path, str(error), "vector" if vector else "raster")) from error
    if dataset is None:
        raise DataError(_why_not_open(path, "not recognized", "vector" if vector else "raster"))
    return dataset


def _why_not_open(path: str, message: str, kind: str) -> str:
    file = Path(path)
    is_name = path.startswith(("/vsi", "<")) or ":" in path[2:]  # [2:]: past a Windows drive
    if not is_name and not file.exists():
        return f"{path} does not exist: no {kind} can be read from it."
    if file.is_file() and file.stat().st_size == 0:
        return f"{path} is empty (0 bytes): no {kind} can be read from it."
    if "not recognized" in message or "No such file" in message:
        gdal = module("gdal")
        return (
            f"{path} can't be read as a {kind}: none of the {gdal.GetDriverCount()} drivers of this GDAL "
            f"({gdal.VersionInfo('RELEASE_NAME')}) recognises it; if another program does, convert it to "
            f"{'GPKG' if kind == 'vector' else 'GeoTIFF'} with that or use a GDAL that has its driver."
        )
    return f"{path} can't be opened as a {kind}: {message}."


# ------------------------------------------------------------------------------------------------------- element types

_DTYPES = {
    "Byte": "uint8",
    "Int8": "int8",
    "UInt16": "uint16",
    "Int16": "int16",
    "UInt32": "uint32",
    "Int32": "int32",
    "UInt64": "uint64",
    "Int64": "int64",
    "Float16": "float16",
    "Float32": "float32",
    "Float64": "float64",
    "CInt16": "complex64",  # NumPy has no complex integers: these two hold them exactly
    "CInt32": "complex128",
    "CFloat16": "complex64",
    "CFloat32": "complex64",
    "CFloat64": "complex128",
}
"""GDAL's type names and the NumPy type that holds all their values."""


def is_signed_byte(band: Any) -> bool:
    """Whether a band holds int8 that GDAL before 3.7 opens as Byte: it has no such type, and says so beside it."""
    return version() < (3, 7) and band.GetMetadataItem("PIXELTYPE", "IMAGE_STRUCTURE") == "SIGNEDBYTE"


def band_dtype(band: Any) -> np.dtype[Any]:
    """The NumPy dtype that holds a band's values exactly.

    Raises:
        DataError: a type that is newer than this code.
    """
    if is_signed_byte(band):
        return np.dtype(np.int8)
    name = module("gdal").GetDataTypeName(band.DataType)
    if name not in _DTYPES:
        raise DataError(f"Bands of GDAL's type {name} have no NumPy dtype: convert them with gdal_translate -ot.")
    return np.dtype(_DTYPES[name])


@functools.cache
def gdal_type(dtype: np.dtype[Any]) -> int | None:
    """The GDAL type whose values lie in memory as those of a NumPy dtype, or None where this GDAL has none."""
    name = {"complex64": "CFloat32", "complex128": "CFloat64", "bool": None}.get(dtype.name, dtype.name)
    if name is None or not dtype.isnative:
        return None
    gdal = module("gdal")
    known = (k for k, v in _DTYPES.items() if name in (k, v))
    return next((getattr(gdal, f"GDT_{k}") for k in known if hasattr(gdal, f"GDT_{k}")), None)


# ---------------------------------------------------------------------------------------- coordinate reference systems


def spatial_reference(crs: str) -> Any:
    """The ``osr.SpatialReference`` of a CRS's text, with x before y whatever the authority says.

    Raises:
        InputError: the text is no CRS.
    """
    osr = module("osr")
    try:
        reference = call(osr.SpatialReference)
        code = call(reference.SetFromUserInput, crs)
    except GdalError as error:
        raise InputError(f"{crs!r} is no CRS that PROJ knows: {error}.") from error
    if code:
        raise InputError(f"{crs!r} is no CRS that PROJ knows.")
    reference.SetAxisMappingStrategy(osr.OAMS_TRADITIONAL_GIS_ORDER)
    return reference


def crs_text(reference: Any) -> str:
    """``"EPSG:32631"`` for what is exactly that, WKT 2 for any other CRS, empty text for None."""
    if reference is None:
        return ""
    name, code = reference.GetAuthorityName(None), reference.GetAuthorityCode(None)
    if name and code:
        short = f"{name}:{code}"
        try:
            if _is_same(spatial_reference(short), reference):  # files name a code and then deviate from it
                return short
        except InputError:
            pass  # a code of an authority that PROJ does not know: the WKT says it all
    return str(call(reference.ExportToWkt, ["FORMAT=WKT2_2019"]))


def _is_same(a: Any, b: Any) -> bool:
    return bool(call(a.IsSame, b, ["IGNORE_DATA_AXIS_TO_SRS_AXIS_MAPPING=YES", "CRITERION=EQUIVALENT"]))


@functools.lru_cache(maxsize=256)
def same_crs(a: str, b: str) -> bool:
    """Whether two texts mean the same CRS; no CRS (empty text) is only the same as no CRS.

    Raises:
        InputError: one of the texts is no CRS.
    """
    if a == b:
        return True
    if not a or not b:
        return False
    return _is_same(spatial_reference(a), spatial_reference(b))


def transform_points(
    x: npt.ArrayLike, y: npt.ArrayLike, from_crs: str, to_crs: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Points in another CRS; those that have no place there become infinite.

    Args:
        x: map coordinates, shape (n,).
        y: map coordinates, shape (n,).
        from_crs: their CRS.
        to_crs: the CRS wanted.

    Returns:
        x and y, float64 of shape (n,).

    Raises:
        InputError: a text that is no CRS, or two CRSs between which PROJ knows no way.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if same_crs(from_crs, to_crs):
        return x, y
    osr = module("osr")
    try:
        way = call(osr.CoordinateTransformation, spatial_reference(from_crs), spatial_reference(to_crs))
    except GdalError as error:
        raise InputError(f"Points can't be moved from {from_crs!r} to {to_crs!r}: {error}.") from error
    points = _transform_all(way, np.column_stack([x, y]).tolist())
    return points[:, 0], points[:, 1]


def _transform_all(way: Any, points: list[list[float]]) -> npt.NDArray[np.float64]:
    """The points moved, shape (n, 2). One that fails makes the whole call fail, so they are tried in halves."""
    if not points:
        return np.empty((0, 2))
    try:
        return np.asarray(call(way.TransformPoints, points), np.float64)[:, :2]
    except GdalError:
        half = len(points) // 2
        if not half:
            return np.full((1, 2), np.inf)
        return np.concatenate([_transform_all(way, points[:half]), _transform_all(way, points[half:])])
