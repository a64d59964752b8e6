from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from otbtf_lite.errors import InputError
from otbtf_lite.layers import Argmax
from otbtf_lite.network import Network, served_names
from otbtf_lite.tracing import building

KERAS = tuple(map(int, keras.version().split(".")[:2]))
ROOT = Path(__file__).resolve().parents[1]
RNG = np.random.default_rng(11)
X = {"xs": RNG.random((8, 6, 6, 3), dtype=np.float32), "dem": RNG.random((8, 6, 6, 1), dtype=np.float32)}
Y = {"a": RNG.random((8, 6, 6, 2), dtype=np.float32), "b": RNG.random((8, 1), dtype=np.float32)}


def two_heads() -> Network:
    """Inputs xs and dem; trained: a (an image), b (a number); served: a crop of a, too."""
    with building():
        inputs = {
            "xs": keras.Input((None, None, 3), name="xs"),
            "dem": keras.Input((None, None, 1), name="dem"),
        }
        both = tf.concat([inputs["xs"] * 2.0, inputs["dem"]], axis=-1)
        hidden = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="hidden")(both)
        left = keras.layers.Conv2D(2, 1, name="left")(hidden)
        right = keras.layers.Conv2D(3, 1, name="middle")(tf.nn.silu(hidden))
        right = keras.layers.Dense(1, name="right")(tf.reduce_mean(right, axis=[1, 2]))
        crop = keras.layers.Activation("linear", name="left_crop2")(left[:, 2:-2, 2:-2])
    outputs = {"b": right, "a": left}
    return Network(inputs, outputs, name="heads", served={**outputs, "a_crop2": crop})


def dataset(x: dict[str, Any] = X, y: dict[str, Any] = Y) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


def reference(model: Network, x: dict[str, Any] = X) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs by NumPy and TensorFlow on arrays, with the model's weights."""

    def convolved(name: str, images: Any) -> Any:
        kernel, bias = model.get_layer(name).get_weights()
        return tf.nn.conv2d(images, kernel, 1, "SAME") + bias

    hidden = tf.nn.relu(convolved("hidden", tf.concat([2 * x["xs"], x["dem"]], axis=-1)))
    middle = tf.reduce_mean(convolved("middle", hidden * tf.sigmoid(hidden)), axis=[1, 2])
    kernel, bias = model.get_layer("right").get_weights()
    image = convolved("left", hidden).numpy()
    return {"a": image, "b": middle.numpy() @ kernel + bias, "a_crop2": image[:, 2:-2, 2:-2]}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5)


def test_a_network_trains_what_is_not_served_alone() -> None:
    model = two_heads()
    assert set(model.output) == {"a", "b"}
    assert set(model.served) == {"a", "b", "a_crop2"}
    assert not [layer.name for layer in model.layers if "crop" in layer.name]
    expected = reference(model)
    assert_same(model.predict(X, verbose=0), {key: expected[key] for key in ("a", "b")})
    assert_same(model(X), {key: expected[key] for key in ("a", "b")})


@pytest.mark.parametrize(
    ("targets", "loss", "metrics", "expected"),
    [
        (["a"], {"a": "mse"}, {"a": ["mae"]}, {"loss", "mae"}),
        (["b"], {"b": "mse"}, {"b": ["mae", "mape"]}, {"loss", "mae", "mape"}),
        (["a", "b"], {"b": "mse"}, {"a": ["mae"]}, {"loss", "a_mae"}),
        (["a", "b"], {"a": "mse", "b": "mae"}, {"b": ["mse"]}, {"loss", "a_loss", "b_loss", "b_mse"}),
        (["b"], "mse", ["mae"], {"loss", "mae"}),
        (["b", "a"], "mse", None, {"loss", "a_loss", "b_loss"}),
    ],
)  # fmt: skip
def test_losses_and_metrics_for_some_outputs(targets: list[str], loss: Any, metrics: Any, expected: set[str]) -> None:
    model = two_heads()
    model.compile(optimizer="sgd", loss=loss, metrics=metrics)
    data = dataset(y={key: Y[key] for key in targets})
    found = model.evaluate(data, verbose=0, return_dict=True)
    # Keras 3.3 reports no losses of single outputs.
    assert {name for name in expected if not name.endswith("_loss")} <= set(found) <= expected
    errors = {key: value - Y[key] for key, value in model(X).items()}
    asked = {key: loss if isinstance(loss, str) else loss.get(key) for key in targets}
    by_hand = sum(
        np.mean(errors[key] ** 2 if name == "mse" else abs(errors[key])) for key, name in asked.items() if name
    )
    assert found["loss"] == pytest.approx(by_hand, rel=1e-4)


