"""Maps from models, compared with the same model run on the whole raster at once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from osgeo import gdal, osr

from otbtf_lite import DataError, InputError, RasterSource
from otbtf_lite.inference import predict_raster

gdal.UseExceptions()

UTM = (600000.0, 10.0, 0.0, 5200000.0, 0.0, -10.0)
Array = npt.NDArray[Any]


def write_tif(path: Path, values: Array, geotransform: tuple[float, ...] = UTM, nodata: float | None = None) -> str:
    """A GeoTIFF of (rows, cols, bands), written by GDAL alone."""
    rows, cols, bands = values.shape
    kind = {"uint8": "Byte", "uint16": "UInt16", "int16": "Int16", "float32": "Float32", "float64": "Float64"}
    data = gdal.GetDriverByName("GTiff").Create(
        str(path), cols, rows, bands, getattr(gdal, f"GDT_{kind[values.dtype.name]}")
    )
    data.SetGeoTransform(geotransform)
    crs = osr.SpatialReference()
    crs.ImportFromEPSG(32631)
    data.SetSpatialRef(crs)
    for band in range(bands):
        if nodata is not None:
            data.GetRasterBand(band + 1).SetNoDataValue(nodata)
        data.GetRasterBand(band + 1).WriteArray(values[..., band])
    data.FlushCache()
    return str(path)


def read_tif(path: Path) -> Array:
    values = gdal.Open(str(path)).ReadAsArray()
    return values[..., None] if values.ndim == 2 else np.moveaxis(values, 0, -1)


def random_values(shape: tuple[int, ...], dtype: str = "uint16", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(1, 200, shape).astype(dtype)


def identity(arrays: dict[str, Array]) -> Array:
    (value,) = arrays.values()
    return value


def box_mean(values: Array, radius: int) -> Array:
    """The mean over (2 radius + 1)^2 pixels of (..., rows, cols, bands), losing ``radius`` pixels on every side."""
    size = 2 * radius + 1
    windows = np.lib.stride_tricks.sliding_window_view(values.astype(float), (size, size), axis=(-3, -2))
    return windows.mean(axis=(-2, -1))


def padded_box_mean(radius: int) -> Any:
    """A model of that receptive field whose output is as large as its input, with zeros around, as convolutions do."""

    def model(arrays: dict[str, Array]) -> Array:
        (value,) = arrays.values()
        return box_mean(np.pad(value, ((0, 0), (radius, radius), (radius, radius), (0, 0))), radius)

    return model


# ------------------------------------------------------------------------------------------------------------- identity


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 40), bands=st.integers(1, 3),
    tile=st.tuples(st.integers(1, 50), st.integers(1, 50)), margin=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    batch_size=st.integers(1, 5), dtype=st.sampled_from(["uint8", "int16", "float32"]),
)  # fmt: skip
def test_identity_gives_the_raster_back(
    tmp_path_factory: pytest.TempPathFactory, rows: int, cols: int, bands: int, tile: tuple[int, int],
    margin: tuple[int, int], batch_size: int, dtype: str,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("identity")
    values = random_values((rows, cols, bands), dtype)
    values[: rows // 2, : cols // 2, 0] = 0  # no data in one band, in some pixels in all
    values[0, 0] = 0
    path = write_tif(folder / "in.tif", values, nodata=0)
    predict_raster(identity, path, folder / "out.tif", tile=tile, margin=margin, batch_size=batch_size)
    np.testing.assert_array_equal(read_tif(folder / "out.tif"), values)
    before, after = gdal.Open(path), gdal.Open(str(folder / "out.tif"))
    assert after.GetGeoTransform() == before.GetGeoTransform()
    assert after.GetSpatialRef().IsSame(before.GetSpatialRef())
    assert after.GetRasterBand(1).DataType == before.GetRasterBand(1).DataType
    assert [after.GetRasterBand(b + 1).GetNoDataValue() for b in range(bands)] == [0] * bands
    assert sorted(p.name for p in folder.iterdir()) == ["in.tif", "out.tif"]


@pytest.mark.parametrize("geotransform", [(5.0, 2.0, 0.0, 9.0, 0.0, 2.0), (5.0, 1.5, 1.0, 9.0, 1.0, -1.5)])
def test_south_up_and_rotated(tmp_path: Path, geotransform: tuple[float, ...]) -> None:
    values = random_values((21, 34, 2))
    path = write_tif(tmp_path / "in.tif", values, geotransform)
    predict_raster(identity, {"xs": path}, tmp_path / "out.tif", tile=16, margin=3)
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), values)
    assert gdal.Open(str(tmp_path / "out.tif")).GetGeoTransform() == geotransform
    assert gdal.Open(str(tmp_path / "out.tif")).GetRasterBand(1).GetNoDataValue() is None


def test_float_nan_is_nodata(tmp_path: Path) -> None:
    values = random_values((9, 9, 1), "float32")
    values[2:4, 3:8] = np.nan
    path = write_tif(tmp_path / "in.tif", values, nodata=np.nan)
    predict_raster(
        lambda arrays: np.nan_to_num(identity(arrays)) + 1, path, tmp_path / "out.tif", tile=4, margin=1
    )  # fmt: skip
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), values + 1)
    assert np.isnan(gdal.Open(str(tmp_path / "out.tif")).GetRasterBand(1).GetNoDataValue())


# -------------------------------------------------------------------------------------------------- margins and windows


@pytest.mark.parametrize("tile", [5, 16, (7, 30), 100])
@pytest.mark.parametrize("margin", [2, 5])
def test_tiles_do_not_show(tmp_path: Path, tile: Any, margin: int) -> None:
    """With a margin as wide as the receptive field the map is that of the whole raster, mirrored at its edges."""
    values = random_values((37, 53, 2), "float64")
    path = write_tif(tmp_path / "in.tif", values)
    predict_raster(padded_box_mean(2), path, tmp_path / "out.tif", tile=tile, margin=margin)
    expected = box_mean(np.pad(values, ((2, 2), (2, 2), (0, 0)), mode="reflect"), 2)
    np.testing.assert_allclose(read_tif(tmp_path / "out.tif"), expected, rtol=1e-12)


def test_without_a_margin_they_show(tmp_path: Path) -> None:
    """The other tests can fail: a margin narrower than the receptive field gives another map."""
    values = random_values((37, 53, 2), "float64")
    path = write_tif(tmp_path / "in.tif", values)
    predict_raster(padded_box_mean(2), path, tmp_path / "out.tif", tile=16, margin=1)
    expected = box_mean(np.pad(values, ((2, 2), (2, 2), (0, 0)), mode="reflect"), 2)
    assert np.abs(read_tif(tmp_path / "out.tif") - expected)[10:20, 10:20].max() > 1


def test_the_model_always_sees_one_size_and_each_tile_once(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((50, 70, 3), "uint8"))
    shapes = []

    def model(arrays: dict[str, Array]) -> Array:
        shapes.append(arrays["xs"].shape)
        return arrays["xs"]

    predict_raster(model, {"xs": path}, tmp_path / "out.tif", tile=(20, 30), margin=(4, 2), batch_size=4)
    assert shapes == [(4, 28, 34, 3), (4, 28, 34, 3), (1, 28, 34, 3)]  # 3 x 3 tiles


def pooled(arrays: dict[str, Array], stride: int = 8, *, drop_rest: bool = False) -> Array:
    """Each block of stride x stride replaced by its mean plus the pixel: what poolings and upsamplings see."""
    (value,) = arrays.values()
    n, rows, cols, bands = value.shape
    if rows % stride or cols % stride:
        if not drop_rest:
            raise ValueError("Concatenate needs matching shapes")
        rows, cols = rows // stride * stride, cols // stride * stride
        value = value[:, :rows, :cols]
    blocks = value.reshape(n, rows // stride, stride, cols // stride, stride, bands).astype(float)
    return (value + 0 * blocks.mean(axis=(2, 4)).repeat(stride, 1).repeat(stride, 2)).astype(value.dtype)


@pytest.mark.parametrize("drop_rest", [False, True])
@pytest.mark.parametrize(("tile", "margin"), [(10, 3), (16, 4), (7, 0), ((9, 24), (2, 4))])
def test_windows_grow_to_what_the_model_takes(tmp_path: Path, tile: Any, margin: Any, drop_rest: bool) -> None:
    """Also for a model that silently drops the rest at the right and bottom: it must not shift the map."""
    values = random_values((33, 45, 1))
    path = write_tif(tmp_path / "in.tif", values)
    predict_raster(
        lambda arrays: pooled(arrays, drop_rest=drop_rest), path, tmp_path / "out.tif", tile=tile, margin=margin
    )
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), values)


@pytest.mark.parametrize("margin", [3, 5])
def test_a_model_without_padding_gives_less_back(tmp_path: Path, margin: int) -> None:
    values = random_values((30, 31, 2), "float64")
    path = write_tif(tmp_path / "in.tif", values)
    predict_raster(lambda a: box_mean(identity(a), 3), path, tmp_path / "out.tif", tile=12, margin=margin)
    expected = box_mean(np.pad(values, ((3, 3), (3, 3), (0, 0)), mode="reflect"), 3)
    np.testing.assert_allclose(read_tif(tmp_path / "out.tif"), expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------------------ several sources


@settings(max_examples=15, deadline=None)
@given(
    shift=st.tuples(st.integers(-2, 2), st.integers(-2, 2)), size=st.tuples(st.integers(20, 40), st.integers(20, 40)),
    margin=st.integers(0, 5), ratio=st.integers(1, 3), coarse_first=st.booleans(),
)  # fmt: skip
def test_two_resolutions(
    tmp_path_factory: pytest.TempPathFactory, shift: tuple[int, int], size: tuple[int, int], margin: int, ratio: int,
    coarse_first: bool,
) -> None:  # fmt: skip
    """Every pixel gets the coarse pixel that covers it, wherever the coarse raster starts on the fine one's lattice."""
    folder = tmp_path_factory.mktemp("resolutions")
    fine = random_values((*size, 1), "uint16", seed=1)
    rows, cols = (-(-(n + 4) // ratio) for n in size)
    coarse = random_values((rows, cols, 2), "uint16", seed=2)
    x, y = UTM[0] + 10 * (shift[1] - 2), UTM[3] - 10 * (shift[0] - 2)  # starts up to 4 pixels before
    paths = {
        "fine": write_tif(folder / "fine.tif", fine),
        "coarse": write_tif(folder / "coarse.tif", coarse, (x, 10.0 * ratio, 0.0, y, 0.0, -10.0 * ratio)),
    }

    def on_fine(arrays: dict[str, Array]) -> Array:
        up = arrays["coarse"].repeat(ratio, axis=1).repeat(ratio, axis=2)
        return np.concatenate([arrays["fine"], up], axis=-1)

    def on_coarse(arrays: dict[str, Array]) -> Array:
        n, r, c, _ = arrays["coarse"].shape
        assert arrays["fine"].shape == (n, r * ratio, c * ratio, 1)
        return arrays["coarse"] + 1000 * arrays["fine"][:, ::ratio, ::ratio]

    keys = ["coarse", "fine"] if coarse_first else ["fine", "coarse"]
    model = on_coarse if coarse_first else on_fine
    predict_raster(model, {key: paths[key] for key in keys}, folder / "out.tif", tile=6, margin=margin)
    result = read_tif(folder / "out.tif")
    if not coarse_first:
        row, col = np.indices(size)
        expected = coarse[(row - shift[0] + 2) // ratio, (col - shift[1] + 2) // ratio]
        np.testing.assert_array_equal(result, np.concatenate([fine, expected], axis=-1))
        return
    for r, c in np.ndindex(rows, cols):
        top, left = r * ratio + shift[0] - 2, c * ratio + shift[1] - 2
        if 0 <= top < size[0] and 0 <= left < size[1]:  # elsewhere the fine raster has nothing: 0
            assert result[r, c].tolist() == (coarse[r, c] + 1000 * fine[top, left]).tolist()
        else:
            assert result[r, c].tolist() == coarse[r, c].tolist()


def test_a_source_that_covers_a_part_is_nodata_elsewhere(tmp_path: Path) -> None:
    big, small = random_values((20, 24, 1)), random_values((6, 7, 1), seed=3)
    paths = {
        "big": write_tif(tmp_path / "big.tif", big, nodata=9999),
        "small": write_tif(tmp_path / "small.tif", small, (UTM[0] + 50, 10, 0, UTM[3] - 40, 0, -10), nodata=777),
    }
    predict_raster(lambda a: a["small"], paths, tmp_path / "out.tif", tile=8, margin=2)
    expected = np.full_like(big, 777)
    expected[4:10, 5:12] = small
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), expected)


def test_sentinel_2_at_10_20_and_60_m(shared_data: Path, tmp_path: Path) -> None:
    """Real bands: the 20 m and 60 m values come out under the 10 m pixels that lie in them."""
    folder = shared_data / "s2_virginia_10_20_60m"
    stacks = {f"{size}m": next(iter(folder.glob(f"*{size}m*.tif"))) for size in (10, 20, 60)}

    def model(arrays: dict[str, Array]) -> Array:
        return np.concatenate(
            [arrays[k].repeat(n, axis=1).repeat(n, axis=2)[..., :1] for k, n in (("10m", 1), ("20m", 2), ("60m", 6))],
            axis=-1,
        )

    predict_raster(model, stacks, tmp_path / "out.tif", tile=120, margin=10)
    result, size = read_tif(tmp_path / "out.tif"), read_tif(stacks["10m"]).shape[:2]
    assert result.shape == (*size, 3)
    for band, (key, ratio) in enumerate({"10m": 1, "20m": 2, "60m": 6}.items()):
        coarse = read_tif(stacks[key])[..., 0].repeat(ratio, 0).repeat(ratio, 1)
        rows, cols = (min(n) for n in zip(coarse.shape, size, strict=True))
        np.testing.assert_array_equal(result[:rows, :cols, band], coarse[:rows, :cols])


# --------------------------------------------------------------------------------------------------------------- nodata


def test_nodata_where_no_source_has_data(tmp_path: Path) -> None:
    a, b = random_values((20, 20, 2)), random_values((10, 10, 1), seed=1)
    a[:8] = 0
    b[:, :6] = 0
    paths = {
        "a": write_tif(tmp_path / "a.tif", a, nodata=0),
        "b": write_tif(tmp_path / "b.tif", b, (UTM[0], 20, 0, UTM[3], 0, -20), nodata=0),
    }
    calls = []

    def model(arrays: dict[str, Array]) -> Array:
        calls.append(len(arrays["a"]))
        return np.full((*arrays["a"].shape[:3], 1), 7, np.int64)

    predict_raster(model, paths, tmp_path / "out.tif", tile=4, margin=2, nodata=-1, batch_size=1, dtype="int16")
    expected = np.full((20, 20, 1), 7)
    expected[:8, :12] = -1
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), expected)
    result = gdal.Open(str(tmp_path / "out.tif"))
    assert result.GetRasterBand(1).GetNoDataValue() == -1
    assert result.GetRasterBand(1).DataType == gdal.GDT_Int16
    assert len(calls) == 25 - 2 * 3 + 1  # empty tiles are not predicted, but the first, which tells the type


