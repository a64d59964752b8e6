"""Directories of records end to end: with an OTBTF-style writer and reader, TensorFlow's auto-sharding, and Keras."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import otbtf_style
import pytest
import tensorflow as tf
from otbtf_style import FourMembers, all_kinds, same_samples
from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

from otbtf_lite import TFRecords
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import JOURNAL, MANIFEST
from otbtf_lite.schema import Schema

PROJECT = Path(__file__).resolve().parents[1]
KINDS = [all_kinds(seed) for seed in range(3)]


def numbered(n: int) -> list[dict[str, Any]]:
    """Samples that say their own number, in three keys."""
    return [{"a": np.full((2, 2, 1), k, np.uint8), "n": np.array([k]), "y": np.array(float(k))} for k in range(n)]


def write(folder: Path, n: int, per_shard: int = 5, *, drop: bool = False, **options: Any) -> TFRecords:
    records = TFRecords(folder)
    records.ds2tfrecord(FourMembers(numbered(n)), per_shard, drop, **options)
    return records


def batches(dataset: tf.data.Dataset, key: str = "n") -> list[list[int]]:
    """The samples' numbers, batch by batch."""
    return [inputs[key].ravel().tolist() for inputs, _ in dataset.as_numpy_iterator()]


def numbers(dataset: tf.data.Dataset, key: str = "n") -> list[int]:
    return [number for batch in batches(dataset, key) for number in batch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 samples, the last shard of 3."""
    path = tmp_path_factory.mktemp("records")
    write(path, 23)
    return path


@pytest.fixture(scope="module")
def records(folder: Path) -> TFRecords:
    return TFRecords(folder)


@pytest.fixture(autouse=True)
def untouched(folder: Path) -> Iterator[None]:
    """Reading changes nothing."""
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    yield
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


class TestInterop:
    def test_otbtf_reads_ours(self, tmp_path: Path) -> None:
        TFRecords(tmp_path).ds2tfrecord(FourMembers(KINDS), 2, drop_remainder=False)
        assert same_samples(otbtf_style.read(tmp_path), KINDS)

    @pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
    def test_tensorflow_reads_ours_compressed(self, tmp_path: Path, compression: str) -> None:
        samples = numbered(7)
        TFRecords(tmp_path).ds2tfrecord(FourMembers(samples), 3, drop_remainder=False, compression=compression)
        assert same_samples(otbtf_style.read(tmp_path, compression), samples)
        assert numbers(TFRecords(tmp_path).read(2, ["y"], drop_remainder=False)) == list(range(7))

    def test_we_read_otbtfs_with_keys_in_any_order(self, tmp_path: Path) -> None:
        otbtf_style.write(tmp_path, KINDS, 2, seed=5)
        records = TFRecords(tmp_path)
        assert records.manifest is None
        assert records.schema == Schema.of(KINDS[0])
        assert records.shards == ["0.records", "1.records"]
        assert len(records) == 3
        dataset = records.read(1, ["nan"], drop_remainder=False)
        assert int(dataset.cardinality()) == 3
        found = []
        for inputs, targets in dataset:
            assert set(targets) == {"nan"}
            sample = otbtf_style.arrays({**inputs, **targets})
            found.append({key: np.asarray(sample[key][0], KINDS[0][key].dtype) for key in KINDS[0]})
        assert same_samples(found, KINDS)

    def test_the_vectorised_parser_reads_the_same(self, tmp_path: Path) -> None:
        """Without strings, batches are parsed at once."""
        samples = [{key: array for key, array in kinds.items() if array.dtype != object} for kinds in KINDS]
        otbtf_style.write(tmp_path, samples, 5, seed=1)
        ((inputs, targets),) = TFRecords(tmp_path).read(3, ["nan"])
        found = otbtf_style.arrays({**inputs, **targets})
        assert same_samples([{key: found[key][k] for key in samples[0]} for k in range(3)], samples)

    def test_large_records_are_read_one_by_one(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        samples = [{"x": rng.random((300, 300, 1), np.float32), "n": np.array(k)} for k in range(3)]
        TFRecords(tmp_path).ds2tfrecord(FourMembers(samples), 3)
        dataset = TFRecords(tmp_path).read(3, ["n"])
        assert dataset.element_spec[0]["x"].shape == (3, 300, 300, 1)
        ((inputs, _),) = dataset.as_numpy_iterator()
        assert (inputs["x"] == np.stack([sample["x"] for sample in samples])).all()

    def test_shards_are_read_in_numeric_order(self, tmp_path: Path) -> None:
        otbtf_style.write(tmp_path, numbered(12), 1)
        assert numbers(TFRecords(tmp_path).read(1, ["y"])) == list(range(12))

    def test_a_record_of_another_schema_is_told(self, tmp_path: Path) -> None:
        otbtf_style.write(tmp_path, numbered(4), 2)
        path = tmp_path / "output_shapes.json"
        path.write_text(path.read_text().replace("1", "2"))
        with pytest.raises(tf.errors.InvalidArgumentError, match="another tensor than the schema says"):
            batches(TFRecords(tmp_path).read(1, ["y"]))


class TestProperties:
    def test_of_a_directory(self, folder: Path, records: TFRecords) -> None:
        assert records.dirpath == str(folder)
        assert records.output_types_file == str(folder / "output_types.json")
        assert records.output_shapes_file == str(folder / "output_shapes.json")
        assert records.output_types == {"a": "uint8", "n": "int64", "y": "float64"}
        assert records.output_shapes == {"a": [2, 2, 1], "n": [1], "y": []}
        assert records.shards == [f"{n}.records" for n in range(5)]
        assert len(records) == 23
        assert repr(records) == f"TFRecords({str(folder)!r})"
        assert records.manifest is not None
        assert records.manifest.schema == records.schema == Schema.of(numbered(1)[0])

    def test_of_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        records = TFRecords(tmp_path / "x")
        assert records.output_types is records.output_shapes is records.manifest is None
        for read in (lambda: records.schema, lambda: records.shards, lambda: len(records)):
            with pytest.raises(DataError, match=f"There is no directory {tmp_path / 'x'}"):
                read()
        assert os.listdir(tmp_path) == []  # noqa: PTH208  # nothing at all

    def test_json_is_saved_and_loaded_as_otbtf_does(self, tmp_path: Path) -> None:
        data = {"x": "uint8", "y": [1, 2]}
        TFRecords.save(data, tmp_path / "x.json")
        assert (tmp_path / "x.json").read_text() == json.dumps(data, indent=4)
        assert TFRecords.load(str(tmp_path / "x.json")) == data
        (tmp_path / "x.json").write_text("[1]")
        with pytest.raises(DataError, match=r"x.json must be a JSON object, got list"):
            TFRecords.load(tmp_path / "x.json")
        (tmp_path / "x.json").write_text("{")
        with pytest.raises(DataError, match=r"x.json is not valid JSON"):
            TFRecords.load(tmp_path / "x.json")

    def test_one_record_is_parsed(self, folder: Path, records: TFRecords) -> None:
        (record,) = tf.data.TFRecordDataset(str(folder / "1.records")).take(1)
        inputs, targets = records.parse_tfrecord(record, ["n"])
        assert (set(inputs), set(targets), targets["n"].numpy().tolist()) == ({"a", "y"}, {"n"}, [5])
        inputs, targets = records.parse_tfrecord(record, ["m"], lambda s, k: {"x": s["a"], "m": s["n"] * k}, k=3)
        assert (set(inputs), targets["m"].numpy().tolist()) == ({"x"}, [15])
        with pytest.raises(InputError, match="target_keys names 'm'"):
            records.parse_tfrecord(record, ["m"])

    def test_reads_like_otbtf_through_parse_tfrecord(self, folder: Path, records: TFRecords) -> None:
        dataset = tf.data.TFRecordDataset(otbtf_style.files(folder)).map(
            lambda each: records.parse_tfrecord(each, ["y"])
        )
        assert numbers(dataset.batch(4)) == list(range(23))


class TestSplitting:
    @pytest.mark.parametrize("drop", [True, False])
    def test_shapes_are_static_and_the_cardinality_known(self, records: TFRecords, drop: bool) -> None:
        dataset = records.read(4, ["y"], drop_remainder=drop)
        rows = 4 if drop else None
        assert dataset.element_spec == (
            {"a": tf.TensorSpec((rows, 2, 2, 1), tf.uint8), "n": tf.TensorSpec((rows, 1), tf.int64)},
            {"y": tf.TensorSpec((rows,), tf.float64)},
        )
        assert int(dataset.cardinality()) == len(batches(dataset)) == (5 if drop else 6)
        assert numbers(dataset) == list(range(20 if drop else 23))
        assert len(list(dataset.repeat(2))) == 2 * int(dataset.cardinality())

    def test_only_the_inputs_asked_for(self, records: TFRecords) -> None:
        assert set(records.read(4, ["y"], input_keys=["n"]).element_spec[0]) == {"n"}
        assert set(records.read(4, ("y", "n"), input_keys=("a",)).element_spec[1]) == {"y", "n"}

    @pytest.mark.parametrize("batched", [True, False])
    def test_preprocessing_takes_its_keywords(self, records: TFRecords, batched: bool) -> None:
        shapes: list[Any] = []

        def preprocess(sample: dict[str, tf.Tensor], factor: int, *, seed: int) -> dict[str, tf.Tensor]:
            shapes.append(sample["a"].shape.as_list())
            if tf.reduce_sum(sample["n"]) >= 0:  # as AutoGraph turns it into an op
                return {"n": sample["n"] * factor + seed, "target": sample["y"]}
            return {"n": sample["n"], "target": sample["y"]}

        dataset = records.read(
            4, ["target"], preprocessing_fn=preprocess, factor=2, preprocessing_kwargs={"seed": 1},
            batched_preprocessing=batched,
        )  # fmt: skip
        assert numbers(dataset) == [2 * n + 1 for n in range(20)]
        assert shapes[0] == ([4, 2, 2, 1] if batched else [2, 2, 1])
        assert dataset.element_spec[0]["n"].shape == (4, 1)
        assert int(dataset.cardinality()) == 5

    def test_start_step_leaves_batches_out(self, records: TFRecords) -> None:
        dataset = records.read(4, ["y"], start_step=3)
        assert batches(dataset) == [[12, 13, 14, 15], [16, 17, 18, 19]]
        assert int(dataset.cardinality()) == 2


class TestShuffling:
    def test_each_iteration_has_another_order_and_each_sample_once(self, records: TFRecords) -> None:
        dataset = records.read(5, ["y"], drop_remainder=False, shuffle_buffer_size=1 << 40)
        both = numbers(dataset.repeat(2))
        epochs = [both[:23], both[23:], numbers(dataset)]
        assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert int(dataset.cardinality()) == 5

    def test_a_seed_gives_the_same_orders_again(self, records: TFRecords) -> None:
        runs = [
            numbers(records.read(5, ["y"], drop_remainder=False, shuffle_buffer_size=8, seed=seed).repeat(2))
            for seed in (3, 3, 4)
        ]
        assert runs[0] == runs[1] != runs[2]
        assert runs[0][:23] != runs[0][23:]

    def test_without_shuffling_the_order_is_the_files(self, records: TFRecords) -> None:
        assert numbers(records.read(1, ["y"]).repeat(2)) == [*range(23), *range(23)]


def three(*workers: list[int]) -> list[list[int]]:
    """The samples of shards of three."""
    return [[3 * shard + k for shard in shards for k in range(3)] for shards in workers]


TABLE: list[tuple[int, int, bool, list[list[int]]]] = [
    # samples at 3 a shard, workers, drop_remainder when written -> the samples that each worker gets
    (12, 1, True, three([0, 1, 2, 3])),
    (12, 2, True, three([0, 2], [1, 3])),
    (12, 3, True, three([0], [1], [2])),
    (12, 4, True, three([0], [1], [2], [3])),
    (16, 2, True, three([0, 2], [1, 3])),
    (16, 2, False, [[0, 1, 2, 6, 7, 8, 12], [3, 4, 5, 9, 10, 11, 15]]),
    (17, 3, False, [[0, 1, 2, 9, 10], [3, 4, 5, 12, 13], [6, 7, 8, 15, 16]]),
    (17, 3, True, three([0], [1], [2])),
    (11, 2, False, [[0, 1, 2, 6, 7], [3, 4, 5, 9, 10]]),
    (2, 1, False, [[0, 1]]),
]


class TestWorkers:
    @pytest.mark.parametrize(("n", "workers", "drop", "expected"), TABLE)
    def test_each_worker_gets_its_files_and_as_many_samples(
        self,
        tmp_path: Path,
        n: int,
        workers: int,
        drop: bool,
        expected: list[list[int]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Under TensorFlow's own auto-sharding, with the policy AUTO."""
        records = write(tmp_path, n, 3, drop=drop)
        caplog.set_level(logging.WARNING)
        dataset = records.read(2, ["y"], workers, drop_remainder=False)
        assert [numbers(_AutoShardDataset(dataset, workers, worker)) for worker in range(workers)] == expected
        lost = len(records) - sum(map(len, expected))
        assert (f"{lost} of {len(records)} samples are left out so that {workers} workers" in caplog.text) == bool(lost)

    @pytest.mark.parametrize("auto", [True, False], ids=["AUTO", "worker_index"])
    @pytest.mark.parametrize(("drop", "shuffle"), [(True, None), (False, 99)])
    def test_however_it_is_read_a_worker_has_its_samples_alone(
        self, records: TFRecords, auto: bool, drop: bool, shuffle: int | None
    ) -> None:
        options: dict[str, Any] = {"n_workers": 2, "drop_remainder": drop, "shuffle_buffer_size": shuffle}
        for worker, shard in enumerate(([0, 1, 2, 3, 4, 10, 11, 12, 13, 14], [5, 6, 7, 8, 9, 15, 16, 17, 18, 19])):
            if auto:
                dataset = _AutoShardDataset(records.read(3, ["y"], **options), 2, worker)
            else:
                dataset = records.read(3, ["y"], **options, worker_index=worker)
                assert int(dataset.cardinality()) == (3 if drop else 4)
            found = numbers(dataset)
            assert sorted(found) == shard[: 9 if drop else 10]
            assert (found == sorted(found)) == (shuffle is None)

    def test_fewer_shards_than_workers_is_an_error(self, records: TFRecords) -> None:
        with pytest.raises(InputError, match=r"5 shards can't feed 6 workers: .*otbtf-lite reshard DIR --shards 6"):
            records.read(2, ["y"], n_workers=6)

    def test_other_policies_and_a_worker_of_its_own(self, records: TFRecords) -> None:
        policies = tf.data.experimental.AutoShardPolicy
        chosen = records.read(2, ["y"], 2, shard_policy=policies.DATA)
        assert chosen.options().experimental_distribute.auto_shard_policy == policies.DATA
        own = records.read(2, ["y"], 2, worker_index=0)
        assert own.options().experimental_distribute.auto_shard_policy == policies.OFF

    def test_several_devices_of_one_host_share_each_batch(self, records: TFRecords) -> None:
        strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
        dataset = strategy.experimental_distribute_dataset(records.read(4, ["y"], drop_remainder=False))
        found = [strategy.experimental_local_results(inputs["n"])[0].numpy().ravel().tolist() for inputs, _ in dataset]
        assert [number for batch in found for number in batch] == list(range(23))


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
            ({"batch_size": 2.0}, "batch_size must be an integer of at least 1, got 2.0"),
            ({"n_workers": 0}, "n_workers must be an integer of at least 1, got 0"),
            ({"target_keys": ["labels"]}, r"target_keys names 'labels', .* \['a', 'n', 'y'\]"),
            ({"target_keys": ["yy"]}, "did you mean 'y'"),
            ({"target_keys": "y"}, r'target_keys must be a list of keys, got the text \'y\': write \["y"\]'),
            ({"target_keys": None}, "target_keys must be a list of keys, got None"),
            ({"input_keys": ["b"]}, "input_keys names 'b'"),
            ({"input_keys": ["y"]}, "both as inputs and as targets"),
            ({"batchsize": 3}, "read has no argument 'batchsize'; did you mean 'batch_size'"),
            ({"shuffle_buffer": 3}, "did you mean 'shuffle_buffer_size'"),
            (
                {"preprocessing_fn": lambda s: s, "scale": 3},
                "Neither preprocessing_fn nor read takes an argument 'scale'",
            ),
            (
                {"preprocessing_fn": lambda s, scale: {**s, "y": scale}},
                "preprocessing_fn can't take a sample .*'scale'",
            ),
            ({"preprocessing_fn": lambda s: {"n": s["n"]}}, r"target_keys names 'y', .* \['n'\]"),
            ({"preprocessing_fn": lambda s: (s["n"], s["y"])}, "must return a dict of tensors by name, got tuple"),
            ({"shuffle_buffer_size": 0}, "shuffle_buffer_size must be an integer of at least 1"),
            ({"engine": "fast"}, "engine must be one of 'auto', 'graph', got 'fast'"),
            ({"seed": -1}, "A seed must be an integer"),
            ({"worker_index": 1}, "worker_index must be an integer from 0 to n_workers - 1 = 0, got 1"),
            ({"shard_policy": 7}, r"shard_policy must be an AutoShardPolicy \(OFF, AUTO, FILE, DATA, HINT\), got 7"),
            ({"start_step": 12}, "start_step must be an integer from 0 to the 11 batches, got 12"),
            ({"start_step": -1}, "start_step must be an integer"),
            ({"start_step": 1, "shuffle_buffer_size": 9}, "finds no exact place in a shuffled order"),
        ],
    )
    def test_an_argument_that_does_not_fit_is_one_clear_error(
        self, records: TFRecords, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InputError, match=message) as caught:
            records.read(**{"batch_size": 2, "target_keys": ["y"], **options})
        assert type(caught.value) is InputError

    def test_a_mistyped_path_creates_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=f"There is no directory {tmp_path / 'trian'}"):
            TFRecords(tmp_path / "trian").read(2, ["y"])
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("names", [[], ["0.records"], ["output_types.json", "output_shapes.json"], ["x.tif"]])
    def test_another_directory_is_no_data_set(self, tmp_path: Path, names: list[str]) -> None:
        for name in names:
            (tmp_path / name).touch()
        with pytest.raises(DataError, match=f"{tmp_path} holds no data set"):
            TFRecords(tmp_path).read(2, ["y"])

    def test_too_few_samples_for_a_shard_leave_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="7 samples do not fill one shard of n_samples_per_shard=100"):
            TFRecords(tmp_path / "x").ds2tfrecord(FourMembers(numbered(7)), 100, drop_remainder=True)
        assert not list(tmp_path.iterdir())

    def test_a_directory_that_has_shards_is_refused(self, folder: Path) -> None:
        with pytest.raises(DataError, match=f"{folder} already holds 8 files of a data set"):
            write(folder, 3)

    def test_what_is_no_dataset_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="list is no dataset that can be written"):
            TFRecords(tmp_path / "x").ds2tfrecord(numbered(3))
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "content", ["", "[]", "{", '{"a": "uint8"}', '{"a": "what", "n": "int64", "y": "float64"}']
    )
    def test_damaged_json_of_otbtf_is_told(self, tmp_path: Path, content: str) -> None:
        otbtf_style.write(tmp_path, numbered(3), 2)
        (tmp_path / "output_types.json").write_text(content)
        with pytest.raises(DataError, match=str(tmp_path)):
            TFRecords(tmp_path).read(2, ["y"])


