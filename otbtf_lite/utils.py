"""OTBTF's names for opening and reading rasters: :func:`gdal_open` and :func:`read_as_np_arr`.

Versions of OTBTF had ``cropped_tensor_name`` and ``_is_chief`` here, too. They are those of :mod:`otbtf_lite.model`,
which loads TensorFlow, so only asking for one of them does.
"""

from __future__ import annotations

from typing import Any

from otbtf_lite.raster import gdal_open, read_as_np_arr

__all__ = ["gdal_open", "read_as_np_arr"]

_FROM_MODEL = ("_is_chief", "cropped_tensor_name", "is_chief")


def __getattr__(name: str) -> Any:
    """Loads a name that belongs to the model module at first use."""
    if name in _FROM_MODEL:
        from otbtf_lite import model

        return getattr(model, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
