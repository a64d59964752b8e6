"""A script as OTBTF's users write them, from patches images to a SavedModel; only its first import names otbtf_lite."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

tf = pytest.importorskip("tensorflow")
gdal = pytest.importorskip("osgeo.gdal")
gdal.UseExceptions()

import keras  # noqa: E402  # it comes with TensorFlow

import otbtf_lite as otbtf  # noqa: E402
from otbtf_lite.model import ModelBase, cropped_tensor_name  # noqa: E402

Array = npt.NDArray[Any]

N_CLASSES = 2
INPUT_NAME = "input_xs"
TARGET_NAME = "predictions"
OUTPUT_SOFTMAX_NAME = "predictions_softmax_tensor"
LABELS_NAME = "labels_layer"
CROPS = (16, 32, 64, 96, 128)


# ---------------------------------------------------------------------------------------------------------- the script


def dataset_preprocessing_fn(examples: dict[str, Any]) -> dict[str, Any]:
    labels = tf.squeeze(tf.cast(examples["labels_patches"], tf.int32), axis=-1)
    return {INPUT_NAME: examples["input_xs_patches"], TARGET_NAME: tf.one_hot(labels, depth=N_CLASSES)}


class FCNNModel(ModelBase):
    """Raw TensorFlow ops and Keras layers, mixed."""

    def normalize_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {INPUT_NAME: tf.cast(inputs[INPUT_NAME], tf.float32) * 1e-4}

    def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
        def conv(inp: Any, depth: int, name: str) -> Any:
            layer = tf.keras.layers.Conv2D(depth, 3, strides=2, activation="relu", padding="same", name=name)
            return layer(inp)

        def tconv(inp: Any, depth: int, name: str, activation: str | None = "relu") -> Any:
            layer = tf.keras.layers.Conv2DTranspose(
                depth, 3, strides=2, activation=activation, padding="same", name=name
            )
            return layer(inp)

        out_conv1 = conv(normalized_inputs[INPUT_NAME], 8, "conv1")
        out_conv2 = conv(out_conv1, 16, "conv2")
        out_tconv1 = tconv(out_conv2, 8, "tconv1") + out_conv1
        out_tconv2 = tconv(tf.concat([out_tconv1, out_conv1], axis=-1), N_CLASSES, "classifier", None)
        predictions = tf.keras.layers.Softmax(name=OUTPUT_SOFTMAX_NAME)(out_tconv2)
        labels = otbtf.layers.Argmax(name=LABELS_NAME)(predictions)
        return {TARGET_NAME: predictions, "estimated_labels": labels}


def train(params: argparse.Namespace, ds_train: Any, ds_valid: Any, ds_test: Any) -> tuple[FCNNModel, list[float]]:
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = FCNNModel(dataset_element_spec=ds_train.element_spec)
        model.compile(
            loss={TARGET_NAME: tf.keras.losses.CategoricalCrossentropy()},
            optimizer=tf.keras.optimizers.Adam(learning_rate=params.learning_rate),
            metrics={TARGET_NAME: [tf.keras.metrics.Precision(class_id=1), tf.keras.metrics.Recall(class_id=1)]},
        )
        model.summary()
        model.fit(ds_train, epochs=params.nb_epochs, validation_data=ds_valid, verbose=0)
        values = model.evaluate(ds_test, batch_size=params.batch_size, verbose=0)
        model.save(params.model_dir)
    return model, values


def from_patches_images(files: dict[str, list[str]], batch_size: int) -> Any:
    dataset = otbtf.DatasetFromPatchesImages(filenames_dict=files)
    return dataset.get_tf_dataset(
        batch_size=batch_size, preprocessing_fn=dataset_preprocessing_fn, targets_keys=[TARGET_NAME]
    )


def create_tfrecords(files: dict[str, list[str]], outdir: str) -> None:
    otbtf.DatasetFromPatchesImages(filenames_dict=files).to_tfrecords(output_dir=outdir, drop_remainder=False)


def from_tfrecords(folder: str, batch_size: int, **kwargs: Any) -> Any:
    return otbtf.TFRecords(folder).read(
        batch_size=batch_size, target_keys=[TARGET_NAME], preprocessing_fn=dataset_preprocessing_fn, **kwargs
    )


# ------------------------------------------------------------------------------------------------------------ the data


def scene(rows: int, cols: int, seed: int) -> tuple[Array, Array]:
    """12-bit values in coarse fields of light and dark, and labels that say which is which."""
    rng = np.random.default_rng(seed)
    fields = rng.integers(0, 2, (rows // 8, cols // 8)).repeat(8, 0).repeat(8, 1)
    image = 1500 + 6000 * fields[..., None] + rng.integers(0, 1000, (rows, cols, 4))
    return image.astype(np.uint16), fields[..., None].astype(np.uint8)


def write(path: Path, image: Array) -> str:
    rows, cols, bands = image.shape
    kind = {"uint16": gdal.GDT_UInt16, "uint8": gdal.GDT_Byte}[image.dtype.name]
    data = gdal.GetDriverByName("GTiff").Create(str(path), cols, rows, bands, kind)
    for band in range(bands):
        data.GetRasterBand(band + 1).WriteArray(image[..., band])
    data = None
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """Two patches images a source for training, one for validation, one for testing; patches of 32 x 32."""
    folder = tmp_path_factory.mktemp("patches")
    found: dict[str, dict[str, list[str]]] = {}
    for name, counts in {"train": [30, 18], "valid": [16], "test": [17]}.items():
        found[name] = {"input_xs_patches": [], "labels_patches": []}
        for number, count in enumerate(counts):
            images = scene(32 * count, 32, seed=len(name) + number)
            for key, image in zip(found[name], images, strict=True):
                found[name][key].append(write(folder / f"{name}_{key}_{number}.tif", image))
    return found


@pytest.fixture
def params(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(batch_size=8, learning_rate=0.02, nb_epochs=6, model_dir=str(tmp_path / "model"))


def check(model: FCNNModel, values: list[float], params: argparse.Namespace) -> None:
    """It has learnt, and the SavedModel serves all that OTBTF's does, on an image of another size."""
    assert len(values) == 3  # loss, precision, recall
    assert values[1] > 0.9
    assert values[2] > 0.9
    assert set(model.output) == {TARGET_NAME, "estimated_labels"}

    served = tf.saved_model.load(params.model_dir).signatures["serving_default"]
    assert set(served.structured_input_signature[1]) == {INPUT_NAME}
    names = [OUTPUT_SOFTMAX_NAME, LABELS_NAME]
    assert set(served.structured_outputs) == {
        *names, *(cropped_tensor_name(name, crop) for name in names for crop in CROPS)
    }  # fmt: skip

    image, labels = scene(160, 192, seed=99)
    outputs = {key: each.numpy() for key, each in served(**{INPUT_NAME: tf.constant(image[None], tf.float32)}).items()}
    whole = model.predict({INPUT_NAME: image[None].astype(np.float32)}, verbose=0)
    np.testing.assert_allclose(outputs[OUTPUT_SOFTMAX_NAME], whole[TARGET_NAME], atol=1e-5)
    assert outputs[OUTPUT_SOFTMAX_NAME].shape == (1, 160, 192, N_CLASSES)
    assert (outputs[LABELS_NAME][0] == labels).mean() > 0.9
    for name in names:
        for crop in (16, 32, 64):
            cropped = outputs[cropped_tensor_name(name, crop)]
            assert cropped.shape[1:3] == (160 - 2 * crop, 192 - 2 * crop)
            np.testing.assert_array_equal(cropped, outputs[name][:, crop:-crop, crop:-crop])


