from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import otbtf_style
import pytest
import tensorflow as tf

from otbtf_lite import Buffer, Dataset, IteratorBase, RandomIterator, TFRecords
from otbtf_lite.dataset import SequentialIterator
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.readers import PatchesReaderBase
from otbtf_lite.schema import Sample

THREAD = "otbtf-lite-dataset"


@pytest.fixture(autouse=True)
def threads(own_threads: Callable[[], list[str]]) -> Iterator[Callable[[], list[str]]]:
    """Names of the threads there are; in the end there must be none."""
    yield own_threads
    assert own_threads() == []


class Numbers(PatchesReaderBase):
    """Samples that say their own number; notes what was read, and by whom."""

    def __init__(self, size: int = 23, *, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.size = size
        self.fails_at = fails_at
        self.error = error
        self.reads: list[list[int]] = []
        self.readers: set[str] = set()
        self.closed = 0

    def get_sample(self, index: int) -> Sample:
        if index == self.fails_at and self.error is not None:
            raise self.error
        return {"x": np.full((2, 2, 1), index, np.float32), "n": np.array([index]), "y": np.array(index / 2)}

    def get_samples(self, indices: Sequence[int]) -> list[Sample]:
        self.reads.append(list(indices))
        self.readers.add(threading.current_thread().name)
        return super().get_samples(indices)

    def get_stats(self) -> dict[str, Any]:
        return {"x": {"mean": np.array([1.5])}}

    def get_size(self) -> int:
        return self.size

    def provenance(self) -> dict[str, Any]:
        return {"sources": {"x": {"paths": ["/data/x.tif"]}}}

    def close(self) -> None:
        self.closed += 1


class ThreeMethods:
    """A reader as OTBTF's scripts define them."""

    def get_sample(self, index: int) -> Sample:
        return {"n": np.array([index])}

    def get_stats(self) -> None:
        return None

    def get_size(self) -> int:
        return 7


def numbers(samples: Any) -> list[int]:
    return [int(sample["n"][0]) for sample in samples]


def read(dataset: Dataset, n: int) -> list[int]:
    return numbers(dataset.read_one_sample() for _ in range(n))


def batches(dataset: tf.data.Dataset) -> list[list[int]]:
    elements = (each[0] if isinstance(each, tuple) else each for each in dataset.as_numpy_iterator())
    return [element["n"].ravel().tolist() for element in elements]


def flat(parts: list[list[int]]) -> list[int]:
    return [number for part in parts for number in part]


class TestBuffer:
    def test_holds_as_much_as_it_is_told(self) -> None:
        buffer = Buffer(2)
        assert (buffer.size(), buffer.is_complete(), buffer.container) == (0, False, [])
        buffer.add("a")
        assert not buffer.is_complete()
        buffer.add("b")
        assert (buffer.size(), buffer.is_complete(), buffer.container) == (2, True, ["a", "b"])
        with pytest.raises(InputError, match="it holds 2 elements"):
            buffer.add("c")


class TestOrder:
    @pytest.mark.parametrize("buffer_length", [1, 5, 23, 128])
    def test_one_pass_gives_each_sample_once_and_the_next_another_order(self, buffer_length: int) -> None:
        with Dataset(Numbers(), buffer_length, seed=1) as dataset:
            passes = [read(dataset, 23) for _ in range(3)]
        assert all(sorted(each) == list(range(23)) for each in passes)
        assert len({tuple(each) for each in passes}) == 3

    def test_one_seed_is_one_order(self) -> None:
        orders = []
        for seed, length in ((1, 4), (1, 9), (2, 4)):
            with Dataset(Numbers(), length, seed=seed) as dataset:
                orders.append((read(dataset, 46), numbers(dataset.samples()), numbers(dataset.samples())))
        assert orders[0] == orders[1] != orders[2]
        both, first, second = orders[0]
        assert both == first + second

    def test_without_a_seed_one_is_drawn(self) -> None:
        seeds = {Dataset(Numbers()).seed for _ in range(5)}
        assert len(seeds) == 5

    def test_the_readers_own_order(self) -> None:
        with Dataset(Numbers(), 4, SequentialIterator) as dataset:
            assert read(dataset, 46) == [*range(23), *range(23)]

    def test_samples_of_a_buffer_are_read_together(self) -> None:
        """So a reader can read each block of a raster once."""
        reader = Numbers()
        with Dataset(reader, 10, SequentialIterator) as dataset:
            assert numbers(dataset.samples()) == list(range(23))
        assert reader.reads == [list(range(10)), list(range(10, 20)), [20, 21, 22]]
        assert all(name.startswith(THREAD) for name in reader.readers)

    def test_at_most_two_buffers_are_held(self) -> None:
        reader = Numbers()
        with Dataset(reader, 5) as dataset:
            dataset.read_one_sample()
        assert len(reader.reads) <= 2

    def test_a_subset_is_the_same_in_each_pass(self) -> None:
        with Dataset(Numbers(), 4, max_nb_of_samples=9, seed=3) as dataset:
            assert dataset.size == 9
            passes = [numbers(dataset.samples()), read(dataset, 9), numbers(dataset.samples())]
        assert len({frozenset(each) for each in passes}) == 1
        assert len(set(passes[0])) == 9
        assert passes[0] == passes[1] != passes[2]
        with Dataset(Numbers(), max_nb_of_samples=9, seed=4) as other:
            assert set(numbers(other.samples())) != set(passes[0])

    def test_more_samples_than_there_are_is_all(self) -> None:
        with Dataset(Numbers(), max_nb_of_samples=99, seed=3) as some, Dataset(Numbers(), seed=3) as every:
            assert numbers(some.samples()) == numbers(every.samples())


class OtbtfIterator(IteratorBase):
    """An iterator in OTBTF's form: it takes the reader alone, and never ends."""

    def __init__(self, patches_reader: Any) -> None:
        super().__init__(patches_reader=patches_reader)
        self.indices = np.arange(patches_reader.get_size())[::-1]
        self.count = 0

    def __next__(self) -> int:
        index = self.indices[self.count % len(self.indices)]
        self.count += 1
        return index


class Generated(IteratorBase):
    """One that ends after each pass, and is started again."""

    def __init__(self, reader: Any) -> None:
        self.size = reader.get_size()

    def __iter__(self) -> Iterator[int]:
        yield from range(1, self.size, 2)
        yield from range(0, self.size, 2)


class Keyworded(RandomIterator):
    def __init__(self, patches_reader: Any, **keywords: Any) -> None:
        super().__init__(patches_reader, keywords["seed"])


class TestIterators:
    def test_in_otbtfs_form(self, tmp_path: Path) -> None:
        with Dataset(Numbers(), 4, OtbtfIterator, seed=5) as dataset:
            assert read(dataset, 24) == [*range(22, -1, -1), 22]
            assert numbers(dataset.samples()) == list(range(22, -1, -1))
            dataset.to_tfrecords(tmp_path, 10, drop_remainder=False)
            with pytest.raises(InputError, match="can't be read again in the same order"):
                dataset.to_tfrecords(tmp_path, 10, drop_remainder=False, resume=True)
        assert numbers(otbtf_style.read(tmp_path)) == list(range(22, -1, -1))
        manifest = TFRecords(tmp_path).manifest
        assert manifest is not None
        assert manifest.seed is None

    def test_that_ends_and_is_started_again(self) -> None:
        with Dataset(Numbers(5), 2, Generated) as dataset:
            assert read(dataset, 12) == [1, 3, 0, 2, 4, 1, 3, 0, 2, 4, 1, 3]

    def test_that_takes_the_seed_among_keywords(self) -> None:
        with Dataset(Numbers(), 4, Keyworded, seed=5) as some, Dataset(Numbers(), 4, seed=5) as other:
            assert numbers(some.samples()) == numbers(other.samples())

    def test_that_gives_nothing_is_told(self) -> None:
        class Nothing(Generated):
            def __iter__(self) -> Iterator[int]:
                return iter(())

        with Dataset(Numbers(), 4, Nothing) as dataset, pytest.raises(InputError, match="Nothing gives no indices"):
            dataset.read_one_sample()

    def test_the_random_one_by_itself(self) -> None:
        iterator = RandomIterator(Numbers(), seed=2)
        assert iterator.seed == 2
        first = [next(iterator) for _ in range(23)]
        assert first == iterator.indices.tolist()
        assert first != [next(iterator) for _ in range(23)]
        assert {type(index) for index in first} == {int}


class TestMembers:
    def test_are_otbtfs(self) -> None:
        reader = Numbers()
        dataset = Dataset(patches_reader=reader, buffer_length=4)
        assert dataset.size == 23
        assert dataset.output_types == {"x": tf.float32, "n": tf.int64, "y": tf.float64}
        assert dataset.output_shapes == {"x": (2, 2, 1), "n": (1,), "y": ()}
        assert dataset.patches_reader is reader
        assert isinstance(dataset.iterator, RandomIterator)
        assert dataset.get_stats() == reader.get_stats()
        assert dataset.get_total_wait_in_seconds() == 0.0
        dataset.read_one_sample()
        assert dataset.get_total_wait_in_seconds() > 0.0
        dataset.close()
        assert dataset.get_total_wait_in_seconds() > 0.0

    def test_a_reader_needs_otbtfs_three_methods_alone(self, tmp_path: Path) -> None:
        with Dataset(ThreeMethods(), 3) as dataset:  # type: ignore[arg-type]
            assert sorted(numbers(dataset.samples())) == list(range(7))
            dataset.to_tfrecords(tmp_path / "x", 3, drop_remainder=False)
            assert sorted(flat(batches(dataset.get_tf_dataset(2, drop_remainder=False)))) == list(range(7))
        assert sorted(numbers(otbtf_style.read(tmp_path / "x"))) == list(range(7))

    def test_nothing_is_started_and_only_the_first_sample_read(
        self, caplog: pytest.LogCaptureFixture, threads: Callable[[], list[str]]
    ) -> None:
        caplog.set_level(logging.INFO, "otbtf_lite")
        reader = Numbers(fails_at=1, error=DataError("read too early"))
        dataset = Dataset(reader)
        dataset.get_tf_dataset(4)
        dataset.samples()
        assert threads() == []
        assert reader.reads == []
        assert "23 samples of Schema(x: float32[2, 2, 1], n: int64[1], y: float64[])" in caplog.messages

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"patches_reader": None}, "needs a patches_reader"),
            ({"patches_reader": Numbers(0)}, "Numbers has no samples"),
            ({"buffer_length": 0}, "buffer_length must be an integer of at least 1, got 0"),
            ({"buffer_length": 1.5}, "buffer_length must be an integer of at least 1, got 1.5"),
            ({"max_nb_of_samples": 0}, "max_nb_of_samples must be an integer of at least 1, got 0"),
            ({"max_nb_of_samples": True}, "max_nb_of_samples must be an integer of at least 1, got True"),
            ({"seed": -1}, "A seed must be an integer"),
        ],
    )
    def test_wrong_arguments_are_told(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            Dataset(**{"patches_reader": Numbers(), **arguments})


class TestThreads:
    def test_eight_threads_read_each_sample_once(self) -> None:
        with Dataset(Numbers(400), 16, seed=1) as dataset, ThreadPoolExecutor(8) as pool:
            found = flat(list(pool.map(lambda _: read(dataset, 50), range(8))))
        assert Counter(found) == Counter(range(400))

    def test_close_joins_the_thread_and_reading_starts_anew(self, threads: Callable[[], list[str]]) -> None:
        reader = Numbers()
        dataset = Dataset(reader, 4, seed=1)
        first = read(dataset, 6)
        assert len(threads()) == 1
        dataset.close()
        assert threads() == []
        assert reader.closed == 1
        assert read(dataset, 6) == first
        dataset.close()
        dataset.close()

    def test_a_pass_cut_short_ends_its_thread(self, threads: Callable[[], list[str]]) -> None:
        dataset = Dataset(Numbers(), 4)
        samples = dataset.samples()
        next(samples)
        assert len(threads()) == 1
        samples.close()  # type: ignore[attr-defined]  # a generator
        assert threads() == []

    def test_close_ends_the_passes_that_are_being_read(self, threads: Callable[[], list[str]]) -> None:
        dataset = Dataset(Numbers(), 4)
        samples = dataset.samples()
        next(samples)
        elements = iter(dataset.get_tf_dataset(2))
        next(elements)
        dataset.close()
        assert threads() == []
        with pytest.raises(InputError, match="closed in the middle of this pass"):
            list(samples)
        assert len(numbers(dataset.samples())) == 23

    @pytest.mark.parametrize("error", [ZeroDivisionError("mine"), OSError("mine"), KeyError("mine")], ids=repr)
    def test_an_error_of_the_reader_arrives_as_itself(self, tmp_path: Path, error: Exception) -> None:
        with Dataset(Numbers(fails_at=7, error=error), 4, SequentialIterator) as dataset:
            assert read(dataset, 4) == [0, 1, 2, 3]
            for reading in (dataset.read_one_sample, dataset.read_one_sample, lambda: list(dataset.samples())):
                with pytest.raises(type(error)) as caught:
                    reading()
                assert caught.value is error
            with pytest.raises(type(error)) as caught:
                dataset.to_tfrecords(str(tmp_path / "x"), 10)
            assert caught.value is error
            assert not list(tmp_path.iterdir())
            with pytest.raises(tf.errors.OpError, match="mine"):
                batches(dataset.get_tf_dataset(2))

    def test_an_error_of_the_first_sample_leaves_no_thread(self) -> None:
        with pytest.raises(DataError, match="mine"):
            Dataset(Numbers(fails_at=0, error=DataError("mine")))


class TestConversion:
    def test_each_conversion_holds_every_sample_once(self, tmp_path: Path) -> None:
        with Dataset(Numbers(), 4, seed=1) as dataset:
            dataset.to_tfrecords(tmp_path / "a", 5, drop_remainder=False)
            read(dataset, 30)
            TFRecords(tmp_path / "b").ds2tfrecord(dataset, 5, drop_remainder=False)
        a, b = (numbers(otbtf_style.read(tmp_path / name)) for name in "ab")
        assert a == b
        assert sorted(a) == list(range(23))

    def test_the_same_seed_gives_the_same_bytes(self, tmp_path: Path) -> None:
        contents = []
        for name, length, seed in (("a", 4, 1), ("b", 50, 1), ("c", 4, 2)):
            with Dataset(Numbers(), length, seed=seed) as dataset:
                dataset.to_tfrecords(str(tmp_path / name), 5)
            contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
        assert contents[0] == contents[1] != contents[2]

    def test_the_manifest_tells_seed_sources_and_what_was_dropped(self, tmp_path: Path) -> None:
        with Dataset(Numbers(), seed=7) as dataset:
            dataset.details["sampling"] = {"method": "by hand"}
            dataset.dropped["rejected"] = {"nodata": 4}
            dataset.to_tfrecords(tmp_path, 5)
        manifest = TFRecords(tmp_path).manifest
        assert manifest is not None
        assert manifest.seed == 7
        assert manifest.dropped == {"rejected": {"nodata": 4}, "remainder": 3}
        assert manifest.details == {
            "order": "random",
            "sources": {"x": {"paths": ["x.tif"]}},
            "sampling": {"method": "by hand"},
        }

    @pytest.mark.parametrize("subset", [None, 17])
    def test_a_run_that_broke_off_is_resumed_to_the_same_bytes(self, tmp_path: Path, subset: int | None) -> None:
        options: dict[str, Any] = {"seed": 3, "max_nb_of_samples": subset, "buffer_length": 2}
        with Dataset(Numbers(), **options) as dataset:
            dataset.to_tfrecords(tmp_path / "a", 4)
            order = numbers(dataset.samples())
        at = next(number for number in order[9:] if number != min(order))  # the first is read for its shape
        with (
            Dataset(Numbers(fails_at=at, error=OSError("mine")), **options) as dataset,
            pytest.raises(OSError, match="mine"),
        ):
            dataset.to_tfrecords(tmp_path / "b", 4)
        assert (tmp_path / "b" / "1.records").exists()
        with Dataset(Numbers(), **options) as dataset:
            dataset.to_tfrecords(tmp_path / "b", 4, resume=True)
        a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
        assert a == b

    def test_positions_follow_their_samples(self) -> None:
        class Placed(Numbers):
            positions = np.arange(100, 123)  # type: ignore[assignment]  # stands for what can be indexed

        for subset in (None, 9):
            given = Dataset(Placed(), 4, max_nb_of_samples=subset, seed=1).one_pass()
            samples = list(given.samples(0))
            assert (np.asarray(given.positions) - 100).tolist() == numbers(samples)
            assert numbers(given.samples(3)) == numbers(samples)[3:]


def preprocess(sample: dict[str, Any]) -> dict[str, Any]:
    if tf.reduce_max(sample["n"]) > 50:  # as AutoGraph turns it into an op
        return {"n": sample["n"] * 0, "target": sample["y"]}
    return {"n": sample["n"] * 2, "target": sample["y"]}


class TestTensorFlow:
    def test_each_iteration_is_one_pass(self) -> None:
        with Dataset(Numbers(), 4, seed=1) as dataset:
            found = dataset.get_tf_dataset(5, drop_remainder=False)
            passes = [flat(batches(found)), flat(batches(found))]
            assert [len(batch) for batch in batches(found)] == [5, 5, 5, 5, 3]
            assert len(flat(batches(found.repeat(2)))) == 46
            assert int(found.cardinality()) == 5
        assert all(sorted(each) == list(range(23)) for each in passes)
        assert passes[0] != passes[1]

    def test_one_seed_is_one_order(self) -> None:
        runs = []
        for _ in range(2):
            with Dataset(Numbers(), 4, seed=1) as dataset:
                runs.append([batches(dataset.get_tf_dataset(5)), numbers(dataset.samples())])
        assert runs[0] == runs[1]

    @pytest.mark.parametrize("drop", [True, False])
    @pytest.mark.parametrize("fn", [None, preprocess])
    def test_shapes_are_static_and_the_cardinality_known(self, drop: bool, fn: Any) -> None:
        with Dataset(Numbers(), 4) as dataset:
            found = dataset.get_tf_dataset(5, drop, fn)
            rows = 5 if drop else None
            assert found.element_spec["n"] == tf.TensorSpec((rows, 1), tf.int64)
            assert set(found.element_spec) == ({"x", "n", "y"} if fn is None else {"n", "target"})
            assert int(found.cardinality()) == len(batches(found)) == (4 if drop else 5)

    @pytest.mark.parametrize("batched", [True, False])
    @pytest.mark.parametrize("name", ["targets_keys", "target_keys"])
    def test_preprocessing_comes_before_the_targets(self, batched: bool, name: str) -> None:
        with Dataset(Numbers(), 4, SequentialIterator) as dataset:
            found = dataset.get_tf_dataset(
                5, preprocessing_fn=preprocess, batched_preprocessing=batched, **{name: ["target"]}
            )
            assert [set(each) for each in found.element_spec] == [{"n"}, {"target"}]
            assert flat(batches(found)) == [2 * n for n in range(20)]
            first = next(target["target"].tolist() for _, target in found.as_numpy_iterator())
            assert first == [0, 0.5, 1, 1.5, 2]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
            ({"targets_keys": ["z"]}, r"target_keys names 'z', which no sample has: the keys are \['n', 'x', 'y'\]"),
            ({"targets_keys": ["y"], "target_keys": ["y"]}, "mean the same: give one of them"),
            ({"targets_keys": "y"}, r'write \["y"\]'),
            ({"targets_keys": ["y"], "preprocessing_fn": preprocess}, r"names 'y', .* \['n', 'target'\]"),
            ({"preprocessing_fn": lambda sample: list(sample.values())}, "must return a dict of tensors by name"),
        ],
    )
    def test_wrong_arguments_are_told(self, options: dict[str, Any], message: str) -> None:
        with Dataset(Numbers()) as dataset, pytest.raises(InputError, match=message):
            dataset.get_tf_dataset(**{"batch_size": 2, **options})

    def test_one_sample_each(self) -> None:
        with Dataset(Numbers(), 4) as dataset:
            found = dataset.tf_dataset
            assert int(found.cardinality()) == 23
            assert found.element_spec["x"] == tf.TensorSpec((2, 2, 1), tf.float32)
            assert sorted(numbers(found.as_numpy_iterator())) == list(range(23))

    def test_each_type_arrives_as_it_is(self) -> None:
        kinds = otbtf_style.all_kinds(4)

        class Kinds(Numbers):
            def get_sample(self, index: int) -> Sample:
                return kinds if index == 0 else otbtf_style.all_kinds(index)

        with Dataset(Kinds(2), iterator_cls=SequentialIterator) as dataset:
            first = otbtf_style.arrays(next(iter(dataset.tf_dataset)))
        assert otbtf_style.same_samples([first], [kinds])

    @pytest.mark.parametrize("other", [{"n": np.array([1.0])}, {"n": np.array([1, 2])}, {"m": np.array([1])}])
    def test_a_sample_that_does_not_fit_is_no_silent_conversion(self, other: Sample) -> None:
        class Odd(Numbers):
            def get_sample(self, index: int) -> Sample:
                return {"n": np.array([index])} if index < 3 else other

        with Dataset(Odd(), 4, SequentialIterator) as dataset, pytest.raises(tf.errors.OpError, match="a sample"):
            batches(dataset.get_tf_dataset(2))

    def test_keras_runs_each_batch_once_an_epoch(self) -> None:
        inputs = {"n": tf.keras.Input((1,), name="n")}
        network = tf.keras.Model(inputs, {"y": tf.keras.layers.Dense(1)(inputs["n"])})
        network.compile(tf.keras.optimizers.SGD(0.0), loss="mse")
        with Dataset(Numbers(), 4) as dataset:
            found = dataset.get_tf_dataset(
                5,
                preprocessing_fn=lambda sample: {"n": sample["n"], "y": sample["y"]},
                targets_keys=["y"],
                batched_preprocessing=True,
            )
            network.fit(found, epochs=3, verbose=0)
        assert int(network.optimizer.iterations) == 3 * 4