def test_a_value_that_reads_as_nodata_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((10, 10, 1)), nodata=0)
    with caplog.at_level(logging.WARNING, "otbtf_lite"):
        predict_raster(lambda a: identity(a) * 0, path, tmp_path / "out.tif", tile=8, margin=0)
    assert "100 pixels" in caplog.text
    assert "nodata=" in caplog.text


def test_a_nodata_value_that_does_not_fit(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((10, 10, 1), "float32"), nodata=-9999)
    with pytest.raises(InputError, match=r"-9999.*uint8.*nodata="):
        predict_raster(identity, path, tmp_path / "out.tif", tile=8, margin=0, dtype="uint8")
    assert [p.name for p in tmp_path.iterdir()] == ["in.tif"]


# ----------------------------------------------------------------------------------------------- outputs and their form


def two_outputs(arrays: dict[str, Array]) -> dict[str, Array]:
    (value,) = arrays.values()
    return {"classes": (value[..., 0] > 100), "twice": value * 2.0}


def test_outputs_are_chosen_by_name(tmp_path: Path) -> None:
    values = random_values((12, 13, 2))
    path = write_tif(tmp_path / "in.tif", values)
    predict_raster(two_outputs, path, tmp_path / "out.tif", tile=8, margin=0, outputs="classes")
    result = read_tif(tmp_path / "out.tif")
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result[..., 0], values[..., 0] > 100)
    predict_raster(two_outputs, path, tmp_path / "out.tif", tile=8, margin=0, outputs=["twice", "classes"])
    expected = np.concatenate([values * 2.0, values[..., :1] > 100], axis=-1)
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), expected)


