"""Array <-> record bytes: the only code that encodes or decodes.

A codec turns one feature's array into the bytes value of a ``tf.train.Feature`` and back, in NumPy (writing, random
access) and as TensorFlow ops (reading). Here is ``tensor``, the serialized ``TensorProto`` that OTBTF writes.

Wire format: protocol buffers' encoding guide; field numbers from TensorFlow's tensor.proto, tensor_shape.proto and
types.proto.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.schema import MAX_RANK, STRING, Feature, nearest, numpy_dtype

if TYPE_CHECKING:
    import tensorflow as tf

TF_DTYPE_NUMBERS: Mapping[str, int] = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "string": 7, "complex64": 8, "int64": 9,
    "bool": 10, "bfloat16": 14, "uint16": 17, "complex128": 18, "float16": 19, "uint32": 22, "uint64": 23,
}  # fmt: skip
"""Numbers of the element types in TensorFlow's types.proto."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """A non-negative integer below 2**64 in protocol buffers' base-128 encoding."""
    out = bytearray()
    while value > 0x7F:  # seven payload bits a byte
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(field: int, size: int) -> bytes:
    """Tag and length of a length-delimited field, before its ``size`` bytes."""
    return varint(field << 3 | _BYTES) + varint(size)


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The integer at a place and the place after it.

    Raises:
        DataError: the bytes end early or the number has over 64 bits.
    """
    value = shift = 0
    while at < len(data) and shift < 64:  # ten bytes at most
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # the last byte has its top bit clear
            return value & (1 << 64) - 1, at
        shift += 7
    msg = "a number in the record's wire format does not end"
    raise DataError(msg)


def messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """The bytes of every length-delimited field of that number, one by one.

    Raises:
        DataError: the bytes are no protocol buffer message.
    """
    for found, wire, value in fields(data):
        if found == number and wire == _BYTES and isinstance(value, memoryview):
            yield value