def test_other_targets_and_weights_are_left_aside() -> None:
    model = two_heads()
    # Keras 3.3 takes no dictionary of weights for one loss.
    weight = {"a": 2.0} if KERAS >= (3, 6) else 2.0
    model.compile(loss={"a": "mse"}, loss_weights=weight, weighted_metrics={"a": ["mse"]})
    weights = {"a": np.tile(np.float32([0, 1]), 4).reshape(8, 1, 1), "unknown": np.ones(8, np.float32)}
    data = tf.data.Dataset.from_tensor_slices((X, {"a": Y["a"], "unknown": Y["b"]}, weights)).batch(4)
    found = model.evaluate(data, verbose=0, return_dict=True)
    errors = (np.asarray(model(X)["a"]) - Y["a"]) ** 2
    assert found["loss"] == pytest.approx(2 * (errors * weights["a"][..., None]).mean(), rel=1e-4)
    assert found["mse"] == pytest.approx(errors[1::2].mean(), rel=1e-4)


@pytest.mark.parametrize("argument", ["loss", "loss_weights", "metrics", "weighted_metrics"])
def test_compile_refuses_what_is_no_output(argument: str) -> None:
    with pytest.raises(InputError, match=rf"{argument} names 'aa'.*outputs \['a', 'b'\]; did you mean 'a'"):
        two_heads().compile(**{argument: {"aa": "mse"}})


@pytest.mark.parametrize(
    ("arguments", "targets", "message"),
    [
        ({"loss": {"a": "mse", "b": "mse"}}, ["a"], r"loss names 'b'.*targets for \['a'\] only"),
        ({"loss": {"a": "mse"}, "metrics": {"b": ["mae"]}}, ["a"], r"metrics names 'b'.*targets for \['a'\] only"),
        ({"loss": "mse"}, ["c"], r"targets are \['c'\].*outputs \['a', 'b'\]"),
    ],
)
def test_training_refuses_what_has_no_target(arguments: dict[str, Any], targets: list[str], message: str) -> None:
    model = two_heads()
    model.compile(**arguments)
    with pytest.raises(InputError, match=message):
        model.fit(dataset(y={key: Y.get(key, Y["b"]) for key in targets}), verbose=0)


def test_inputs_are_picked_by_key() -> None:
    model = two_heads()
    extra = {"aaa": np.zeros((8, 2), np.float32), **X, "zzz": np.zeros((8, 2), np.float32)}
    assert_same(model(extra), model(X))
    assert_same(model.predict(tf.data.Dataset.from_tensor_slices(extra).batch(3), verbose=0), model(X))
    with pytest.raises(InputError, match=r"'heads' needs the input 'dem', got \['xs', 'dems'\]; did you mean 'dems'"):
        model({"xs": X["xs"], "dems": X["dem"]})


def signature(path: Path) -> Any:
    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]
    serve.owner = loaded  # which owns the variables
    return serve


def test_a_saved_model_serves_by_layer_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = two_heads()
    model.save(tmp_path / "saved")
    assert capsys.readouterr().out == ""
    serve = signature(tmp_path / "saved")
    assert set(serve.structured_input_signature[1]) == {"xs", "dem"}
    for rows, cols in ((6, 6), (7, 13), (3, 2)):
        images = {name: RNG.random((1, rows, cols, bands), dtype=np.float32) for name, bands in (("xs", 3), ("dem", 1))}
        expected = reference(model, images)
        found = serve(**{name: tf.constant(image) for name, image in images.items()})
        names = {"left": "a", "right": "b", "left_crop2": "a_crop2"}
        assert set(found) == set(names)
        assert_same({key: found[name] for name, key in names.items()}, expected)


def test_save_does_not_replace_unasked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path} exists"):
        two_heads().save(tmp_path, overwrite=False)
    two_heads().save(tmp_path)
    assert (tmp_path / "saved_model.pb").is_file()


