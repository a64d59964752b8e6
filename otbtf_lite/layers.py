"""Keras layers for masks, scalars and class maps.

Each of them passes values on as they come, also under a mixed precision policy, which would otherwise round a nodata
value of -9999 or 65535. Inputs and outputs are batches: ``(batch, rows, cols, bands)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from otbtf_lite.errors import InputError


def _holds(dtype: Any, value: float) -> bool:
    """Whether a number is a value of a dtype; casting -9999 to uint8 would make it 241."""
    dtype = tf.as_dtype(dtype)
    return not dtype.is_integer or (float(value).is_integer() and dtype.min <= value <= dtype.max)


def _constant(value: float, dtype: Any) -> Any:
    return tf.constant(int(value) if tf.as_dtype(dtype).is_integer else value, dtype)


class _Exact(keras.layers.Layer):
    """A layer without weights that gets its inputs in their own dtype."""

    def __init__(self, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name, autocast=False, **kwargs)


@keras.saving.register_keras_serializable(package="otbtf_lite")
class DilatedMask(_Exact):
    """Where an image has nodata, and everything within ``radius`` pixels of it.

    Args:
        nodata_value: value of pixels without data; may be nan.
        radius: pixels, 0 or more; the mask grows by a square of ``2 * radius + 1`` pixels.
        name: the layer's name.
        **kwargs: those of ``keras.layers.Layer``.

    Raises:
        InputError: ``radius`` is negative or not an integer.
    """

    def __init__(self, nodata_value: float, radius: int, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        if isinstance(radius, bool) or radius != int(radius) or radius < 0:
            raise InputError(f"radius must be a whole number of pixels, 0 or more, got {radius!r}.")
        self.nodata_value = nodata_value
        self.radius = int(radius)

    def call(self, inp: Any) -> Any:
        """Makes the mask.

        Args:
            inp: ``(batch, rows, cols, bands)``, of any real dtype.

        Returns:
            uint8 of the same shape, band by band: 1 for nodata and what is near, 0 elsewhere.
        """
        if math.isnan(self.nodata_value):
            mask = tf.not_equal(inp, inp)
        elif _holds(inp.dtype, self.nodata_value):
            mask = tf.equal(inp, _constant(self.nodata_value, inp.dtype))
        else:
            mask = tf.zeros_like(inp, tf.bool)
        # A square dilates by its rows, then by its columns.
        dilated = tf.cast(mask, tf.float32)
        side = 2 * self.radius + 1
        for window in ((side, 1), (1, side)):
            dilated = tf.nn.max_pool2d(dilated, window, strides=1, padding="SAME")
        return tf.cast(dilated, tf.uint8)

    def compute_output_spec(self, inp: keras.KerasTensor, **_: Any) -> keras.KerasTensor:
        """The input's shape, in uint8."""
        return keras.KerasTensor(inp.shape, "uint8")

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "nodata_value": self.nodata_value, "radius": self.radius}


@keras.saving.register_keras_serializable(package="otbtf_lite")
class ApplyMask(_Exact):
    """Set the pixels that a mask covers to a value.

    Args:
        out_nodata: the value for masked pixels.
        name: the layer's name.
        **kwargs: those of ``keras.layers.Layer``.
    """

    def __init__(self, out_nodata: float, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.out_nodata = out_nodata

    def call(self, inputs: Sequence[Any]) -> Any:
        """Masks an image.

        Args:
            inputs: the mask, 1 (or True) where the image is to be masked, and the image; their shapes must broadcast,
                so a one-band mask covers all bands.

        Returns:
            The image, in its own dtype, with ``out_nodata`` where the mask is 1.
        """
        mask, inp = inputs
        covered = mask if mask.dtype == tf.bool else tf.equal(mask, tf.ones((), mask.dtype))
        return tf.where(covered, _constant(self.out_nodata, inp.dtype), inp)

    def compute_output_spec(self, inputs: Sequence[keras.KerasTensor], **_: Any) -> keras.KerasTensor:
        """The shape of the mask and the image together, in the image's dtype.

        Raises:
            InputError: ``out_nodata`` is no value of the image's dtype, or the shapes don't broadcast.
        """
        mask, inp = inputs
        if not _holds(inp.dtype, self.out_nodata):
            raise InputError(
                f"Layer {self.name!r} gets an image of {inp.dtype}, which can't hold out_nodata={self.out_nodata}: "
                "cast the image, or choose another value."
            )
        try:
            shape = tf.broadcast_static_shape(tf.TensorShape(mask.shape), tf.TensorShape(inp.shape))
        except ValueError as error:
            raise InputError(
                f"Layer {self.name!r} gets a mask of {mask.shape}, which does not fit the image of {inp.shape}."
            ) from error
        return keras.KerasTensor(tuple(shape), inp.dtype)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "out_nodata": self.out_nodata}


