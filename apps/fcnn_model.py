"""A small U-Net for class maps, from one or more rasters of one pixel size. As a script: print the network."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from training_data import band_stats, scaled

from otbtf_lite import ModelBase, TFRecords
from otbtf_lite.layers import Argmax

convolution = functools.partial(keras.layers.Conv2D, kernel_size=3, padding="same", activation="relu")


class FCNNModel(ModelBase):
    """Probabilities of the first target's classes, under its key, and for maps the most probable one: ``classes``."""

    def __init__(self, spec: Any, n_classes: int, stats: Mapping[str, Any], nodata: Mapping[str, Any]) -> None:
        self.target, self.n_classes, self.stats, self.nodata = next(iter(spec[1])), n_classes, stats, nodata
        super().__init__(spec)

    def normalize_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Each band to mean 0 and standard deviation 1, by the statistics of the training patches."""
        return {key: scaled(patches, self.stats[key], self.nodata.get(key)) for key, patches in inputs.items()}

    def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
        """Two poolings down and up again, with skips; the receptive field reaches 22 pixels to each side."""
        x, skips = tf.concat(list(normalized_inputs.values()), axis=-1), []
        for filters in (16, 32):
            skips.append(convolution(filters)(convolution(filters)(x)))
            x = keras.layers.MaxPooling2D()(skips[-1])
        x = keras.layers.SpatialDropout2D(0.2)(convolution(64)(convolution(64)(x)))
        for filters in (32, 16):
            x = keras.layers.Conv2DTranspose(filters, 2, strides=2)(x)
            x = convolution(filters)(convolution(filters)(tf.concat([x, skips.pop()], axis=-1)))
        return {self.target: keras.layers.Conv2D(self.n_classes, 1, activation="softmax", name=self.target)(x)}

    def postprocess_outputs(self, outputs: dict[str, Any], **_: Any) -> dict[str, Any]:
        """The class map, and what a SavedModel gives besides: both outputs without their margins."""
        outputs["classes"] = Argmax(name="classes")(outputs[self.target])
        return super().postprocess_outputs(outputs)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the network for a directory of records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tfrecords", help="a directory of records")
    parser.add_argument("target", help="key of the labels")
    args = parser.parse_args(argv)
    patches = TFRecords(args.tfrecords).read(1, [args.target])
    FCNNModel(patches.element_spec, 2, band_stats(patches), {}).summary()


if __name__ == "__main__":
    main()