def test_outputs_must_be_known(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((12, 13, 2)))
    with pytest.raises(InputError, match=r"'classes', 'twice'.*outputs="):
        predict_raster(two_outputs, path, tmp_path / "out.tif", tile=8, margin=0)
    with pytest.raises(InputError, match="did you mean 'twice'"):
        predict_raster(two_outputs, path, tmp_path / "out.tif", tile=8, margin=0, outputs="twise")
    assert [p.name for p in tmp_path.iterdir()] == ["in.tif"]


def test_integers_are_rounded_and_clipped(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", np.array([[[-3.2], [1.6], [2.4], [300.0]]]))
    predict_raster(identity, path, tmp_path / "out.tif", tile=4, margin=0, dtype=np.uint8)
    assert read_tif(tmp_path / "out.tif").ravel().tolist() == [0, 2, 2, 255]
    path = write_tif(tmp_path / "int.tif", np.array([[[-3], [1], [2], [300]]], np.int16))
    predict_raster(identity, path, tmp_path / "out.tif", tile=4, margin=0, dtype=np.uint8)
    assert read_tif(tmp_path / "out.tif").ravel().tolist() == [0, 1, 2, 255]


def test_colours_and_names(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((5, 5, 1), "uint8") % 2)
    predict_raster(
        identity, path, tmp_path / "out.tif", tile=8, margin=0, colors={0: (1, 2, 3), 1: (9, 8, 7)},
        categories={0: "low", 1: "high"}, descriptions=["zone"],
    )  # fmt: skip
    data = gdal.Open(str(tmp_path / "out.tif"))
    band = data.GetRasterBand(1)
    assert [tuple(band.GetColorTable().GetColorEntry(i))[:3] for i in (0, 1)] == [(1, 2, 3), (9, 8, 7)]
    assert [band.GetMetadataItem(f"CATEGORY_{value}") for value in (0, 1)] == ["low", "high"]
    assert band.GetDescription() == "zone"


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blend": "linaer"}, r"blend must be one of \['crop'"),
        ({"tile": 0}, "tile must be"),
        ({"margin": -1}, "margin must be"),
        ({"batch_size": 0}, "batch_size"),
        ({"model": 3}, "model must be"),
        ({"sources": {}}, "no raster"),
        ({"model": lambda a: identity(a)[:, :-1]}, "windows' size"),
        ({"model": lambda a: identity(a)[:, 0, 0]}, "one size|batch, rows"),
        ({"model": lambda a: identity(a)[:1]}, "windows' size"),
        ({"model": lambda a: a["nir"]}, "model fails on windows of .*'image': .*KeyError"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((12, 13, 2)))
    call = {"model": identity, "sources": path, "tile": 8, "margin": 0, **arguments}
    with pytest.raises(InputError, match=message):
        predict_raster(call.pop("model"), call.pop("sources"), tmp_path / "out.tif", **call)
    assert [p.name for p in tmp_path.iterdir()] == ["in.tif"]


def test_the_output_is_no_source(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((12, 13, 2)))
    with pytest.raises(InputError, match="source 'image' reads"):
        predict_raster(identity, path, path, tile=8, margin=0)


def test_a_tile_cuts_no_coarse_pixel(tmp_path: Path) -> None:
    fine = write_tif(tmp_path / "fine.tif", random_values((12, 12, 1)))
    coarse = write_tif(tmp_path / "coarse.tif", random_values((4, 4, 1)), (UTM[0], 30, 0, UTM[3], 0, -30))
    with pytest.raises(InputError, match=r"multiple of 3, such as 9"):
        predict_raster(lambda a: a["f"], {"f": fine, "c": coarse}, tmp_path / "out.tif", tile=8, margin=0)


def test_grids_that_do_not_meet(tmp_path: Path) -> None:
    a = write_tif(tmp_path / "a.tif", random_values((12, 12, 1)))
    b = write_tif(tmp_path / "b.tif", random_values((12, 12, 1)), (UTM[0] + 3, 10, 0, UTM[3], 0, -10))
    with pytest.raises(InputError, match="resampling"):
        predict_raster(lambda x: x["a"], {"a": a, "b": b}, tmp_path / "out.tif", tile=8, margin=0)
    sources = {"a": RasterSource(a, 8), "b": RasterSource(b, 8, resampling="nearest")}
    predict_raster(lambda x: x["a"] + 0 * x["b"], sources, tmp_path / "out.tif", tile=8, margin=0)
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), read_tif(Path(a)))


