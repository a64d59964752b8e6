"""The scripts in apps/ with OTBTF's arguments, from patches images to a model that its server finds its way in."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import otbtf_style
import pytest

from otbtf_lite import DataError, InputError, TFRecords

tf = pytest.importorskip("tensorflow")
gdal = pytest.importorskip("osgeo.gdal")
gdal.UseExceptions()

APPS = Path(__file__).resolve().parents[1] / "apps"
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def app() -> Any:
    """Import a script of apps/ by name, with its neighbours, as `python apps/NAME.py` does."""
    sys.path.insert(0, str(APPS))
    yield importlib.import_module
    sys.path.remove(str(APPS))


def scene(rows: int, cols: int, seed: int) -> tuple[Array, Array]:
    """An image of dark and bright fields, and labels that say which is which."""
    rng = np.random.default_rng(seed)
    fields = rng.integers(0, 2, (rows // 8, cols // 8, 1)).repeat(8, 0).repeat(8, 1)
    image = 500 + 2000 * fields + rng.integers(0, 300, (rows, cols, 3))
    return image.astype(np.uint16), fields.astype(np.uint8)


def write(path: Path, image: Array) -> str:
    rows, cols, bands = image.shape
    kind = {"uint16": gdal.GDT_UInt16, "uint8": gdal.GDT_Byte}[image.dtype.name]
    data = gdal.GetDriverByName("GTiff").Create(str(path), cols, rows, bands, kind)
    for band in range(bands):
        data.GetRasterBand(band + 1).WriteArray(image[..., band])
    data = None
    return str(path)


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """Patches of 16 x 16, named as OTBTF's examples name them: by split "xs" and "labels"."""
    folder = tmp_path_factory.mktemp("patches")
    found: dict[str, dict[str, list[str]]] = {}
    for name, counts in {"train": [40, 24], "valid": [16], "test": [18]}.items():
        found[name] = {"xs": [], "labels": []}
        for number, count in enumerate(counts):
            for key, image in zip(found[name], scene(16 * count, 16, 7 * len(name) + number), strict=True):
                found[name][key].append(write(folder / f"{name}_{key}_{'AB'[number]}.tif", image))
    return found


