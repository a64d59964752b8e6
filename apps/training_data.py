"""What the U-Net does with its inputs: random turns in training, scaling by their statistics, nodata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from otbtf_lite import TFRecords
from otbtf_lite.stats import BandStats

OTBTF_NAMES = {"input_xs_patches": "input_xs", "labels_patches": "predictions"}  # what its scripts call them in a model


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key, a sample for example, under the names that the model has for them."""
    return {OTBTF_NAMES.get(key, key): value for key, value in values.items()}


def turned(sample: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """A sample, named, in one of its eight orientations, drawn at random: all patches turned and flipped alike.

    Args:
        sample: square patches of (rows, cols, bands) by key.
    """
    turns = tf.random.uniform([], 0, 4, tf.int32)
    flipped = tf.random.uniform([], 0, 2, tf.int32) > 0

    def turn(patch: tf.Tensor) -> tf.Tensor:
        shape = patch.shape
        patch = tf.image.rot90(patch, turns)
        return tf.ensure_shape(tf.where(flipped, patch[:, ::-1], patch), shape)

    return {key: turn(patch) for key, patch in named(sample).items()}


def band_stats(dataset: tf.data.Dataset) -> dict[str, BandStats]:
    """Mean, standard deviation and so on of each band of each input."""
    stats: dict[str, Any] = {}
    for inputs, _ in dataset:
        for key, patches in inputs.items():
            stats.setdefault(key, BandStats(patches.shape[-1])).update(patches.numpy())
    return stats


def nodata_values(records: TFRecords) -> dict[str, list[float]]:
    """The nodata values of the rasters that the records come from, one a band; keys without any are left out."""
    sources = records.manifest.details.get("sources", {}) if records.manifest else {}
    values = {key: source.get("nodata") or [None] for key, source in sources.items()}
    return {key: each for key, each in values.items() if all(isinstance(value, int | float) for value in each)}


def scaled(patches: tf.Tensor, stats: BandStats, nodata: list[float] | None) -> tf.Tensor:
    """Each band with mean 0 and standard deviation 1; pixels that are nodata in all bands become the mean."""
    normal = (patches - stats.mean) / stats.std
    if nodata is None:
        return normal
    has_data = tf.reduce_any(tf.not_equal(patches, nodata), axis=-1, keepdims=True)
    return normal * tf.cast(has_data, normal.dtype)
