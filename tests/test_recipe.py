"""Recipes: the documented file names every key, and every key does something."""

from __future__ import annotations

import dataclasses
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otbtf_lite import RasterSource, TFRecords, parallel, recipe, vector
from otbtf_lite.cli import main
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid
from otbtf_lite.raster import write_raster

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ogr = pytest.importorskip("osgeo.ogr")
DOCUMENT = Path(__file__).parents[1] / "docs" / "recipe.md"
GRID = Grid("EPSG:32631", (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0), 64, 64)


def documented() -> str:
    """The example, with what is commented out in force."""
    block = DOCUMENT.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    return re.sub(r"(?m)^# (?=\[|\w+ = )", "", block)


# ------------------------------------------------------------------------------------------------- the document


def test_the_document_names_every_key_and_no_other() -> None:
    data = tomllib.loads(documented())
    assert list(data) == [key for key in recipe.SECTIONS if key in data]
    assert set(data) == set(recipe.SECTIONS)
    assert set(data["output"]) == {field.name for field in dataclasses.fields(parallel.Output)}
    assert {key for table in data["sources"].values() for key in table} == set(recipe.source_keys())
    of_methods = {key for method in recipe.METHODS for key in recipe.method_keys(method)}
    assert set(data["positions"]) == {"method", *recipe.SELECT_KEYS, *of_methods}
    assert set(data["splits"]) == set(recipe.split_keys())
    assert {*data["splits"]["groups"], "layer"} == set(recipe.GROUP_KEYS)


def test_what_is_said_of_methods_is_so() -> None:
    """The comments say which methods a key belongs to."""
    positions = documented().split("[positions]")[1].split("[splits]")[0]
    for line in positions.strip().splitlines()[2:]:
        key, comment = line.split(" = ")[0], line.split("#")[1].split(":")[0]
        takers = {method for method in recipe.METHODS if key in recipe.method_keys(method)}
        if key not in recipe.SELECT_KEYS:
            assert takers == {word.strip() for word in comment.split(",")}, key


def test_the_defaults_in_the_document_are_the_functions() -> None:
    data = tomllib.loads(documented())
    for field in dataclasses.fields(parallel.Output):
        if field.name not in ("compression", "label_key"):
            default = field.default_factory() if field.name == "codecs" else field.default  # type: ignore[misc]
            assert data["output"][field.name] == default, field.name
    assert data["sources"]["xs"]["categorical"] is data["sources"]["xs"]["scaled"] is False


# ------------------------------------------------------------------------------------------------------ at work


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """An image of 64 x 64 pixels with 32 missing, and two polygons that halve it."""
    pixels = np.arange(1, 64 * 64 + 1, dtype=np.uint16).reshape(64, 64, 1)
    pixels[:4, :8] = 0
    write_raster(tmp_path / "image.tif", pixels, GRID, nodata=0)
    dataset = ogr.GetDriverByName("GPKG").CreateDataSource(str(tmp_path / "fields.gpkg"))
    reference = ogr.osr.SpatialReference()
    reference.ImportFromEPSG(32631)
    layer = dataset.CreateLayer("fields", reference, ogr.wkbPolygon)
    layer.CreateField(ogr.FieldDefn("crop", ogr.OFTString))
    for name, left, right in [("wheat", 500000, 500320), ("maize", 500320, 500640)]:
        feature = ogr.Feature(layer.GetLayerDefn())
        feature.SetField("crop", name)
        ring = f"{left} 4000000,{right} 4000000,{right} 3999360,{left} 3999360,{left} 4000000"
        feature.SetGeometry(ogr.CreateGeometryFromWkt(f"POLYGON(({ring}))"))
        layer.CreateFeature(feature)
    del feature, layer, dataset
    return tmp_path


def write(scene: Path, text: str) -> str:
    path = scene / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


WHOLE = """
seed = 3
[output]
samples_per_shard = 4
drop_remainder = false
label_key = "class"
[sources.image]
paths = "image.tif"
patch_size = 8
[sources.labels]
paths = "burned.tif"
vector = "fields.gpkg"
field = "crop"
patch_size = 8
[positions]
method = "from_labels"
labels = "labels"
strategy = "constant"
n = 40
[splits]
strategy = "groups"
groups = {vector = "fields.gpkg", field = "crop"}
fractions = {train = 0.5, test = 0.5}
"""


