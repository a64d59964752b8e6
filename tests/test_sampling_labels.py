"""Positions from label images: by class, and balanced on the classes of whole patches."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from otbtf_lite import RasterSource, balance, classdraw, lookup
from otbtf_lite.errors import InputError
from otbtf_lite.footprints import Footprints
from otbtf_lite.grid import Grid, Positions, concat_positions
from otbtf_lite.raster import transform_points, write_raster
from otbtf_lite.readers import RasterPatchesReader
from otbtf_lite.sampling import at_random, balanced, from_labels, on_grid, select

Make = Callable[..., RasterSource]
Array = npt.NDArray[Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes an image with its upper-left corner at (500000, 4000000) of UTM 31, or elsewhere."""

    def raster(
        pixels: Array, patch_size: int = 1, *, pixel: float = 10.0, nodata: float | None = None,
        origin: tuple[float, float] = (500000.0, 4000000.0), crs: str = "EPSG:32631", **source: Any,
    ) -> RasterSource:  # fmt: skip
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.tif"
        grid = Grid(crs, (origin[0], pixel, 0.0, origin[1], 0.0, -pixel), pixels.shape[1], pixels.shape[0])
        write_raster(path, pixels.reshape(*pixels.shape[:2], -1), grid, nodata=nodata)
        return RasterSource(path, patch_size, **source)

    return raster


def places(positions: Positions, source: RasterSource) -> list[tuple[int, int]]:
    row, col = source.grid.rowcol(positions.x, positions.y)
    return list(zip(row.tolist(), col.tolist(), strict=True))


def labels_of(positions: Positions) -> Array:
    assert positions.label is not None
    return positions.label


NOISE = np.random.default_rng(0).integers(0, 4, (40, 50)).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------- from_labels


@pytest.mark.parametrize("tile", [1024, 9])
@pytest.mark.parametrize("strategy", ["all", "constant", "total", "smallest"])
def test_strategies(make: Make, tile: int, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classdraw, "_TILE", tile)
    source, labels = make(NOISE, 7), make(NOISE, nodata=3)
    n = {"constant": 50, "total": 80}.get(strategy)
    positions = from_labels(source, labels, seed=1, strategy=strategy, n=n)
    available = Counter(NOISE[3:37, 3:47].ravel().tolist())
    del available[3]
    found = Counter(labels_of(positions).tolist())
    if strategy == "all":
        assert found == available
    elif strategy == "constant":
        assert set(found.values()) == {50}
    elif strategy == "smallest":
        assert set(found.values()) == {min(available.values())}
    else:
        assert found.total() == 80
        assert all(abs(found[k] - 80 * available[k] / available.total()) < 1 for k in available)
    drawn = places(positions, source)
    assert len(set(drawn)) == len(drawn)
    assert drawn == sorted(drawn)
    assert [NOISE[place] for place in drawn] == labels_of(positions).tolist()
    kept, rejections = select(positions, {"image": source})
    assert len(kept) == len(positions), str(rejections)  # every patch lies inside


def test_a_path_and_a_source_give_the_same_and_the_seed_decides(make: Make) -> None:
    source, labels = make(NOISE, 4), make(NOISE, 3)
    found = from_labels(source, labels.paths[0], seed=1)
    assert found == from_labels(source, labels, seed=1)
    assert found != from_labels(source, labels, seed=2)
    with pytest.raises(InputError, match="needs a seed"):
        from_labels(source, labels, seed=None)  # type: ignore[arg-type]


def test_nodata_of_labels(make: Make) -> None:
    source = make(NOISE)
    undeclared, declared = make(NOISE), make(NOISE, nodata=0)

    def classes(labels: RasterSource, **options: Any) -> set[int]:
        return set(labels_of(from_labels(source, labels, seed=0, **options)).tolist())

    assert classes(undeclared) == {0, 1, 2, 3}  # none declared: a valid class that looks like one
    assert classes(declared) == {1, 2, 3}
    assert classes(undeclared, nodata=0) == {1, 2, 3}
    assert classes(undeclared, nodata=[0, 3]) == {1, 2}
    assert classes(declared, nodata=()) == {0, 1, 2, 3}  # instead of what the file says
    assert classes(declared, nodata=2) == {0, 1, 3}
    with pytest.raises(InputError, match="No pixel whose patch lies inside the raster lies in the labels"):
        classes(undeclared, nodata=[0, 1, 2, 3])


