"""The graph engine: shards -> ``tf.data.Dataset`` of (inputs, targets), with TensorFlow's own ops.

It works on any file system that TensorFlow knows and with TensorFlow's auto-sharding by file. Small records are batched
as bytes and parsed a batch at a time, large ones one by one in parallel; what is shuffled is bytes, not arrays.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from otbtf_lite import sharding
from otbtf_lite.codecs import get_codec
from otbtf_lite.errors import InputError
from otbtf_lite.schema import Schema, key_list, nearest
from otbtf_lite.shards import first_fault
from otbtf_lite.storage import Directory

if TYPE_CHECKING:
    import tensorflow as tf

_UNREADABLE = b"\xff"
"""How the element that stands for an unreadable record starts. No Example does: it would be wire type 7."""

_LARGE_RECORD = 1 << 18
"""From this many bytes a record on, parsing one by one is as fast as by the batch and needs less memory."""


@dataclass(frozen=True)
class Split:
    """What becomes of a sample: preprocessing, then inputs and targets."""

    target_keys: Sequence[str]
    """Names of the targets, after preprocessing."""
    input_keys: Sequence[str] | None = None
    """Names of the inputs, after preprocessing; None takes all that are no targets."""
    preprocessing_fn: Callable[..., Mapping[str, Any]] | None = None
    """Takes the dict of tensors and gives another."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords for ``preprocessing_fn``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_keys", key_list(self.target_keys, "target_keys"))
        if self.input_keys is not None:
            object.__setattr__(self, "input_keys", key_list(self.input_keys, "input_keys"))
        both = sorted(set(self.target_keys) & set(self.input_keys or ()))
        if both:
            raise InputError(f"{both} are named both as inputs and as targets: a key is one or the other.")

    def needed(self, schema: Schema) -> list[str]:
        """The features that have to be decoded: all where there is a preprocessing function, else those named.

        Raises:
            InputError: without a preprocessing function, a key that no sample has.
        """
        if self.preprocessing_fn is not None:
            return list(schema)
        inputs, targets = schema.split_keys(self.target_keys, self.input_keys)
        return [key for key in schema if key in inputs or key in targets]

    def __call__(self, sample: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and targets of a sample (or a batch of them), before preprocessing.

        Raises:
            InputError: ``preprocessing_fn`` gives no dict, or a key is not in it.
        """
        if self.preprocessing_fn is not None:
            sample = self.preprocessing_fn(sample, **self.kwargs)
        return self.parts(sample)

    def parts(self, sample: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and targets of what preprocessing gave, tensors or their types.

        Raises:
            InputError: it is no dict, or a key is not in it.
        """
        if not isinstance(sample, Mapping):
            raise InputError(
                f"preprocessing_fn must return a dict of tensors by name, got {type(sample).__name__}: it takes the"
                " dict of one sample, and inputs and targets are split after it."
            )
        for what, keys in (("target_keys", self.target_keys), ("input_keys", self.input_keys or ())):
            for key in keys:
                if key not in sample:
                    known = f"the keys are {sorted(sample)}{nearest(key, sample)}"
                    raise InputError(f"{what} names {key!r}, which no sample has: {known}")
        targets = {key: sample[key] for key in sample if key in self.target_keys}
        inputs = {key: sample[key] for key in sample if key not in targets}
        if self.input_keys is not None:
            inputs = {key: value for key, value in inputs.items() if key in self.input_keys}
        return inputs, targets


def bind_kwargs(
    preprocessing_fn: Callable[..., Any] | None,
    kwargs: Mapping[str, Any],
    extra: Mapping[str, Any] | None,
    known: Sequence[str],
) -> dict[str, Any]:
    """The keywords for ``preprocessing_fn``, checked against its signature.

    Args:
        preprocessing_fn: the function, if there is one.
        kwargs: keywords that ``read`` does not know itself.
        extra: ``preprocessing_kwargs``.
        known: the names that ``read`` knows, to guess what a mistyped one meant.

    Raises:
        InputError: a keyword that the function does not take, with the nearest right name, or one that it lacks.
    """
    merged = {**kwargs, **(extra or {})}
    if preprocessing_fn is None:
        for name in merged:
            raise InputError(f"read has no argument {name!r}{nearest(name, known)}")
        return merged
    try:
        signature = inspect.signature(preprocessing_fn)
    except (TypeError, ValueError):  # a built-in without a signature takes what it takes
        return merged
    parameters = list(signature.parameters.values())
    takes = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in merged:
            if name not in takes:
                raise InputError(
                    f"Neither preprocessing_fn nor read takes an argument {name!r}{nearest(name, [*takes, *known])}"
                )
    try:
        signature.bind({}, **merged)
    except TypeError as error:
        raise InputError(f"preprocessing_fn can't take a sample and the keywords {list(merged)}: {error}.") from error
    return merged


def parse_example(schema: Schema, keys: Sequence[str], example: tf.Tensor) -> dict[str, tf.Tensor]:
    """The features of serialized Examples as tensors.

    Args:
        schema: types, shapes and codecs.
        keys: the features wanted.
        example: a string tensor of shape () or (batch,).

    Returns:
        The tensors by name, each of the feature's shape with the batch in front where there is one.
    """
    import tensorflow as tf

    spec = {key: tf.io.FixedLenFeature([], tf.string) for key in keys}
    parser = tf.io.parse_single_example if example.shape.rank == 0 else tf.io.parse_example
    values = parser(example, spec)
    return {key: get_codec(schema[key].codec).parse(schema[key], values[key]) for key in keys}


def guarded(example: tf.Tensor) -> tf.Tensor:
    """Serialized records as they are, or an error that names file and record where :func:`shuffled` met a bad one.

    Args:
        example: a string tensor of shape () or (batch,).
    """
    import tensorflow as tf

    bad = tf.equal(tf.strings.substr(example, 0, 1), _UNREADABLE)
    some = tf.reduce_any(bad)

    def fault() -> tf.Tensor:
        path = tf.strings.substr(tf.boolean_mask(tf.reshape(example, [-1]), tf.reshape(bad, [-1]))[0], 1, -1)
        return tf.ensure_shape(tf.numpy_function(_fault, [path], tf.string, stateful=False), [])

    message = tf.cond(some, fault, lambda: tf.constant(""))
    with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(some), [message])]):
        return tf.identity(example)