# ----------------------------------------------------------------------------------------------------------- the tests


def test_from_patches_images(files: Any, params: argparse.Namespace) -> None:
    keras.utils.set_random_seed(1)
    datasets = [from_patches_images(files[name], params.batch_size) for name in ("train", "valid", "test")]
    assert [int(each.cardinality()) for each in datasets] == [6, 2, 2]
    inputs, targets = next(iter(datasets[0]))
    assert (inputs[INPUT_NAME].shape, inputs[INPUT_NAME].dtype) == ((8, 32, 32, 4), tf.uint16)
    assert (targets[TARGET_NAME].shape, targets[TARGET_NAME].dtype) == ((8, 32, 32, N_CLASSES), tf.float32)
    model, values = train(params, *datasets)
    check(model, values, params)


def test_from_tfrecords(files: Any, params: argparse.Namespace, tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    for name in ("train", "valid", "test"):
        create_tfrecords(files[name], str(tmp_path / name))
    size = params.batch_size
    ds_train = from_tfrecords(str(tmp_path / "train"), size, shuffle_buffer_size=1000)
    ds_valid, ds_test = (from_tfrecords(str(tmp_path / name), size) for name in ("valid", "test"))
    model, values = train(params, ds_train, ds_valid, ds_test)
    check(model, values, params)


def one_hot_of_keras(examples: dict[str, Any]) -> dict[str, Any]:
    labels = keras.ops.squeeze(keras.ops.cast(examples["labels_patches"], tf.int32), axis=-1)
    return {INPUT_NAME: examples["input_xs_patches"], TARGET_NAME: keras.ops.one_hot(labels, N_CLASSES)}


def one_hot_of_otbtf(examples: dict[str, Any]) -> dict[str, Any]:
    target = otbtf.ops.one_hot(labels=examples["labels_patches"], nb_classes=N_CLASSES)
    return {INPUT_NAME: examples["input_xs_patches"], TARGET_NAME: target}


@pytest.mark.parametrize("preprocessing_fn", [one_hot_of_keras, one_hot_of_otbtf])
def test_the_other_ways_of_one_hot_encoding_give_the_same(files: Any, preprocessing_fn: Callable[..., Any]) -> None:
    batches = []
    for function in (dataset_preprocessing_fn, preprocessing_fn):
        with otbtf.DatasetFromPatchesImages(files["test"], seed=3) as dataset:
            batches.append(
                list(
                    dataset.get_tf_dataset(8, preprocessing_fn=function, targets_keys=[TARGET_NAME]).as_numpy_iterator()
                )
            )
    assert len(batches[0]) == len(batches[1]) == 2
    for (inputs, targets), (same_inputs, same_targets) in zip(*batches, strict=True):
        np.testing.assert_array_equal(inputs[INPUT_NAME], same_inputs[INPUT_NAME])
        np.testing.assert_array_equal(targets[TARGET_NAME], same_targets[TARGET_NAME])


def test_one_loss_and_a_list_of_metrics_for_a_single_output(files: Any) -> None:
    """As in the tutorial of OTBTF 4, where no dicts are given to compile."""

    class SingleOutput(FCNNModel):
        def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
            return {TARGET_NAME: super().get_outputs(normalized_inputs)[TARGET_NAME]}

    ds_valid = from_patches_images(files["valid"], 8)
    model = SingleOutput(ds_valid.element_spec)
    model.compile(
        loss=tf.keras.losses.CategoricalCrossentropy(),
        optimizer=tf.keras.optimizers.Adam(learning_rate=1e-4),
        metrics=[tf.keras.metrics.Precision(), tf.keras.metrics.Recall()],
    )
    history = model.fit(ds_valid, epochs=1, verbose=0)
    assert len(history.history) == 3
    assert len(model.evaluate(ds_valid, batch_size=64, verbose=0)) == 3


def test_scalars_in_a_model(files: Any, tmp_path: Path) -> None:
    """Scalars of each patches image, tiled over the patch."""

    class WithAngle(ModelBase):
        def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
            image = tf.cast(normalized_inputs["input_xs_patches"], tf.float32) * 1e-4
            angle = otbtf.layers.ScalarsTile(name="tile")([image, normalized_inputs["angle"]])
            x = tf.concat([image, angle], axis=-1)
            return {"labels_patches": tf.keras.layers.Conv2D(1, 1, activation="sigmoid", name="out")(x)}

    scalars = {"angle": [np.array([0.25], np.float32), np.array([0.5], np.float32)]}
    with otbtf.Dataset(otbtf.PatchesImagesReader(files["train"], scalar_dict=scalars), seed=0) as dataset:
        dataset.to_tfrecords(str(tmp_path / "records"), n_samples_per_shard=16)
        batches = dataset.get_tf_dataset(8, targets_keys=["labels_patches"])
        model = WithAngle(batches.element_spec, inference_cropping=[4])
        model.compile(loss={"labels_patches": "binary_crossentropy"}, optimizer="adam")
        model.fit(batches, epochs=1, verbose=0)
    model.fit(otbtf.TFRecords(str(tmp_path / "records")).read(8, ["labels_patches"]), epochs=1, verbose=0)
    model.save(str(tmp_path / "model"))
    served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    out = served(input_xs_patches=tf.zeros((1, 24, 20, 4)), angle=tf.constant([[0.25]]))
    assert {key: tuple(each.shape) for key, each in out.items()} == {"out": (1, 24, 20, 1), "out_crop4": (1, 16, 12, 1)}
