from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from otbtf_lite import partition
from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid, Positions
from otbtf_lite.raster import RasterSource, write_raster
from otbtf_lite.sampling import on_grid, split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CRS = "EPSG:32631"
THIRDS = {"train": 0.6, "valid": 0.2, "test": 0.2}


@pytest.fixture(scope="module")
def rasters(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, str]:
    """The same 960 x 960 m of ground in pixels of 10, 20 and 5 m: paths by pixel size."""
    folder = tmp_path_factory.mktemp("rasters")
    paths = {}
    for pixel in (10, 20, 5):
        n = 960 // pixel
        paths[pixel] = str(folder / f"{pixel}.tif")
        grid = Grid(CRS, (500000.0, pixel, 0.0, 4000000.0, 0.0, -pixel), n, n)
        write_raster(paths[pixel], np.zeros((n, n, 1), np.uint8), grid)
    return paths


def paint(positions: Positions, sources: Sequence[RasterSource], grow: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """By brute force, in cells of 5 m: the ground under each split's patches, grown by so many map units a side."""
    ground = {}
    assert positions.split is not None
    for name in np.unique(positions.split).tolist():
        ground[name] = np.zeros((192 + 60, 192 + 60), bool)
        mine = positions.split == name
        for source in sources:
            pixel = int(source.grid.pixel_size[0])
            for x, y in zip(positions.x[mine], positions.y[mine], strict=True):
                window = source.grid.footprint_window(x, y, source.patch_size)
                top, left = window.row_off * pixel - grow, window.col_off * pixel - grow
                bottom, right = top + window.height * pixel + 2 * grow, left + window.width * pixel + 2 * grow
                ground[name][top // 5 + 30 : bottom // 5 + 30, left // 5 + 30 : right // 5 + 30] = True
    return ground


def covers(positions: Positions, sources: Sequence[RasterSource]) -> np.ndarray[Any, Any]:
    """The number of splits on each cell of the ground."""
    return np.sum(list(paint(positions, sources).values()), axis=0)


def shares(positions: Positions, fractions: Mapping[str, float]) -> np.ndarray[Any, Any]:
    return np.array([np.count_nonzero(positions.split == name) for name in fractions]) / len(positions)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strategy=st.sampled_from(["blocks", "chessboard"]),
    size=st.integers(1, 12),
    other=st.sampled_from([(20, 1), (20, 2), (20, 6), (5, 3), (5, 16), (10, 5)]),
    stride=st.integers(3, 20),
    offset=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    block=st.sampled_from([None, 60.0, 80.0, 130.0, 240.0]),
    buffer=st.sampled_from([0.0, 10.0, 35.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_no_pixel_is_in_two_splits_and_the_buffer_is_kept(
    rasters: Mapping[int, str],
    strategy: Any,
    size: int,
    other: tuple[int, int],
    stride: int,
    offset: tuple[int, int],
    block: float | None,
    buffer: float,
    seed: int,
) -> None:
    sources = {"a": RasterSource(rasters[10], size), "b": RasterSource(rasters[other[0]], other[1])}
    fractions = {"train": 0.5, "test": 0.5} if strategy == "chessboard" else THIRDS
    positions = on_grid(sources["a"], stride=stride, offset=offset)
    try:
        kept = split(positions, sources, fractions, seed=seed, strategy=strategy, block_size=block, buffer=buffer)
    except InputError as error:
        assume("gets no position" not in str(error))
        raise
    ground, grown = (paint(kept, list(sources.values()), grow) for grow in (0, int(buffer)))
    for name, mine in ground.items():
        for other_name, theirs in grown.items():
            assert name == other_name or not (mine & theirs).any()
    # Positions come back in their order, at their places.
    where = {(x, y): i for i, (x, y) in enumerate(zip(positions.x.tolist(), positions.y.tolist(), strict=True))}
    indices = [where[place] for place in zip(kept.x.tolist(), kept.y.tolist(), strict=True)]
    assert indices == sorted(set(indices))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 16),
    stride=st.integers(1, 20),
    block_pixels=st.integers(8, 24),
    fractions=st.sampled_from([THIRDS, {"train": 0.8, "valid": 0.1, "test": 0.1}, {"a": 0.5, "b": 0.5}]),
    buffer=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_fractions_are_met_within_one_block(
    rasters: Mapping[int, str],
    size: int,
    stride: int,
    block_pixels: int,
    fractions: dict[str, float],
    buffer: float,
    seed: int,
) -> None:
    source = RasterSource(rasters[10], size)
    positions = on_grid(source, stride=max(stride, size // 4))
    try:
        kept = split(positions, {"a": source}, fractions, seed=seed, block_size=10 * block_pixels, buffer=buffer)
    except InputError as error:  # small blocks of large patches
        assume("gets no position" not in str(error))
        raise
    rows, cols = (np.round(v).astype(int) for v in source.grid.fractional_rowcol(positions.x, positions.y))
    centres = np.stack([rows, cols]) - size // 2 + size / 2
    cells = (centres - size / 2) // 1  # first rows and columns: blocks start at the first patch
    number = ((cells + size / 2) // block_pixels).astype(int)
    in_a_block = np.unique(number, axis=1, return_counts=True)[1].max()
    missed = np.abs(shares(kept, fractions) - list(fractions.values())) * len(kept)
    assert missed.max() <= in_a_block + 1e-9


def test_tiles_that_fill_blocks_are_all_kept(rasters: Mapping[int, str]) -> None:
    source = RasterSource(rasters[10], 12)
    positions = on_grid(source)
    kept = split(positions, {"a": source}, THIRDS, seed=1, block_size=240)
    assert len(kept) == len(positions) == 64
    assert shares(kept, THIRDS) == pytest.approx([0.6, 0.2, 0.2], abs=4 / 64)
    # A block is one split's: 2 x 2 tiles of equal name.
    assert kept.split is not None
    names = kept.split.reshape(4, 2, 4, 2)
    assert (names == names[:, :1, :, :1]).all()


def test_the_seed_decides(rasters: Mapping[int, str]) -> None:
    source = RasterSource(rasters[10], 8)
    positions = on_grid(source, stride=5)
    first, again, other = (split(positions, {"a": source}, THIRDS, seed=s, buffer=10) for s in (7, 7, 8))
    assert first == again
    assert first != other


def test_sparse_positions_are_not_dropped_for_nothing(rasters: Mapping[int, str]) -> None:
    # Patches on block borders, but no two near each other.
    source = RasterSource(rasters[10], 8)
    grid = source.grid
    rows, cols = (v.ravel() for v in np.meshgrid(np.arange(8, 90, 12), np.arange(8, 90, 12)))
    positions = Positions(*grid.xy(rows, cols), CRS)
    assert len(split(positions, {"a": source}, THIRDS, seed=0, block_size=160)) == len(positions)


def test_each_class_is_shared_out(rasters: Mapping[int, str]) -> None:
    source = RasterSource(rasters[10], 4)
    base = on_grid(source)
    rng = np.random.default_rng(0)
    # Classes that lie apart: the rare one fills a corner.
    label = np.where((base.x < 500300) & (base.y > 3999600), 2, rng.integers(0, 2, len(base)))
    positions = Positions(base.x, base.y, base.crs, label=label, classes=("water", "field", "town"))
    kept = split(positions, {"a": source}, THIRDS, seed=3, block_size=80)
    assert kept.classes == positions.classes
    assert kept.label is not None
    for value in range(3):
        of_class = kept[kept.label == value]
        assert shares(of_class, THIRDS) == pytest.approx([0.6, 0.2, 0.2], abs=0.08)


def test_what_each_split_gets_is_logged(rasters: Mapping[int, str], caplog: pytest.LogCaptureFixture) -> None:
    source = RasterSource(rasters[10], 12)
    base = on_grid(source)
    positions = Positions(base.x, base.y, base.crs, label=np.arange(64) % 2, classes=("a", "b"))
    with caplog.at_level(logging.INFO, "otbtf_lite"):
        split(positions, {"a": source}, {"train": 0.5, "test": 0.5}, seed=1, block_size=240)
    assert "split: train 32, test 32; 0 of 64 dropped" in caplog.text
    assert "class a: train 50.0%, test 50.0%" in caplog.text


def test_a_chessboard_alternates(rasters: Mapping[int, str]) -> None:
    source = RasterSource(rasters[10], 12)
    halves = {"white": 0.5, "black": 0.5}
    kept = split(on_grid(source), {"a": source}, halves, seed=1, strategy="chessboard", block_size=240)
    assert kept.split is not None
    assert len(kept) == 64
    fields = kept.split.reshape(8, 8)[::2, ::2]
    assert (fields[1:] != fields[:-1]).all()
    assert (fields[:, 1:] != fields[:, :-1]).all()
    # Overlapping patches: both colours lose alike.
    kept = split(on_grid(source, stride=3), {"a": source}, halves, seed=1, strategy="chessboard", block_size=240)
    assert shares(kept, halves) == pytest.approx([0.5, 0.5], abs=0.05)
    assert covers(kept, [source]).max() == 1


def test_random_warns_of_shared_pixels(rasters: Mapping[int, str], caplog: pytest.LogCaptureFixture) -> None:
    source = RasterSource(rasters[10], 12)
    positions = on_grid(source, stride=6)
    kept = split(positions, {"a": source}, THIRDS, seed=1, strategy="random")
    assert len(kept) == len(positions)
    assert shares(kept, THIRDS) == pytest.approx([0.6, 0.2, 0.2], abs=1 / len(kept))
    found = re.search(r"Leak: (\d+) pixels", caplog.text)
    assert found is not None
    assert int(found[1]) == np.count_nonzero(covers(kept, [source]) > 1) / 4
    caplog.clear()
    split(on_grid(source), {"a": source}, THIRDS, seed=1, strategy="random")
    assert "Leak" not in caplog.text
    apart = split(positions, {"a": source}, THIRDS, seed=1, strategy="random", buffer=10)
    ground, grown = paint(apart, [source]), paint(apart, [source], grow=10)
    assert not any((ground[a] & grown[b]).any() for a in THIRDS for b in THIRDS if a != b)


def test_groups_stay_together(rasters: Mapping[int, str]) -> None:
    source = RasterSource(rasters[10], 4)
    positions = on_grid(source)
    groups = np.array([f"field {i}" for i in np.arange(len(positions)) // 13])
    kept = split(positions, {"a": source}, THIRDS, seed=1, strategy="groups", groups=groups)
    assert kept.split is not None
    assert len(kept) == len(positions)
    assert all(len(set(kept.split[groups == group])) == 1 for group in np.unique(groups))
    assert shares(kept, THIRDS) == pytest.approx([0.6, 0.2, 0.2], abs=13 / len(kept))


def test_blocks_are_in_map_units(tmp_path: Path) -> None:
    # Pixels of 30 x 10 map units: a block of 120 is 4 columns wide and 12 rows high.
    path = str(tmp_path / "flat.tif")
    write_raster(path, np.zeros((96, 96, 1), np.uint8), Grid(CRS, (0.0, 30.0, 0.0, 0.0, 0.0, -10.0), 96, 96))
    source = RasterSource(path, 1)
    kept = split(on_grid(source), {"a": source}, THIRDS, seed=1, block_size=120)
    assert kept.split is not None
    blocks = kept.split.reshape(8, 12, 24, 4)
    assert (blocks == blocks[:, :1, :, :1]).all()
    assert not (blocks[:, 0, :-1, 0] == blocks[:, 0, 1:, 0]).all()


def test_a_turned_raster_keeps_its_buffer(tmp_path: Path) -> None:
    turn, pixel = np.deg2rad(30), 10.0
    a, d = pixel * np.cos(turn), pixel * np.sin(turn)
    path = str(tmp_path / "turned.tif")
    write_raster(path, np.zeros((96, 96, 1), np.uint8), Grid(CRS, (5e5, a, d, 4e6, d, -a), 96, 96))
    source = RasterSource(path, 6)
    kept = split(on_grid(source, stride=4), {"a": source}, THIRDS, seed=1, block_size=200, buffer=25)
    assert kept.split is not None
    rows, cols = source.grid.rowcol(kept.x, kept.y)
    # Gaps between patches in whole pixels, along the axis on which they are further apart: 25 units take 3 pixels.
    for name in THIRDS:
        mine, others = kept.split == name, kept.split != name
        gap = np.maximum(abs(rows[mine][:, None] - rows[others]), abs(cols[mine][:, None] - cols[others])) - 6
        assert gap.min() >= 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fractions": {"train": 0.8, "test": 0.3}}, "sum to 1"),
        ({"fractions": {"train": 1.0, "test": 0.0}}, "positive"),
        ({"fractions": {"train": "most"}}, "sum to 1"),
        ({"fractions": {}}, "dict of shares"),
        ({"strategy": "block"}, "blocks, chessboard, random, groups"),
        ({"strategy": "chessboard"}, "two splits"),
        ({"strategy": "groups"}, "groups"),
        ({"groups": [1, 2]}, 'strategy "groups"'),
        ({"block_size": -1.0}, "block_size"),
        ({"block_size": 2.0}, "below a pixel"),
        ({"block_size": 960.0}, "1 blocks"),
        ({"buffer": -1.0}, "buffer"),
        ({"buffer": float("nan")}, "buffer"),
        ({"buffer": 700.0}, "gets no position"),
        ({"seed": None}, "seed"),
    ],
)
def test_mistakes_are_explained(rasters: Mapping[int, str], arguments: dict[str, Any], words: str) -> None:
    source = RasterSource(rasters[10], 8)
    complete = {"fractions": THIRDS, "seed": 1, **arguments}
    with pytest.raises(InputError, match=re.escape(words)):
        split(on_grid(source), {"a": source}, **complete)


# ------------------------------------------------------------------------------------------------ the arithmetic

points = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=40)


@settings(max_examples=200, deadline=None)
@given(points, points, st.tuples(st.floats(0.5, 40), st.floats(0.5, 40)))
def test_near_any_is_what_comparing_all_pairs_finds(mine: Any, others: Any, reach: tuple[float, float]) -> None:
    corners, rest = (np.array(p, np.float64).reshape(-1, 2) for p in (mine, others))
    expected = (np.abs(corners[:, None] - rest) < reach).all(2).any(1)
    assert partition.near_any(corners, rest, np.array(reach)).tolist() == expected.tolist()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.integers(0, 40)] * 2, *[st.integers(1, 20)] * 2, st.integers(0, 2)), min_size=1, max_size=30
    )
)
def test_shared_cells_are_what_painting_finds(boxes: Any) -> None:
    table = np.array(boxes)
    edges = np.concatenate([table[:, :2], table[:, :2] + table[:, 2:4]], axis=1)
    ground = np.zeros((3, 64, 64), bool)
    for (top, left, bottom, right), number in zip(edges, table[:, 4], strict=True):
        ground[number, top:bottom, left:right] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_STRIP_CELLS", 300)  # several strips
        assert partition.shared_cells(edges, table[:, 4], 3) == np.count_nonzero(ground.sum(0) > 1)


@pytest.mark.parametrize(
    ("counts", "fractions"), [([5] * 40, [0.8, 0.1, 0.1]), ([1, 9, 2, 2, 30, 3, 3, 8], [0.5, 0.5])]
)
def test_blocks_are_shared_out_within_one(counts: list[int], fractions: list[float]) -> None:
    table, wanted = np.array(counts, np.float64)[:, None], np.array(fractions)
    for seed in range(20):
        numbers = partition.share_out(table, wanted, np.random.default_rng(seed))
        got = np.bincount(numbers, weights=table[:, 0], minlength=len(wanted))
        assert np.abs(got - wanted * table.sum()).max() <= table.max()
        assert got.min() > 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("size", "side", "buffer", "fractions"),
    [(3, 3, 3, [0.5, 0.5]), (1, 3, 3, [0.6, 0.2, 0.2]), (6, 9, 0, [0.8, 0.1, 0.1])],
)
def test_shares_hold_also_where_blocks_are_hardly_larger_than_patches(
    size: int, side: int, buffer: int, fractions: list[float], seed: int
) -> None:
    axis = np.arange(90.0)
    corners = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    block = np.unique(((corners + size / 2) // side) @ [100, 1], return_inverse=True)[1]
    reach, wanted = np.full(2, size + buffer - 1e-3), np.array(fractions)
    number, kept = partition.split_blocks(corners, block, None, wanted, reach, np.random.default_rng(seed))
    got = np.bincount(number[kept], minlength=len(wanted))
    assert got.min() > 0
    assert np.abs(got - wanted * got.sum()).max() <= side**2


def test_a_hundred_thousand_positions_split_in_seconds() -> None:
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 10916, (100_000, 2)).astype(np.float64)
    block = np.unique((corners // 256) @ [100, 1], return_inverse=True)[1]
    fractions, reach = np.array([0.8, 0.1, 0.1]), np.full(2, 64 - 1e-3)
    number, kept = partition.split_blocks(corners, block, None, fractions, reach, rng)
    assert kept.mean() > 0.8
    for k in range(3):
        mine, others = corners[kept & (number == k)], corners[kept & (number != k)]
        assert not partition.near_any(mine, others, reach).any()