def _fault(path: bytes) -> np.bytes_:
    """What is wrong with a shard: looked for when it has gone wrong, so that a sound one costs nothing."""
    folder, name = os.path.split(path.decode())
    return np.bytes_(first_fault(Directory(folder or "."), name).encode())


@dataclass(frozen=True)
class Shards:
    """The files that a dataset reads."""

    paths: Sequence[str]
    """In numeric order."""
    takes: Sequence[int]
    """Records read of each, from its start."""
    compressions: Sequence[str | None]
    """How each is compressed."""


def shuffled(shards: Shards, buffer_size: int | None, seed: int | None) -> tf.data.Dataset:
    """The serialized records of the shards, shuffled anew in each iteration where ``buffer_size`` is given.

    The counts travel with the file names, so TensorFlow's auto-sharding, which shares out the elements of the list of
    files, shares them out too. Where a shard has fewer readable records than promised, an element that no record can be
    stands for the first one missing: :func:`guarded` tells of it.
    """
    import tensorflow as tf

    def records(path: tf.Tensor, take: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        # TensorFlow's own error names the byte, but not the file; and a file cut between records is none to it.
        readable = tf.data.TFRecordDataset(path, compression).ignore_errors()
        unreadable = tf.data.Dataset.from_tensors(tf.strings.join([_UNREADABLE, path]))
        return readable.concatenate(unreadable).take(take)

    takes, compressions = np.asarray(shards.takes, np.int64), [c or "" for c in shards.compressions]
    files = tf.data.Dataset.from_tensor_slices((list(shards.paths), takes, compressions))
    dataset = files.flat_map(tf.autograph.experimental.do_not_convert(records))
    if buffer_size is None:
        return dataset
    if isinstance(buffer_size, bool) or not isinstance(buffer_size, int | np.integer) or buffer_size < 1:
        raise InputError(f"shuffle_buffer_size must be an integer of at least 1, or None, got {buffer_size!r}.")
    # No more than there are records: TensorFlow 2.21 crashes on sizes that no memory holds.
    return dataset.shuffle(max(1, min(int(buffer_size), sum(shards.takes))), seed=seed)


def parted(
    dataset: tf.data.Dataset,
    split: Split,
    num_parallel_calls: int,
    *,
    parse: Callable[[Any], Mapping[str, Any]] | None = None,
    batch: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None,
) -> tf.data.Dataset:
    """Samples, or batches of them -> preprocessing -> (inputs, targets).

    Args:
        dataset: dicts of tensors, or what ``parse`` makes them of.
        split: preprocessing, inputs and targets.
        num_parallel_calls: parallel calls of parsing and preprocessing.
        parse: is called first.
        batch: makes batches after preprocessing.

    Raises:
        InputError: ``preprocessing_fn`` gives no dict, or a key is not in it.
    """
    import tensorflow as tf

    # AutoGraph is for what users write. It would cost time in our own functions, and hide the type of their errors.
    ours = tf.autograph.experimental.do_not_convert
    parse = ours(parse) if parse is not None else (lambda sample: sample)
    function = split.preprocessing_fn
    if function is None:
        dataset = dataset.map(ours(lambda sample: split.parts(parse(sample))), num_parallel_calls=num_parallel_calls)
        return dataset if batch is None else batch(dataset)

    def preprocess(sample: Any) -> Any:
        return function(parse(sample), **split.kwargs)

    dataset = dataset.map(preprocess, num_parallel_calls=num_parallel_calls)
    split.parts(dataset.element_spec)
    return (dataset if batch is None else batch(dataset)).map(ours(split.parts))


def batched(
    records: tf.data.Dataset,
    schema: Schema,
    split: Split,
    batch_size: int,
    *,
    drop_remainder: bool,
    record_bytes: int,
    batched_preprocessing: bool,
    num_parallel_calls: int,
) -> tf.data.Dataset:
    """Serialized records -> batches of (inputs, targets)."""
    keys = split.needed(schema)

    def parse(example: tf.Tensor) -> Mapping[str, tf.Tensor]:
        return parse_example(schema, keys, guarded(example))

    def batch(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.batch(batch_size, drop_remainder=drop_remainder)

    fixed = all(get_codec(schema[key].codec).prefix(schema[key]) is not None for key in keys)
    vectorised = split.preprocessing_fn is None or batched_preprocessing
    if vectorised and ((fixed and record_bytes < _LARGE_RECORD) or batched_preprocessing):
        return parted(batch(records), split, num_parallel_calls, parse=parse)
    return parted(records, split, num_parallel_calls, parse=parse, batch=batch)


def finish(
    dataset: tf.data.Dataset, n_batches: int, shard_policy: Any, prefetch_buffer_size: int, *, deterministic: bool
) -> tf.data.Dataset:
    """Known cardinality (Keras counts a step too many without), prefetching and options."""
    import tensorflow as tf

    options = tf.data.Options()
    options.deterministic = deterministic
    options.experimental_distribute.auto_shard_policy = shard_policy
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(n_batches))
    return dataset.prefetch(prefetch_buffer_size).with_options(options)


def share_of(shards: Shards, n_workers: int, worker_index: int | None) -> Shards:
    """The shards of one worker, or all of them where TensorFlow shares them out itself.

    Raises:
        InputError: the index is not one of the workers'.
    """
    if worker_index is None:
        return shards
    workers = sharding.check_workers(n_workers)
    whole = isinstance(worker_index, int | np.integer) and not isinstance(worker_index, bool)
    if not whole or not 0 <= worker_index < workers:
        raise InputError(
            f"worker_index must be an integer from 0 to n_workers - 1 = {workers - 1}, got {worker_index!r}."
        )
    mine = slice(int(worker_index), None, workers)
    return Shards(shards.paths[mine], shards.takes[mine], shards.compressions[mine])