@pytest.fixture(scope="module")
def records(app: Any, patches: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What create_tfrecords.py makes of each split."""
    folder = tmp_path_factory.mktemp("records")
    for name, files in patches.items():
        outdir = str(folder / name)
        app("create_tfrecords").main(["--xs", *files["xs"], "--labels", *files["labels"], "--outdir", outdir])
    return folder


def read_plainly(files: list[str]) -> Array:
    arrays = [gdal.Open(path).ReadAsArray() for path in sorted(files)]
    stacks = [np.moveaxis(array if array.ndim == 3 else array[None], 0, -1) for array in arrays]
    return np.concatenate([stack.reshape(-1, 16, 16, stack.shape[-1]) for stack in stacks])


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_created_records_hold_every_patch_once_with_its_labels(patches: Any, records: Path, name: str) -> None:
    samples = otbtf_style.read(records / name)  # by TensorFlow and the JSON files alone
    found = sorted(sample["input_xs_patches"].tobytes() + sample["labels_patches"].tobytes() for sample in samples)
    xs, labels = (read_plainly(patches[name][key]) for key in ("xs", "labels"))
    assert found == sorted(x.tobytes() + y.tobytes() for x, y in zip(xs, labels, strict=True))


def test_created_records_are_in_the_order_of_the_seed(app: Any, patches: Any, records: Path, tmp_path: Path) -> None:
    files = patches["train"]
    for seed in ("0", "1"):
        # in another order on the command line, as the shell may give them
        arguments = ["--xs", *files["xs"][::-1], "--labels", *files["labels"], "--outdir", str(tmp_path / seed)]
        app("create_tfrecords").main([*arguments, "--seed", seed, "--n_samples_per_shard", "64"])
    first, other, default = (otbtf_style.read(folder) for folder in (tmp_path / "0", tmp_path / "1", records / "train"))
    assert otbtf_style.same_samples(first, default)
    assert not otbtf_style.same_samples(first, other)


def test_creating_again_needs_overwrite(app: Any, patches: Any, tmp_path: Path) -> None:
    files, create = patches["valid"], app("create_tfrecords").main
    arguments = ["--xs", *files["xs"], "--labels", *files["labels"], "--outdir", str(tmp_path / "out")]
    create(arguments)
    with pytest.raises(DataError, match="overwrite"):
        create(arguments)
    create([*arguments, "--overwrite"])
    assert len(TFRecords(tmp_path / "out")) == 16


def test_images_and_labels_that_do_not_go_together(app: Any, patches: Any, tmp_path: Path) -> None:
    arguments = ["--xs", *patches["train"]["xs"], "--labels", *patches["valid"]["labels"]]
    with pytest.raises(InputError, match="'input_xs_patches' has 64 and 'labels_patches' has 16"):
        app("create_tfrecords").main([*arguments, "--outdir", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def check_model(folder: Path) -> None:
    """The SavedModel has OTBTF's names, maps another image, and serves it without its margins."""
    served = tf.saved_model.load(str(folder)).signatures["serving_default"]
    assert set(served.structured_input_signature[1]) == {"input_xs"}
    outputs = {"predictions", "classes"}
    assert set(served.structured_outputs) == outputs | {f"{x}_crop{n}" for x in outputs for n in (16, 32, 64, 96, 128)}
    image, labels = scene(64, 96, seed=99)
    given = {key: each.numpy() for key, each in served(input_xs=tf.constant(image[None], tf.float32)).items()}
    assert given["predictions"].shape == (1, 64, 96, 2)
    assert (given["classes"][0] == labels).mean() > 0.8  # each class has about a half
    np.testing.assert_array_equal(given["predictions_crop16"], given["predictions"][:, 16:-16, 16:-16])


SHORT = ["--batch_size", "8", "--learning_rate", "0.003", "--nb_epochs", "4", "--seed", "1"]


def test_train_from_patchesimages(app: Any, patches: Any, tmp_path: Path) -> None:
    arguments = ["--model_dir", str(tmp_path / "model"), *SHORT]
    for name in ("train", "valid", "test"):
        for key, files in patches[name].items():
            arguments += [f"--{name}_{key}", *files]
    reached = app("train_from_patchesimages").main(arguments)
    assert set(reached) == {"loss", "accuracy"}
    assert reached["accuracy"] > 0.8
    assert (tmp_path / "model" / "best.keras").is_file()
    check_model(tmp_path / "model")


def test_train_from_tfrecords(app: Any, records: Path, tmp_path: Path) -> None:
    """Also from records that OTBTF wrote: here those of the validation."""
    for name in ("train", "test"):
        (tmp_path / name).symlink_to(records / name)
    otbtf_style.write(tmp_path / "valid", otbtf_style.read(records / "valid"), 20)
    arguments = ["--tfrecords_dir", str(tmp_path), "--model_dir", str(tmp_path / "model"), *SHORT]
    assert app("train_from_tfrecords").main(arguments)["accuracy"] > 0.8
    check_model(tmp_path / "model")


def test_test_labels_are_not_forgotten(
    app: Any, patches: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model_dir", str(tmp_path / "model"), "--test_xs", *patches["test"]["xs"]]
    for name in ("train", "valid"):
        for key, files in patches[name].items():
            arguments += [f"--{name}_{key}", *files]
    with pytest.raises(SystemExit):
        app("train_from_patchesimages").main(arguments)
    assert "--test_xs and --test_labels go together" in capsys.readouterr().err


# OTBTF's arguments and their defaults; None: it has none, so it must be given, or the test split that may be missing.
OTBTFS = {
    "create_tfrecords": {"xs": None, "labels": None, "outdir": None},
    "train_from_tfrecords": {
        "tfrecords_dir": None, "model_dir": None, "batch_size": 8, "learning_rate": 1e-4, "nb_epochs": 100
    },
    "train_from_patchesimages": {
        "train_xs": None, "train_labels": None, "valid_xs": None, "valid_labels": None, "test_xs": None,
        "test_labels": None, "model_dir": None, "batch_size": 8, "learning_rate": 1e-4, "nb_epochs": 100,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTBTFS)
def test_arguments_are_otbtfs(app: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    seen: dict[str, argparse.Action] = {}

    def note(self: argparse.ArgumentParser, *_: object) -> None:
        seen.update({action.dest: action for action in self._actions})
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", note)
    with pytest.raises(SystemExit):
        app(name).main([])
    for argument, default in OTBTFS[name].items():
        assert seen[argument].option_strings == [f"--{argument}"]
        assert seen[argument].default == default
        assert seen[argument].required == (default is None and not argument.startswith("test_"))
        assert seen[argument].nargs == ("+" if argument.endswith(("xs", "labels")) else None)
    more = seen.keys() - OTBTFS[name].keys() - {"help"}
    assert not [argument for argument in more if seen[argument].required]