@keras.saving.register_keras_serializable(package="otbtf_lite")
class ScalarsTile(_Exact):
    """Repeat scalars over the rows and columns of an image, so that they can be stacked with its bands."""

    def call(self, inputs: Sequence[Any]) -> Any:
        """Tiles scalars.

        Args:
            inputs: the reference image, ``(batch, rows, cols, bands)``, and the scalars: one tensor ``(batch, n)`` or
                ``(batch,)``, or a list of those, taken one after the other.

        Returns:
            ``(batch, rows, cols, n)``, in the dtype of the scalars.
        """
        ref, scalars = inputs
        several = list(scalars) if isinstance(scalars, (list, tuple)) else [scalars]
        columns = tf.concat([x if len(x.shape) > 1 else x[:, None] for x in several], axis=-1)
        size = tf.shape(ref)
        return tf.tile(columns[:, None, None, :], [1, size[1], size[2], 1])

    def compute_output_spec(self, inputs: Sequence[Any], **_: Any) -> keras.KerasTensor:
        """The reference's rows and columns, with a band for each scalar."""
        ref, scalars = inputs
        several = list(scalars) if isinstance(scalars, (list, tuple)) else [scalars]
        bands = [x.shape[1] if len(x.shape) > 1 else 1 for x in several]
        return keras.KerasTensor((ref.shape[0], ref.shape[1], ref.shape[2], sum(bands)), several[0].dtype)


@keras.saving.register_keras_serializable(package="otbtf_lite")
class Argmax(_Exact):
    """The number of the band that has the largest value: from class probabilities to a class map.

    Args:
        name: the layer's name.
        expand_last_dim: keep the last axis, with length 1, as an image has it.
        **kwargs: those of ``keras.layers.Layer``.
    """

    def __init__(self, name: str | None = None, expand_last_dim: bool = True, **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.expand_last_dim = expand_last_dim

    def call(self, inputs: Any) -> Any:
        """Finds the largest.

        Args:
            inputs: ``(..., bands)``.

        Returns:
            int32, ``(..., 1)``, or ``(...)`` without ``expand_last_dim``; the first of equal bands.
        """
        largest = tf.argmax(inputs, axis=-1, output_type=tf.int32)
        return tf.expand_dims(largest, axis=-1) if self.expand_last_dim else largest

    def compute_output_spec(self, inputs: keras.KerasTensor, **_: Any) -> keras.KerasTensor:
        """The input's shape without bands, in int32."""
        return keras.KerasTensor((*inputs.shape[:-1], *([1] if self.expand_last_dim else [])), "int32")

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "expand_last_dim": self.expand_last_dim}


@keras.saving.register_keras_serializable(package="otbtf_lite")
class Max(_Exact):
    """The largest value over the bands, for instance the confidence of a class map."""

    def call(self, inputs: Any) -> Any:
        """Finds the largest.

        Args:
            inputs: ``(..., bands)``.

        Returns:
            ``(..., 1)``, in the input's dtype.
        """
        return tf.reduce_max(inputs, axis=-1, keepdims=True)

    def compute_output_spec(self, inputs: keras.KerasTensor, **_: Any) -> keras.KerasTensor:
        """The input's shape with one band."""
        return keras.KerasTensor((*inputs.shape[:-1], 1), inputs.dtype)
