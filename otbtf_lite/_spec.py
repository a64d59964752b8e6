"""What a raster source is made of, as checked plain values; part of `raster`."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid, rows_cols
from otbtf_lite.schema import dtype_name, nearest, numpy_dtype

Number = int | float

RESAMPLINGS = {
    "nearest": "near",
    "bilinear": "bilinear",
    "cubic": "cubic",
    "cubicspline": "cubicspline",
    "lanczos": "lanczos",
    "average": "average",
    "rms": "rms",
    "mode": "mode",
    "min": "min",
    "max": "max",
    "med": "med",
    "q1": "q1",
    "q3": "q3",
}
"""Names of resampling methods and what gdalwarp calls them; https://gdal.org/en/stable/programs/gdalwarp.html."""


@dataclass(frozen=True, kw_only=True)
class RasterSpec:
    """What to read of which files; the arguments of `RasterSource` mean the same."""

    paths: tuple[str, ...]
    patch_size: tuple[int, int]
    bands: tuple[int, ...] | None = None
    nodata: tuple[Number, ...] | None = None
    dtype: np.dtype[Any] | None = None
    resampling: str | None = None
    categorical: bool = False
    scaled: bool = False
    view: Grid | None = None
    """The grid onto which the files are warped; None: their own."""

    @property
    def name(self) -> str:
        """What to call the source in a message."""
        return self.paths[0] if len(self.paths) == 1 else f"the stack of {self.paths[0]} to {self.paths[-1]}"

    @property
    def method(self) -> str:
        """The resampling method of a view."""
        return self.resampling or "nearest"

    @classmethod
    def of(
        cls,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        patch_size: int | Sequence[int],
        *,
        bands: Sequence[int] | int | None,
        nodata: Number | Sequence[Number] | None,
        dtype: npt.DTypeLike | None,
        resampling: str | None,
        categorical: bool,
        scaled: bool,
    ) -> RasterSpec:
        """The checked values of the arguments that `RasterSource` takes.

        Raises:
            InputError: a wrong argument, or two that exclude each other.
        """
        files = (paths,) if isinstance(paths, str | os.PathLike) else tuple(paths)
        if not files or not all(isinstance(file, str | os.PathLike) and os.fspath(file) for file in files):
            raise InputError(f"A raster source is a path or a list of paths, got {paths!r}.")
        if resampling is not None and resampling not in RESAMPLINGS:
            known = f"{', '.join(RESAMPLINGS)}{nearest(resampling, RESAMPLINGS)}"
            raise InputError(f"Unknown resampling {resampling!r}: it is one of {known}")
        if categorical and resampling not in (None, "nearest", "mode"):
            raise InputError(f'Classes can\'t be mixed by resampling={resampling!r}: take "nearest" or "mode".')
        if categorical and scaled:
            raise InputError("Classes have no scale: categorical and scaled exclude each other.")
        element = None if dtype is None else element_type(dtype)
        if scaled and element is not None and element.kind not in "fV":  # V: bfloat16
            raise InputError(
                f"Scaled values are not whole: dtype={dtype!r} can't hold them, give a floating-point one."
            )
        return cls(
            paths=tuple(os.fspath(file) for file in files),
            patch_size=rows_cols(patch_size, "patch_size"),
            bands=None if bands is None else _band_numbers(bands),
            nodata=None if nodata is None else plain_numbers(nodata),
            dtype=element,
            resampling=resampling,
            categorical=bool(categorical),
            scaled=bool(scaled),
        )


def element_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The NumPy dtype of a name or type, in the machine's byte order.

    Raises:
        InputError: it is unknown, or no number that a record holds.
    """
    try:
        element = numpy_dtype("bfloat16") if dtype == "bfloat16" else np.dtype(dtype)
        is_text = dtype_name(element) == "string"
    except TypeError as error:
        raise InputError(f"{dtype!r} is no element type that NumPy knows.") from error
    if is_text:
        raise InputError(f"Pixels are numbers: they can't be read as {dtype!r}.")
    return element.newbyteorder("=")


def _band_numbers(bands: Sequence[int] | int) -> tuple[int, ...]:
    try:
        numbers = tuple(operator.index(b) for b in ([bands] if isinstance(bands, int) else bands))
    except TypeError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise InputError(f"bands are numbers that count from 1, got {bands!r}.")
    return numbers


def plain_numbers(nodata: Number | Sequence[Number]) -> tuple[Number, ...]:
    """One number or several as Python numbers, NaN as ``math.nan``: as one object it equals itself inside a tuple.

    Raises:
        InputError: what is no number.
    """
    values: list[Any] = [nodata] if np.ndim(nodata) == 0 else list(nodata)  # type: ignore[arg-type]
    try:
        plain = [operator.index(v) if hasattr(v, "__index__") else float(v) for v in values]
    except (TypeError, ValueError) as error:
        raise InputError(f"nodata must be a number or one number a band, got {nodata!r}.") from error
    return tuple(math.nan if v != v else v for v in plain)  # noqa: PLR0124  # only NaN differs from itself
