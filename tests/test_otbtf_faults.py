"""What goes wrong with OTBTF's Python classes, and what is right: one test for each fault."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from otbtf_lite import (
    DataError,
    Dataset,
    DatasetFromPatchesImages,
    InputError,
    PatchesImagesReader,
    PatchesReaderBase,
    RandomIterator,
    TFRecords,
)
from otbtf_lite.schema import Sample

gdal = pytest.importorskip("osgeo.gdal")
gdal.UseExceptions()

Array = npt.NDArray[Any]
MakeRaster = Callable[..., Path]

MODES = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "in memory"])


@pytest.fixture
def image(make_raster: MakeRaster) -> MakeRaster:
    """Write patches (n, rows, cols, bands) one below the other, as PatchesExtraction does."""

    def write(name: str, stack: Array, **options: Any) -> Path:
        n, rows, cols, bands = stack.shape
        return make_raster(name, stack.reshape(n * rows, cols, bands), **options)

    return write


@pytest.fixture
def numbered(image: MakeRaster) -> dict[str, list[str]]:
    """23 samples, whose pixels and labels say their number."""
    numbers = np.arange(23, dtype=np.uint16)[:, None, None, None]
    xs = image("xs.tif", np.broadcast_to(numbers, (23, 4, 4, 2)))
    labels = image("labels.tif", numbers.astype(np.uint8))
    return {"xs": [str(xs)], "labels": [str(labels)]}


def number_of(sample: Any) -> int:
    numbers = np.unique(np.asarray(sample["xs"]))
    assert numbers.tolist() == [int(np.asarray(sample["labels"]).item())]  # one patch, with its own label
    return int(numbers[0])


def one_pass(dataset: Dataset) -> list[Sample]:
    return [dataset.read_one_sample() for _ in range(dataset.size)]


def numbers_in(records: Path) -> list[int]:
    dataset = TFRecords(records).read(1, ["labels"], drop_remainder=False)
    return [number_of({**inputs, **targets}) for inputs, targets in dataset]


class Spy(PatchesReaderBase):
    """Notes which samples are asked for; one of them may not be readable."""

    def __init__(self, error_at: int | None = None, error: Exception | None = None) -> None:
        self.asked: list[int] = []
        self.stats_asked = 0
        self._fault = (error_at, error)

    def get_sample(self, index: int) -> Sample:
        self.asked.append(index)
        if index == self._fault[0] and self._fault[1] is not None:
            raise self._fault[1]
        return {"xs": np.full((2, 2, 1), index, np.uint16), "labels": np.array([index], np.uint8)}

    def get_stats(self) -> dict[str, Any]:
        self.stats_asked += 1
        return {}

    def get_size(self) -> int:
        return 9


# A conversion goes on where the last reading has stopped, in OTBTF: after a dropped remainder that is amid a pass.


@MODES
def test_every_conversion_holds_every_sample_once(numbered: Any, tmp_path: Path, streaming: bool) -> None:
    with DatasetFromPatchesImages(numbered, streaming, buffer_length=5, seed=1) as dataset:
        dataset.to_tfrecords(tmp_path / "without remainder", n_samples_per_shard=5)
        for name in ("first", "second"):
            for _ in range(3):
                dataset.read_one_sample()
            dataset.to_tfrecords(tmp_path / name, n_samples_per_shard=5, drop_remainder=False)
    for name in ("first", "second"):
        assert sorted(numbers_in(tmp_path / name)) == list(range(23))
    assert len(set(numbers_in(tmp_path / "without remainder"))) == 20


def test_every_iteration_of_a_tf_dataset_is_one_whole_pass(numbered: Any) -> None:
    with DatasetFromPatchesImages(numbered, buffer_length=5, seed=1) as dataset:
        batches = dataset.get_tf_dataset(4, drop_remainder=False, targets_keys=["labels"])
        single = dataset.tf_dataset
        for _ in range(2):
            found = [int(n) for _, targets in batches for n in targets["labels"].numpy().ravel()]
            assert sorted(found) == list(range(23))
            assert sorted(number_of({key: each.numpy() for key, each in sample.items()}) for sample in single) == list(
                range(23)
            )


# Streaming squares integers in their own type, starts maxima at 0 and trips over scalars.


@pytest.mark.parametrize(
    "values",
    [
        np.arange(39990, 39990 + 3 * 8 * 8 * 2).astype(np.uint16),
        -1 - np.arange(3 * 8 * 8 * 2).astype(np.int16),
        -np.geomspace(1e-3, 1e3, 3 * 8 * 8 * 2).astype(np.float32),
        np.arange(3 * 8 * 8 * 2).astype(np.uint8),
    ],
    ids=["uint16 near 40000", "negative int16", "negative float32", "uint8"],
)
@pytest.mark.parametrize("scalars", [None, {"name": ["a"], "angle": [0.5]}], ids=["", "scalars"])
def test_statistics_are_right_and_the_same_in_both_modes(image: MakeRaster, values: Array, scalars: Any) -> None:
    array = values.reshape(3, 8, 8, 2)
    files = {"xs": [image("xs.tif", array)]}
    streamed, in_memory = (PatchesImagesReader(files, mode, scalars).get_stats() for mode in (True, False))
    exact = array.astype(np.float64)
    assert list(streamed) == list(in_memory) == ["xs"]
    for name, function in {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}.items():
        np.testing.assert_array_equal(streamed["xs"][name], in_memory["xs"][name])
        np.testing.assert_allclose(streamed["xs"][name], function(exact, axis=(0, 1, 2)), rtol=1e-9)
    assert (streamed["xs"]["max"] == exact.max(axis=(0, 1, 2))).all()
    assert np.isfinite(streamed["xs"]["std"]).all()


def test_statistics_of_a_dataset_are_its_readers(numbered: Any) -> None:
    with DatasetFromPatchesImages(numbered, use_streaming=True) as dataset:
        assert dataset.get_stats()["xs"]["mean"].tolist() == [11.0, 11.0]
        assert dataset.get_stats()["labels"]["max"].tolist() == [22.0]


# Rows that do not fill a patch are dropped in one mode, and fail in NumPy in the other.


def test_a_height_that_is_no_multiple_of_the_width_is_one_error(make_raster: MakeRaster) -> None:
    path = make_raster("odd.tif", np.zeros((30, 8, 2), np.uint16))
    said = []
    for streaming in (True, False):
        with pytest.raises(InputError, match=r"odd\.tif has 8 columns and 30 rows.*multiple of its width") as error:
            PatchesImagesReader({"xs": [path]}, streaming)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("bands", [1, 2, 3])
def test_strips_are_read_alike_in_both_modes(image: MakeRaster, n: int, bands: int) -> None:
    array = np.arange(n * 5 * 5 * bands, dtype=np.uint16).reshape(n, 5, 5, bands)
    path = image("xs.tif", array)
    for streaming in (True, False):
        reader = PatchesImagesReader({"xs": [path]}, streaming)
        assert reader.size == n
        for index in range(n):
            np.testing.assert_array_equal(reader.get_sample(index)["xs"], array[index])


# An exception in OTBTF's reading thread is printed; the caller gets an IndexError, from a buffer that was not filled.


@pytest.mark.parametrize("position", [0, 4, 8])
def test_the_reading_threads_error_arrives_as_itself(tmp_path: Path, position: int) -> None:
    order = RandomIterator(Spy(), seed=5).indices
    fault = OSError(5, "Input/output error")
    reader = Spy()
    with Dataset(reader, buffer_length=2, seed=5) as dataset:
        reader._fault = (order[position], fault)
        with pytest.raises(OSError, match="Input/output") as raised:
            one_pass(dataset)
        assert raised.value is fault
        with pytest.raises(OSError, match="Input/output") as raised:
            dataset.to_tfrecords(tmp_path / "records", n_samples_per_shard=3)
        assert raised.value is fault


@MODES
def test_a_damaged_file_is_named_when_its_pixels_are_needed(damaged: Path, streaming: bool) -> None:
    with (
        DatasetFromPatchesImages({"xs": [damaged]}, streaming, seed=0) as dataset,
        pytest.raises(DataError, match=rf"{re.escape(str(damaged))} can't be read at rows \d+"),
    ):
        one_pass(dataset)


# Constructors start threads, fill buffers and make directories.


@pytest.fixture
def damaged(image: MakeRaster) -> Path:
    """A good header, and no pixels beyond the first few."""
    path = image("damaged.tif", np.ones((40, 16, 16, 1), np.float32))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 10)
    return path


@MODES
def test_no_pixel_is_read_and_nothing_starts_in_a_constructor(
    damaged: Path, streaming: bool, own_threads: Callable[[], list[str]]
) -> None:
    with DatasetFromPatchesImages({"xs": [damaged]}, streaming, seed=0) as dataset:
        assert dataset.size == 40
        assert dataset.output_shapes == {"xs": (16, 16, 1)}
        batches = dataset.get_tf_dataset(8, targets_keys=[])
        assert batches.cardinality() == 5
        assert own_threads() == []


def test_a_constructor_asks_for_the_first_sample_alone(own_threads: Callable[[], list[str]]) -> None:
    reader = Spy()
    with Dataset(reader, buffer_length=3, seed=0) as dataset:
        dataset.get_tf_dataset(4)
        assert dataset.output_shapes["xs"] == (2, 2, 1)
        assert own_threads() == []
    assert reader.asked == [0]
    assert reader.stats_asked == 0


def test_a_mistyped_directory_is_not_made(tmp_path: Path) -> None:
    records = TFRecords(tmp_path / "mistyped")
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "mistyped"))):
        records.read(4, ["labels"])
    assert not list(tmp_path.iterdir())


# Orders come from NumPy's global generator.


@MODES
def test_two_datasets_with_one_seed_agree(numbered: Any, streaming: bool) -> None:
    orders = []
    for state in (1, 2):
        np.random.seed(state)  # noqa: NPY002  # to show that it does not matter
        with DatasetFromPatchesImages(numbered, streaming, buffer_length=4 + state, seed=7) as dataset:
            orders.append([number_of(dataset.read_one_sample()) for _ in range(3 * dataset.size)])
    assert orders[0] == orders[1]
    passes = [orders[0][start : start + 23] for start in (0, 23, 46)]
    assert all(sorted(each) == list(range(23)) for each in passes)
    assert passes[0] != passes[1] != passes[2]


def test_numpys_global_generator_is_left_alone(numbered: Any) -> None:
    np.random.seed(3)  # noqa: NPY002  # as a script may
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    with DatasetFromPatchesImages(numbered) as dataset:
        dataset.read_one_sample()
    assert np.random.random() == expected  # noqa: NPY002


def test_max_nb_of_samples_are_the_same_in_each_pass(numbered: Any) -> None:
    with Dataset(PatchesImagesReader(numbered), max_nb_of_samples=7, seed=2) as dataset:
        assert dataset.size == 7
        passes = [sorted(number_of(dataset.read_one_sample()) for _ in range(7)) for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]
    assert len(set(passes[0])) == 7


# Sources that do not fit together pass unnoticed, or fail without saying which.


@MODES
def test_sources_of_unequal_counts_are_named(image: MakeRaster, streaming: bool) -> None:
    files = {
        "xs": [image("xs_1.tif", np.zeros((3, 4, 4, 2))), image("xs_2.tif", np.zeros((4, 4, 4, 2)))],
        "labels": [image("labels_1.tif", np.zeros((3, 2, 2, 1))), image("labels_2.tif", np.zeros((2, 2, 2, 1)))],
    }
    with pytest.raises(InputError, match=r"'xs' has 7 and 'labels' has 5.*xs_2\.tif has 4 and .*labels_2\.tif has 2"):
        PatchesImagesReader(files, streaming)


@MODES
def test_files_of_unequal_bands_are_named(image: MakeRaster, streaming: bool) -> None:
    paths = [image("a.tif", np.zeros((3, 4, 4, 2))), image("b.tif", np.zeros((3, 4, 4, 3)))]
    with pytest.raises(InputError, match=r"'xs'.*a\.tif .*\[4, 4, 2\].*b\.tif .*\[4, 4, 3\]"):
        PatchesImagesReader({"xs": paths}, streaming)


@pytest.mark.parametrize("splits", [(5, 18), (20, 3)])
def test_sources_cut_at_different_places_stay_together(image: MakeRaster, splits: tuple[int, int]) -> None:
    numbers = np.arange(23, dtype=np.uint16)[:, None, None, None]
    cut = splits[0]
    files = {
        "xs": [image("xs.tif", np.broadcast_to(numbers, (23, 4, 4, 1)))],
        "labels": [image("l1.tif", numbers[:cut]), image("l2.tif", numbers[cut:])],
    }
    for streaming in (True, False):
        assert [number_of(sample) for sample in PatchesImagesReader(files, streaming)] == list(range(23))


# Threads.


@MODES
def test_eight_threads_get_every_sample_once(numbered: Any, streaming: bool) -> None:
    with DatasetFromPatchesImages(numbered, streaming, buffer_length=3, seed=4) as dataset:
        start = threading.Barrier(8)

        def take(count: int) -> list[int]:
            start.wait(30)
            return [number_of(dataset.read_one_sample()) for _ in range(count)]

        with ThreadPoolExecutor(8) as pool:
            found = [n for part in pool.map(take, [6, 6, 6, 6, 6, 6, 5, 5]) for n in part]  # two passes
    assert Counter(found) == dict.fromkeys(range(23), 2)
