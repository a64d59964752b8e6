"""Raw TensorFlow calls in a network: every case is compared with TensorFlow itself on arrays."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from otbtf_lite.errors import InputError
from otbtf_lite.tracing import TensorFlowOp, building

IMAGES = np.random.default_rng(7).random((2, 9, 7, 3), dtype=np.float32)
IMAGES[0, 0, 0] = 0

CALLS: dict[str, Callable[[Any], Any]] = {
    # dtypes and arithmetic; NumPy's float64 takes the tensor's dtype, as in TensorFlow
    "scale": lambda x: tf.cast(x, tf.float32) * 1e-4,
    "standardize": lambda x: (x - np.array([0.1, 0.2, 0.3])) / np.float64(3),
    "array on the left": lambda x: np.array([1.0, 2.0, 3.0]) * x,
    "constant on the left": lambda x: tf.constant([1.0, 2.0, 3.0]) - x,
    "reflected": lambda x: 1 - 2.0**x + 3 / (x + 1),
    "powers": lambda x: abs(-x) ** 2 % 0.3,
    "floor": lambda x: tf.floor(x * 9) // 2,
    "matmul": lambda x: x @ tf.eye(3),
    "integers": lambda x: tf.cast(x * 255, tf.uint8) // 2,
    # comparisons: Keras has no ==
    "equal": lambda x: tf.cast(x == 0, tf.float32),
    "not equal": lambda x: tf.cast(x != 0, tf.uint8),
    "logic": lambda x: tf.cast((x > 0.2) & ~(x >= 0.5) | (x < 0.1) ^ (x <= 0.05), tf.int32),
    "where": lambda x: tf.where(x > 0.5, x, 0.0),
    # slices, also by what the network computes
    "slice": lambda x: x[:, 2:-2, 1:-1, ::-1],
    "band": lambda x: x[..., 0],
    "new axis": lambda x: x[..., None, 1:],
    "computed slice": lambda x: x[:, : tf.shape(x)[1] // 2, ..., tf.newaxis],
    "slice of a constant": lambda x: tf.range(100)[: tf.shape(x)[1]],
    # shapes
    "concat": lambda x: tf.concat([x, x * 2, tf.ones_like(x)], axis=-1),
    "stack": lambda x: tf.stack([x, x], axis=1),
    "split": lambda x: tf.split(x, 3, axis=-1),
    "unstack": lambda x: tf.unstack(x, axis=-1),
    "squeeze": lambda x: tf.squeeze(x[..., :1], axis=-1),
    "expand": lambda x: tf.expand_dims(x, 1),
    "transpose": lambda x: tf.transpose(x, [0, 3, 1, 2]),
    "reshape": lambda x: tf.reshape(x, [tf.shape(x)[0], -1, 3]),
    "tile": lambda x: tf.tile(x, [1, 2, 2, 1]),
    "pad": lambda x: tf.pad(x, [[0, 0], [2, 2], [2, 2], [0, 0]], mode="REFLECT"),
    "zeros": lambda x: tf.zeros(tf.shape(x)),
    "static shape": lambda x: x * x.get_shape()[-1],
    # reductions and classes
    "mean": lambda x: tf.reduce_mean(x, axis=[1, 2]),
    "mean of all": tf.reduce_mean,
    "moments": lambda x: tf.nn.moments(x, [1, 2], keepdims=True),
    "top k": lambda x: tf.math.top_k(x, 2).indices,
    "argmax": lambda x: tf.argmax(x, axis=-1, output_type=tf.int32),
    "one hot": lambda x: tf.one_hot(tf.argmax(x, axis=-1), 3),
    "softmax": tf.nn.softmax,
    "silu": tf.nn.silu,
    # images: functions that call many others
    "resize": lambda x: tf.image.resize(x, (8, 8)),
    "resize to another's size": lambda x: tf.image.resize(x[:, ::2, ::2], tf.shape(x)[1:3], method="nearest"),
    "bicubic": lambda x: tf.image.resize(x, (4, 4), method="bicubic"),
    "crop or pad": lambda x: tf.image.resize_with_crop_or_pad(x, 8, 8),
    "standardization": tf.image.per_image_standardization,
    "sobel": tf.image.sobel_edges,
    "convolution": lambda x: tf.nn.conv2d(x, np.ones((3, 3, 3, 2), np.float32), 1, "SAME"),
    "pooling": lambda x: tf.nn.max_pool2d(x, 3, 1, "SAME"),
    "batch normalization": lambda x: tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), None, None, 1e-3),
    "depth to space": lambda x: tf.nn.depth_to_space(tf.concat([x] * 4, -1), 2),
    # functions within the graph
    "scan": lambda x: tf.scan(lambda a, b: a + b * a, x),
    "branch": lambda x: tf.cond(tf.reduce_mean(x) > 0.4, lambda: 1.0, lambda: 0.0) + x,
}


def network(call: Callable[[Any], Any], dtype: str = "float32") -> tuple[Any, keras.Model]:
    """The symbolic result of a call, and a model of it that was written to text and read again."""
    inputs = keras.Input((None, None, 3), dtype=dtype, name="x")
    with building():
        results = call(inputs)
    config = json.dumps(keras.Model(inputs, results).get_config())
    return results, keras.Model.from_config(json.loads(config))


@pytest.mark.parametrize("case", CALLS)
def test_a_call_does_what_tensorflow_does(case: str) -> None:
    expected = [np.asarray(x) for x in tf.nest.flatten(CALLS[case](tf.constant(IMAGES)))]
    results, model = network(CALLS[case])
    for symbol, array in zip(tf.nest.flatten(results), expected, strict=True):
        assert symbol.dtype == array.dtype.name
        assert not symbol.sparse
        assert len(symbol.shape) == array.ndim
        assert all(known in (None, size) for known, size in zip(symbol.shape, array.shape, strict=True))
    for found in (model(IMAGES), tf.function(model)(IMAGES)):
        for result, array in zip(tf.nest.flatten(found), expected, strict=True):
            assert result.dtype.name == array.dtype.name
            np.testing.assert_allclose(result, array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["scale", "computed slice", "concat", "silu", "bicubic", "where", "scan", "branch"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_gradients_pass_through_a_call(case: str, compiled: bool) -> None:
    _, model = network(CALLS[case])

    def gradient(function: Callable[[Any], Any]) -> Any:
        images = tf.constant(IMAGES)
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_sum(function(images) ** 2)
        return tape.gradient(loss, images)

    found = (tf.function(gradient) if compiled else gradient)(model)
    np.testing.assert_allclose(found, gradient(CALLS[case]), rtol=1e-4, atol=1e-6)


def test_structures_come_back_as_tensorflow_gives_them() -> None:
    inputs = keras.Input((4,))
    with building():
        found = tf.math.top_k(inputs, 2)
        moments = tf.nn.moments(inputs, [0])
    assert type(found).__name__ == "TopKV2"
    assert found.values.shape == (None, 2)
    assert found.indices.dtype == "int32"
    assert isinstance(moments, tuple)


def test_layers_are_named_after_the_calls() -> None:
    inputs = keras.Input((4,))
    names = []
    for _ in range(2):  # each network counts for itself
        with building():
            tensors = [
                tf.nn.softmax(inputs), tf.nn.softmax(inputs), inputs * 2, tf.identity(inputs, name="mine"),
                tf.identity(inputs, name="a/b"),
            ]  # fmt: skip
        names.append([tensor._keras_history.operation.name for tensor in tensors])
    assert names == [["tf.nn.softmax", "tf.nn.softmax_1", "tf.operators.mul", "mine", "a_b"]] * 2


def test_mixed_floats_are_widened() -> None:
    half, single = keras.Input((2,), dtype="float16"), keras.Input((3,), dtype="float32")
    with building():
        joined = tf.concat([half, single], axis=-1)
        total = half[:, :1] + single
        kept = tf.concat([half, half], axis=-1)
    assert (joined.dtype, total.dtype, kept.dtype) == ("float32", "float32", "float16")


def test_a_large_array_becomes_part_of_the_layer() -> None:
    table = tf.constant(np.arange(30_000, dtype=np.float32).reshape(10_000, 3))
    _, model = network(lambda x: tf.gather(table, tf.cast(x[..., 0] * 9_999, tf.int32)))
    expected = np.asarray(table)[(IMAGES[..., 0] * 9_999).astype(np.int32)]
    np.testing.assert_array_equal(model(IMAGES), expected)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shapes": (
        lambda x: tf.matmul(x, tf.zeros((5, 2))),
        r"tf.linalg.matmul can't be applied to float32\[None, None, None, 3\]",
    ),
    "dtypes": (lambda x: tf.cast(x, tf.int32) * 0.5, r"tf.operators.mul can't be applied to int32"),
    "a variable": (lambda x: x * tf.Variable(2.0), "tf.operators.mul holds a variable.*keras.layers.Layer"),
    "a variable in a call": (lambda x: tf.multiply(x, tf.Variable(2.0)), "tf.math.multiply holds a variable"),
    "a Python callback": (
        lambda x: tf.numpy_function(np.sin, [x], tf.float32),
        "calls back into Python.*neither saved nor served",
    ),
    "any rank": (lambda x: tf.reshape(x, tf.cast(x[0, 0, 0], tf.int32)[: tf.shape(x)[0]]), "number of axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_a_layer_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with building(), pytest.raises(InputError, match=message):
        call(keras.Input((None, None, 3)))


def test_a_damaged_config_is_refused() -> None:
    for graph in ("%%%", "AAAA", ""):
        with pytest.raises(InputError, match="'broken' holds no TensorFlow graph"):
            TensorFlowOp(graph, ["input_0:0"], ["Relu:0"], name="broken")


def test_xla_is_not_asked_to_compile_any_op() -> None:
    inputs = keras.Input((None, None, 3))
    with building():
        raw = tf.image.resize(inputs, (4, 4), method="area")  # which XLA lacks
    model = keras.Model(inputs, raw)
    model.compile(loss="mse")
    assert model.jit_compile is False


def test_nothing_changes_outside_a_network() -> None:
    inputs = keras.Input((4,))
    with building():
        tf.nn.relu(inputs)
    with pytest.raises(ValueError, match="KerasTensor"):
        tf.nn.relu(inputs)
    with pytest.raises(NotImplementedError):
        iter(inputs)
    assert (inputs == 0) is False
    assert [keras.Input((4,)), inputs].index(inputs) == 1
    assert {inputs: 1}[inputs] == 1
    assert not hasattr(inputs, "get_shape")
    assert type((inputs * 2)._keras_history.operation).__module__.startswith("keras.")


def test_another_thread_is_not_building() -> None:
    inputs = keras.Input((4,))
    caught: list[BaseException] = []

    def other() -> None:
        try:
            tf.nn.relu(inputs)
        except ValueError as error:
            caught.append(error)

    with building():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        tf.nn.relu(inputs)
    assert len(caught) == 1


def test_an_error_ends_the_building() -> None:
    inputs = keras.Input((4,))
    with pytest.raises(InputError), building():
        tf.matmul(inputs, tf.zeros((5, 2)))
    with pytest.raises(ValueError, match="KerasTensor"):
        tf.nn.relu(inputs)


def test_tensorflow_and_keras_have_what_the_hooks_use() -> None:
    """What is semi-private: where this fails, ``otbtf_lite/tracing.py`` must follow what moved."""
    dispatch = getattr(tf.__internal__, "dispatch", None)
    base = getattr(dispatch, "GlobalOpDispatcher", None)
    assert base is not None, "tf.__internal__.dispatch.GlobalOpDispatcher is gone: raw TensorFlow calls raise"
    assert hasattr(base, "register"), "GlobalOpDispatcher.register is gone"
    assert hasattr(base, "NOT_SUPPORTED"), "GlobalOpDispatcher.NOT_SUPPORTED is gone"

    asked: list[tuple[str, list[str]]] = []

    class Spy(base):  # type: ignore[misc, valid-type]
        def handle(self, op: Any, args: Any, kwargs: Any) -> Any:
            if any(isinstance(leaf, Mark) for leaf in tf.nest.flatten((args, kwargs))):
                frame, names = sys._getframe(), []
                while frame is not None:
                    names.append(frame.f_code.co_name)
                    frame = frame.f_back
                asked.append((op.__name__, names))
            return self.NOT_SUPPORTED

    class Mark:
        """What no TensorFlow function takes."""

    Spy().register()
    with pytest.raises((TypeError, ValueError)):
        tf.shape(Mark())
    assert asked, "TensorFlow no longer asks global dispatchers about a call that failed for its types"
    inner, outer = (names.count("op_dispatch_handler") for _, names in (asked[0], asked[-1]))
    assert (inner, outer) == (2, 1), "op_dispatch_handler no longer runs public calls: nested calls can't be told"

    for method in ("__add__", "__rmul__", "__lt__", "__getitem__", "__and__", "__neg__"):
        assert method in vars(keras.KerasTensor), f"KerasTensor.{method} is gone: operators may be defined elsewhere"
    history = keras.Input((1,))._keras_history
    assert hasattr(history, "operation"), "KerasTensor._keras_history.operation is gone: outputs have no layer's name"