def test_a_raster_that_cannot_be_read_is_no_fault_of_the_model(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((200, 200, 3), "float64"))
    Path(path).write_bytes(Path(path).read_bytes()[: 200 * 200 * 3])
    with pytest.raises(DataError, match=r"in\.tif"):
        predict_raster(identity, path, tmp_path / "out.tif", tile=50, margin=0)
    assert [p.name for p in tmp_path.iterdir()] == ["in.tif"]


def test_a_model_that_fails_halfway_leaves_the_old_map(tmp_path: Path) -> None:
    path = write_tif(tmp_path / "in.tif", random_values((40, 40, 1)))
    out = tmp_path / "out.tif"
    predict_raster(identity, path, out, tile=8, margin=0)
    before, calls = out.read_bytes(), []

    def model(arrays: dict[str, Array]) -> Array:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of memory")
        return identity(arrays)

    with pytest.raises(RuntimeError, match="out of memory"):
        predict_raster(model, path, out, tile=8, margin=0)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.tif", "out.tif"]


# --------------------------------------------------------------------------------------------------------- Keras models


@pytest.fixture(scope="module")
def keras() -> Any:
    return pytest.importorskip("keras")


@pytest.fixture
def scene(tmp_path: Path) -> tuple[dict[str, str], Array, Array]:
    xs, dem = random_values((20, 30, 3), "uint8"), random_values((20, 30, 1), "int16", seed=5)
    return {"xs": write_tif(tmp_path / "xs.tif", xs), "dem": write_tif(tmp_path / "dem.tif", dem)}, xs, dem


