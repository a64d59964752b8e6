from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from otbtf_lite import layers, model, ops
from otbtf_lite.errors import InputError, MissingDependencyError
from otbtf_lite.model import ModelBase, cropped_tensor_name, is_chief
from otbtf_lite.network import Network

ROOT = Path(__file__).resolve().parents[1]

N_CLASSES = 2
INPUT_NAME = "input_xs"
TARGET_NAME = "predictions"
OUTPUT_SOFTMAX_NAME = "predictions_softmax_tensor"


class FCNNModel(ModelBase):
    """A fully convolutional network as OTBTF's examples write it, with more of TensorFlow itself in it."""

    def normalize_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {INPUT_NAME: tf.cast(inputs[INPUT_NAME], tf.float32) * 1e-4}

    def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
        norm_inp = normalized_inputs[INPUT_NAME]

        def _conv(inp: Any, depth: int, name: str) -> Any:
            return keras.layers.Conv2D(depth, 3, strides=2, activation="relu", padding="same", name=name)(inp)

        out_conv1 = _conv(norm_inp, 8, "conv1")
        out_conv2 = _conv(out_conv1 - tf.reduce_mean(out_conv1, axis=[1, 2], keepdims=True), 8, "conv2")
        upsampled = tf.image.resize(out_conv2, tf.shape(norm_inp)[1:3])
        features = tf.concat([upsampled, norm_inp], axis=-1)
        logits = keras.layers.Conv2D(N_CLASSES, 1, name="classifier")(features)
        return {TARGET_NAME: keras.layers.Softmax(name=OUTPUT_SOFTMAX_NAME)(logits)}


class WithClasses(FCNNModel):
    """Adds outputs of its own to the cropped ones."""

    def postprocess_outputs(
        self, outputs: dict[str, Any], inputs: Any = None, normalized_inputs: Any = None
    ) -> dict[str, Any]:
        extra = super().postprocess_outputs(outputs, inputs, normalized_inputs)
        classes = layers.Argmax(name="argmax_layer")(outputs[TARGET_NAME])
        nodata = layers.DilatedMask(nodata_value=0, radius=1)(inputs[INPUT_NAME][..., :1])
        extra["estimated_labels"] = layers.ApplyMask(out_nodata=255, name="masked_labels")([nodata, classes])
        extra["confidence"] = layers.Max(name="confidence_layer")(outputs[TARGET_NAME])
        return extra


class Linear(ModelBase):
    """One weight per band; small and quick."""

    def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
        return {"y": keras.layers.Conv2D(1, 1, name="linear")(normalized_inputs["x"])}


