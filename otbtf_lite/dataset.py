"""Datasets: a reader, an order, and bounded buffers that a background thread fills ahead.

A pass gives each sample once; the next pass has another order, drawn from the seed and the number of the pass. Samples
of one buffer are read together, so that a reader can decode each block of a raster once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from otbtf_lite import graph, sharding
from otbtf_lite.errors import InputError
from otbtf_lite.iterators import (
    BlockIterator,
    Buffer,
    Chunks,
    IteratorBase,
    RandomIterator,
    SequentialIterator,
    Subset,
    Summed,
    endless,
    new_iterator,
    read_samples,
)
from otbtf_lite.patches_images import PatchesImagesReader, write_patches_images
from otbtf_lite.progress import bar
from otbtf_lite.raster import gdal_open, read_as_np_arr
from otbtf_lite.readers import PatchesReaderBase, RasterPatchesReader, stack_samples
from otbtf_lite.schema import Sample, Schema
from otbtf_lite.tfrecords import TFRecords
from otbtf_lite.writing import Pass

if TYPE_CHECKING:
    import tensorflow as tf

    from otbtf_lite.grid import Positions
    from otbtf_lite.raster import RasterSource

__all__ = [
    "BlockIterator",
    "Buffer",
    "Dataset",
    "DatasetFromPatchesImages",
    "DatasetFromRasters",
    "IteratorBase",
    "PatchesImagesReader",
    "PatchesReaderBase",
    "RandomIterator",
    "SequentialIterator",
    "gdal_open",
    "read_as_np_arr",
]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_SUBSET_STREAM = 0x737562  # keeps the draw of a subset apart from the orders of the passes


class Dataset:
    """Samples of a reader, in the order of an iterator.

    Nothing starts and nothing is read before it is asked for, but the first sample, for its shape. Safe to use from
    several threads.

    Args:
        patches_reader: where samples come from.
        buffer_length: how many samples are read together, and held ahead.
        iterator_cls: class of the order; ``seed`` reaches it only if its signature takes it.
        max_nb_of_samples: at most so many samples, drawn by the seed and the same in each pass.
        seed: None draws one.

    Raises:
        InputError: no reader, an empty one, or a size that is no positive integer.
    """

    def __init__(
        self,
        patches_reader: PatchesReaderBase | None = None,
        buffer_length: int = 128,
        iterator_cls: type[IteratorBase] = RandomIterator,
        max_nb_of_samples: int | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        if patches_reader is None:
            raise InputError("A Dataset needs a patches_reader to read samples from.")
        for name, value in (("buffer_length", buffer_length), ("max_nb_of_samples", max_nb_of_samples)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
                raise InputError(f"{name} must be an integer of at least 1, got {value!r}.")
        available = patches_reader.get_size()
        if available < 1:
            raise InputError(f"{type(patches_reader).__name__} has no samples.")
        self.patches_reader = patches_reader
        """The reader, as given."""
        self.seed = sharding.check_seed(seed)
        """The seed of the orders."""
        self._seed_is_drawn = seed is None
        self._max_nb_of_samples = max_nb_of_samples
        self._reader = patches_reader
        self._subset: npt.NDArray[np.int64] | None = None
        if max_nb_of_samples is not None and max_nb_of_samples < available:
            draw = sharding.generator(self.seed, _SUBSET_STREAM)
            self._subset = np.sort(draw.choice(available, int(max_nb_of_samples), replace=False))
            self._reader = Subset(patches_reader, self._subset)
        self.size: int = self._reader.get_size()
        """Number of samples in a pass."""
        self.buffer_length = min(int(buffer_length), self.size)
        """Samples read together."""
        self._iterator_cls = iterator_cls
        self.iterator = self._new_iterator()
        """The iterator that :meth:`read_one_sample` follows."""
        self.details: dict[str, Any] = {}
        """Further JSON values for the manifest of what is written, such as how the positions were drawn."""
        self.dropped: dict[str, Any] = {}
        """What was left out before and why, for the manifest: counts by reason."""
        known = getattr(patches_reader, "schema", None)
        self.schema = known if isinstance(known, Schema) else Schema.of(self._reader.get_sample(0))
        """What every sample looks like."""
        _log.info("%d samples of %s", self.size, self.schema)
        self._read_lock = threading.Lock()
        self._chunks = Chunks(self._read, endless(self.iterator), self.buffer_length)
        self._buffer: Iterator[Sample] = iter(())
        self._epochs: Iterator[int] | None = None
        self._passes: set[Chunks[Any]] = set()  # those that are being read
        self._wait = 0.0

    def _new_iterator(self) -> IteratorBase:
        return new_iterator(self._iterator_cls, self._reader, self.seed)

    @property
    def output_types(self) -> dict[str, tf.DType]:
        """TensorFlow's element types by name."""
        import tensorflow as tf

        return {key: tf.dtypes.as_dtype(feature.dtype) for key, feature in self.schema.items()}

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, without a batch dimension."""
        return {key: feature.shape for key, feature in self.schema.items()}

    def read_one_sample(self) -> Sample:
        """The next sample; after a pass it goes on into the next.

        Raises:
            Whatever the reader raised: an error of the background thread arrives as itself.
        """
        with self._read_lock:
            sample = next(self._buffer, None)
            if sample is None:
                self._buffer = iter(self._chunks.take() or ())
                sample = next(self._buffer)
            return sample

    def samples(self) -> Iterator[Sample]:
        """The samples of one pass: of the first one at the first call, of the next at the next."""
        return self._run(self._next_pass())

    def _next_pass(self) -> list[int]:
        with self._read_lock:
            if self._epochs is None:
                self._epochs = endless(self._new_iterator())
            return list(itertools.islice(self._epochs, self.size))

    def _read(self, indices: Sequence[int]) -> list[Sample]:
        return read_samples(self._reader, indices)

    def _run(self, indices: Sequence[int], summed: Summed | None = None, start: int = 0) -> Iterator[Sample]:
        if summed is None:
            for chunk in self._ahead(self._read, indices, self.buffer_length):
                yield from chunk
        else:
            chunks = self._ahead(self._reader.get_summarised, indices, self.buffer_length)
            with contextlib.closing(chunks):
                yield from summed.samples(start, chunks)

    def _ahead(self, fetch: Callable[[Sequence[int]], T], indices: Sequence[int], length: int) -> Generator[T]:
        """What ``fetch`` gives for each ``length`` of the indices, one ahead."""
        chunks = Chunks(fetch, iter(indices), length)
        self._passes.add(chunks)
        try:
            while chunk := chunks.take():
                yield chunk
        finally:
            self._passes.discard(chunks)
            self._wait += chunks.wait
            chunks.close()

    def one_pass(self, seed: int | None = None) -> Pass:
        """The dataset's first pass, from its start and whatever has been read before: what a conversion writes.

        Args:
            seed: of the order; None: the dataset's. A conversion that is resumed goes on with the one it began with.
        """
        if seed is not None and seed != self.seed:
            again = Dataset(
                self.patches_reader, self.buffer_length, self._iterator_cls, self._max_nb_of_samples, seed=seed
            )
            again.details, again.dropped = self.details, self.dropped
            return again.one_pass()
        iterator = self._new_iterator()
        indices = list(itertools.islice(endless(iterator), self.size))
        # An order of the user's own has no seed that would give it again.
        repeatable = bool(getattr(iterator, "repeatable", False))
        order = {} if getattr(iterator, "order", None) is None else {"order": iterator.order}
        summed = None
        if getattr(self._reader, "summarises", False):
            summed = Summed(self._reader, indices, self.buffer_length)
        reader = self.patches_reader
        provenance = getattr(reader, "provenance", dict)
        positions = getattr(reader, "positions", None)
        if positions is not None:
            chosen = np.asarray(indices) if self._subset is None else self._subset[indices]
            positions = positions[chosen]
        return Pass(
            self.schema, self.size, lambda start: self._run(indices[start:], summed, start),
            self.seed if repeatable else None, repeatable, {**order, **provenance(), **self.details}, self.dropped,
            positions, with_seed=self.one_pass if repeatable and self._seed_is_drawn else None,
            summary=None if summed is None else lambda n: summed.result(n).to_json(),
        )  # fmt: skip

    def get_stats(self) -> Mapping[str, Any]:
        """Statistics of the reader's samples: by key ``min``, ``max``, ``mean`` and ``std``, each of shape (bands,)."""
        return self.patches_reader.get_stats()

    @property
    def tf_dataset(self) -> tf.data.Dataset:
        """One pass as a ``tf.data.Dataset`` of dicts of tensors, one sample each."""
        import tensorflow as tf

        # No unbatch(): that crashes on arrays without elements.
        samples = self._batches(self.buffer_length, drop_remainder=False).flat_map(tf.data.Dataset.from_tensor_slices)
        return samples.apply(_cardinality(self.size))

    def _batches(self, batch_size: int, *, drop_remainder: bool) -> tf.data.Dataset:
        import tensorflow as tf

        rows = batch_size if drop_remainder else None
        signature = {
            key: tf.TensorSpec((rows, *feature.shape), tf.dtypes.as_dtype(feature.dtype))
            for key, feature in self.schema.items()
        }

        def generate() -> Iterator[Sample]:
            gathers = getattr(self._reader, "gathers", False)
            batches = self._gathered(batch_size) if gathers else self._stacked(batch_size)
            # Not islice: closing this generator must close the one within.
            with contextlib.closing(batches):
                for _ in range(sharding.n_batches(self.size, batch_size, drop_remainder)):
                    yield next(batches)

        return tf.data.Dataset.from_generator(generate, output_signature=signature)

    def _gathered(self, batch_size: int) -> Generator[Sample]:
        """Batches of a reader that makes them in one go."""
        yield from self._ahead(self._reader.get_batch, self._next_pass(), batch_size)

    def _stacked(self, batch_size: int) -> Generator[Sample]:
        """Batches of samples, which are read a buffer at a time: more of them share a block of a raster."""
        samples = self.samples()
        # Checked, as TensorFlow would convert another type in silence.
        while batch := [self.schema.check(sample) for sample in itertools.islice(samples, batch_size)]:
            yield stack_samples(batch)

    def get_tf_dataset(
        self,
        batch_size: int,
        drop_remainder: bool = True,
        preprocessing_fn: Callable[..., Mapping[str, Any]] | None = None,
        targets_keys: Sequence[str] | None = None,
        *,
        target_keys: Sequence[str] | None = None,
        batched_preprocessing: bool = False,
    ) -> tf.data.Dataset:
        """Batches for Keras. Each iteration is one whole pass; the next one has another order.

        Args:
            batch_size: samples a batch.
            drop_remainder: leave out a last batch that is not full.
            preprocessing_fn: takes the dict of one sample's tensors and returns another.
            targets_keys: names of the targets, after preprocessing; with any, elements are ``(inputs, targets)``, else
                one dict.
            target_keys: the same.
            batched_preprocessing: ``preprocessing_fn`` takes whole batches.

        Raises:
            InputError: both names of the targets, or a key that no sample has.
        """
        import tensorflow as tf

        size = sharding.check_batch_size(batch_size)
        if targets_keys is not None and target_keys is not None:
            raise InputError("targets_keys and target_keys mean the same: give one of them.")
        targets = targets_keys if targets_keys is not None else target_keys
        split = graph.Split(targets or (), None, preprocessing_fn)
        split.needed(self.schema)
        if preprocessing_fn is None or batched_preprocessing:
            dataset = graph.parted(self._batches(size, drop_remainder=drop_remainder), split, tf.data.AUTOTUNE)
        else:
            dataset = graph.parted(
                self.tf_dataset, split, tf.data.AUTOTUNE,
                batch=lambda samples: samples.batch(size, drop_remainder=drop_remainder),
            )  # fmt: skip
        if not targets:
            dataset = dataset.map(lambda inputs, _: inputs)
        batches = sharding.n_batches(self.size, size, drop_remainder)
        return dataset.apply(_cardinality(batches)).prefetch(tf.data.AUTOTUNE)

    def to_tfrecords(
        self, output_dir: str, n_samples_per_shard: int = 100, drop_remainder: bool = True, **options: Any
    ) -> None:
        """Writes one pass into a directory of TFRecords.

        Args:
            output_dir: the directory.
            n_samples_per_shard: records a shard.
            drop_remainder: leave out the samples that do not fill a last shard.
            **options: the others of :meth:`otbtf_lite.TFRecords.ds2tfrecord`.
        """
        TFRecords(output_dir).ds2tfrecord(self, n_samples_per_shard, drop_remainder, **options)

    def to_patches_images(
        self, output_dir: str | os.PathLike[str], *, progress: bool | None = None
    ) -> dict[str, list[str]]:
        """Writes one pass as patches images, ``output_dir/KEY.tif``: rasters of stacked patches for QGIS and OTBTF.

        Args:
            output_dir: the folder; it is made where it is missing.
            progress: show a progress bar; None does so on a terminal.

        Returns:
            The files by key, as :class:`PatchesImagesReader` takes them.

        Raises:
            InputError: a feature that is no square patch nor number, or of a type that GDAL can't write.
            DataError: a file is there already, or can't be written.
        """
        source = self.one_pass()
        with bar(source.size, "writing", "sample", progress) as shown:
            return write_patches_images(source.samples(0), source.schema, source.size, output_dir, shown.update)

    def get_total_wait_in_seconds(self) -> float:
        """Seconds during which a caller has waited for samples."""
        return self._wait + self._chunks.wait

    def close(self) -> None:
        """Joins the background thread and closes the reader's files. Reading again starts anew, at the first pass.

        A pass that is being read, by :meth:`samples` or through TensorFlow, ends with an InputError.
        """
        for chunks in tuple(self._passes):
            chunks.close()
        with self._read_lock:
            self._wait += self._chunks.wait
            self._chunks.close()
            self._buffer = iter(())
            self._epochs = None
            self.iterator = self._new_iterator()
            self._chunks = Chunks(self._read, endless(self.iterator), self.buffer_length)
        close = getattr(self.patches_reader, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Dataset:  # noqa: PYI034  # typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DatasetFromPatchesImages(Dataset):
    """Patches of patches images, as OTBTF's PatchesExtraction writes them.

    Args:
        filenames_dict: files by source, as for :class:`PatchesImagesReader`.
        use_streaming: read patches from the files each time; else they are kept in memory.
        buffer_length: as for :class:`Dataset`.
        iterator_cls: as for :class:`Dataset`.
        scalar_dict: values that go with the patches, as for :class:`PatchesImagesReader`.
        seed: as for :class:`Dataset`.
    """

    def __init__(
        self,
        filenames_dict: Mapping[str, Sequence[str | os.PathLike[str]]],
        use_streaming: bool = False,
        buffer_length: int = 128,
        iterator_cls: type[IteratorBase] = RandomIterator,
        *,
        scalar_dict: Mapping[str, Sequence[Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        reader = PatchesImagesReader(filenames_dict, use_streaming, scalar_dict)
        super().__init__(reader, buffer_length, iterator_cls, seed=seed)


class DatasetFromRasters(Dataset):
    """Patches of rasters around positions.

    Args:
        sources: :class:`~otbtf_lite.RasterSource` by key; the first is the reference.
        positions: where the patches are.
        buffer_length: as for :class:`Dataset`.
        iterator_cls: as for :class:`Dataset`.
        seed: as for :class:`Dataset`.
        threads: threads that read rasters; None takes one a core.
        label_key: key under which a position's class enters the sample, int64 of shape (1,).
        max_nb_of_samples: as for :class:`Dataset`.
    """

    def __init__(
        self,
        sources: Mapping[str, RasterSource],
        positions: Positions,
        *,
        buffer_length: int = 128,
        iterator_cls: type[IteratorBase] = RandomIterator,
        seed: int | None = None,
        threads: int | None = None,
        label_key: str | None = None,
        max_nb_of_samples: int | None = None,
    ) -> None:
        reader = RasterPatchesReader(sources, positions, threads=threads, label_key=label_key)
        super().__init__(reader, buffer_length, iterator_cls, max_nb_of_samples, seed=seed)


def _cardinality(n: int) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    import tensorflow as tf

    apply: Callable[[tf.data.Dataset], tf.data.Dataset] = tf.data.experimental.assert_cardinality(n)
    return apply