def weighted_sum(keras: Any, *, as_dict: bool = True) -> Any:
    """A model of two inputs with the outputs ``first`` and ``sum``: known values, an order that sorting would break."""
    inputs = {"xs": keras.Input((None, None, 3), name="xs"), "dem": keras.Input((None, None, 1), name="dem")}
    total = keras.layers.Conv2D(1, 1, kernel_initializer="ones", name="total")(inputs["xs"])
    outputs = {"sum": keras.layers.Add()([total, inputs["dem"]]), "first": inputs["xs"][..., :1]}
    return keras.Model(inputs if as_dict else list(inputs.values()), outputs)


@pytest.mark.parametrize("form", ["model", "list", "held", "keras", "exported", "loaded"])
def test_keras_models_in_every_form(
    tmp_path: Path, keras: Any, scene: tuple[dict[str, str], Array, Array], form: str
) -> None:
    """``also`` sorts before all inputs: were it handed over, Keras would take it for one of them."""
    paths, xs, dem = scene
    network = weighted_sum(keras, as_dict=form != "list")
    model: Any = network
    if form == "held":

        class Holder:
            model = network

        model = Holder()
    elif form == "keras":
        model = tmp_path / "model.keras"
        network.save(model)
    elif form in ("exported", "loaded"):
        model = tmp_path / "saved"
        network.export(model, verbose=False)
        if form == "loaded":
            model = pytest.importorskip("tensorflow").saved_model.load(str(model))
    sources = {"xs": paths["xs"], "dem": paths["dem"], "also": paths["dem"]}
    predict_raster(model, sources, tmp_path / "out.tif", tile=16, margin=2, outputs="sum")
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), xs.sum(-1, keepdims=True, dtype=np.float32) + dem)


