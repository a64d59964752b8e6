from __future__ import annotations

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Positions
from otbtf_lite.raster import RasterSource, write_raster
from otbtf_lite.readers import (
    ArraysReader,
    ConcatReader,
    PatchesReaderBase,
    RasterPatchesReader,
    SampleIndexError,
)
from otbtf_lite.sampling import at_random, on_grid
from otbtf_lite.stats import BandStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from otbtf_lite.schema import Sample

CRS = "EPSG:32631"
SIZE = 600
"""Pixels of 10 m on each side of the scene: several blocks of a GeoTIFF."""


@pytest.fixture(scope="module")
def pixels() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "xs": rng.integers(0, 10000, (SIZE, SIZE, 3)).astype(np.uint16),
        "swir": rng.normal(size=(SIZE // 2, SIZE // 2, 1)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def sources(pixels: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RasterSource]:
    """10 m and 20 m images of one place."""
    folder = tmp_path_factory.mktemp("scene")
    found = {}
    for key, pixel, size in (("xs", 10.0, 16), ("swir", 20.0, 8)):
        path = folder / f"{key}.tif"
        grid = Grid(CRS, (500000.0, pixel, 0.0, 4000000.0, 0.0, -pixel), *pixels[key].shape[1::-1])
        write_raster(path, pixels[key], grid)
        found[key] = RasterSource(path, size)
    return found


@pytest.fixture(scope="module")
def positions(sources: Mapping[str, RasterSource]) -> Positions:
    places = at_random(sources["xs"], 200, seed=0)
    inside = (places.x < 505800) & (places.y > 3994200)  # where a 20 m patch fits as well
    return Positions(places.x, places.y, CRS, label=np.arange(200), classes=tuple("abcdefghij" * 20))[inside]


def naive(pixels: Mapping[str, Any], positions: Positions, index: int) -> Sample:
    """The sample by plain arithmetic on the arrays that were written."""
    sample = {}
    for key, pixel, size in (("xs", 10.0, 16), ("swir", 20.0, 8)):
        row = int((4000000 - positions.y[index]) // pixel) - size // 2
        col = int((positions.x[index] - 500000) // pixel) - size // 2
        sample[key] = pixels[key][row : row + size, col : col + size]
    assert positions.label is not None
    sample["label"] = positions.label[index : index + 1]
    return sample


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


# ------------------------------------------------------------------------------------------ RasterPatchesReader


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(threads=st.sampled_from([1, 2, 3, 8]), data=st.data())
def test_samples_are_the_windows_in_the_order_asked(
    sources: dict[str, RasterSource], pixels: dict[str, Any], positions: Positions, threads: int, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, len(positions) - 1), max_size=60))
    reader = RasterPatchesReader(sources, positions, threads=threads, label_key="label")
    samples = reader.get_samples(indices)
    assert len(samples) == len(indices)
    assert all(same(sample, naive(pixels, positions, i)) for sample, i in zip(samples, indices, strict=True))
    reader.close()


def test_one_sample_is_the_window(
    sources: dict[str, RasterSource], pixels: dict[str, Any], positions: Positions
) -> None:
    reader = RasterPatchesReader(sources, positions, label_key="label")
    assert len(reader) == reader.get_size() == len(positions)
    assert same(reader.get_sample(3), naive(pixels, positions, 3))
    assert same(reader[-1], naive(pixels, positions, len(positions) - 1))
    assert reader[0]["label"].dtype == np.int64
    assert reader[0]["label"].shape == (1,)
    assert reader.positions is positions
    assert "label" not in RasterPatchesReader(sources, positions)[0]


@pytest.mark.parametrize("threads", [1, 2])
def test_reads_go_through_the_blocks_in_order(
    sources: dict[str, RasterSource], positions: Positions, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from otbtf_lite.raster import RasterReader

    read, log = RasterReader.read, []

    def logged(self: RasterReader, window: Any, *args: Any) -> Any:
        if self.source.paths == sources["xs"].paths:
            log.append((threading.current_thread().name, window.row_off // rows, window.col_off // cols))
        return read(self, window, *args)

    rows, cols = sources["xs"].block_shape
    assert rows < SIZE  # else nothing is shown
    monkeypatch.setattr(RasterReader, "read", logged)
    RasterPatchesReader(sources, positions, threads=threads).get_samples(range(len(positions)))
    assert len(log) == len(positions)
    names = {name for name, *_ in log}
    if len(names) == threads:  # else one thread was so quick that it took both halves, whichever came first
        for name in names:
            mine = [block for who, *block in log if who == name]
            assert mine == sorted(mine)


def test_nothing_is_opened_before_use(tmp_path: Path) -> None:
    reader = RasterPatchesReader({"xs": RasterSource(tmp_path / "gone.tif", 4)}, Positions([0.0], [0.0], CRS))
    assert len(reader) == 1
    with pytest.raises(DataError, match=r"gone\.tif"):
        reader.get_sample(0)


def test_no_threads_run_before_use_nor_after_close(
    sources: dict[str, RasterSource], positions: Positions, own_threads: Callable[[], list[str]]
) -> None:
    reader = RasterPatchesReader(sources, positions, threads=2)
    assert not own_threads()
    first = reader.get_samples(range(20))
    assert own_threads()
    reader.close()
    assert not own_threads()
    reader.close()
    again = reader.get_samples(range(20))  # opens again
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    reader.close()


def test_many_threads_may_share_a_reader(
    sources: dict[str, RasterSource], pixels: dict[str, Any], positions: Positions
) -> None:
    reader = RasterPatchesReader(sources, positions, threads=2, label_key="label")
    with ThreadPoolExecutor(8) as pool:
        samples = list(pool.map(reader.get_sample, list(range(len(positions))) * 2))
        batches = list(pool.map(reader.get_samples, [range(i, i + 9) for i in range(30)]))
    expected = [naive(pixels, positions, i) for i in range(len(positions))]
    assert all(same(sample, expected[i % len(positions)]) for i, sample in enumerate(samples))
    assert all(
        same(sample, expected[start + k]) for start, batch in enumerate(batches) for k, sample in enumerate(batch)
    )
    reader.close()


def test_it_pickles_after_use(sources: dict[str, RasterSource], pixels: dict[str, Any], positions: Positions) -> None:
    reader = RasterPatchesReader(sources, positions, threads=2, label_key="label")
    reader.get_samples([0, 1, 2])
    copy = pickle.loads(pickle.dumps(reader))  # noqa: S301  # our own bytes
    assert (copy.threads, copy.label_key, copy.sources) == (2, "label", sources)
    assert all(same(s, naive(pixels, positions, i)) for i, s in enumerate(copy.get_samples(range(5))))


def _read_in_child(reader: RasterPatchesReader, queue: Any) -> None:
    samples = reader.get_samples(range(40))
    queue.put([sample["xs"].sum() for sample in samples])
    reader.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that threads run is the point
def test_a_forked_child_reads_with_its_own_threads(
    sources: dict[str, RasterSource], pixels: dict[str, Any], positions: Positions
) -> None:
    reader = RasterPatchesReader(sources, positions, threads=2)
    reader.get_samples(range(40))  # threads and files of the parent
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, queue))
    child.start()
    found = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert found == [naive(pixels, positions, i)["xs"].sum() for i in range(40)]
    assert len(reader.get_samples(range(40))) == 40  # the parent's still work
    reader.close()


def test_a_patch_outside_names_position_and_source(sources: dict[str, RasterSource]) -> None:
    reader = RasterPatchesReader(sources, Positions([500500.0, 500050.0], [3999500.0, 3999950.0], CRS))
    reader.get_sample(0)
    with pytest.raises(InputError, match="Position 1, source 'xs'"):
        reader.get_samples([0, 1])
    with pytest.raises(InputError, match="Position 0, source 'xs'"):
        RasterPatchesReader(sources, Positions([10.0], [89.0], "EPSG:4326"))[0]


def test_an_error_in_a_thread_arrives_as_itself(tmp_path: Path) -> None:
    path = tmp_path / "cut.tif"
    grid = Grid(CRS, (0.0, 10.0, 0.0, 0.0, 0.0, -10.0), 1024, 1024)
    write_raster(path, np.random.default_rng(0).integers(0, 60000, (1024, 1024, 1)).astype(np.uint16), grid)
    source = RasterSource(path, 128)
    positions = on_grid(source)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    reader = RasterPatchesReader({"xs": source}, positions, threads=4)
    with pytest.raises(DataError, match=r"Position \d+, source 'xs': .*cut\.tif"):
        reader.get_samples(range(len(positions)))
    assert reader.get_sample(0)["xs"].shape == (128, 128, 1)  # the whole half still reads
    reader.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_leave_nodata_out(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("otbtf_lite.readers._STATS_CHUNK", 5)
    rng = np.random.default_rng(1)
    values = rng.normal(5000, 3, (64, 64, 2)).astype(np.float32)
    missing = rng.random((64, 64)) < 0.5
    values[missing] = -9999
    path = tmp_path / "half.tif"
    write_raster(path, values, Grid(CRS, (0.0, 10.0, 0.0, 0.0, 0.0, -10.0), 64, 64), nodata=-9999)
    source = RasterSource(path, 8)
    reader = RasterPatchesReader({"xs": source}, on_grid(source), threads=threads)
    stats = reader.get_stats()["xs"]
    good = values[~missing].astype(np.float64)
    assert stats.keys() == {"min", "max", "mean", "std"}
    assert np.array_equal(stats["min"], good.min(0))
    assert np.array_equal(stats["max"], good.max(0))
    np.testing.assert_allclose(stats["mean"], good.mean(0), rtol=1e-12)
    np.testing.assert_allclose(stats["std"], good.std(0), rtol=1e-12)
    reader.close()


def test_statistics_do_not_depend_on_threads(sources: dict[str, RasterSource], positions: Positions) -> None:
    one, three = (RasterPatchesReader(sources, positions, threads=n).get_stats() for n in (1, 3))
    assert all(np.array_equal(one[key][name], three[key][name]) for key in one for name in one[key])


def test_provenance_describes_the_sources(sources: dict[str, RasterSource], positions: Positions) -> None:
    found = RasterPatchesReader(sources, positions).provenance()
    assert found["sources"] == {key: source.describe() for key, source in sources.items()}
    assert found["classes"] == list(positions.classes or ())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sources": {}}, "RasterSource"),
        ({"positions": Positions([], [], CRS)}, "at least one position"),
        ({"positions": None}, "at least one position"),
        ({"label_key": "xs"}, "key of a source"),
        ({"label_key": "label", "positions": Positions([0.0], [0.0], CRS)}, "no labels"),
        ({"threads": 0}, "threads"),
        ({"threads": True}, "threads"),
        ({"threads": 1.5}, "threads"),
    ],
)
def test_mistakes_are_explained(
    sources: dict[str, RasterSource], positions: Positions, arguments: dict[str, Any], words: str
) -> None:
    complete = {"sources": sources, "positions": positions, **arguments}
    with pytest.raises(InputError, match=words):
        RasterPatchesReader(**complete)


# ------------------------------------------------------------------------------------------------- ArraysReader


def arrays(n: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    return {
        "x": rng.normal(size=(n, 2, 3, 4)).astype(np.float32),
        "y": np.arange(n),
        "name": np.array([f"{i}" for i in range(n)], object),
    }


def test_arrays_give_rows() -> None:
    given_arrays = arrays()
    reader = ArraysReader(given_arrays)
    assert len(reader) == 5
    for i, sample in enumerate(reader):
        assert same(sample, {key: np.array(array[i], array.dtype) for key, array in given_arrays.items()})
    reader[0]["x"][:] = 0
    assert same(reader[0], {key: np.array(array[0], array.dtype) for key, array in given_arrays.items()})
    assert [int(s["y"]) for s in reader.get_samples([3, 0, 3])] == [3, 0, 3]


@pytest.mark.parametrize("index", [5, -1, 10**20])
def test_an_index_beyond_the_end_is_an_error(index: int) -> None:
    reader = ArraysReader(arrays())
    with pytest.raises(SampleIndexError, match="numbered from 0 to 4"):
        reader.get_sample(index)
    with pytest.raises(IndexError):
        reader[index if index > 0 else -6]
    with pytest.raises(InputError):
        reader.get_samples([0, index])


def test_statistics_of_arrays_go_by_the_last_axis() -> None:
    given_arrays = arrays(700)
    stats = ArraysReader(given_arrays).get_stats()
    assert stats.keys() == {"x", "y"}
    np.testing.assert_allclose(stats["x"]["mean"], given_arrays["x"].mean((0, 1, 2), dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(stats["x"]["std"], given_arrays["x"].std((0, 1, 2), dtype=np.float64), rtol=1e-12)
    assert stats["y"]["max"].tolist() == [699.0]


@pytest.mark.parametrize(
    ("given_arrays", "words"),
    [
        ({}, "at least one"),
        (None, "at least one"),
        ({"x": 5}, "first axis"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, "'x' has 3 samples and array 'y' has 4"),
    ],
)
def test_wrong_arrays_are_refused(given_arrays: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ArraysReader(given_arrays)


# ------------------------------------------------------------------------------------------------- ConcatReader


class Own(PatchesReaderBase):
    """A user's reader: only what must be written."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.closed = 0

    def get_sample(self, index: int) -> Sample:
        return {"v": np.array([[[self.values[index]]]])}

    def get_stats(self) -> Any:
        return {}

    def get_size(self) -> int:
        return len(self.values)

    def close(self) -> None:
        self.closed += 1


def test_readers_one_after_the_other() -> None:
    parts = [Own([1.0, 2.0]), Own([]), Own([3.0]), ArraysReader({"v": np.full((2, 1, 1, 1), 4.0)})]
    reader = ConcatReader(parts)
    assert [sample["v"].item() for sample in reader] == [1, 2, 3, 4, 4]
    assert [sample["v"].item() for sample in reader.get_samples([4, 0, 2, 1, 0])] == [4, 1, 3, 2, 1]
    with pytest.raises(SampleIndexError):
        reader.get_sample(5)
    stats = reader.get_stats()["v"]
    assert {name: value.item() for name, value in stats.items()} == {
        "min": 1.0,
        "max": 4.0,
        "mean": pytest.approx(2.8),
        "std": pytest.approx(np.std([1, 2, 3, 4, 4])),
    }
    assert len(pickle.loads(pickle.dumps(reader))) == 5  # noqa: S301  # our own bytes
    reader.close()
    assert parts[0].closed == 1  # type: ignore[union-attr]


def test_each_reader_is_asked_once() -> None:
    class Counting(Own):
        calls = 0

        def get_samples(self, indices: Sequence[int]) -> list[Sample]:
            type(self).calls += 1
            return super().get_samples(indices)

    ConcatReader([Counting([1.0, 2.0]), Own([3.0, 4.0])]).get_samples([3, 0, 2, 1])
    assert Counting.calls == 1


def test_readers_of_different_samples_are_named() -> None:
    with pytest.raises(InputError, match=r"reader 0 \(Own\) .*float64.* reader 1 \(ArraysReader\) .*float32"):
        ConcatReader([Own([1.0]), ArraysReader({"v": np.zeros((1, 1, 1, 1), np.float32)})])
    with pytest.raises(InputError, match="at least one"):
        ConcatReader([])


def test_positions_are_joined(sources: dict[str, RasterSource], positions: Positions) -> None:
    parts = [RasterPatchesReader(sources, positions[:9]), RasterPatchesReader(sources, positions[9:20])]
    reader = ConcatReader(parts)
    assert reader.positions == positions[:20]
    assert reader.provenance()["parts"] == [part.provenance() for part in parts]
    assert (
        ConcatReader(
            [
                *parts[:1],
            ]
        ).positions
        == positions[:9]
    )
    other = Positions(positions.x[:2], positions.y[:2], CRS, label=[0, 1], classes=("z", "y"))
    with pytest.raises(InputError, match="different classes"):
        ConcatReader([parts[0], RasterPatchesReader(sources, other)])
    elsewhere = Positions([505000.0], [3995000.0], f"{CRS}+5773")
    assert ConcatReader([parts[0], _Placed(sources, elsewhere)]).positions is None


class _Placed(RasterPatchesReader):
    """Reads at the first of the scene's own positions, whatever its positions say."""

    def get_sample(self, index: int) -> Sample:  # noqa: ARG002  # the base's
        return {"xs": np.zeros((16, 16, 3), np.uint16), "swir": np.zeros((8, 8, 1), np.float32)}


def test_the_base_needs_three_methods_and_sums_up_by_itself() -> None:
    with pytest.raises(TypeError, match="abstract"):
        PatchesReaderBase()  # type: ignore[abstract]
    reader = Own([1.0, 2.0, 6.0])
    found = reader.band_stats()["v"]
    assert isinstance(found, BandStats)
    assert (found.count.item(), found.mean.item()) == (3, 3.0)
    assert reader.positions is None
    assert reader.provenance() == {}
