from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Grid, Positions, Window

NORTH_UP = (500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0)
GEOTRANSFORMS = {
    "north up": NORTH_UP,
    "south up": (-180.0, 0.5, 0.0, -90.0, 0.0, 0.5),
    "no georeferencing": (0.0, 1.0, 0.0, 0.0, 0.0, 1.0),
    "rotated": (100.0, 17.32050808, 5.0, 200.0, 10.0, -8.660254038),
    "turned by 90 degrees": (7.0, 0.0, 2.0, 9.0, -3.0, 0.0),
    "sheared": (1841001.75, 1.5, -5.0, 1144003.25, -5.0, -1.5),
}


@st.composite
def grids(draw: st.DrawFn, *, rotated: bool = True) -> Grid:
    size = st.floats(0.001, 1000)
    dx, dy = draw(size), draw(size)
    flip = draw(st.sampled_from([1, -1]))
    angle = math.radians(draw(st.sampled_from([0, 17, 90, 135, 200]))) if rotated else 0.0
    origin = st.floats(-1e6, 1e6)
    cos, sin = math.cos(angle), math.sin(angle)
    gt = (draw(origin), dx * cos, -flip * dy * sin, draw(origin), dx * sin, flip * dy * cos)
    return Grid("", gt, draw(st.integers(1, 300)), draw(st.integers(1, 300)))


windows = st.builds(Window, st.integers(-20, 20), st.integers(-20, 20), st.integers(1, 20), st.integers(1, 20))


def pixels(window: Window) -> set[tuple[int, int]]:
    return {
        (row, col)
        for row in range(window.row_off, window.row_off + window.height)
        for col in range(window.col_off, window.col_off + window.width)
    }


class TestWindow:
    @given(windows, windows)
    def test_intersection_has_the_pixels_of_both(self, a: Window, b: Window) -> None:
        both = a.intersection(b)
        assert (set() if both is None else pixels(both)) == pixels(a) & pixels(b)

    @given(windows, st.integers(1, 20), st.integers(1, 20))
    def test_inside_means_all_pixels(self, window: Window, width: int, height: int) -> None:
        assert window.is_inside(width, height) == (pixels(window) <= pixels(Window(0, 0, width, height)))

    def test_slices_pick_its_pixels(self) -> None:
        array = np.arange(40).reshape(5, 8)
        window = Window(2, 1, 3, 2)
        assert array[window.slices].tolist() == [[10, 11, 12], [18, 19, 20]]
        assert array[window.slices].shape == window.shape == (2, 3)

    def test_slices_of_what_lies_outside(self) -> None:
        with pytest.raises(InputError, match="outside"):
            _ = Window(-1, 0, 3, 3).slices

    def test_padded(self) -> None:
        assert Window(10, 20, 3, 4).padded(1, 2) == Window(8, 19, 7, 6)
        assert Window(10, 20, 30, 40).padded(-1, -2).padded(1, 2) == Window(10, 20, 30, 40)

    @pytest.mark.parametrize("values", [(0, 0, 0, 1), (0, 0, 1, -1), (0, 0, 1.5, 1), ("a", 0, 1, 1), (None, 0, 1, 1)])
    def test_wrong_values(self, values: tuple[object, ...]) -> None:
        with pytest.raises(InputError, match="window"):
            Window(*values)

    def test_numpy_integers_become_plain(self) -> None:
        window = Window(*np.array([1, 2, 3, 4]))
        assert window == Window(1, 2, 3, 4)
        assert type(window.width) is int