def test_one_source_goes_to_the_only_input(
    tmp_path: Path, keras: Any, scene: tuple[dict[str, str], Array, Array]
) -> None:
    paths, xs, _ = scene
    tensor = keras.Input((None, None, 3))
    model = keras.Model(tensor, keras.layers.Rescaling(2.0)(tensor))
    predict_raster(model, paths["xs"], tmp_path / "out.tif", tile=16, margin=2)
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), xs * np.float32(2))
    predict_raster(model, {"any name": paths["xs"]}, tmp_path / "out2.tif", tile=16, margin=2)
    np.testing.assert_array_equal(read_tif(tmp_path / "out2.tif"), xs * np.float32(2))


def test_a_subclassed_model_gets_the_arrays_by_key(
    tmp_path: Path, keras: Any, scene: tuple[dict[str, str], Array, Array]
) -> None:
    paths, _, dem = scene

    class Model(keras.Model):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return {"dem": inputs["dem"] * 2}

    predict_raster(Model(), paths, tmp_path / "out.tif", tile=16, margin=2)
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), dem * 2)


def test_a_unet_of_stride_4_takes_any_tile(
    tmp_path: Path, keras: Any, scene: tuple[dict[str, str], Array, Array]
) -> None:
    """Poolings and skips: Keras refuses windows that 4 does not divide."""
    tensor = keras.Input((None, None, 3), name="xs")
    down = keras.layers.MaxPooling2D(4)(tensor)
    up = keras.layers.UpSampling2D(4)(down)
    model = keras.Model({"xs": tensor}, keras.layers.Concatenate()([tensor, 0 * up])[..., :3])
    predict_raster(model, {"xs": scene[0]["xs"]}, tmp_path / "out.tif", tile=11, margin=3)
    np.testing.assert_array_equal(read_tif(tmp_path / "out.tif"), scene[1])


def test_missing_inputs_and_models_are_named(
    tmp_path: Path, keras: Any, scene: tuple[dict[str, str], Array, Array]
) -> None:
    model = weighted_sum(keras)
    with pytest.raises(InputError, match=r"\['dem', 'xs'\].*\['xs', 'xss'\].*'dem'.*missing"):
        predict_raster(model, {"xs": scene[0]["xs"], "xss": scene[0]["xs"]}, tmp_path / "out.tif", tile=16, margin=0)
    with pytest.raises(DataError, match=r"nowhere.*saved_model\.pb"):
        predict_raster(tmp_path / "nowhere", scene[0], tmp_path / "out.tif", tile=16, margin=0)
    (tmp_path / "bad.keras").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"bad\.keras can't be loaded"):
        predict_raster(tmp_path / "bad.keras", scene[0], tmp_path / "out.tif", tile=16, margin=0)
    assert not (tmp_path / "out.tif").exists()
