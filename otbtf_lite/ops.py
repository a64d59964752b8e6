"""Small TensorFlow operations for preprocessing functions and networks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from otbtf_lite.errors import InputError


def one_hot(labels: Any, nb_classes: int) -> Any:
    """One-hot encodes an image, or a batch of images, of class numbers.

    Args:
        labels: class numbers from 0, of any real dtype (they are cast to int32), in one of two shapes: ``(..., 1)``,
            whose last axis is the single band of an image and is dropped, or ``(...)`` without a band axis. A last axis
            of length 1 is always taken for the band.
        nb_classes: number of classes.

    Returns:
        A float32 tensor of shape ``(..., nb_classes)``: 1 at the class, 0 elsewhere. A number outside
        ``0..nb_classes - 1`` gives zeros only.

    Raises:
        InputError: the length of the last axis is unknown, so that a band axis can't be told.
    """
    shape = tf.TensorShape(labels.shape if hasattr(labels, "shape") else tf.convert_to_tensor(labels).shape)
    if shape.rank is None or (shape.rank > 0 and shape[-1] is None):
        raise InputError(
            f"labels must have a last axis of known length, to tell whether it is a band axis, got {shape}: set it "
            "with tf.ensure_shape."
        )
    if shape.rank > 0 and shape[-1] == 1:
        labels = tf.squeeze(labels, axis=-1)
    return tf.one_hot(tf.cast(labels, tf.int32), depth=nb_classes, dtype=tf.float32)