class TestDamage:
    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        write(tmp_path, 15)
        return tmp_path

    @staticmethod
    def change(path: Path, data: bytes) -> None:
        path.write_bytes(data)

    @pytest.mark.parametrize("verify", [True, False])
    @pytest.mark.parametrize("size", [0, 1, 6, 12, 100], ids=lambda size: f"{size} bytes less")
    def test_a_shard_that_was_cut(self, copy: Path, size: int, verify: bool) -> None:
        data = (copy / "1.records").read_bytes()
        whole = len(data) // 5 * (5 - 1)  # on a record boundary
        (copy / "1.records").write_bytes(data[: -size or whole])
        with pytest.raises(DataError, match=r"1.records has \d+ bytes where the manifest says \d+: it was cut"):
            TFRecords(copy).read(2, ["y"], verify=verify)

    @pytest.mark.parametrize("verify", [True, False])
    def test_shards_that_were_swapped(self, copy: Path, verify: bool) -> None:
        (copy / "0.records").rename(copy / "x")
        (copy / "1.records").rename(copy / "0.records")
        (copy / "x").rename(copy / "1.records")
        with pytest.raises(DataError, match=r"0.records does not begin with the record that the manifest says"):
            TFRecords(copy).read(2, ["y"], verify=verify)

    def test_compressed_shards_that_were_swapped(self, tmp_path: Path) -> None:
        records = write(tmp_path, 15, compression="GZIP")
        manifest = records.manifest
        assert manifest is not None
        data = (tmp_path / "1.records").read_bytes()
        size = manifest.shards[0].bytes
        (tmp_path / "0.records").write_bytes(data[:size].ljust(size, b"\0"))
        with pytest.raises(DataError, match=r"0.records does not begin with the record"):
            records.read(2, ["y"])

    def test_a_shard_that_is_missing(self, copy: Path) -> None:
        (copy / "2.records").unlink()
        with pytest.raises(DataError, match=r"Could not read .*2.records: No such file or directory"):
            TFRecords(copy).read(2, ["y"])

    def test_a_first_record_that_was_damaged(self, copy: Path) -> None:
        data = bytearray((copy / "0.records").read_bytes())
        data[3] ^= 1
        (copy / "0.records").write_bytes(data)
        with pytest.raises(DataError, match=r"0.records: record 0 at byte 0 is corrupt"):
            TFRecords(copy).read(2, ["y"])

    def test_a_later_record_that_was_damaged(self, copy: Path) -> None:
        data = bytearray((copy / "0.records").read_bytes())
        data[-20] ^= 1
        (copy / "0.records").write_bytes(data)
        for engine_side in (None, 4):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"0\.records: record 4 at byte \d+ is corrupt"):
                batches(TFRecords(copy).read(2, ["y"], shuffle_buffer_size=engine_side))

    def test_a_stray_shard_is_not_read(self, copy: Path) -> None:
        (copy / "3.records").write_bytes((copy / "0.records").read_bytes())
        assert numbers(TFRecords(copy).read(1, ["y"])) == list(range(15))

    @pytest.mark.parametrize("compression", [None, "GZIP"])
    def test_an_unfinished_directory(self, tmp_path: Path, compression: str | None) -> None:
        records = write(tmp_path, 15, compression=compression)
        (tmp_path / MANIFEST).rename(tmp_path / JOURNAL)
        for read in (lambda: records.read(2, ["y"]), lambda: len(records), lambda: records.manifest):
            with pytest.raises(DataError, match="is unfinished"):
                read()

    def test_without_a_manifest_what_can_be_told_is(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        otbtf_style.write(tmp_path, numbered(9), 3)
        (tmp_path / "1.records").rename(tmp_path / "4.records")
        assert numbers(TFRecords(tmp_path).read(1, ["y"])) == [0, 1, 2, 6, 7, 8, 3, 4, 5]
        assert "has no manifest: a shard that is missing or short can't be noticed" in caplog.text
        assert "has only 3 shards of 5" in caplog.text
        data = (tmp_path / "2.records").read_bytes()
        for cut, message in (
            (data[:-1], "is cut"),
            (data[: len(data) // 3 + 5], "is cut"),
            (b"", "2.records is empty"),
        ):
            (tmp_path / "2.records").write_bytes(cut)
            with pytest.raises(DataError, match=message):
                TFRecords(tmp_path).read(1, ["y"])


def test_what_is_found_and_kept_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "otbtf_lite")
    records = write(tmp_path, 15)
    assert "15 samples" in caplog.messages
    caplog.clear()
    records.read(2, ["y"], 2)
    assert caplog.messages[:3] == [f"15 samples in {tmp_path}", "3 shards found", "2 shards kept for 2 workers"]
    assert caplog.records[3].levelname == "WARNING"


def test_a_directory_in_memory_is_written_and_read(tmp_path: Path) -> None:
    records = TFRecords(f"ram://{tmp_path.name}/records")
    records.ds2tfrecord(FourMembers(numbered(7)), 3, drop_remainder=False)
    assert len(records) == 7
    assert records.output_types == {"a": "uint8", "n": "int64", "y": "float64"}
    assert numbers(records.read(2, ["y"], drop_remainder=False)) == list(range(7))
    with pytest.raises(DataError, match="already holds"):
        records.ds2tfrecord(FourMembers(numbered(7)), 3)


def test_a_path_object_will_do(folder: Path) -> None:
    assert len(TFRecords(folder)) == len(TFRecords(os.fspath(folder))) == 23


@pytest.mark.parametrize(("drop", "shuffle"), [(True, None), (False, 8)])
def test_keras_runs_each_batch_once_an_epoch(records: TFRecords, drop: bool, shuffle: int | None) -> None:
    """Keras 3 runs one step more than there are batches where it does not know their number."""
    dataset = records.read(5, ["y"], drop_remainder=drop, shuffle_buffer_size=shuffle, input_keys=["n"])
    inputs = {"n": tf.keras.Input((1,), name="n")}
    network = tf.keras.Model(inputs, {"y": tf.keras.layers.Dense(1)(inputs["n"])})
    network.compile(tf.keras.optimizers.SGD(0.0), loss="mse")
    steps: Counter[int] = Counter()
    epochs: list[int] = []

    count = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, *_: epochs.append(epoch),
        on_train_batch_end=lambda *_, **__: steps.update(epochs[-1:]),
    )
    network.fit(dataset, epochs=2, verbose=0, callbacks=[count])
    n = 4 if drop else 5
    assert steps == {0: n, 1: n}
    assert int(network.optimizer.iterations) == 2 * n
    losses = network.evaluate(dataset, verbose=0)
    weights = [float(each.numpy().ravel()[0]) for each in network.weights]
    k = np.arange(20 if drop else 23)
    assert losses == pytest.approx(np.mean((weights[0] * k + weights[1] - k) ** 2), rel=1e-4)


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "osgeo":
            raise ImportError("no GDAL here")
sys.meta_path.insert(0, Blocker())
import otbtf_lite
assert not {"tensorflow", "osgeo", "keras"} & set(sys.modules)
dataset = otbtf_lite.TFRecords(sys.argv[1]).read(4, ["y"], drop_remainder=False, shuffle_buffer_size=9)
print(sorted(n for inputs, _ in dataset for n in inputs["n"].numpy().ravel().tolist()))
try:
    import osgeo
except ImportError as error:
    print(error)
"""


def test_records_are_read_where_there_is_no_gdal(folder: Path) -> None:
    command = [sys.executable, "-c", BLOCKED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(list(range(23))), "no GDAL here"]
