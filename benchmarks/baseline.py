"""The way OTBTF writes and reads, written independently: what ratios are measured against.

One sample at a time. Records: each array through an eager ``tf.io.serialize_tensor`` into a ``tf.train.Example``, which
``tf.io.TFRecordWriter`` writes; read by ``parse_single_example`` and ``parse_tensor`` in a parallel map, shuffled after
it. Samples in memory: a Python generator of single samples, which TensorFlow batches. Patches images: one window of
each file through ``ReadAsArray`` for each sample.
"""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from osgeo import gdal

gdal.UseExceptions()

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def write(
    read_one_sample: Callable[[], Mapping[str, np.ndarray]],
    n_samples: int,
    schema: Mapping[str, tuple[str, Sequence[int]]],
    folder: Path,
    per_shard: int,
) -> None:
    """Writes full shards of samples and the two JSON files."""
    folder.mkdir(parents=True)
    (folder / "output_types.json").write_text(json.dumps({k: dtype for k, (dtype, _) in schema.items()}, indent=4))
    (folder / "output_shapes.json").write_text(json.dumps({k: list(s) for k, (_, s) in schema.items()}, indent=4))
    for shard in range(n_samples // per_shard):
        with tf.io.TFRecordWriter(str(folder / f"{shard}.records")) as writer:
            for _ in range(per_shard):
                features = {
                    key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[tf.io.serialize_tensor(array).numpy()]))
                    for key, array in read_one_sample().items()
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def read(folder: Path, batch_size: int, target_keys: Sequence[str], shuffle: int | None = None) -> tf.data.Dataset:
    """The records as batches of (inputs, targets)."""
    types = json.loads((folder / "output_types.json").read_text())
    spec = {key: tf.io.FixedLenFeature([], tf.string) for key in types}

    def parse(record: tf.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        values = tf.io.parse_single_example(record, spec)
        tensors = {key: tf.io.parse_tensor(values[key], types[key]) for key in types}
        inputs = {key: value for key, value in tensors.items() if key not in target_keys}
        return inputs, {key: value for key, value in tensors.items() if key in target_keys}

    options = tf.data.Options()
    options.deterministic = not shuffle
    files = sorted(str(path) for path in folder.glob("*.records"))
    dataset = tf.data.TFRecordDataset(files).with_options(options).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    if shuffle:
        dataset = dataset.shuffle(shuffle)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def in_memory(arrays: Mapping[str, np.ndarray], batch_size: int, target_keys: Sequence[str]) -> tf.data.Dataset:
    """Arrays of shape (samples, ...) as batches of (inputs, targets), each pass in a new order."""
    rng = np.random.default_rng(1)

    def generate() -> Iterator[dict[str, np.ndarray]]:
        for index in rng.permutation(len(next(iter(arrays.values())))):
            yield {key: array[index] for key, array in arrays.items()}

    def split(sample: dict[str, tf.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs = {key: value for key, value in sample.items() if key not in target_keys}
        return inputs, {key: value for key, value in sample.items() if key in target_keys}

    signature = {key: tf.TensorSpec(array.shape[1:], array.dtype) for key, array in arrays.items()}
    samples = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return samples.map(split).batch(batch_size, drop_remainder=True)


def raster_patches(file: str, size: int, rows: Sequence[int], cols: Sequence[int]) -> Iterator[np.ndarray]:
    """Patches of one raster by their first rows and columns, one ``ReadAsArray`` each: (rows, cols, bands)."""
    raster = gdal.Open(file)
    for row, col in zip(rows, cols, strict=True):
        yield raster.ReadAsArray(int(col), int(row), size, size).transpose(1, 2, 0)


def ahead(samples: Iterator[Any], length: int = 128) -> Iterator[Any]:
    """Samples taken from a buffer that one background thread fills."""
    buffer: queue.Queue[Any] = queue.Queue(length)

    def fill() -> None:
        for sample in samples:
            buffer.put(sample)
        buffer.put(None)

    threading.Thread(target=fill, daemon=True).start()
    return iter(buffer.get, None)


def patches(files: Mapping[str, str], n_samples: int) -> Iterator[dict[str, np.ndarray]]:
    """The samples of one patches image a key, in a random order."""
    rasters = {key: gdal.Open(path) for key, path in files.items()}
    for index in np.random.default_rng(1).permutation(n_samples):
        sample = {}
        for key, raster in rasters.items():
            size = raster.RasterXSize
            window = raster.ReadAsArray(0, int(index) * size, size, size)
            sample[key] = window[:, :, None] if window.ndim == 2 else window.transpose(1, 2, 0)
        yield sample
