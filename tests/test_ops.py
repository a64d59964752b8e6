from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from otbtf_lite.errors import InputError
from otbtf_lite.ops import one_hot
from otbtf_lite.tracing import building


@given(
    labels=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=4), elements=st.integers(0, 7)),
    nb_classes=st.integers(1, 6),
)
def test_each_label_becomes_a_row_of_the_identity(labels: np.ndarray[Any, Any], nb_classes: int) -> None:
    plain = labels[..., 0] if labels.shape[-1] == 1 else labels
    expected = (plain[..., None] == np.arange(nb_classes)).astype(np.float32)
    result = one_hot(labels, nb_classes)
    assert result.dtype == tf.float32
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int64", "float32", "float64"])
def test_any_dtype_of_labels(dtype: str) -> None:
    labels = np.array([[[0], [2]], [[1], [1]]]).astype(dtype)
    np.testing.assert_array_equal(one_hot(labels, 3), np.eye(3)[labels[..., 0].astype(int)])


def test_a_scalar_and_a_list() -> None:
    np.testing.assert_array_equal(one_hot(np.int32(1), 3), [0, 1, 0])
    np.testing.assert_array_equal(one_hot([0, 1], 2), np.eye(2))


def test_labels_without_a_class_are_zeros() -> None:
    np.testing.assert_array_equal(one_hot(np.array([[255], [0]], np.uint8), 2), [[0, 0], [1, 0]])


def test_in_a_pipeline_and_in_a_network() -> None:
    labels = np.arange(8, dtype=np.uint8).reshape(2, 2, 2, 1) % 3
    mapped = tf.data.Dataset.from_tensor_slices(labels).map(lambda x: one_hot(x, 3)).batch(2)
    assert mapped.element_spec.shape.as_list() == [None, 2, 2, 3]
    np.testing.assert_array_equal(next(iter(mapped)), np.eye(3)[labels[..., 0]])
    with building():
        inputs = keras.Input((None, None, 1), dtype="uint8")
        model = keras.Model(inputs, one_hot(inputs, 3))
    np.testing.assert_array_equal(model(labels), np.eye(3)[labels[..., 0]])


@pytest.mark.parametrize("shape", [None, [None, None]])
def test_an_unknown_last_axis_is_refused(shape: list[None] | None) -> None:
    traced = tf.function(lambda x: one_hot(x, 3), autograph=False).get_concrete_function
    with pytest.raises(InputError, match=r"last axis of known length.*tf.ensure_shape"):
        traced(tf.TensorSpec(shape, tf.uint8))
