"""Records as OTBTF writes and reads them, with TensorFlow alone: the independent other side of the tests.

Nothing here imports otbtf_lite, so that the two sides can't share a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Arrays = dict[str, npt.NDArray[Any]]

DTYPES = (
    tf.float16, tf.float32, tf.float64, tf.bfloat16, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16,
    tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.complex128,
)  # fmt: skip
"""The numeric types that have a fixed size."""


class FourMembers:
    """A dataset with the four members that OTBTF's have, and nothing else."""

    def __init__(self, samples: Sequence[Mapping[str, npt.ArrayLike]]) -> None:
        self._samples = iter(samples)
        self.size = len(samples)
        first = {key: tf.convert_to_tensor(value) for key, value in samples[0].items()}
        self.output_types = {key: value.dtype for key, value in first.items()}
        self.output_shapes = {key: value.shape for key, value in first.items()}

    def read_one_sample(self) -> Mapping[str, npt.ArrayLike]:
        return next(self._samples)


def random_array(dtype: tf.DType, shape: Sequence[int], rng: np.random.Generator) -> npt.NDArray[Any]:
    """Any bit patterns at all, so also NaN payloads, infinities and negative zeros."""
    if dtype == tf.bool:
        return rng.integers(0, 2, tuple(shape)).astype(bool)
    kind = np.dtype(dtype.as_numpy_dtype)
    data = rng.integers(0, 256, int(np.prod(shape)) * kind.itemsize, np.uint8)
    return data.view(kind).reshape(tuple(shape))


def all_kinds(seed: int) -> Arrays:
    """One sample with each type as a patch and as a scalar, arrays without elements, and strings."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for dtype in DTYPES:
        arrays[f"patch-{dtype.name}-"] = random_array(dtype, (3, 2, 2), rng)
        arrays[f"scalar-{dtype.name}-"] = random_array(dtype, (), rng)
    for dtype in (tf.int16, tf.float32):
        arrays[f"empty-{dtype.name}-"] = random_array(dtype, (0, 4), rng)
    payloads = np.array([0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x80000000], np.uint32)  # two quiet, one signalling; -0.0
    arrays["nan"] = payloads.view(np.float32)
    arrays["text"] = np.array([[b"", b"a\0b\0"], ["\u00e9".encode(), b"\xff" * 200]], object)
    arrays["word"] = np.array(b"seed %d" % seed, object)
    arrays["no-text"] = np.empty((0,), object)
    return arrays


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays are the same to the last bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes()


def same_samples(some: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> bool:
    return all(
        a.keys() == b.keys() and all(same(a[key], b[key]) for key in a) for a, b in zip(some, others, strict=True)
    )


def feature(array: npt.ArrayLike) -> tf.train.Feature:
    value = tf.io.serialize_tensor(tf.convert_to_tensor(array)).numpy()
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def example(sample: Mapping[str, npt.ArrayLike]) -> tf.train.Example:
    return tf.train.Example(features=tf.train.Features(feature={key: feature(sample[key]) for key in sample}))


def example_bytes(sample: Mapping[str, npt.ArrayLike], keys: Sequence[str]) -> bytes:
    """A serialized Example with its keys in the order given, which protocol buffers leave open."""
    entries = [tf.train.Features(feature={key: feature(sample[key])}).SerializeToString() for key in keys]
    # An Example's features and a BytesList's value are alike on the wire: field 1, with a length.
    return bytes(tf.train.BytesList(value=[b"".join(entries)]).SerializeToString())


def write(
    folder: Path, samples: Sequence[Mapping[str, npt.ArrayLike]], n_samples_per_shard: int, seed: int | None = None
) -> Path:
    """A directory as OTBTF leaves it: shards and two JSON files.

    Keys come in the order that ``SerializeToString`` happens to give, or with a seed in one drawn for each record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = None if seed is None else np.random.default_rng(seed)
    for start in range(0, len(samples), n_samples_per_shard):
        with tf.io.TFRecordWriter(str(folder / f"{start // n_samples_per_shard}.records")) as writer:
            for sample in samples[start : start + n_samples_per_shard]:
                if rng is None:
                    writer.write(example(sample).SerializeToString())
                else:
                    writer.write(example_bytes(sample, [str(key) for key in rng.permutation(list(sample))]))
    first = {key: tf.convert_to_tensor(value) for key, value in samples[0].items()}
    types = {key: value.dtype.name for key, value in first.items()}
    shapes = {key: list(value.shape) for key, value in first.items()}
    (folder / "output_types.json").write_text(json.dumps(types, indent=4), encoding="utf-8")
    (folder / "output_shapes.json").write_text(json.dumps(shapes, indent=4), encoding="utf-8")
    return folder


def files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.records"), key=lambda path: int(path.stem))]


def read(folder: Path, compression: str = "") -> list[Arrays]:
    """Every sample of a directory, by the JSON files and TensorFlow's parsers."""
    types = json.loads((folder / "output_types.json").read_text(encoding="utf-8"))
    shapes = json.loads((folder / "output_shapes.json").read_text(encoding="utf-8"))

    def parse(record: tf.Tensor) -> dict[str, tf.Tensor]:
        spec = {key: tf.io.FixedLenFeature([], tf.string) for key in types}
        parsed = tf.io.parse_single_example(record, spec)
        tensors = {key: tf.io.parse_tensor(parsed[key], tf.dtypes.as_dtype(types[key])) for key in types}
        return {key: tf.ensure_shape(value, shapes[key]) for key, value in tensors.items()}

    dataset = tf.data.TFRecordDataset(files(folder), compression).map(parse)
    return [arrays(sample) for sample in dataset]


def arrays(sample: Mapping[str, tf.Tensor]) -> Arrays:
    """Tensors as arrays; NumPy's own type for bytes would take zeros at the end away."""
    return {key: np.asarray(each.numpy(), object if each.dtype == tf.string else None) for key, each in sample.items()}
