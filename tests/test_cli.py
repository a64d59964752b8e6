"""The command: what it prints where, and its exit status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from otbtf_lite import TFRecords
from otbtf_lite.cli import main
from otbtf_lite.raster import RasterSource

if TYPE_CHECKING:
    from conftest import MakeRaster

RECIPE = """
seed = 4
[output]
samples_per_shard = 5
drop_remainder = false
[sources.xs]
paths = "image.tif"
patch_size = 8
[positions]
method = "on_grid"
[splits]
fractions = {train = 0.5, test = 0.5}
block_size = 160.0
"""


@pytest.fixture
def recipe(tmp_path: Path, make_raster: MakeRaster) -> Path:
    make_raster("image.tif", np.arange(64 * 64 * 2, dtype=np.uint16).reshape(64, 64, 2), nodata=7)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_convert_makes_a_directory_a_split_and_info_shows_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(recipe), "-o", str(out), "--quiet"]) == 0
    printed = capsys.readouterr()
    train, test = TFRecords(out / "train"), TFRecords(out / "test")
    assert f"{train.dirpath}: {len(train)} samples in {len(train.shards)} shards" in printed.out
    assert len(train) + len(test) == 63  # of 64 tiles one has the nodata value
    assert "1 of 64 positions rejected: 1 nodata (xs 1)" in printed.out
    assert printed.err == ""
    assert main(["info", str(out / "train")]) == 0
    shown = capsys.readouterr().out
    for line in ("  xs: uint16 [8, 8, 2], tensor", "  compression: none", "  seed: 4", "  source xs: ../../image.tif"):
        assert line in shown.splitlines()


def test_converting_again_gives_the_same_bytes_and_needs_to_be_asked_for(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert main(["convert", str(recipe), "-o", str(tmp_path / name), "-q"]) == 0
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file
    capsys.readouterr()
    assert main(["convert", str(recipe), "-o", str(tmp_path / "one"), "-q"]) == 1
    assert "already holds" in capsys.readouterr().err
    assert main(["convert", str(recipe), "-o", str(tmp_path / "one"), "-q", "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("patch_size", "patch_siz"),
            r"recipe.toml: \[sources.xs\] has no key 'patch_siz'; did you mean 'patch_size'\?",
        ),
        (("image.tif", "no.tif"), "no.tif"),
        (("image.tif", "recipe.toml"), "recipe.toml can't be read as a raster"),
        (("patch_size = 8", "patch_size = 80"), "A patch of 80 x 80 pixels"),
        (("on_grid", "on_gird"), "got 'on_gird'; did you mean 'on_grid'"),
        (("[splits]", "[split]"), "has no key 'split'; did you mean 'splits'"),
        (("= 0.5}", "= 0.6}"), "fractions"),
        (("seed = 4", "seed = "), "is not valid TOML"),
        (("seed = 4", "seed = -4"), "seed must be"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line_and_leaves_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str
) -> None:
    recipe.write_text(RECIPE.replace(*change))
    assert main(["convert", str(recipe), "-o", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("otbtf-lite: ")
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_predict_maps_a_raster_with_a_model(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keras = pytest.importorskip("keras")
    inputs = keras.Input((None, None, 2), name="xs")
    keras.Model(inputs, keras.layers.Rescaling(2.0)(inputs)).save(tmp_path / "double.keras")
    image, out = tmp_path / "image.tif", tmp_path / "map.tif"
    for raster in (str(image), f"xs={image}"):
        words = ["predict", str(tmp_path / "double.keras"), raster, str(out), "--tile", "24", "--margin", "4", "-q"]
        assert main(words) == 0
        assert capsys.readouterr().out.strip() == str(out)
        source = RasterSource(out, 1)
        with source.open() as reader, RasterSource(image, 1).open() as original:
            mapped = reader.read(source.grid.window)
            expected = original.read(source.grid.window).astype(np.float32) * 2
            void = ~original.valid(source.grid.window)
        assert np.array_equal(mapped[~void], expected[~void])
        assert source.grid == RasterSource(image, 1).grid
    assert main(["predict", str(tmp_path / "double.keras"), str(image), "a=b.tif", str(out)]) == 1
    assert "KEY=RASTER" in capsys.readouterr().err


def test_the_module_runs_as_a_program_and_says_what_is_wrong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "otbtf_lite", "info", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"otbtf-lite: There is no directory {tmp_path / 'nowhere'}.\n"
    assert not done.stdout
    assert not (tmp_path / "nowhere").exists()


def test_what_is_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["convrt"])
    assert stop.value.code == 2
    assert "convrt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ('{"../train" = 0.5, test = 0.5}', "'../train' can't be a directory's name"),
        ('{".train" = 0.5, test = 0.5}', "'.train' can't be a directory's name"),
        ("{train = 0.5, Train = 0.5}", "'train' and 'Train' differ only in case"),
    ],
)
def test_splits_are_plain_directories(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str, message: str
) -> None:
    recipe.write_text(RECIPE.replace("{train = 0.5, test = 0.5}", names))
    assert main(["convert", str(recipe), "-o", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "train").exists()


def test_no_split_is_written_where_another_can_not_be(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "test").mkdir(parents=True)
    (tmp_path / "out" / "test" / "0.records").write_bytes(b"another data set")
    assert main(["convert", str(recipe), "-o", str(tmp_path / "out"), "-q"]) == 1
    assert "already holds" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train").exists()
