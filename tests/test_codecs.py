"""The codecs against TensorFlow's own serialization and parsing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from otbtf_style import DTYPES, all_kinds, arrays, random_array, same

from otbtf_lite import codecs
from otbtf_lite.codecs import get_codec
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.schema import NUMERIC_DTYPES, Feature, Schema

KINDS = all_kinds(1)
SCHEMA = Schema.of(KINDS)
TENSOR = get_codec("tensor")


def serialized(array: Any) -> bytes:
    return bytes(tf.io.serialize_tensor(tf.convert_to_tensor(array)).numpy())


def test_the_types_have_tensorflows_numbers() -> None:
    assert {dtype.name for dtype in DTYPES} == set(NUMERIC_DTYPES)
    assert {dtype.name: dtype.as_datatype_enum for dtype in (*DTYPES, tf.string)} == codecs.TF_DTYPE_NUMBERS


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, (1 << 32) - 1, (1 << 63) - 1])
def test_varints_are_protocol_buffers(value: int) -> None:
    message = tf.train.Int64List(value=[value]).SerializeToString()  # field 1, packed: tag, length, numbers
    assert codecs.length_delimited(1, len(message) - 2) + codecs.varint(value) == message
    assert codecs.read_varint(memoryview(message), 2) == (value, len(message))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 11])
def test_a_varint_ends(data: bytes) -> None:
    with pytest.raises(DataError, match="does not end"):
        codecs.read_varint(memoryview(data), 0)


@pytest.mark.parametrize("shape", [(3,), (), (0,), (2, 0, 3), (1, 200, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_of_each_type_and_shape_the_bytes_are_serialize_tensors(dtype: tf.DType, shape: tuple[int, ...]) -> None:
    array = random_array(dtype, shape, np.random.default_rng(0))
    value = TENSOR.encode(Feature(dtype.name, shape), array)
    assert value == serialized(array)
    assert same(TENSOR.decode(Feature(dtype.name, shape), memoryview(value)), array)


@pytest.mark.parametrize("key", KINDS)
def test_the_bytes_are_serialize_tensors(key: str) -> None:
    feature = SCHEMA[key]
    value = TENSOR.encode(feature, KINDS[key])
    assert value == serialized(KINDS[key])
    assert same(TENSOR.decode(feature, memoryview(value)), KINDS[key])
    prefix = TENSOR.prefix(feature)
    assert (prefix is None) == (feature.dtype == "string")
    assert prefix is None or value == prefix + KINDS[key].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_any_memory_layout_is_written_the_same(dtype: tf.DType) -> None:
    array = random_array(dtype, (4, 6, 2), np.random.default_rng(0))
    feature = Feature(dtype.name, (3, 4, 2))
    part = array.transpose(1, 0, 2)[::2]
    for view in (part, np.asfortranarray(part), part.astype(part.dtype.newbyteorder(">"))):
        assert TENSOR.encode(feature, view) == serialized(part)


@pytest.mark.parametrize("batch", [None, 2], ids=["one", "batch"])
def test_tensorflow_parses_the_same(batch: int | None) -> None:
    values = {key: serialized(array) for key, array in KINDS.items()}
    shape = [] if batch is None else [None]
    signature = {key: tf.TensorSpec(shape, tf.string) for key in values}

    @tf.function(input_signature=[signature], autograph=False)
    def parse(value: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        parsed = {key: TENSOR.parse(SCHEMA[key], value[key]) for key in value}
        for key, tensor in parsed.items():
            assert tensor.shape.as_list() == [*shape, *SCHEMA[key].shape]
        return parsed

    result = arrays(
        parse({key: tf.constant(value if batch is None else [value] * batch) for key, value in values.items()})
    )
    for key, array in result.items():
        assert same(array, KINDS[key] if batch is None else np.stack([KINDS[key]] * batch)), key


NUMBERS = np.arange(6, dtype=np.int16).reshape(2, 3)
NUMERIC = Feature("int16", (2, 3))
WRONG = {
    "another type": NUMBERS.view(np.uint16),
    "another size of type": NUMBERS.astype(np.int32),
    "another shape": NUMBERS.reshape(3, 2),
    "another rank": NUMBERS.reshape(6),
    "fewer": NUMBERS[:1],
    "none": NUMBERS[:0],
    "text": np.array([["a"] * 3] * 2),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_tensor_is_told_in_numpy_and_in_tensorflow(wrong: str) -> None:
    value = serialized(WRONG[wrong])
    with pytest.raises(DataError, match=r"holds .* where the schema says int16\[2, 3\]"):
        TENSOR.decode(NUMERIC, memoryview(value))
    with pytest.raises(tf.errors.InvalidArgumentError, match="another tensor than the schema says, int16"):
        TENSOR.parse(NUMERIC, tf.constant(value))
    with pytest.raises(tf.errors.InvalidArgumentError):
        TENSOR.parse(NUMERIC, tf.constant([serialized(NUMBERS), value]))


@pytest.mark.parametrize("change", ["cut", "longer", "empty"])
def test_a_damaged_value_is_told(change: str) -> None:
    value = serialized(NUMBERS)
    value = {"cut": value[:-1], "longer": value + b"\0", "empty": b""}[change]
    with pytest.raises(DataError):
        TENSOR.decode(NUMERIC, memoryview(value))
    with pytest.raises(tf.errors.InvalidArgumentError, match="another tensor"):
        TENSOR.parse(NUMERIC, tf.constant(value))


@pytest.mark.parametrize("key", ["text", "word", "no-text", "empty-int16-"])
def test_what_parse_tensor_reads_is_compared_too(key: str) -> None:
    value = serialized(NUMBERS)
    with pytest.raises(DataError, match="where the schema says"):
        TENSOR.decode(SCHEMA[key], memoryview(value))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        TENSOR.parse(SCHEMA[key], tf.constant(value))


def test_a_number_of_strings_other_than_the_shapes_is_told() -> None:
    value = serialized(["a", "b"])
    with pytest.raises(DataError, match="holds 1 strings where the schema says 2"):
        TENSOR.decode(Feature("string", (2,)), memoryview(value[:-3]))


def test_a_header_in_another_form_is_read() -> None:
    """Protocol buffers leave the order of fields open, and unknown ones are passed over."""
    proto = tf.make_tensor_proto(NUMBERS)
    content = type(proto)(tensor_content=proto.tensor_content).SerializeToString()
    proto.ClearField("tensor_content")
    for value in (content + proto.SerializeToString(), serialized(NUMBERS) + b"\x38\x00"):
        assert value != serialized(NUMBERS)
        assert same(TENSOR.decode(NUMERIC, memoryview(value)), NUMBERS)


def test_numbers_outside_the_content_are_refused() -> None:
    value = tf.make_tensor_proto(np.float32(3)).SerializeToString()  # in float_val, as serialize_tensor never writes
    with pytest.raises(DataError, match="holds 0 bytes of data where the schema says 4"):
        TENSOR.decode(Feature("float32", ()), memoryview(value))


def test_a_bool_is_0_or_1_whatever_the_byte() -> None:
    feature = Feature("bool", (4,))
    value = TENSOR.encode(feature, np.zeros(4, bool))[:-4] + b"\x00\x01\x02\xff"
    decoded = TENSOR.decode(feature, memoryview(value))
    assert decoded.tobytes() == TENSOR.parse(feature, tf.constant(value)).numpy().tobytes() == b"\x00\x01\x01\x01"


@pytest.mark.parametrize("text", [b"\0\0", "\u00e9", "", np.str_("x"), np.bytes_(b"y")])
def test_text_and_bytes_are_strings(text: Any) -> None:
    feature = Feature("string", ())
    decoded = TENSOR.decode(feature, memoryview(TENSOR.encode(feature, np.array(text, object)))).item()
    assert decoded == (text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(("other", "message"), [(5, "got int"), (None, "got NoneType"), ("\ud800", "no form in UTF-8")])
def test_other_objects_are_no_strings(other: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TENSOR.encode(Feature("string", ()), np.array(other, object))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_data_error(data: bytes) -> None:
    for feature in (NUMERIC, Feature("string", (1,))):
        try:
            array = TENSOR.decode(feature, memoryview(data))
        except DataError:
            continue
        assert array.shape == feature.shape


def test_an_absurd_shape_costs_nothing() -> None:
    shape = tf.TensorShape([1 << 40, 1 << 40]).as_proto()
    proto = tf.make_tensor_proto(NUMBERS)
    proto.tensor_shape.CopyFrom(shape)
    with pytest.raises(DataError, match=r"holds int16\[1099511627776, 1099511627776\]"):
        TENSOR.decode(NUMERIC, memoryview(proto.SerializeToString()))


def test_an_unknown_codec_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match="Unknown codec 'tenser': there is 'tensor'; did you mean 'tensor'"):
        get_codec("tenser")
