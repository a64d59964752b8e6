"""Patches images against plain GDAL and slices of arrays: both modes, several files, scalars, and the way back."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from otbtf_lite import ArraysReader, DataError, Dataset, InputError, PatchesImagesReader
from otbtf_lite.patches_images import write_patches_images
from otbtf_lite.readers import SampleIndexError
from otbtf_lite.schema import Feature, Schema

gdal = pytest.importorskip("osgeo.gdal")
gdal.UseExceptions()

Array = npt.NDArray[Any]
MakeRaster = Callable[..., Path]

MODES = pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "in memory"])


def patches(n: int, size: int, bands: int, dtype: str = "uint16", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 200, (n, size, size, bands)).astype(dtype)


@pytest.fixture
def image(make_raster: MakeRaster) -> MakeRaster:
    """Write patches (n, rows, cols, bands) one below the other, without any place on the map."""

    def write(name: str, stack: Array, **options: Any) -> Path:
        n, rows, cols, bands = stack.shape
        return make_raster(name, stack.reshape(n * rows, cols, bands), geotransform=None, crs="", **options)

    return write


@pytest.fixture
def two_sources(image: MakeRaster) -> tuple[dict[str, list[Path]], dict[str, Array]]:
    """Three images of patches of 6 x 6 x 2 and two of labels of 2 x 2 x 1, cut at other places: 9 samples."""
    xs, labels = patches(9, 6, 2), patches(9, 2, 1, "uint8", seed=1)
    files = {
        "xs": [image("xs_1.tif", xs[:4]), image("xs_2.tif", xs[4:5]), image("xs_3.tif", xs[5:])],
        "labels": [image("labels_1.tif", labels[:7]), image("labels_2.tif", labels[7:])],
    }
    return files, {"xs": xs, "labels": labels}


# ------------------------------------------------------------------------------------------------------------- reading


@MODES
def test_samples_are_the_patches_in_order(two_sources: Any, streaming: bool) -> None:
    files, arrays = two_sources
    reader = PatchesImagesReader(files, streaming)
    assert reader.size == reader.get_size() == len(reader) == 9
    assert reader.schema == Schema({"xs": Feature("uint16", (6, 6, 2)), "labels": Feature("uint8", (2, 2, 1))})
    for index, sample in enumerate(reader):
        assert list(sample) == ["xs", "labels"]
        reader.schema.check(sample)
        for key, array in arrays.items():
            np.testing.assert_array_equal(sample[key], array[index])


@MODES
def test_samples_in_any_order_and_more_than_once(two_sources: Any, streaming: bool) -> None:
    files, arrays = two_sources
    reader = PatchesImagesReader(files, streaming)
    wanted = [8, 0, 4, 4, 7, 1, 3]
    batch = reader.get_batch(wanted)
    samples = reader.get_samples(wanted)
    for key, array in arrays.items():
        np.testing.assert_array_equal(batch[key], array[wanted])
        np.testing.assert_array_equal([sample[key] for sample in samples], array[wanted])
    assert reader.get_samples([]) == []
    assert reader.get_batch([])["xs"].shape == (0, 6, 6, 2)


@MODES
def test_a_sample_is_the_callers_own(two_sources: Any, streaming: bool) -> None:
    files, arrays = two_sources
    reader = PatchesImagesReader(files, streaming)
    reader.get_sample(3)["xs"][:] = 7
    np.testing.assert_array_equal(reader.get_sample(3)["xs"], arrays["xs"][3])


@MODES
@pytest.mark.parametrize("index", [-1, 9])
def test_numbers_without_a_sample(two_sources: Any, streaming: bool, index: int) -> None:
    with pytest.raises(SampleIndexError, match=f"no sample {index}.*0 to 8"):
        PatchesImagesReader(two_sources[0], streaming).get_sample(index)


@MODES
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "float32", "float64"])
@pytest.mark.parametrize("interleave", ["PIXEL", "BAND"])
def test_types_and_layouts(image: MakeRaster, streaming: bool, dtype: str, interleave: str) -> None:
    expected = patches(5, 3, 4, dtype)
    path = image("a.tif", expected, INTERLEAVE=interleave)
    batch = PatchesImagesReader({"a": [path]}, streaming).get_batch(range(5))
    assert batch["a"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(batch["a"], expected)


@MODES
def test_one_path_alone_is_a_list_of_one(image: MakeRaster, streaming: bool) -> None:
    expected = patches(2, 3, 1)
    path = image("a.tif", expected)
    for given in (path, str(path), (path,)):
        np.testing.assert_array_equal(PatchesImagesReader({"a": given}, streaming)[1]["a"], expected[1])


@MODES
def test_many_threads_at_once(two_sources: Any, streaming: bool) -> None:
    files, arrays = two_sources
    reader = PatchesImagesReader(files, streaming)
    wanted = list(range(9)) * 30
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(reader.get_sample, wanted))
    for key, array in arrays.items():
        np.testing.assert_array_equal([sample[key] for sample in found], array[wanted])


@MODES
def test_pickled_and_closed_readers_read_again(two_sources: Any, streaming: bool) -> None:
    files, arrays = two_sources
    reader = PatchesImagesReader(files, streaming, {"name": ["a", "b", "c"]})
    reader.get_sample(0)
    reader.close()
    for same in (reader, pickle.loads(pickle.dumps(reader))):  # noqa: S301  # our own bytes
        np.testing.assert_array_equal(same.get_sample(8)["xs"], arrays["xs"][8])
        assert same.get_sample(8)["name"] == "c"


def test_in_memory_nothing_is_read_twice(two_sources: Any) -> None:
    files, arrays = two_sources
    reader = PatchesImagesReader(files)
    reader.get_batch(range(9))
    for paths in files.values():
        for path in paths:
            path.unlink()
    np.testing.assert_array_equal(reader.get_batch(range(9))["xs"], arrays["xs"])


@MODES
def test_nothing_is_left_beside_the_files(two_sources: Any, tmp_path: Path, streaming: bool) -> None:
    before = sorted(tmp_path.iterdir())
    with_stats = PatchesImagesReader(two_sources[0], streaming)
    with_stats.get_batch(range(9))
    with_stats.get_stats()
    with_stats.close()
    assert sorted(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------------------------- scalars


@MODES
def test_scalars_one_a_file(two_sources: Any, streaming: bool) -> None:
    scalars = {"name": ["first", "2nd", "\u00e9"], "angle": [1, 2.5, 3], "pair": [np.array([1, 2], np.int16)] * 3}
    reader = PatchesImagesReader(two_sources[0], streaming, scalars)
    assert reader.schema["name"] == Feature("string", ())
    assert reader.schema["angle"] == Feature("float64", ())
    assert reader.schema["pair"] == Feature("int16", (2,))
    owners = [0, 0, 0, 0, 1, 2, 2, 2, 2]  # what xs_1, xs_2 and xs_3 hold
    for sample, owner in zip(reader, owners, strict=True):
        reader.schema.check(sample)
        assert sample["name"] == scalars["name"][owner]
        assert sample["angle"] == scalars["angle"][owner]
        assert sample["pair"].tolist() == [1, 2]
    batch = reader.get_batch([8, 4, 0])
    assert batch["name"].tolist() == ["\u00e9", "2nd", "first"]


@MODES
def test_scalars_one_a_patch(two_sources: Any, streaming: bool) -> None:
    reader = PatchesImagesReader(two_sources[0], streaming, {"id": range(9), "raw": [b"%d\0" % i for i in range(9)]})
    for index, sample in enumerate(reader):
        assert sample["id"] == index
        assert sample["id"].dtype == np.int64
        assert sample["id"].shape == ()
        assert sample["raw"].item() == b"%d\0" % index


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"s": [1, 2]}, r"'s' have 2 values: give one a file \(3\) or one a patch \(9\)"),
        ({"s": []}, "'s' have 0 values"),
        ({"s": "abc"}, "'s' must be a list of values, got 'abc'"),
        ({"s": 5}, "'s' must be a list of values, got 5"),
        ({"s": ["a", 1, 2]}, "'s' must all be numbers or all be text"),
        ({"s": [[1, 2], [1], [3, 4]]}, "'s' must all be .* of one shape"),
        ({"xs": [1, 2, 3]}, r"\['xs'\] are keys of sources and of scalars"),
    ],
)
def test_scalars_that_do_not_fit(two_sources: Any, scalars: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PatchesImagesReader(two_sources[0], scalar_dict=scalars)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("given", [{}, None, ["a.tif"]])
def test_no_dict_of_sources(given: Any) -> None:
    with pytest.raises(InputError, match="filenames_dict is a dict"):
        PatchesImagesReader(given)


def test_a_source_without_files() -> None:
    with pytest.raises(InputError, match="'xs' has no files"):
        PatchesImagesReader({"xs": []})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "none.tif"))):
        PatchesImagesReader({"xs": [tmp_path / "none.tif"]})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (patches(3, 4, 1), r"uint16\[4, 4, 1\]"),
        (patches(3, 5, 2), r"uint16\[5, 5, 2\]"),
        (patches(3, 4, 2, "int16"), r"int16\[4, 4, 2\]"),
    ],
    ids=["bands", "size", "type"],
)
def test_files_of_one_source_must_be_alike(image: MakeRaster, other: Array, said: str) -> None:
    paths = [image("one.tif", patches(2, 4, 2)), image("two.tif", other)]
    with pytest.raises(InputError, match=rf"'xs'.*one\.tif are uint16\[4, 4, 2\].*two\.tif are {said}"):
        PatchesImagesReader({"xs": paths})


# ---------------------------------------------------------------------------------------------------------- statistics


@MODES
def test_stats_are_numpys(two_sources: Any, streaming: bool) -> None:
    files, arrays = two_sources
    stats = PatchesImagesReader(files, streaming, {"name": ["a", "b", "c"], "number": [1, 2, 3]}).get_stats()
    assert list(stats) == ["xs", "labels"]
    for key, array in arrays.items():
        values = array.astype(np.float64)
        for name, function in {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}.items():
            np.testing.assert_allclose(stats[key][name], function(values, axis=(0, 1, 2)), rtol=1e-12)
            assert stats[key][name].shape == array.shape[-1:]


def test_stats_do_not_depend_on_how_much_is_read_at_once(two_sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PatchesImagesReader(two_sources[0]).get_stats()["xs"]
    monkeypatch.setattr("otbtf_lite.patches_images._CHUNK_BYTES", 2 * 6 * 6 * 2 * 2)  # two patches
    reader = PatchesImagesReader(two_sources[0])
    for name, values in reader.get_stats()["xs"].items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-12)
    np.testing.assert_array_equal(reader.get_batch(range(9))["xs"], two_sources[1]["xs"])


@MODES
def test_stats_leave_nodata_out(image: MakeRaster, streaming: bool) -> None:
    array = patches(3, 4, 1)
    array[1, 2:] = 65535
    stats = PatchesImagesReader({"xs": [image("xs.tif", array, nodata=65535)]}, streaming).get_stats()["xs"]
    values = array[array != 65535].astype(float)
    assert (stats["min"], stats["max"]) == (values.min(), values.max())
    np.testing.assert_allclose([stats["mean"][0], stats["std"][0]], [values.mean(), values.std()])


def test_stats_leave_complex_values_out(image: MakeRaster) -> None:
    reader = PatchesImagesReader({"z": [image("z.tif", patches(2, 3, 1, "complex64"))]})
    assert reader.get_stats() == {}
    assert reader.get_sample(0)["z"].dtype == np.complex64


def test_provenance_lists_all_files(two_sources: Any) -> None:
    files, _ = two_sources
    said = PatchesImagesReader(files).provenance()["sources"]
    assert said["xs"]["paths"] == [str(path) for path in files["xs"]]
    assert said["xs"]["sizes"] == [path.stat().st_size for path in files["xs"]]
    assert [len(digest) for digest in said["labels"]["digests"]] == [64, 64]
    assert said["labels"] == {
        **said["labels"], "patches": [7, 2], "patch_shape": [2, 2, 1], "dtype": "uint8", "nodata": None
    }  # fmt: skip


def test_provenance_has_the_nodata_values_that_all_files_share(image: MakeRaster) -> None:
    array = patches(2, 3, 2)
    same = [image("a.tif", array, nodata=7), image("b.tif", array, nodata=7)]
    reader = PatchesImagesReader({"same": same, "other": [same[0], image("c.tif", array)]})
    said = reader.provenance()["sources"]
    assert (said["same"]["nodata"], said["other"]["nodata"]) == ([7, 7], None)


def test_files_in_another_order_are_noticed(image: MakeRaster, caplog: pytest.LogCaptureFixture) -> None:
    three, two = patches(3, 4, 1), patches(2, 4, 1)
    files = {key: [image(f"{key}{n}.tif", stack) for n, stack in enumerate((three, two))] for key in ("a", "b")}
    PatchesImagesReader(files)
    assert not caplog.records
    PatchesImagesReader({**files, "b": files["b"][::-1]})
    assert "a0.tif has 3 and" in caplog.text
    assert "b1.tif has 2 patches: are the files of 'a' and 'b' in the same order?" in caplog.text


# -------------------------------------------------------------------------------------------------------- the way back


def read_plainly(path: str) -> Array:
    """A column of square patches by plain GDAL."""
    data = gdal.Open(path)
    array = data.ReadAsArray()
    planes = array if array.ndim == 3 else array[None]
    size = data.RasterXSize
    return np.moveaxis(planes, 0, -1).reshape(-1, size, size, data.RasterCount)


def arrays_of_all_sorts() -> dict[str, Array]:
    return {
        "xs": patches(5, 7, 3),
        "labels": patches(5, 2, 1, "uint8"),
        "floats": patches(5, 4, 2, "float32") / np.float32(3),
        "class": np.arange(5, dtype=np.int64)[:, None],
        "angle": np.linspace(0, 1, 5),
        "mask": patches(5, 3, 1) > 100,
    }


@MODES
def test_to_patches_images_and_back(tmp_path: Path, streaming: bool) -> None:
    arrays = arrays_of_all_sorts()
    with Dataset(ArraysReader(arrays), seed=3) as dataset:
        order = [int(np.flatnonzero(arrays["angle"] == sample["angle"])[0]) for sample in dataset.one_pass().samples(0)]
        files = dataset.to_patches_images(tmp_path / "new" / "out")
    assert sorted(order) == list(range(5))
    assert {key: [Path(name).name for name in names] for key, names in files.items()} == {
        key: [f"{key}.tif"] for key in arrays
    }
    again = PatchesImagesReader(files, streaming).get_batch(range(5))
    for key, array in arrays.items():
        expected = array[order]
        plain = read_plainly(files[key][0])
        np.testing.assert_array_equal(plain.reshape(expected.shape), expected)
        assert plain.dtype == (np.uint8 if array.dtype == bool else array.dtype)
        np.testing.assert_array_equal(again[key], plain)
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == sorted(f"{key}.tif" for key in arrays)


@pytest.mark.parametrize(
    ("name", "feature", "message"),
    [
        ("x", Feature("uint8", (4, 5, 1)), r"'x' of shape \[4, 5, 1\] is no square patch"),
        ("x", Feature("uint8", (0, 0, 1)), "is no square patch"),
        ("x", Feature("uint8", (4, 4)), "is no square patch"),
        ("x", Feature("string", ()), "'x' is of type string"),
        ("x", Feature("bfloat16", (4, 4, 1)), "'x' is of type bfloat16"),
        ("a/b", Feature("uint8", (4, 4, 1)), "'a/b' can't be a file's name"),
        ("Y", Feature("uint8", (4, 4, 1)), r"differ only in case.*\['Y', 'y'\]"),
    ],
)
def test_what_no_patches_image_can_hold(tmp_path: Path, name: str, feature: Feature, message: str) -> None:
    schema = Schema({"y": Feature("uint8", (2, 2, 1)), name: feature})
    with pytest.raises(InputError, match=message):
        write_patches_images([], schema, 3, tmp_path / "out", lambda: None)
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "xs.tif").write_text("mine")
    with (
        Dataset(ArraysReader({"xs": patches(2, 3, 1)})) as dataset,
        pytest.raises(DataError, match=r"xs\.tif is there already"),
    ):
        dataset.to_patches_images(tmp_path)
    assert (tmp_path / "xs.tif").read_text() == "mine"


def test_after_an_error_there_is_nothing(tmp_path: Path) -> None:
    def samples() -> Any:
        yield {"xs": np.zeros((2, 2, 1), np.uint8)}
        yield {"xs": np.zeros((2, 2, 2), np.uint8)}

    schema = Schema({"xs": Feature("uint8", (2, 2, 1))})
    with pytest.raises(InputError, match=r"sample 1, 'xs'"):
        write_patches_images(samples(), schema, 2, tmp_path, lambda: None)
    assert not list(tmp_path.iterdir())