def rows(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_whole_recipe(scene: Path) -> None:
    plan = parallel.plan(write(scene, WHOLE))
    written = parallel.convert(plan, scene / "out", progress=False)
    assert set(written) == {"train", "test"}
    for records in written.values():
        batches = list(records.read(1, ["class"], drop_remainder=False))
        assert len(batches) == len(records) > 0
        labels = {int(targets["class"][0, 0]) for _, targets in batches}
        assert len(labels) == 1  # a group stays together
        centres = {int(inputs["labels"][0, 4, 4, 0]) for inputs, _ in batches}
        assert centres == labels
    manifest = written["train"].manifest
    assert manifest is not None
    assert manifest.details["sampling"]["burned"]["labels"]["vector"] == "fields.gpkg"
    assert manifest.details["sampling"]["burned"]["labels"]["classes"] == {"0": "maize", "1": "wheat"}
    assert "burned.tif" in str(manifest.details["sources"]["labels"]["paths"])
    assert len(plan.rejections) > 0
    saved = rows(scene / "out" / "rejected.gpkg", "SELECT source, reason FROM positions")
    assert saved == [("image", "nodata")] * len(plan.rejections)
    # Again, over its own burned file.
    again = parallel.plan(scene / "recipe.toml")
    assert again.positions == plan.positions


def test_rejections_lie_beside_a_directory_of_records(scene: Path) -> None:
    text = WHOLE.split("[splits]", maxsplit=1)[0]
    parallel.convert(parallel.plan(write(scene, text)), scene / "out", progress=False)
    assert not (scene / "out" / "rejected.gpkg").exists()
    assert rows(scene / "out.rejected.gpkg", "SELECT DISTINCT reason FROM positions") == [("nodata",)]
    TFRecords(scene / "out").verify()
    # A recipe that rejects nothing leaves nothing of an older one.
    relaxed = text.replace("[positions]", "[positions]\nmax_nodata = 1.0")
    parallel.convert(parallel.plan(write(scene, relaxed)), scene / "out", overwrite=True, progress=False)
    assert not (scene / "out.rejected.gpkg").exists()


@pytest.mark.parametrize(
    ("settings", "n"),
    [
        ('method = "on_grid"\nstride = 16\noffset = [8, 8]\nedges = "shift"', 16),
        ('method = "at_random"\nn = 5\nmin_distance = 50.0\nmask = "image"', 5),
        ('method = "from_vector"\nvector = "fields.gpkg"\nlayer = "fields"\nfield = "crop"\nstrategy = "all"', 57 * 57),
        ('method = "from_labels"\nlabels = "labels"\nstrategy = "total"\nn = 9\nnodata = 0', 9),
        ('method = "balanced"\nlabels = "burned.tif"\nn = 9\nspatial_fraction = 0.5\npatch_size = [8, 8]', 9),
    ],
)  # fmt: skip
def test_every_method(scene: Path, settings: str, n: int) -> None:
    head = WHOLE.split("[positions]", maxsplit=1)[0]
    plan = parallel.plan(write(scene, f"{head}[positions]\n{settings}\nmax_nodata = 1.0\n"))
    assert plan.n_samples == n


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n = 40", "n = 40\nstride = 3", r"\[positions\] has no key 'stride'"),
        ("field =", "feild =", r"\[sources.labels\] has no key 'feild'; did you mean 'field'"),
        ('vector = "fields.gpkg"\n', "", "no vector"),
        ('paths = "burned.tif"', 'paths = "image.tif"', "would replace .*image.tif, which was not burned"),
        ('paths = "burned.tif"', 'paths = ["a.tif", "b.tif"]', "the one file"),
        ("[sources.labels]", "[sources.labels]\ncategorical = false", "categorical"),
        ("[sources.image]", "[sources.image]\nvector = 'fields.gpkg'", "can't be the first source"),
        ('method = "from_labels"', 'method = "from_label"', "did you mean 'from_labels'"),
        ("fractions", "fraction", "has no key 'fraction'; did you mean 'fractions'"),
        ('field = "crop"}', 'fields = "crop"}', "groups has no key 'fields'"),
        ("seed = 3", "sead = 3", "has no key 'sead'; did you mean 'seed'"),
    ],
)  # fmt: skip
def test_mistakes_are_named(scene: Path, old: str, new: str, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(InputError, match=message) as error:
        parallel.plan(write(scene, WHOLE.replace(old, new, 1)))
    assert "recipe.toml" in str(error.value)


def test_a_scene_without_a_valid_position_says_why(scene: Path) -> None:
    write_raster(scene / "image.tif", np.zeros((64, 64, 1), np.uint16), GRID, nodata=0)
    with pytest.raises(InputError, match=r"No position is left: .* nodata \(image \d+\)"):
        parallel.plan(write(scene, WHOLE))


# ------------------------------------------------------------------------------------------------------ the command


def test_sample_saves_positions_and_rejections(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample", write(scene, WHOLE), "-o", str(scene / "p.gpkg"), "--rejected", str(scene / "r.gpkg")]
    assert main(command) == 0
    plan = parallel.plan(scene / "recipe.toml")
    positions = vector.read_positions(scene / "p.gpkg")
    assert len(positions) == plan.n_samples
    assert set(np.asarray(positions.split).tolist()) == {"train", "test"}
    assert positions.label is not None
    assert len(vector.read_positions(scene / "r.gpkg")) == len(plan.rejections)
    out = capsys.readouterr().out
    assert str(plan.rejections) in out
    for name, part in plan.positions.items():
        assert f"{name}: {len(part)} positions" in out


def test_sample_in_one_piece(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    positions = """[positions]
method = "from_vector"
vector = "fields.gpkg"
field = "crop"
strategy = "constant"
n = 3
max_nodata = 1.0
"""
    recipe_path = write(scene, WHOLE.split("[positions]", maxsplit=1)[0] + positions)
    assert main(["sample", recipe_path, "-o", str(scene / "p.geojson")]) == 0
    assert "6 positions, maize 3, wheat 3" in capsys.readouterr().out
    assert main(["sample", recipe_path, "-o", str(scene / "p.doc")]) == 1
    assert not list(scene.glob("p.doc*"))


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.toml"):
        recipe.load_recipe(tmp_path / "none.toml")


def test_paths_that_only_gdal_knows_are_kept(scene: Path) -> None:
    assert recipe._joined("base", "/vsizip/x.zip/a.tif") == "/vsizip/x.zip/a.tif"
    assert recipe._joined("base", 'NETCDF:"x.nc":band') == 'NETCDF:"x.nc":band'
    assert recipe._joined("base", "a.tif") == str(Path("base", "a.tif"))
    assert RasterSource(recipe._joined(str(scene), "image.tif"), 1).count == 1