def images(n: int, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images whose first band tells the class, and the labels."""
    xs = np.random.default_rng(seed).integers(1, 10_000, (n, rows, cols, 3)).astype(np.uint16)
    return xs, (xs[..., :1] > 5000).astype(np.uint8)


def dataset(n: int = 16, size: int = 16, batch_size: int = 4) -> tf.data.Dataset:
    xs, labels = images(n, size, size)

    def dataset_preprocessing_fn(examples: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {INPUT_NAME: examples["input_xs_patches"]},
            {TARGET_NAME: ops.one_hot(examples["labels_patches"], nb_classes=N_CLASSES)},
        )

    examples = tf.data.Dataset.from_tensor_slices({"input_xs_patches": xs, "labels_patches": labels})
    return examples.map(dataset_preprocessing_fn).batch(batch_size, drop_remainder=True)


def spec(**shapes: Any) -> dict[str, tf.TensorSpec]:
    return {name: tf.TensorSpec(shape, tf.uint16) for name, shape in shapes.items()}


@pytest.fixture
def mixed_precision() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def test_a_script_in_otbtf_style(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keras.utils.set_random_seed(1)
    ds_train = dataset()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        fcnn = FCNNModel(dataset_element_spec=ds_train.element_spec)
        fcnn.compile(
            loss={TARGET_NAME: tf.keras.losses.CategoricalCrossentropy()},
            optimizer=tf.keras.optimizers.Adam(0.1),
            metrics={TARGET_NAME: [tf.keras.metrics.Precision(class_id=1), tf.keras.metrics.Recall(class_id=1)]},
        )
        fcnn.summary(strategy)
        assert OUTPUT_SOFTMAX_NAME[:15] in capsys.readouterr().out
        history = fcnn.fit(ds_train, epochs=6, validation_data=ds_train, verbose=0).history
        loss, precision, recall = fcnn.evaluate(ds_train, batch_size=4, verbose=0)
        fcnn.save(str(tmp_path / "model"))
    assert history["val_loss"][-1] < 0.9 * history["val_loss"][0]
    assert loss == pytest.approx(history["val_loss"][-1], rel=1e-4)
    assert min(precision, recall) > 0.5

    loaded = tf.saved_model.load(str(tmp_path / "model"))
    serve = loaded.signatures["serving_default"]
    names = {OUTPUT_SOFTMAX_NAME, *(cropped_tensor_name(OUTPUT_SOFTMAX_NAME, crop) for crop in (16, 32, 64, 96, 128))}
    assert set(serve.structured_outputs) == names
    xs, _ = images(1, 80, 53, seed=2)
    found = serve(**{INPUT_NAME: tf.constant(xs, tf.float32)})
    whole = fcnn.predict({INPUT_NAME: xs}, verbose=0)[TARGET_NAME]
    np.testing.assert_allclose(found[OUTPUT_SOFTMAX_NAME], whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[f"{OUTPUT_SOFTMAX_NAME}_crop16"], whole[:, 16:-16, 16:-16], rtol=1e-4, atol=1e-6)
    assert found[f"{OUTPUT_SOFTMAX_NAME}_crop32"].shape == (1, 16, 0, 2)
    assert found[f"{OUTPUT_SOFTMAX_NAME}_crop128"].shape == (1, 0, 0, 2)


def test_raw_calls_and_layers_give_what_they_should() -> None:
    fcnn = FCNNModel(dataset().element_spec, inference_cropping=[])
    xs, _ = images(2, 12, 20)

    def convolved(name: str, inp: Any, strides: int = 1) -> Any:
        kernel, bias = fcnn.get_layer(name).get_weights()
        return tf.nn.conv2d(inp, kernel, strides, "SAME") + bias

    scaled = tf.constant(xs, tf.float32) * 1e-4
    first = tf.nn.relu(convolved("conv1", scaled, 2))
    second = tf.nn.relu(convolved("conv2", first - tf.reduce_mean(first, axis=[1, 2], keepdims=True), 2))
    features = tf.concat([tf.image.resize(second, (12, 20)), scaled], axis=-1)
    expected = tf.nn.softmax(convolved("classifier", features))
    np.testing.assert_allclose(fcnn({INPUT_NAME: xs})[TARGET_NAME], expected, rtol=1e-4, atol=1e-6)
    assert len(fcnn.trainable_weights) == 6


def test_every_weighted_layer_is_trained_and_saved(tmp_path: Path) -> None:
    """Also those between raw calls, and those in each of the three methods."""

    class Everywhere(Linear):
        def normalize_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return {"x": keras.layers.Conv2D(2, 1, name="in")(tf.math.log1p(inputs["x"])) + 0.5}

        def postprocess_outputs(self, outputs: Any, inputs: Any = None, normalized_inputs: Any = None) -> Any:
            extra = super().postprocess_outputs(outputs, inputs, normalized_inputs)
            return {**extra, "z": keras.layers.Dense(1, name="out")(tf.nn.relu(outputs["y"] + 1.0))}

    x = np.random.default_rng(4).random((8, 4, 4, 3), dtype=np.float32)
    data = tf.data.Dataset.from_tensor_slices(({"x": x}, {"y": x[..., :1], "z": x[..., 1:2]})).batch(4)
    built = Everywhere(data.element_spec, inference_cropping=[1])
    weights = {weight.path for weight in built.trainable_weights}
    assert weights == {f"{layer}/{kind}" for layer in ("in", "linear", "out") for kind in ("kernel", "bias")}
    built.compile(optimizer=keras.optimizers.SGD(0.1), loss={"y": "mse", "z": "mse"})
    before = built.get_weights()
    built.fit(data, epochs=1, verbose=0)
    assert all((old != new).any() for old, new in zip(before, built.get_weights(), strict=True))
    built.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for key, value in built({"x": x}).items():
        np.testing.assert_allclose(loaded({"x": x})[key], value, rtol=1e-5, atol=1e-6)


def test_outputs_of_postprocessing(tmp_path: Path) -> None:
    ours = WithClasses(dataset().element_spec, inference_cropping=[4])
    assert isinstance(ours.model, Network)
    assert ours.model.name == "WithClasses"
    assert set(ours.output) == {TARGET_NAME, "estimated_labels", "confidence"}
    assert set(ours.served) == {*ours.output, f"{TARGET_NAME}_crop4"}
    ours.compile(loss={TARGET_NAME: "categorical_crossentropy"})
    assert np.isfinite(ours.evaluate(dataset(n=4), verbose=0))
    ours.export(tmp_path / "model")
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    names = {OUTPUT_SOFTMAX_NAME, f"{OUTPUT_SOFTMAX_NAME}_crop4", "masked_labels", "confidence_layer"}
    assert set(serve.structured_outputs) == names
    xs, _ = images(1, 11, 9)
    xs[0, 5, 5] = 0
    found = ours.predict({INPUT_NAME: xs}, verbose=0)
    expected = found[TARGET_NAME].argmax(axis=-1)[..., None]
    expected[0, 4:7, 4:7] = 255
    np.testing.assert_array_equal(found["estimated_labels"], expected)
    np.testing.assert_array_equal(found["confidence"], found[TARGET_NAME].max(axis=-1, keepdims=True))


def test_outputs_that_postprocessing_adds_to_its_argument() -> None:
    class Adds(Linear):
        def postprocess_outputs(self, outputs: Any, inputs: Any = None, normalized_inputs: Any = None) -> Any:
            outputs["doubled"] = 2 * outputs["y"]
            return super().postprocess_outputs(outputs, inputs, normalized_inputs)

    added = Adds(spec(x=(None, 8, 8, 3)), inference_cropping=[2])
    assert set(added.output) == {"y", "doubled"}
    assert set(added.served) == {"y", "doubled", "y_crop2", "doubled_crop2"}


def test_only_images_are_cropped_and_by_key_where_a_layer_makes_several() -> None:
    class Several(ModelBase):
        def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
            first, second = tf.split(normalized_inputs["x"], [1, 2], axis=-1)
            return {"first": first, "second": second, "mean": tf.reduce_mean(first, axis=[1, 2], name="mean_of_x")}

    several = Several(spec(x=(None, 8, 8, 3)), inference_cropping=[2])
    assert set(several.served) == {"first", "second", "mean", "first_crop2", "second_crop2"}
    cropped = several.served["second_crop2"]._keras_history.operation.name
    assert cropped == "second_crop2"


def test_mixed_precision(mixed_precision: None, tmp_path: Path) -> None:
    ours = WithClasses(dataset().element_spec, inference_cropping=[2])
    assert ours.output[TARGET_NAME].dtype == "float16"
    ours.compile(loss={TARGET_NAME: "categorical_crossentropy"}, optimizer="adam")
    assert np.isfinite(ours.fit(dataset(), epochs=1, verbose=0).history["loss"]).all()
    ours.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    xs, _ = images(1, 8, 8)
    found = loaded({INPUT_NAME: xs})
    for key, value in ours({INPUT_NAME: xs}).items():
        np.testing.assert_array_equal(found[key], value)


def test_inputs_from_the_dataset() -> None:
    shapes = {"x": (4, 16, 16, 3), "scalars": (4, 5), "series": (4, 10, 16, 2, 3), "labels": (4, 16, 16)}
    specs = {**spec(**shapes), "name": tf.TensorSpec((4, 1), tf.string)}
    built = Linear((specs, spec(y=(4, 16, 16, 1))))
    assert built.inputs_shapes["x"] == [16, 16, 3]
    assert {key: value.shape for key, value in built.get_inputs().items()} == {
        "x": (None, None, None, 3),
        "scalars": (None, 5),
        "series": (None, None, None, 2, 3),
        "labels": (None, 16, 16),
        "name": (None, 1),
    }
    assert {key: value.dtype for key, value in built.get_inputs().items()} == {
        **dict.fromkeys(shapes, "float32"),
        "name": "string",
    }
    assert list(Linear((specs, {}), ["x"]).input) == ["x"]
    assert list(Linear(spec(x=(None, None, None, 1)), input_keys=("x",)).input) == ["x"]


@pytest.mark.parametrize(
    ("element_spec", "arguments", "message"),
    [
        (tf.TensorSpec((None, 3)), {}, "dataset_element_spec must be a dictionary"),
        ((), {}, "dataset_element_spec must be a dictionary"),
        ((tf.TensorSpec((None, 3)), spec(y=(None, 1))), {}, "dataset_element_spec must be a dictionary"),
        (spec(x=(None, 3)), {"input_keys": ["xs"]}, r"input_keys names 'xs'.*\['x'\]; did you mean 'x'"),
        (spec(x=(None, 3)), {"input_keys": []}, "input_keys must name at least one"),
        (spec(x=(None, 3)), {"input_keys": "x"}, "input_keys must be a list of keys"),
        (spec(x=None), {}, "'x' must have a shape that is known"),
        (spec(x=()), {}, "'x' must have a shape that is known"),
        (spec(**{"a/x": (None, 3)}), {}, "'a/x' can't be an input's name.*'/' separates"),
        (spec(**{"a x": (None, 3)}), {}, "'a x' can't be an input's name"),
        (spec(**{"class": (None, 3)}), {}, "'class' can't be an input's name"),
        (spec(x=(None, 3)), {"inference_cropping": [16, 0]}, "inference_cropping must list whole numbers.*got 0"),
        (spec(x=(None, 3)), {"inference_cropping": [1.5]}, "inference_cropping must list whole numbers.*got 1.5"),
    ],
)  # fmt: skip
def test_arguments_are_checked(element_spec: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Linear(element_spec, **arguments)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([1], r"get_outputs must return a dictionary of tensors by key, got \[1\]"),
        ({"y": 1.0}, "get_outputs must return tensors made from the model's inputs by key, got 'y': 1.0"),
        (None, "get_outputs must return a dictionary"),
    ],
)
def test_outputs_are_checked(outputs: Any, message: str) -> None:
    class Wrong(ModelBase):
        def get_outputs(self, normalized_inputs: dict[str, Any]) -> Any:  # noqa: ARG002  # the signature asked for
            return outputs

    with pytest.raises(InputError, match=message):
        Wrong(spec(x=(None, 3)))


def test_names_that_exist_before_the_end_of_training_only_are_found_at_once() -> None:
    class Clash(ModelBase):
        def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
            first, second = tf.unstack(normalized_inputs["x"], 2, axis=-1)
            return {"a": first, "b": second, "c": keras.layers.Activation("relu", name="a")(first)}

    with pytest.raises(InputError, match="would all be served as 'a'"):
        Clash(spec(x=(None, 2)))


def test_other_attributes_are_those_of_the_keras_model(tmp_path: Path) -> None:
    built = Linear(spec(x=(None, 8, 8, 3)))
    assert built.get_layer("linear") is built.model.get_layer("linear")
    assert built.count_params() == 4
    built.save_weights(tmp_path / "weights.weights.h5")
    for name in ("nothing", "__deepcopy__"):
        with pytest.raises(AttributeError, match=name):
            getattr(built, name)


def test_a_mistake_in_a_method_is_that_mistake() -> None:
    class Mistaken(ModelBase):
        def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
            return {"y": self.misspelt(normalized_inputs)}

    with pytest.raises(AttributeError, match="'Mistaken' object has no attribute 'misspelt'"):
        Mistaken(spec(x=(None, 3)))


def test_get_outputs_must_be_written() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ModelBase(spec(x=(None, 3)))  # type: ignore[abstract]


def test_signatures_are_those_of_otbtf() -> None:
    expected = {
        ModelBase: "(dataset_element_spec, input_keys=None, inference_cropping=None)",
        ModelBase.get_inputs: "(self)",
        ModelBase.normalize_inputs: "(self, inputs)",
        ModelBase.get_outputs: "(self, normalized_inputs)",
        ModelBase.postprocess_outputs: "(self, outputs, inputs=None, normalized_inputs=None)",
        ModelBase.create_network: "(self)",
        ModelBase.summary: "(self, strategy=None)",
        ModelBase.plot: "(self, output_path, strategy=None, show_shapes=False)",
        cropped_tensor_name: "(tensor_name, crop)",
        is_chief: "(strategy)",
        ops.one_hot: "(labels, nb_classes)",
    }
    for function, text in expected.items():
        found = inspect.signature(function)
        bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
        assert str(inspect.Signature(bare)) == text
    assert model._is_chief is is_chief
    assert cropped_tensor_name("softmax", 16) == "softmax_crop16"
    assert Linear(spec(x=(None, 4, 4, 1))).inference_cropping == [16, 32, 64, 96, 128]


def resolver(task_type: str | None, task_id: int | None, *jobs: str) -> SimpleNamespace:
    cluster = tf.train.ClusterSpec({job: ["localhost:1", "localhost:2"] for job in jobs})
    found = SimpleNamespace(task_type=task_type, task_id=task_id, cluster_spec=lambda: cluster)
    return SimpleNamespace(cluster_resolver=found)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (None, True),
        (SimpleNamespace(cluster_resolver=None), True),
        (resolver(None, None), True),
        (resolver("chief", 0, "chief", "worker"), True),
        (resolver("worker", 0, "chief", "worker"), False),
        (resolver("worker", 0, "worker"), True),
        (resolver("worker", 1, "worker"), False),
        (resolver("evaluator", 0, "chief"), False),
    ],
)
def test_is_chief(strategy: Any, expected: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert is_chief(strategy) is expected
    built = Linear(spec(x=(None, 4, 4, 1)))
    built.summary(strategy)
    assert ("linear" in capsys.readouterr().out) is expected
    if not expected:
        built.plot(tmp_path / "model.png", strategy)
        assert not list(tmp_path.iterdir())


def test_plot_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = Linear(spec(x=(None, 4, 4, 1)))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(MissingDependencyError, match="program dot on the PATH: install Graphviz"):
        built.plot(tmp_path / "model.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="pip install pydot"):
        built.plot(tmp_path / "model.png")


@pytest.mark.skipif(
    importlib.util.find_spec("pydot") is None or shutil.which("dot") is None, reason="pydot or Graphviz is missing"
)
def test_plot_draws(tmp_path: Path) -> None:
    WithClasses(dataset().element_spec).plot(tmp_path / "model.png", show_shapes=True)
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


TWO_DEVICES = """
import sys
sys.path.insert(0, "tests")
import numpy as np, tensorflow as tf
from test_model import FCNNModel, INPUT_NAME, OUTPUT_SOFTMAX_NAME, TARGET_NAME, dataset, images
device = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert strategy.num_replicas_in_sync == 2
with strategy.scope():
    fcnn = FCNNModel(dataset().element_spec)
    fcnn.compile(loss={TARGET_NAME: tf.keras.losses.CategoricalCrossentropy()}, metrics={TARGET_NAME: ["accuracy"]})
    before = fcnn.evaluate(dataset(), verbose=0)
    fcnn.fit(dataset(), epochs=4, verbose=0)
    after = fcnn.evaluate(dataset(), batch_size=4, verbose=0)
    fcnn.save(sys.argv[1])
assert after[0] < before[0], (before, after)
xs, _ = images(1, 50, 41, seed=2)
found = tf.saved_model.load(sys.argv[1]).signatures["serving_default"](**{INPUT_NAME: tf.constant(xs, tf.float32)})
expected = fcnn({INPUT_NAME: xs})[TARGET_NAME][:, 16:-16, 16:-16]
np.testing.assert_allclose(found[OUTPUT_SOFTMAX_NAME + "_crop16"], expected, rtol=1e-4, atol=1e-6)
"""


@pytest.mark.slow
def test_two_devices(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "model")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