def test_labels_that_are_whole_numbers_in_floats(make: Make) -> None:
    pixels = NOISE.astype(np.float32)
    pixels[pixels == 2] = np.nan
    source = make(NOISE)
    assert set(labels_of(from_labels(source, make(pixels), seed=0)).tolist()) == {0, 1, 3}
    with pytest.raises(InputError, match=r"holds [0-3]\.5: labels are whole numbers"):
        from_labels(source, make(pixels + 0.5), seed=0)
    with pytest.raises(InputError, match="has 2 bands: labels are one"):
        from_labels(source, make(np.dstack([NOISE, NOISE])), seed=0)
    big = make(np.full((40, 50), (1 << 64) - 1, np.uint64))
    with pytest.raises(InputError, match="whole numbers within int64"):
        from_labels(source, big, seed=0)


@pytest.mark.parametrize(
    ("pixel", "origin"), [(20.0, (500000.0, 4000000.0)), (5.0, (500003.0, 3999990.0)), (7.0, (500040.0, 3999950.0))]
)
@pytest.mark.parametrize("most", [1 << 24, 50])
def test_labels_on_other_pixels(
    make: Make, pixel: float, origin: tuple[float, float], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pixel that contains the centre, of labels 1 and 9 alone: never a 5 between them."""
    monkeypatch.setattr(lookup, "_MOST_PIXELS", most)
    pixels = np.random.default_rng(1).choice([1, 9], (30, 30)).astype(np.uint8)
    source, labels = make(NOISE), make(pixels, pixel=pixel, origin=origin)
    positions = from_labels(source, labels, seed=0, strategy="all")
    expected = {}
    for row in range(40):
        for col in range(50):
            x, y = 500000 + 10 * col + 5, 4000000 - 10 * row - 5
            r, c = int((origin[1] - y) // pixel), int((x - origin[0]) // pixel)
            if 0 <= r < 30 and 0 <= c < 30:
                expected[row, col] = int(pixels[r, c])
    assert dict(zip(places(positions, source), labels_of(positions).tolist(), strict=True)) == expected


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_classes_upsampled_twofold_are_never_mixed(make: Make, shift: float) -> None:
    pixels = np.random.default_rng(1).choice([1, 9], (20, 25)).astype(np.uint8)
    source = make(NOISE, 8)
    coarse = make(pixels, 4, pixel=20.0, origin=(500000.0 + shift, 4000000.0), categorical=True)
    sources = {"image": source, "labels": coarse}
    kept, _ = select(on_grid(source, stride=3), sources, snap="coarsest")
    reader = RasterPatchesReader(sources, kept)
    values = {int(v) for sample in reader.get_samples(range(len(kept))) for v in np.unique(sample["labels"])}
    reader.close()
    assert values == {1, 9}


def test_labels_in_another_crs(make: Make) -> None:
    source = make(NOISE)
    pixels = np.random.default_rng(2).integers(1, 200, (60, 60)).astype(np.uint8)
    lon, lat = transform_points(np.array([499990.0]), np.array([4000020.0]), "EPSG:32631", "EPSG:4326")
    labels = make(pixels, pixel=1e-4, origin=(float(lon[0]), float(lat[0])), crs="EPSG:4326")
    positions = from_labels(source, labels, seed=0, strategy="all")
    x, y = transform_points(positions.x, positions.y, "EPSG:32631", "EPSG:4326")
    row, col = labels.grid.rowcol(x, y)
    assert (pixels[row, col] == labels_of(positions)).all()
    assert len(positions) == 40 * 50


def test_elkton_whose_class_0_is_real(shared_data: Path) -> None:
    folder = shared_data / "l8_elkton_labels"
    source = RasterSource(folder / "L8-B4-Elkton-VA.tiff", 1)
    positions = from_labels(source, folder / "L8-Labels-Elkton-VA.tiff", seed=0)
    assert Counter(labels_of(positions).tolist()) == {0: 99, 1: 99, 2: 99}


# --------------------------------------------------------------------------------------------------- nodata in two


def test_nodata_in_the_image_with_a_valid_label_and_the_reverse(make: Make) -> None:
    image, pixels = np.full((9, 9), 5, np.uint16), np.full((9, 9), 1, np.uint8)
    image[4, 1] = 0  # a valid label there
    pixels[4, 7] = 255  # a valid image there
    source, labels = make(image, nodata=0), make(pixels, nodata=255, categorical=True)
    positions = from_labels(source, labels, seed=0, strategy="all")
    assert (4, 1) in places(positions, source)
    assert (4, 7) not in places(positions, source)
    kept, rejections = select(positions, {"image": source, "labels": labels})
    assert rejections.reasons == (("image", "nodata"),)
    assert places(rejections.positions, source) == [(4, 1)]
    assert len(kept) == 79
    _, both = select(on_grid(source), {"image": source, "labels": labels})
    assert dict(zip(places(both.positions, source), both.reasons, strict=True)) == {
        (4, 1): ("image", "nodata"), (4, 7): ("labels", "nodata"),
    }  # fmt: skip


def test_nodata_that_looks_like_a_value(make: Make) -> None:
    """Undeclared, 0 is a value; declared, every patch with it goes; given, it goes before what the file says."""
    image = np.ones((6, 6), np.uint16)
    image[0, 0] = 0
    for declared, given, expected in [
        (None, None, 9),
        (0, None, 8),
        (None, 0, 8),
        (0, (), 9),
        (0, 7, 9),
        (1, None, None),
    ]:
        source = RasterSource(make(image, nodata=declared).paths, 2, nodata=given)
        if expected is None:
            with pytest.raises(InputError, match="9 of 9 positions rejected: 9 nodata"):
                select(on_grid(source), {"image": source})
        else:
            assert len(select(on_grid(source), {"image": source})[0]) == expected


def test_a_scene_with_no_valid_position_among_good_ones(make: Make) -> None:
    good, empty = make(np.ones((8, 8), np.uint8), 4, nodata=0), make(np.zeros((8, 8), np.uint8), 4, nodata=0)
    kept, messages = [], []

    def usable(scene: RasterSource) -> None:
        try:
            kept.append(select(on_grid(scene), {"image": scene})[0])
        except InputError as error:
            messages.append(str(error))

    for scene in (good, empty, good):
        usable(scene)
    assert messages == ["No position is left: 4 of 4 positions rejected: 4 nodata (image 4)."]
    together = concat_positions(kept)
    assert together is not None
    assert len(together) == 8


# ------------------------------------------------------------------------------------------------ the rotated square


@pytest.fixture
def square(make: Make) -> tuple[RasterSource, set[tuple[int, int]]]:
    """20 x 20 pixels, valid in a square on its tip, as a scene on its orbit; and the centres of its patches of 5."""
    rows, cols = np.mgrid[:20, :20]
    valid = np.abs(rows - 9.5) + np.abs(cols - 9.5) <= 9
    source = make(np.where(valid, 7, 0).astype(np.uint16), 5, nodata=0)
    whole = {(r, c) for r in range(2, 18) for c in range(2, 18) if valid[r - 2 : r + 3, c - 2 : c + 3].all()}
    assert 20 < len(whole) < 100
    return source, whole


def test_a_rotated_footprint(square: tuple[RasterSource, set[tuple[int, int]]], make: Make) -> None:
    source, whole = square
    sources = {"image": source}
    kept, rejections = select(on_grid(source, stride=1), sources)
    assert set(places(kept, source)) == whole
    assert rejections.counts() == {"nodata": 256 - len(whole)}
    kept, _ = select(at_random(source, 256, seed=0), sources)
    assert set(places(kept, source)) == whole
    kept, _ = select(from_labels(source, make(np.ones((20, 20), np.uint8)), seed=0, strategy="all"), sources)
    assert set(places(kept, source)) == whole


def test_balanced_in_a_rotated_footprint(square: tuple[RasterSource, set[tuple[int, int]]], make: Make) -> None:
    source, whole = square
    labels = make(np.arange(400).reshape(20, 20).astype(np.uint8) % 3)
    positions = balanced(source, labels, len(whole), seed=0)  # as many as there are, so overlapping
    assert set(places(positions, source)) == whole
    assert len(select(positions, {"image": source})[1]) == 0
    with pytest.raises(InputError, match=f"{len(whole) + 1} patches .* only {len(whole)} of"):
        balanced(source, labels, len(whole) + 1, seed=0)


# -------------------------------------------------------------------------------------------------------- balanced


def stripes() -> Array:
    """Patches of 4 x 4 in 15 rows and columns: one row of them is of class 2, one holds both, all others class 1."""
    pixels = np.ones((60, 60), np.uint8)
    pixels[12:16] = 2
    pixels[40:44, ::2] = 2
    return pixels


def test_random_or_even(make: Make) -> None:
    source, labels = make(stripes(), 4), make(stripes())
    even = balanced(source, labels, 24, seed=0, spatial_fraction=0)
    patches = [stripes()[r - 2 : r + 2, c - 2 : c + 2] for r, c in places(even, source)]
    assert np.mean([patch == 2 for patch in patches]) == pytest.approx(0.5, abs=0.03)
    random = balanced(source, labels, 100, seed=0, spatial_fraction=1)
    assert Counter(labels_of(random).tolist())[2] < 20  # as rare as in the scene: 1 in 15
    drawn = places(random, source)
    assert len(set(drawn)) == 100
    mixed = balanced(source, labels, 24, seed=0, spatial_fraction=0.5)
    assert Counter(labels_of(mixed).tolist())[2] >= 9


def test_patches_lie_side_by_side(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    source, labels = make(stripes(), 4), make(stripes())
    positions = balanced(source, labels, 200, seed=3)
    starts = Footprints.of(positions, {"image": source}).starts["image"]
    assert len(np.unique(starts // 4, axis=0)) == 200
    assert len({tuple(each) for each in (starts % 4).tolist()}) == 1
    assert not caplog.text
    more = balanced(source, labels, 300, seed=3)  # 225 lie side by side
    assert "they start every 2 x 2 pixels (rows x cols) and overlap" in caplog.text
    assert len(set(places(more, source))) == 300


def test_each_choice_is_the_best_one() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 50, (40, 4)) * rng.integers(0, 2, (40, 4))
    counts[:, 0] += 1
    chosen = balance._choose(counts, 15, 4)
    assert chosen[:4].tolist() == [0, 1, 2, 3]
    for number in range(4, 15):
        total = counts[chosen[:number]].sum(0)
        left = [i for i in range(40) if i not in chosen[:number].tolist()]

        def cosine(index: int, total: Array = total) -> float:
            together = (total + counts[index]).tolist()
            return float(sum(together) / (len(together) * sum(v * v for v in together)) ** 0.5)

        assert cosine(int(chosen[number])) == pytest.approx(max(map(cosine, left)), abs=1e-12)


def test_masks_of_image_and_labels(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    image, pixels = np.ones((40, 40), np.uint8), np.full((40, 40), 255, np.uint8)
    image[:, 20:] = 0  # no image in the east
    pixels[:20] = 3  # no labels in the south but one
    pixels[32, 2] = 8
    source, labels = make(image, 4, nodata=0), make(pixels, nodata=255)
    positions = balanced(source, labels, 26, seed=0, spatial_fraction=0)
    row, col = np.array(places(positions, source)).T
    assert (col < 20).all()
    assert Counter(labels_of(positions).tolist()) == {3: 25, 8: 1}
    assert row[labels_of(positions) == 8].tolist() == [34]
    assert "26 of 26 patches; shares of the classes 3 99.8%, 8 0.2%" in caplog.text


def test_a_choice_is_the_beginning_of_a_larger_one(make: Make) -> None:
    source, labels = make(stripes(), 4), make(stripes())
    few = balanced(source, labels, 10, seed=5, spatial_fraction=0)
    assert few == balanced(source, labels, 30, seed=5, spatial_fraction=0)[:10]
    assert few != balanced(source, labels, 10, seed=6, spatial_fraction=0)
    assert few == balanced(RasterSource(source.paths, 9), labels.paths[0], 10, seed=5, patch_size=4, spatial_fraction=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be an integer"),
        ({"spatial_fraction": 1.5}, "from 0 to 1"),
        ({"seed": None}, "needs a seed"),
        ({"patch_size": 41}, re.escape("41 x 41 pixels (rows x cols) is larger")),
    ],
)
def test_wrong_arguments(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        balanced(make(NOISE, 4), make(NOISE), **{"n": 3, "seed": 0, **options})


def test_wide_rasters_are_read_in_parts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, labels = make(NOISE, 5), make(NOISE)
    whole = balanced(source, labels, 30, seed=0)
    monkeypatch.setattr(balance, "_MOST_PIXELS", 60)  # two patches
    assert balanced(source, labels, 30, seed=0) == whole


def test_slovenia(shared_data: Path) -> None:
    folder = shared_data / "s2_slovenia_lulc"
    source = RasterSource(folder / "ndvi_12dates_10m.tif", 8)
    with RasterSource(folder / "lulc.tif", 8).open() as reader:
        truth = reader.read(source.grid.window)[..., 0]

    def shares(fraction: float) -> Array:
        positions = balanced(source, folder / "lulc.tif", 40, seed=1, spatial_fraction=fraction)
        patches = [truth[r - 4 : r + 4, c - 4 : c + 4] for r, c in places(positions, source)]
        return np.array([np.mean([patch == value for patch in patches]) for value in (0, 1, 2, 3, 4, 8)])

    spread = [float(np.std(shares(fraction))) for fraction in (0.0, 0.25, 1.0)]
    assert spread == sorted(spread)
    assert spread[0] < 0.75 * spread[2]