def test_outputs_of_one_layer_are_served_by_key() -> None:
    inputs = keras.Input((4,))
    with building():
        first, second = tf.split(inputs, 2, axis=-1)
    dense = keras.layers.Dense(1, name="dense")(first)
    assert served_names({"x": first, "y": second, "z": dense}) == {"x": "x", "y": "y", "z": "dense"}
    assert served_names({"x": dense, "same": dense}) == {"x": "x", "same": "same"}
    with pytest.raises(InputError, match=r"\['dense', 'z'\] would all be served as 'dense'"):
        served_names({"x": first, "dense": second, "z": dense})


def test_a_keras_file_holds_everything(tmp_path: Path) -> None:
    model = two_heads()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss={"a": "mse"}, metrics={"a": ["mae"]})
    data = dataset(y={"a": Y["a"]})
    model.fit(data, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is Network
    assert loaded.name == "heads"
    assert set(loaded.served) == {"a", "b", "a_crop2"}
    assert_same(loaded(X), model(X))
    assert loaded.optimizer.iterations.numpy() == 2
    for one in (model, loaded):  # both go on from the same state of the optimizer
        one.fit(data, epochs=1, verbose=0)
    assert_same(loaded(X), model(X))
    loaded.export(tmp_path / "exported")
    assert set(signature(tmp_path / "exported").structured_outputs) == {"left", "right", "left_crop2"}
    loaded.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    assert_same(again(X), loaded(X))


def test_a_network_can_be_pickled() -> None:
    model = two_heads()
    copy = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own
    assert_same(copy(X), model(X))
    assert set(copy.served) == set(model.served)


def test_frozen_stays_frozen(tmp_path: Path) -> None:
    model = two_heads()
    model.trainable = False
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").trainable_variables == []


FRESH = """
import sys
import keras, numpy as np, tensorflow as tf
import otbtf_lite.model
folder = sys.argv[1]
arrays = dict(np.load(folder + "/arrays.npz"))
# Functions of this process with the numbers that those in the file had in theirs.
table = [tf.function(lambda x, n=n: tf.scan(lambda a, b: a * n + b, x)).get_concrete_function(tf.zeros((3, 2)))
         for n in range(4)]
model = keras.models.load_model(folder + "/model.keras")
images = {"xs": arrays["xs"]}
np.testing.assert_allclose(model(images)["a"], arrays["before"], rtol=1e-4, atol=1e-5)
model.fit(images, {"a": arrays["y"]}, batch_size=2, shuffle=False, epochs=1, verbose=0)
np.testing.assert_allclose(model(images)["a"], arrays["after"], rtol=1e-3, atol=1e-4)
model.export(folder + "/exported")
"""


@pytest.mark.slow
def test_a_keras_file_in_another_process(tmp_path: Path) -> None:
    """A loop, a branch and a function with a gradient of its own are what could be tied to this process."""
    with building():
        inputs = {"xs": keras.Input((4, 4, 3), name="xs")}
        hidden = keras.layers.Conv2D(3, 1)(tf.nn.silu(keras.layers.Conv2D(4, 3, padding="same")(inputs["xs"])))
        hidden = tf.scan(lambda a, b: 0.5 * a + b, hidden)
        hidden = hidden * tf.cond(tf.reduce_mean(inputs["xs"]) > 0.0, lambda: 2.0, lambda: 1.0)
        out = keras.layers.Conv2D(1, 1, name="out")(hidden)
        classes = Argmax(name="classes")(out)
    model = Network(inputs, {"a": out}, served={"a": out, "classes": classes})
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss={"a": "mse"})
    xs, y = X["xs"][:4, :4, :4], RNG.random((4, 4, 4, 1), dtype=np.float32)
    model.save(tmp_path / "model.keras")
    before = model({"xs": xs})["a"]
    model.fit({"xs": xs}, {"a": y}, batch_size=2, shuffle=False, epochs=1, verbose=0)
    np.savez(tmp_path / "arrays.npz", xs=xs, y=y, before=before, after=model({"xs": xs})["a"])
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(signature(tmp_path / "exported").structured_outputs) == {"out", "classes"}