class TestGrid:
    @pytest.mark.parametrize(
        ("geotransform", "width", "height", "message"),
        [
            ((0, 1, 0, 0, 0), 1, 1, "six finite numbers"),
            ((0, 1, 0, 0, 0, math.nan), 1, 1, "six finite numbers"),
            ((0, 1, 0, 0, 0, "x"), 1, 1, "six numbers"),
            ((0, 0, 0, 0, 0, -1), 1, 1, "pixel size is zero"),
            ((0, 2, 4, 0, 1, 2), 1, 1, "to a line"),
            (NORTH_UP, 0, 1, "at least one column"),
            (NORTH_UP, 1, -5, "at least one column"),
            (NORTH_UP, 1.5, 1, "integer width"),
        ],
    )
    def test_wrong_values(self, geotransform: object, width: object, height: object, message: str) -> None:
        with pytest.raises(InputError, match=message):
            Grid("", geotransform, width, height)

    def test_crs_must_be_text(self) -> None:
        with pytest.raises(InputError, match="CRS"):
            Grid(None, NORTH_UP, 1, 1)

    @given(grids())
    def test_pickles_hashes_and_compares(self, grid: Grid) -> None:
        copy = pickle.loads(pickle.dumps(grid))  # noqa: S301
        assert copy == grid
        assert hash(copy) == hash(grid)

    @given(grids(), st.integers(-50, 350), st.integers(-50, 350), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
    def test_rowcol_finds_the_pixel_that_xy_lies_in(self, grid: Grid, row: int, col: int, u: float, v: float) -> None:
        x, y = grid.xy(row + u, col + v, "ul")
        assert grid.rowcol(x, y) == (row, col)
        assert grid.rowcol(*grid.xy(row, col)) == (row, col)

    @given(grids(), st.lists(st.tuples(st.integers(-9, 99), st.integers(-9, 99)), min_size=1))
    def test_arrays_as_numbers(self, grid: Grid, places: list[tuple[int, int]]) -> None:
        row, col = np.array(places).T
        x, y = grid.xy(row, col)
        assert list(zip(x.tolist(), y.tolist(), strict=True)) == [grid.xy(*place) for place in places]
        rows, cols = grid.rowcol(x, y)
        assert rows.dtype == cols.dtype == np.int64
        assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == places

    @pytest.mark.parametrize("geotransform", GEOTRANSFORMS.values(), ids=GEOTRANSFORMS)
    def test_xy_is_the_affine_map(self, geotransform: tuple[float, ...]) -> None:
        grid = Grid("", geotransform, 20, 10)
        matrix = np.array(geotransform).reshape(2, 3)
        for row, col in [(0, 0), (3, 7), (10, 20)]:
            assert grid.xy(row, col, "ul") == pytest.approx(matrix @ [1, col, row])
            assert grid.xy(row, col) == pytest.approx(matrix @ [1, col + 0.5, row + 0.5])
        corners = [matrix @ [1, col, row] for col in (0, 20) for row in (0, 10)]
        assert grid.bounds == pytest.approx((*np.min(corners, axis=0), *np.max(corners, axis=0)))

    def test_pixel_size_is_a_length(self) -> None:
        assert Grid("", GEOTRANSFORMS["rotated"], 1, 1).pixel_size == pytest.approx((20, 10))
        assert Grid("", GEOTRANSFORMS["south up"], 1, 1).pixel_size == (0.5, 0.5)
        assert Grid("", GEOTRANSFORMS["rotated"], 1, 1).is_rotated
        assert not Grid("", GEOTRANSFORMS["south up"], 1, 1).is_rotated

    def test_a_pixel_owns_its_upper_left_edges(self) -> None:
        grid = Grid("", NORTH_UP, 10, 10)
        assert grid.rowcol(500000, 4000000) == (0, 0)
        assert grid.rowcol(500010, 3999990) == (1, 1)
        assert grid.rowcol(499999.999, 4000000.001) == (-1, -1)

    def test_far_away_is_outside_and_no_overflow(self) -> None:
        row, col = Grid("", NORTH_UP, 10, 10).rowcol(1e300, -1e300)
        assert row > 2**50
        assert col > 2**50

    @pytest.mark.parametrize("x", [math.nan, math.inf])
    def test_nowhere_is_no_pixel(self, x: float) -> None:
        with pytest.raises(InputError, match="finite"):
            Grid("", NORTH_UP, 10, 10).rowcol(x, 0)

    def test_unknown_offset(self) -> None:
        with pytest.raises(InputError, match="lr"):
            Grid("", NORTH_UP, 10, 10).xy(0, 0, "lr")

    @given(grids(), windows, st.integers(0, 5), st.integers(0, 5))
    def test_window_grid_keeps_pixels_where_they_are(self, grid: Grid, window: Window, row: int, col: int) -> None:
        part = grid.window_grid(window)
        assert part.shape == window.shape
        expected = grid.xy(window.row_off + row, window.col_off + col)
        assert part.xy(row, col) == pytest.approx(expected, rel=1e-12, abs=1e-6)


class TestFootprint:
    image = np.arange(64).reshape(8, 8)  # row * 8 + col: each pixel says where it is

    @pytest.mark.parametrize("geotransform", GEOTRANSFORMS.values(), ids=GEOTRANSFORMS)
    @pytest.mark.parametrize(
        ("size", "first", "last"),
        [
            (4, (1, 2), (4, 5)),  # starts two before, ends one after pixel (3, 4)
            (5, (1, 2), (5, 6)),  # centred on it
            (1, (3, 4), (3, 4)),
            ((2, 3), (2, 3), (3, 5)),
        ],
    )
    def test_of_a_point_in_pixel_3_4(
        self,
        geotransform: tuple[float, ...],
        size: int | tuple[int, int],
        first: tuple[int, int],
        last: tuple[int, int],
    ) -> None:
        grid = Grid("", geotransform, 8, 8)
        for u, v in [(0.5, 0.5), (0.01, 0.99), (0.99, 0.01)]:
            patch = self.image[grid.footprint_window(*grid.xy(3 + u, 4 + v, "ul"), size).slices]
            assert divmod(int(patch[0, 0]), 8) == first
            assert divmod(int(patch[-1, -1]), 8) == last

    @given(grids(), st.integers(1, 9), st.lists(st.tuples(st.integers(-5, 50), st.integers(-5, 50)), min_size=1))
    def test_of_many_points_at_once(self, grid: Grid, size: int, places: list[tuple[int, int]]) -> None:
        x, y = grid.xy(*np.array(places).T)
        rows, cols = grid.footprint_starts(x, y, size)
        one_by_one = [grid.footprint_window(*point, size) for point in zip(x, y, strict=True)]
        assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == [(w.row_off, w.col_off) for w in one_by_one]

    @pytest.mark.parametrize("size", [0, -1, 2.5, "4", (4,), (4, 4, 4), (4, 0), None])
    def test_wrong_size(self, size: object) -> None:
        with pytest.raises(InputError, match="size"):
            Grid("", NORTH_UP, 8, 8).footprint_window(500000, 4000000, size)


class TestTiles:
    @pytest.mark.parametrize(
        ("length", "size", "stride", "offset", "edges", "expected"),
        [
            (10, 4, None, 0, "drop", [(0, 4), (4, 4)]),
            (10, 4, None, 0, "shift", [(0, 4), (4, 4), (6, 4)]),
            (10, 4, None, 0, "clip", [(0, 4), (4, 4), (8, 2)]),
            (8, 4, None, 0, "drop", [(0, 4), (4, 4)]),
            (8, 4, None, 0, "shift", [(0, 4), (4, 4)]),
            (8, 4, None, 0, "clip", [(0, 4), (4, 4)]),
            (10, 4, 2, 0, "drop", [(0, 4), (2, 4), (4, 4), (6, 4)]),
            (11, 4, 2, 0, "shift", [(0, 4), (2, 4), (4, 4), (6, 4), (7, 4)]),
            (11, 4, 2, 0, "clip", [(0, 4), (2, 4), (4, 4), (6, 4), (8, 3)]),
            (11, 4, 5, 0, "shift", [(0, 4), (5, 4), (7, 4)]),
            (10, 2, 6, 0, "shift", [(0, 2), (6, 2)]),  # the rest is a gap that the stride makes
            (10, 4, None, 3, "drop", [(3, 4)]),
            (10, 4, None, 3, "shift", [(3, 4), (6, 4)]),
            (10, 4, None, 3, "clip", [(3, 4), (7, 3)]),
            (3, 4, None, 0, "drop", []),
            (3, 4, None, 0, "clip", [(0, 3)]),
            (4, 4, None, 4, "shift", []),
        ],
    )
    def test_along_one_axis(
        self, length: int, size: int, stride: int | None, offset: int, edges: str, expected: list[tuple[int, int]]
    ) -> None:
        across = Grid("", NORTH_UP, length, 1).tiles(
            (1, size),
            None if stride is None else (1, stride),
            offset=(0, offset),
            edges=edges,
        )
        assert [(w.col_off, w.width) for w in across] == expected
        down = Grid("", NORTH_UP, 1, length).tiles(
            (size, 1),
            None if stride is None else (stride, 1),
            offset=(offset, 0),
            edges=edges,
        )
        assert [(w.row_off, w.height) for w in down] == expected

    @given(
        st.integers(1, 30), st.integers(1, 30), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.data(),
        st.sampled_from(["drop", "shift", "clip"]),
    )  # fmt: skip
    def test_painted(
        self, width: int, height: int, rows: int, cols: int, stride: int, data: st.DataObject, edges: str
    ) -> None:
        assume(edges != "shift" or (rows <= height and cols <= width))
        offset = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
        grid = Grid("", NORTH_UP, width, height)
        tiles = list(grid.tiles((rows, cols), stride, offset=offset, edges=edges))
        painted = np.zeros((height, width), int)
        for tile in tiles:
            assert tile.is_inside(width, height)
            assert tile.shape == (rows, cols) or edges == "clip"
            painted[tile.slices] += 1
        assert [(t.row_off, t.col_off) for t in tiles] == sorted((t.row_off, t.col_off) for t in tiles)
        assert len(set(tiles)) == len(tiles)
        if stride <= min(rows, cols) and edges != "drop":
            assert (painted[offset[0] :, offset[1] :] > 0).all()
        if edges == "drop":
            per_axis = [
                max(0, (n - s - o) // stride + 1) for n, s, o in zip((height, width), (rows, cols), offset, strict=True)
            ]
            assert len(tiles) == math.prod(per_axis)

    def test_shift_needs_room(self) -> None:
        with pytest.raises(InputError, match=r"128 x 128.*67 x 56"):
            Grid("", NORTH_UP, 56, 67).tiles(128, edges="shift")

    @pytest.mark.parametrize(
        "arguments",
        [
            {"size": 0},
            {"size": 4, "stride": 0},
            {"size": 4, "offset": (-1, 0)},
            {"size": 4, "edges": "keep"},
            {"size": "4"},
        ],
    )
    def test_wrong_arguments_are_refused_at_the_call(self, arguments: dict[str, object]) -> None:
        with pytest.raises(InputError):
            Grid("", NORTH_UP, 56, 67).tiles(**arguments)


def scaled(grid: Grid, ratio_col: float, ratio_row: float, col: float, row: float) -> Grid:
    """The grid that starts at a place of another, with pixels so many times as large."""
    _, a, b, _, d, e = grid.geotransform
    x, y = grid.xy(row, col, "ul")
    return Grid(grid.crs, (x, a * ratio_col, b * ratio_row, y, d * ratio_col, e * ratio_row), 30, 20)


class TestMeets:
    @given(grids(), st.integers(1, 7), st.integers(1, 7), st.integers(-99, 99), st.integers(-99, 99))
    def test_whole_pixels_of_the_finer_grid(self, grid: Grid, right: int, down: int, col: int, row: int) -> None:
        coarser = scaled(grid, right, down, col, row)
        assert grid.meets(coarser)
        assert coarser.meets(grid)

    @given(grids(), st.integers(1, 7), st.floats(0.01, 0.99), st.integers(-99, 99))
    def test_a_fraction_of_a_pixel_off(self, grid: Grid, ratio: int, part: float, row: int) -> None:
        assert not grid.meets(scaled(grid, ratio, ratio, row + part, row))
        assert not grid.meets(scaled(grid, ratio, ratio, row, row + part))

    @given(grids(), st.floats(0.2, 5), st.floats(0.2, 5), st.floats(-9, 9), st.floats(-9, 9), st.booleans())
    def test_symmetric(self, grid: Grid, right: float, down: float, col: float, row: float, whole: bool) -> None:
        other = scaled(grid, right, down, round(col) if whole else col, round(row) if whole else row)
        assert grid.meets(other) == other.meets(grid)

    @pytest.mark.parametrize(
        ("other", "meets"),
        [
            ((500000.0, 10.0, 0.0, 4000000.0, 0.0, -10.0), True),
            ((500005.0, 10.0, 0.0, 4000000.0, 0.0, -10.0), False),  # half a pixel off
            ((500000.0, 20.0, 0.0, 4000000.0, 0.0, -20.0), True),
            ((500010.0, 20.0, 0.0, 3999990.0, 0.0, -20.0), True),
            ((500000.0, 5.0, 0.0, 4000000.0, 0.0, -5.0), True),
            ((500000.0, 5.0, 0.0, 4000000.0, 0.0, -20.0), True),  # finer across, coarser down
            ((500000.0, 15.0, 0.0, 4000000.0, 0.0, -15.0), False),  # no whole ratio
            ((500000.0, 10.001, 0.0, 4000000.0, 0.0, -10.0), False),  # drifts to 0.01 pixel over 100
            ((500000.0, 10.0000001, 0.0, 4000000.0, 0.0, -10.0), True),  # drifts to 1e-6 pixel
            ((500000.0, 10.0, 0.0, 3999000.0, 0.0, 10.0), False),  # south up
            ((501000.0, -10.0, 0.0, 4000000.0, 0.0, -10.0), False),  # mirrored
            ((500000.0, 10.0, 0.01, 4000000.0, 0.01, -10.0), False),  # slightly turned
            ((500000.0, 0.0, 10.0, 4000000.0, -10.0, 0.0), False),  # turned by 90 degrees
        ],
    )
    def test_against_ten_metres(self, other: tuple[float, ...], meets: bool) -> None:
        grid = Grid("", NORTH_UP, 100, 100)
        assert grid.meets(Grid("", other, 100, 100)) is meets
        assert Grid("", other, 100, 100).meets(grid) is meets


class TestPositions:
    def example(self) -> Positions:
        return Positions(
            [1, 2, 3],
            [4, 5, 6],
            "EPSG:32631",
            label=[0, 2, 1],
            split=["train", "", "test"],
            weight=[1, math.nan, 0.5],
            classes=["a", "b", "c"],
        )

    def test_columns_are_arrays_of_fixed_types(self) -> None:
        p = self.example()
        assert (p.x.dtype, p.y.dtype, p.label.dtype, p.weight.dtype) == (np.float64, np.float64, np.int64, np.float64)
        assert p.split.tolist() == ["train", "", "test"]
        assert p.classes == ("a", "b", "c")
        assert len(p) == 3

    @pytest.mark.parametrize(
        ("chosen", "expected"),
        [
            ([True, False, True], [1, 3]),
            (np.array([2, 0]), [3, 1]),
            (slice(1, None), [2, 3]),
            (1, [2]),
            ([], []),
            (np.zeros(3, bool), []),
        ],
    )
    def test_choosing(self, chosen: object, expected: list[int]) -> None:
        p = self.example()[chosen]
        assert p.x.tolist() == expected
        assert p.y.tolist() == [v + 3 for v in expected]
        assert p.label.tolist() == [[0, 2, 1][v - 1] for v in expected]
        assert len(p.split) == len(p.weight) == len(p) == len(expected)
        assert p.classes == ("a", "b", "c")

    def test_equal_by_value(self) -> None:
        p = self.example()
        assert p == self.example()
        assert p == pickle.loads(pickle.dumps(p))  # noqa: S301
        assert p != p[:2]
        assert p != Positions(p.x, p.y, p.crs)
        assert p != Positions(p.x, p.y, "", p.label, p.split, p.weight, p.classes)
        assert p != Positions(p.x, p.y + 1, p.crs, p.label, p.split, p.weight, p.classes)
        assert p != "positions"

    def test_what_was_given_stays_the_callers(self) -> None:
        x = np.zeros(2)
        p = Positions(x, x, "")
        x[0] = 9
        assert p.x.tolist() == [0, 0]
        with pytest.raises(ValueError, match="read-only"):
            p.x[0] = 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"y": [1, 2]}, "y has the shape"),
            ({"label": [1]}, "label has the shape"),
            ({"x": [[1, 2, 3]]}, "one dimension"),
            ({"x": [1, math.nan, 3]}, "Position 1 .*finite"),
            ({"label": ["a", "b", "c"]}, "integers"),
            ({"label": [0.5, 1, 2]}, "integers"),
            ({"label": [0, 1, 5]}, "Label 5 has no name"),
            ({"label": [0, -1, 1]}, "Label -1 has no name"),
            ({"crs": 32631}, "CRS"),
        ],
    )
    def test_wrong_values(self, arguments: dict[str, object], message: str) -> None:
        good = {"x": [1, 2, 3], "y": [1, 2, 3], "crs": "", "label": [0, 1, 1], "classes": ["a", "b"]}
        with pytest.raises(InputError, match=message):
            Positions(**(good | arguments))

    def test_none_at_all(self) -> None:
        p = Positions([], [], "", label=[], split=[], weight=[])
        assert len(p) == 0
        assert p.label.dtype == np.int64
        assert p == p[:]
