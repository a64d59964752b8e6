"""A directory of TFRecord shards: write it, read it, look at it. Names and defaults are OTBTF's."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from otbtf_lite import graph, sharding
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import SHAPES_FILE, TYPES_FILE, Manifest, load_manifest
from otbtf_lite.schema import Schema
from otbtf_lite.shards import Finished, load_json, open_finished
from otbtf_lite.storage import Directory
from otbtf_lite.verify import directory_faults
from otbtf_lite.writing import pass_over, write_records

if TYPE_CHECKING:
    import tensorflow as tf

AUTOTUNE = -1
"""``tf.data.AUTOTUNE``, without importing TensorFlow."""
AUTO = 0
"""``tf.data.experimental.AutoShardPolicy.AUTO``, without importing TensorFlow."""

_log = logging.getLogger(__name__)
_ENGINES = ("auto", "graph")


class TFRecords:
    """A directory of shards with its JSON files. Constructing one touches nothing, whatever lies there.

    Args:
        path: the directory, as text, an ``os.PathLike`` or a URL that ``tf.io.gfile`` knows.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = Directory(path)
        self.dirpath = self._directory.url
        """The directory, as text."""
        self.output_types_file = self._directory.path(TYPES_FILE)
        """Path of the JSON file with the element types."""
        self.output_shapes_file = self._directory.path(SHAPES_FILE)
        """Path of the JSON file with the shapes."""

    def __repr__(self) -> str:
        """The directory."""
        return f"TFRecords({self.dirpath!r})"

    @property
    def output_types(self) -> dict[str, str] | None:
        """Element types by name, as in ``output_types.json``; None where that is not there (yet)."""
        return self.load(self.output_types_file) if self._directory.exists(TYPES_FILE) else None

    @property
    def output_shapes(self) -> dict[str, list[int]] | None:
        """Shapes by name, as in ``output_shapes.json``; None where that is not there (yet)."""
        return self.load(self.output_shapes_file) if self._directory.exists(SHAPES_FILE) else None

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None where OTBTF wrote the directory.

        Raises:
            DataError: the directory is unfinished or the manifest is not valid.
        """
        return load_manifest(self._directory)

    @property
    def schema(self) -> Schema:
        """What every sample looks like.

        Raises:
            DataError: there are no finished records.
        """
        return self._open().schema

    @property
    def shards(self) -> list[str]:
        """The shards' file names in numeric order: the manifest's, or for OTBTF's directories those that are there.

        Raises:
            DataError: there are no finished records.
        """
        return list(self._open().names)

    def __len__(self) -> int:
        """The number of samples: the manifest's, or counted by record headers where there is none."""
        return sum(self._open().counts)

    def verify(self, *, threads: int | None = None, progress: bool | None = None) -> None:
        """Reads every record and compares everything: framing, checksums, schema, counts, digests, stray shards.

        Args:
            threads: how many shards are read at once; None: one a processor.
            progress: show a progress bar; None does so on a terminal.

        Raises:
            DataError: naming every fault, one line each.
        """
        faults = self.faults(threads=threads, progress=progress)
        if faults:
            raise DataError("\n".join(faults))

    def faults(self, *, threads: int | None = None, progress: bool | None = None) -> list[str]:
        """What :meth:`verify` finds, one sentence a fault; none when all is well."""
        return directory_faults(self._directory, threads=threads, progress=progress)

    def ds2tfrecord(
        self,
        dataset: Any,
        n_samples_per_shard: int = 100,
        drop_remainder: bool = True,
        *,
        overwrite: bool = False,
        resume: bool = False,
        compression: str | None = None,
        codecs: Mapping[str, str] | None = None,
        progress: bool | None = None,
    ) -> None:
        """Writes one pass over a dataset into the directory, in the dataset's own order.

        Args:
            dataset: a :class:`~otbtf_lite.Dataset`, or any object with OTBTF's four members ``size``, ``output_types``,
                ``output_shapes`` and ``read_one_sample()``.
            n_samples_per_shard: records a shard.
            drop_remainder: leave out the samples that do not fill a last shard (all workers then get equal shares).
            overwrite: replace what the directory holds.
            resume: go on where a run with the same settings broke off.
            compression: None, ``"GZIP"`` or ``"ZLIB"``, of whole shards.
            codecs: codec names by feature; the others are serialized tensors.
            progress: show a progress bar; None does so on a terminal.

        Raises:
            InputError: nothing to write, samples that do not fit together, or options that exclude each other.
            DataError: the directory holds a data set already, is being written by another process, or can't be written.
        """
        source = pass_over(dataset)
        _log.info("%d samples", source.size)
        write_records(
            self._directory, source, sharding.plan_shards(source.size, n_samples_per_shard, drop_remainder),
            overwrite=overwrite, resume=resume, compression=compression, codecs=codecs, progress=progress,
        )  # fmt: skip

    def read(
        self,
        batch_size: int,
        target_keys: Sequence[str],
        n_workers: int = 1,
        drop_remainder: bool = True,
        shuffle_buffer_size: int | None = None,
        preprocessing_fn: Callable[..., Mapping[str, Any]] | None = None,
        shard_policy: Any = AUTO,
        prefetch_buffer_size: int = AUTOTUNE,
        num_parallel_calls: int = AUTOTUNE,
        *,
        worker_index: int | None = None,
        input_keys: Sequence[str] | None = None,
        seed: int | None = None,
        start_epoch: int = 0,
        start_step: int = 0,
        engine: str = "auto",
        batched_preprocessing: bool = False,
        verify: bool = True,  # noqa: ARG002  # the graph engine can't leave it
        preprocessing_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tf.data.Dataset:
        """The samples as batches of ``(inputs, targets)``, two dicts of tensors of shape (batch, ...).

        Every batch's shape is static where ``drop_remainder`` is set, and the dataset's cardinality is known.

        Args:
            batch_size: samples a batch.
            target_keys: names of the targets, after preprocessing.
            n_workers: how many workers share the directory; shards are trimmed so that each gets as many samples.
            drop_remainder: leave out a last batch that is not full.
            shuffle_buffer_size: records held for shuffling, drawn anew in each iteration; None keeps file order.
            preprocessing_fn: takes the dict of one sample's tensors and returns another; inputs and targets part then.
            shard_policy: a ``tf.data.experimental.AutoShardPolicy``.
            prefetch_buffer_size: batches made ahead.
            num_parallel_calls: parallel calls of parsing and preprocessing.
            worker_index: reads this worker's shards only (0 to n_workers - 1); None leaves that to TensorFlow.
            input_keys: names of the inputs, after preprocessing; None takes all that are no targets.
            seed: of the shuffling.
            start_epoch: first epoch of the order; only 0 so far.
            start_step: batches left out at the start of each iteration, in file order only.
            engine: ``"auto"`` or ``"graph"``.
            batched_preprocessing: ``preprocessing_fn`` takes whole batches.
            verify: check every record's checksum. The graph engine always does, as TensorFlow's own reader; sizes and
                first records are compared with the manifest in any case.
            preprocessing_kwargs: keywords for ``preprocessing_fn``, also such as ``read`` has itself.
            **kwargs: keywords for ``preprocessing_fn``.

        Raises:
            InputError: an argument that does not fit, a key that no sample has, fewer shards than workers.
            DataError: no such directory, an unfinished one, or a shard that is not what the manifest says.
        """
        size = sharding.check_batch_size(batch_size)
        workers = sharding.check_workers(n_workers)
        if engine not in _ENGINES:
            raise InputError(f"engine must be one of {', '.join(map(repr, _ENGINES))}, got {engine!r}.")
        if start_epoch or (start_step and shuffle_buffer_size is not None):
            raise InputError("The graph engine finds no exact place in a shuffled order: read in file order for that.")
        if seed is not None:
            sharding.check_seed(seed)
        bound = graph.bind_kwargs(preprocessing_fn, kwargs, preprocessing_kwargs, _READ_ARGUMENTS)
        split = graph.Split(target_keys, input_keys, preprocessing_fn, bound)

        opened = self._open()
        split.needed(opened.schema)  # a wrong key is told before the files are looked at
        opened.check()
        trimmed = sharding.trim(opened.counts, workers)
        self._log_trim(opened, trimmed, workers)
        kept = opened.names[: len(trimmed.takes)]
        shards = graph.Shards([self._directory.path(n) for n in kept], trimmed.takes, opened.compressions[: len(kept)])
        shards = graph.share_of(shards, workers, worker_index)
        records = graph.shuffled(shards, shuffle_buffer_size, seed)
        dataset = graph.batched(
            records, opened.schema, split, size, drop_remainder=drop_remainder, record_bytes=opened.record_bytes,
            batched_preprocessing=batched_preprocessing, num_parallel_calls=num_parallel_calls,
        )  # fmt: skip
        batches = sharding.n_batches(sum(shards.takes), size, drop_remainder)
        if start_step:
            if isinstance(start_step, bool) or not isinstance(start_step, int) or not 0 <= start_step <= batches:
                raise InputError(f"start_step must be an integer from 0 to the {batches} batches, got {start_step!r}.")
            dataset, batches = dataset.skip(start_step), batches - start_step
        policy = _no_sharding() if worker_index is not None else _policy(shard_policy)
        ordered = shuffle_buffer_size is None or seed is not None
        return graph.finish(dataset, batches, policy, prefetch_buffer_size, deterministic=ordered)

    def parse_tfrecord(
        self,
        example: tf.Tensor,
        target_keys: Sequence[str],
        preprocessing_fn: Callable[..., Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Inputs and targets of one serialized record.

        Args:
            example: a string tensor of shape () (or of shape (batch,): then all tensors have the batch in front).
            target_keys: names of the targets, after preprocessing.
            preprocessing_fn: takes the dict of the sample's tensors and returns another.
            **kwargs: keywords for it.

        Raises:
            InputError: a key that no sample has.
        """
        import tensorflow as tf

        schema = self.schema
        split = graph.Split(target_keys, None, preprocessing_fn, graph.bind_kwargs(preprocessing_fn, kwargs, None, ()))
        return split(graph.parse_example(schema, split.needed(schema), tf.convert_to_tensor(example)))

    @staticmethod
    def save(data: Mapping[str, Any], filepath: str | os.PathLike[str]) -> None:
        """Saves JSON values as OTBTF does: indented by four spaces.

        Raises:
            DataError: the file can't be written.
        """
        folder, name = os.path.split(os.fspath(filepath))
        Directory(folder or ".").write(name, json.dumps(data, indent=4).encode())

    @staticmethod
    def load(filepath: str | os.PathLike[str]) -> dict[str, Any]:
        """The JSON object in a file.

        Raises:
            DataError: the file can't be read or holds something else.
        """
        folder, name = os.path.split(os.fspath(filepath))
        return load_json(Directory(folder or "."), name)

    def _open(self) -> Finished:
        return open_finished(self._directory)

    def _log_trim(self, opened: Finished, trimmed: sharding.WorkerTrim, workers: int) -> None:
        _log.info("%d samples in %s", sum(opened.counts), self.dirpath)
        _log.info("%d shards found", len(opened.names))
        _log.info("%d shards kept for %d workers", len(trimmed.takes), workers)
        if trimmed.lost:
            _log.warning(
                "%s: %d of %d samples are left out so that %d workers get %d each (more, smaller shards lose fewer)",
                self.dirpath, trimmed.lost, sum(opened.counts), workers, trimmed.per_worker,
            )  # fmt: skip


_READ_ARGUMENTS = tuple(name for name in TFRecords.read.__annotations__ if name not in ("return", "kwargs"))


def _policy(policy: Any) -> Any:
    import tensorflow as tf

    policies = tf.data.experimental.AutoShardPolicy
    try:
        return policies(policy)
    except ValueError as error:
        names = ", ".join(each.name for each in policies)
        raise InputError(f"shard_policy must be an AutoShardPolicy ({names}), got {policy!r}.") from error


def _no_sharding() -> Any:
    import tensorflow as tf

    return tf.data.experimental.AutoShardPolicy.OFF
