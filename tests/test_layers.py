from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from otbtf_lite.errors import InputError
from otbtf_lite.layers import ApplyMask, Argmax, DilatedMask, Max, ScalarsTile

Array = np.ndarray[Any, np.dtype[Any]]

IMAGES = hnp.array_shapes(min_dims=4, max_dims=4, max_side=6)


@pytest.fixture(params=["float32", "mixed_float16"])
def policy(request: pytest.FixtureRequest) -> Any:
    """Each test runs under this policy of the whole process, which ends with it."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def dilated(mask: Array, radius: int) -> Array:
    """By the definition, pixel by pixel."""
    result = np.zeros_like(mask, np.uint8)
    for index in np.ndindex(mask.shape):
        batch, row, col, band = index
        rows = slice(max(row - radius, 0), row + radius + 1)
        cols = slice(max(col - radius, 0), col + radius + 1)
        result[index] = mask[batch, rows, cols, band].any()
    return result


@given(images=hnp.arrays(np.int16, IMAGES, elements=st.integers(0, 9)), radius=st.integers(0, 4))
def test_dilated_mask_grows_by_a_square(images: Array, radius: int) -> None:
    result = DilatedMask(nodata_value=0, radius=radius)(images)
    assert result.dtype == tf.uint8
    np.testing.assert_array_equal(result, dilated(images == 0, radius))


@pytest.mark.parametrize(
    ("dtype", "nodata"),
    [
        ("uint8", 255), ("uint16", 65535), ("int16", -9999), ("int32", -(2**31)), ("float32", -9999.0),
        ("float32", 65535), ("float32", -3.4028234663852886e38), ("float32", float("nan")), ("float64", 0.1),
    ],
)  # fmt: skip
def test_dilated_mask_of_any_dtype_and_policy(dtype: str, nodata: float, policy: str) -> None:
    image = np.ones((1, 5, 5, 1), dtype)
    image[0, 1, 2, 0] = nodata
    expected = np.zeros((1, 5, 5, 1), np.uint8)
    expected[0, 0:3, 1:4, 0] = 1
    np.testing.assert_array_equal(DilatedMask(nodata, 1)(tf.constant(image)), expected)


@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint8", -9999), ("uint8", 0.5), ("uint8", float("nan")), ("int8", 128)]
)
def test_nodata_that_the_image_can_not_hold_masks_nothing(dtype: str, nodata: float) -> None:
    image = np.arange(-128, 128).astype(dtype).reshape(1, 16, 16, 1)
    assert not np.any(DilatedMask(nodata, 1)(image))


@pytest.mark.parametrize("radius", [-1, 0.5, True])
def test_dilated_mask_refuses_radius(radius: float) -> None:
    with pytest.raises(InputError, match="radius must be a whole number of pixels"):
        DilatedMask(0, radius)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask_dtype", ["bool", "uint8", "int32", "float32"])
@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint8", 255), ("int16", -9999.0), ("float32", 1e9), ("float32", 65535), ("float64", 0.1)]
)
def test_apply_mask_keeps_the_dtype(dtype: str, nodata: float, mask_dtype: str, policy: str) -> None:
    image = np.arange(24, dtype=dtype).reshape(1, 3, 4, 2) + np.array(100, dtype)
    mask = np.random.default_rng(3).integers(0, 2, (1, 3, 4, 1)).astype(mask_dtype)
    result = ApplyMask(out_nodata=nodata)((tf.constant(mask), tf.constant(image)))
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(result, np.where(mask == 1, np.array(nodata, dtype), image))


def test_apply_mask_covers_ones_alone() -> None:
    mask = np.array([0, 1, 2, 255], np.uint8).reshape(1, 2, 2, 1)
    result = ApplyMask(-1)((mask, np.zeros((1, 2, 2, 1), np.float32)))
    np.testing.assert_array_equal(np.ravel(result), [0, -1, 0, 0])


@pytest.mark.parametrize("nodata", [-9999, 0.5, 300])
def test_apply_mask_refuses_what_the_image_can_not_hold(nodata: float) -> None:
    mask, image = keras.Input((None, None, 1), dtype="uint8"), keras.Input((None, None, 2), dtype="uint8")
    with pytest.raises(InputError, match=f"'mine' gets an image of uint8, which can't hold out_nodata={nodata}"):
        ApplyMask(nodata, name="mine")((mask, image))


def test_apply_mask_refuses_a_mask_of_another_size() -> None:
    mask, image = keras.Input((4, 4, 3), dtype="uint8"), keras.Input((4, 4, 2))
    with pytest.raises(InputError, match="does not fit the image"):
        ApplyMask(0)((mask, image))


def test_scalars_tile_repeats_scalars() -> None:
    image = np.zeros((2, 3, 4, 5), np.uint8)
    scalars = np.array([[1.5, 2.5], [3.5, 4.5]], np.float32)
    expected = np.broadcast_to(scalars[:, None, None, :], (2, 3, 4, 2))
    tile = ScalarsTile(name="tiled")
    for given_scalars in (scalars, [scalars[:, 0], scalars[:, 1]], [scalars[:, :1], scalars[:, 1]]):
        np.testing.assert_array_equal(tile([image, given_scalars]), expected)
    np.testing.assert_array_equal(tile([image, scalars[:, 0]]), expected[..., :1])


@given(images=hnp.arrays(np.float32, IMAGES, elements=st.integers(-3, 3)))
def test_argmax_and_max_over_the_bands(images: Array) -> None:
    classes = Argmax()(images)
    assert classes.dtype == tf.int32
    np.testing.assert_array_equal(classes, images.argmax(axis=-1)[..., None])
    np.testing.assert_array_equal(Argmax(expand_last_dim=False)(images), images.argmax(axis=-1))
    np.testing.assert_array_equal(Max()(images), images.max(axis=-1, keepdims=True))


LAYERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    "dilated mask": (lambda: DilatedMask(0, 1, name="a"), lambda layer, x: layer(x["image"])),
    "apply mask": (lambda: ApplyMask(-1.0, name="a"), lambda layer, x: layer([x["image"], x["image"]])),
    "scalars tile": (lambda: ScalarsTile(name="a"), lambda layer, x: layer([x["image"], x["scalars"]])),
    "argmax": (lambda: Argmax("a", False), lambda layer, x: layer(x["image"])),  # noqa: FBT003  # OTBTF's positions
    "max": (lambda: Max("a"), lambda layer, x: layer(x["image"])),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_are_saved_and_infer_shapes(case: str, tmp_path: Path, policy: str) -> None:
    make, call = LAYERS[case]
    inputs = {"image": keras.Input((None, None, 3), name="image"), "scalars": keras.Input((2,), name="scalars")}
    symbol = call(make(), inputs)
    model = keras.Model(inputs, {"out": symbol})
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("a").get_config() == make().get_config()
    rng = np.random.default_rng(5)
    arrays = {
        "image": tf.constant(rng.integers(0, 2, (2, 6, 7, 3)), tf.float32),
        "scalars": tf.constant(rng.random((2, 2)), tf.float32),
    }
    expected = call(make(), arrays)
    result = loaded(arrays)["out"]
    np.testing.assert_array_equal(result, expected)
    assert symbol.dtype == result.dtype.name
    assert symbol.shape == (None, *(None if n in (6, 7) else n for n in result.shape[1:]))
    compiled = tf.function(model, jit_compile=True)(arrays)["out"]
    np.testing.assert_array_equal(compiled, expected)


def test_layers_are_registered_under_the_package() -> None:
    for layer in (DilatedMask, ApplyMask, ScalarsTile, Argmax, Max):
        assert keras.saving.get_registered_name(layer) == f"otbtf_lite>{layer.__name__}"