def fields(data: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """The fields of one protocol buffer message, one by one: (number, wire type, integer or bytes).

    Not a list: two bytes can be a field, and a hundred bytes of memory each would add up.

    Raises:
        DataError: the bytes are no such message.
    """
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        value: int | memoryview
        if wire == _VARINT:
            value, at = read_varint(data, at)
        elif wire in (_BYTES, _FIXED32, _FIXED64):
            if wire == _BYTES:
                size, at = read_varint(data, at)
            else:
                size = 4 if wire == _FIXED32 else 8
            if size > len(data) - at:
                msg = f"field {number} of the record claims {size} bytes where {len(data) - at} are left"
                raise DataError(msg)
            value, at = data[at : at + size], at + size
        else:
            msg = f"field {number} of the record has the unknown wire type {wire}"
            raise DataError(msg)
        if number == 0:
            msg = "a field of the record has the number 0"
            raise DataError(msg)
        yield number, wire, value


class Codec(Protocol):
    """How one kind of feature is stored."""

    def check(self, name: str, feature: Feature) -> None:
        """Raises InputError where the codec can't keep this feature."""

    def prefix(self, feature: Feature) -> bytes | None:
        """The constant bytes before the raw little-endian array, or None where the value has another form."""

    def encode(self, feature: Feature, array: npt.NDArray[Any]) -> bytes:
        """The bytes value of an array that fits the feature."""

    def decode(self, feature: Feature, value: memoryview) -> npt.NDArray[Any]:
        """The array of a bytes value; DataError where it does not fit the feature."""

    def parse(self, feature: Feature, value: tf.Tensor) -> tf.Tensor:
        """The same as ops: a string tensor of shape () or (batch,) -> the feature's shape with that in front."""


def little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array in little-endian byte order, C-contiguous (itself where it is so already)."""
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array)


class TensorCodec:
    """``tf.io.serialize_tensor``'s bytes: a ``TensorProto`` of fixed type and shape.

    For numeric types and at least one element this is a constant header followed by the array's little-endian bytes
    (``tensor_content``); a tensor without elements has no content; strings are repeated ``string_val`` fields.
    """

    def check(self, name: str, feature: Feature) -> None:
        """Every feature fits."""

    def prefix(self, feature: Feature) -> bytes | None:
        """The header, for numeric types (also without elements: then nothing follows it)."""
        if feature.dtype == STRING:
            return None
        header = self._header(feature)
        return header + length_delimited(4, feature.nbytes) if feature.size else header

    @staticmethod
    def _header(feature: Feature) -> bytes:
        dims = b""
        for n in feature.shape:
            dim = b"\x08" + varint(n) if n else b""  # proto3 leaves a zero out
            dims += length_delimited(2, len(dim)) + dim
        return b"\x08" + varint(TF_DTYPE_NUMBERS[feature.dtype]) + length_delimited(2, len(dims)) + dims

    def encode(self, feature: Feature, array: npt.NDArray[Any]) -> bytes:
        """The ``TensorProto`` of an array that fits the feature."""
        prefix = self.prefix(feature)
        if prefix is not None:
            return prefix + little_endian(array).tobytes()
        out = bytearray(self._header(feature))
        for text in np.asarray(array).ravel():
            data = _as_bytes(text)
            out += length_delimited(8, len(data)) + data
        return bytes(out)

    def decode(self, feature: Feature, value: memoryview) -> npt.NDArray[Any]:
        """The array of a ``TensorProto``.

        Raises:
            DataError: another type, another shape or another number of elements than the feature says.
        """
        prefix = self.prefix(feature)
        if prefix is not None and len(value) == len(prefix) + feature.nbytes and value[: len(prefix)] == prefix:
            return _from_bytes(feature, value[len(prefix) :])
        return self._decode_any(feature, value)

    def _decode_any(self, feature: Feature, value: memoryview) -> npt.NDArray[Any]:
        """The general case: strings, and headers written in another, equivalent way."""
        # Field numbers of tensor.proto: 1 type, 2 shape, 4 content, 8 strings. Of a single value the last one counts.
        number, content = -1, memoryview(b"")
        for field, _, part in fields(value):
            if field == 1 and isinstance(part, int):
                number = part
            elif field == 4 and not isinstance(part, int):
                content = part
        sizes = (_dim(dim) for part in messages(value, 2) for dim in messages(part, 2))
        shape = tuple(itertools.islice(sizes, MAX_RANK + 1))
        if number != TF_DTYPE_NUMBERS[feature.dtype] or shape != feature.shape:
            name = next((k for k, v in TF_DTYPE_NUMBERS.items() if v == number), f"type {number}")
            msg = f"holds {name}{list(shape)} where the schema says {feature.dtype}{list(feature.shape)}"
            raise DataError(msg)
        if feature.dtype == STRING:
            strings = [bytes(text) for text in itertools.islice(messages(value, 8), feature.size + 1)]
            if len(strings) != feature.size:
                more = "more" if len(strings) > feature.size else len(strings)
                msg = f"holds {more} strings where the schema says {feature.size}"
                raise DataError(msg)
            array = np.empty(feature.size, object)
            array[:] = strings
            return array.reshape(feature.shape)
        if len(content) != feature.nbytes:
            msg = f"holds {len(content)} bytes of data where the schema says {feature.nbytes}"
            raise DataError(msg)
        return _from_bytes(feature, content)

    def parse(self, feature: Feature, value: tf.Tensor) -> tf.Tensor:
        """The same as TensorFlow ops, for one value or a batch of them."""
        import tensorflow as tf  # a cost of seconds, paid by readers alone

        prefix = self.prefix(feature)
        dtype = tf.dtypes.as_dtype(feature.dtype)
        if prefix is None or not feature.size:
            if value.shape.rank == 0:
                return tf.ensure_shape(tf.io.parse_tensor(value, dtype), feature.shape)
            each = tf.TensorSpec(feature.shape, dtype)
            return tf.map_fn(
                lambda v: tf.ensure_shape(tf.io.parse_tensor(v, dtype), feature.shape), value, fn_output_signature=each
            )
        # decode_raw pads in silence where it is told a length, and substr shortens: so lengths are compared first.
        right = tf.strings.length(value) == len(prefix) + feature.nbytes
        right &= tf.strings.substr(value, 0, len(prefix)) == prefix
        told = f"a record holds another tensor than the schema says, {feature.dtype}{list(feature.shape)}"
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(right), [told])]):
            # It knows not every type either: bytes first, then the type.
            body = tf.io.decode_raw(value, tf.uint8)[..., len(prefix) :]
        batch = [] if value.shape.rank == 0 else [-1 if value.shape[0] is None else value.shape[0]]
        if feature.dtype == "bool":
            return tf.cast(tf.reshape(body, [*batch, *feature.shape]), tf.bool)
        if dtype.size > 1:
            body = tf.reshape(body, [*batch, *feature.shape, dtype.size])
        return tf.reshape(tf.bitcast(body, dtype), [*batch, *feature.shape])


def _from_bytes(feature: Feature, data: memoryview) -> npt.NDArray[Any]:
    """The array of little-endian bytes, as many as the feature has; read-only where NumPy can view them."""
    dtype = numpy_dtype(feature.dtype)
    if feature.dtype == "bool":  # any byte but zero is true, and an array of bool may hold no other than 0 and 1
        return np.asarray(np.frombuffer(data, np.uint8) != 0).reshape(feature.shape)
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(feature.shape).astype(dtype, copy=False)


def _dim(data: memoryview) -> int:
    size = 0
    for field, _, value in fields(data):
        if field == 1 and isinstance(value, int):
            size = value
    return size


def _as_bytes(text: object) -> bytes:
    if isinstance(text, str):
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            msg = f"The text {text!r} has no form in UTF-8 ({error.reason})."
            raise InputError(msg) from error
    if isinstance(text, bytes | np.bytes_):
        return bytes(text)
    msg = f"A string feature holds text or bytes, got {type(text).__name__}."
    raise InputError(msg)


CODECS: Mapping[str, Codec] = {"tensor": TensorCodec()}
"""The codecs by name."""


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    if name not in CODECS:
        msg = f"Unknown codec {name!r}: there is {', '.join(map(repr, CODECS))}{nearest(name, CODECS)}"
        raise InputError(msg)
    return CODECS[name]
