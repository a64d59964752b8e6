"""TFRecord framing and the bytes of a record, without TensorFlow.

A TFRecord file is a run of records: length (uint64), masked CRC-32C of those 8 bytes, the data, masked CRC-32C of the
data, all little-endian (TensorFlow, tensorflow/core/lib/io/record_writer.h). A record is a ``tf.train.Example`` whose
features are each a ``bytes_list`` of one value (tensorflow/core/example/example.proto and feature.proto).

For a schema of fixed types and shapes a whole record is constant bytes with fixed gaps for the arrays' bytes: a
:class:`RecordLayout`. :class:`RecordEncoder` keeps a buffer of such records, fills the gaps and hands out the bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from otbtf_lite.codecs import get_codec, length_delimited, little_endian, messages
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.schema import Sample, Schema, shown

HEADER_BYTES = 12
"""Bytes before a record's data: length and its CRC."""
FRAME_BYTES = 16
"""Bytes that the framing adds to each record."""
MAX_RECORD_BYTES = (1 << 31) - 1
"""The longest record that is written or read: TensorFlow's protocol buffers end at 2 GiB."""

_BUFFER_BYTES = 1 << 20
_MASK_DELTA = 0xA282EAD8


def masked_crc(data: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """TensorFlow's masked CRC-32C: rotated right by 15 bits, plus a constant."""
    crc = int(crc32c(data))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def frame_header(size: int) -> bytes:
    """The 12 bytes before a record of ``size`` bytes."""
    length = struct.pack("<Q", size)
    return length + struct.pack("<I", masked_crc(length))


@dataclass(frozen=True)
class RecordLayout:
    """Constant bytes with fixed gaps: what every record of a schema of fixed types and shapes looks like."""

    template: bytes
    """The framed record, header and trailing CRC included, with zeros in the gaps and for the CRC of the data."""
    gaps: Mapping[str, tuple[int, int]]
    """Where each feature's raw bytes lie in the template: (offset, bytes)."""

    @classmethod
    def of(cls, schema: Schema) -> RecordLayout | None:
        """The layout of a schema, keys in byte order; None where a feature has no fixed size.

        The bytes equal ``SerializeToString(deterministic=True)`` unless one key is a prefix of another.
        """
        pieces: list[bytes] = []
        gaps: dict[str, tuple[int, int]] = {}
        for name in sorted(schema, key=str.encode):
            feature = schema[name]
            prefix = get_codec(feature.codec).prefix(feature)
            if prefix is None:
                return None
            pieces.append(_entry_head(name, len(prefix) + feature.nbytes) + prefix)
            gaps[name] = (sum(map(len, pieces)), feature.nbytes)
            pieces.append(bytes(feature.nbytes))
        body = b"".join(pieces)
        head = length_delimited(1, len(body))
        start = HEADER_BYTES + len(head)
        template = frame_header(len(head) + len(body)) + head + body + bytes(4)
        return cls(template, {k: (start + offset, size) for k, (offset, size) in gaps.items()})


def _entry_head(name: str, value_size: int) -> bytes:
    """What comes before a feature's value in ``Features``: map entry, key, Feature, BytesList, each with its length."""
    bytes_list = length_delimited(1, value_size)
    feature = length_delimited(1, len(bytes_list) + value_size) + bytes_list
    key = name.encode()
    entry = length_delimited(1, len(key)) + key + length_delimited(2, len(feature) + value_size) + feature
    return length_delimited(1, len(entry) + value_size) + entry


def encode_example(schema: Schema, sample: Sample) -> bytes:
    """The ``tf.train.Example`` of a sample that fits the schema, keys in byte order, without framing.

    Raises:
        InputError: a string feature holds something other than text or bytes.
    """
    body = bytearray()
    for name in sorted(schema, key=str.encode):
        try:
            value = get_codec(schema[name].codec).encode(schema[name], sample[name])
        except InputError as error:
            msg = f"Feature {name!r}: {error}"
            raise InputError(msg) from error
        body += _entry_head(name, len(value)) + value
    return length_delimited(1, len(body)) + bytes(body)


def decode_example(schema: Schema, data: bytes | memoryview) -> Sample:
    """The sample of a record's data, in the schema's order. Keys that the schema lacks are passed over.

    Raises:
        DataError: the data are no such Example, a key is missing, or a value does not fit.
    """
    values = example_values(memoryview(data))
    out: Sample = {}
    for name, feature in schema.items():
        if name not in values:
            msg = f"has no feature {name!r}: it has {shown(sorted(values))}"
            raise DataError(msg)
        try:
            out[name] = get_codec(feature.codec).decode(feature, values[name])
        except DataError as error:
            msg = f"feature {name!r} {error}"
            raise DataError(msg) from error
    return out


def example_values(data: memoryview) -> dict[str, memoryview]:
    """The bytes value of every feature of a ``tf.train.Example`` that holds exactly one.

    Raises:
        DataError: the data are no Example.
    """
    out: dict[str, memoryview] = {}
    for features in messages(data, 1):
        for entry in messages(features, 1):
            keys = list(messages(entry, 1))
            try:
                name = bytes(keys[-1]).decode() if keys else ""
            except UnicodeDecodeError as error:
                msg = "a feature's name is not UTF-8"
                raise DataError(msg) from error
            lists = (bytes_list for value in messages(entry, 2) for bytes_list in messages(value, 1))
            single = list(itertools.islice((value for one in lists for value in messages(one, 1)), 2))
            out.pop(name, None)  # of two features with one name the last one counts
            if len(single) == 1:
                out[name] = single[0]
    return out


@dataclass(frozen=True)
class Record:
    """One record of a file, as it is stored."""

    offset: int
    """Where its length header starts, in (uncompressed) bytes from the file's start."""
    data: bytes
    """The data, checked against its CRC where that was asked for."""
    crc: int
    """The stored, masked CRC of the data."""


class ShardDigest:
    """What a manifest keeps of a shard: SHA-256 over each record's length and stored CRC, records, bytes, first CRC.

    Through the CRCs the digest binds every byte, at no cost worth naming; it is the same for a compressed shard.
    """

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self.records = 0
        """Records so far."""
        self.first_crc: int | None = None
        """The stored (masked) CRC of the first record's data."""

    def add(self, length_and_crc: bytes) -> None:
        """Counts one record in, by its length (8 bytes) and the stored CRC of its data (4 bytes)."""
        if self.first_crc is None:
            self.first_crc = int.from_bytes(length_and_crc[8:], "little")
        self._sha.update(length_and_crc)
        self.records += 1

    def hexdigest(self) -> str:
        """The digest of the records so far."""
        return self._sha.hexdigest()


class RawEncoder:
    """Records that are serialized already -> framed record bytes."""

    def encode(self, records: Iterator[Record], digest: ShardDigest) -> Iterator[memoryview]:
        """The framed bytes of the records, one at a time. Their checksums are those that they have."""
        for record in records:
            head, crc = frame_header(len(record.data)), struct.pack("<I", record.crc)
            digest.add(head[:8] + crc)
            yield memoryview(b"".join((head, record.data, crc)))


class RecordEncoder:
    """Samples -> framed record bytes, by way of one reusable buffer of about 1 MB where the schema has a layout.

    Args:
        schema: what every sample looks like.

    Raises:
        InputError: records would be longer than :data:`MAX_RECORD_BYTES`.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        _check_length(sum(feature.nbytes for feature in schema.values()))
        self._layout = RecordLayout.of(schema)
        if self._layout is not None:
            size = len(self._layout.template)
            _check_length(size - FRAME_BYTES)
            self._rows = np.empty((max(1, _BUFFER_BYTES // size), size), np.uint8)
            self._rows[:] = np.frombuffer(self._layout.template, np.uint8)
            self._length = self._layout.template[:8]

    def encode(self, samples: Iterator[Sample], digest: ShardDigest) -> Iterator[memoryview]:
        """The framed bytes of the samples, a buffer at a time; each is valid until the next is asked for.

        Args:
            samples: samples that fit the schema.
            digest: counts every record in.

        Raises:
            InputError: a sample whose strings are no strings, or make too long a record.
        """
        if self._layout is None:
            for sample in samples:
                yield memoryview(self._encode_one(sample, digest))
            return
        at = 0
        for sample in samples:
            row = self._rows[at]
            for name, (offset, size) in self._layout.gaps.items():
                # A zero-size array has no buffer to view; there is nothing to copy either.
                if size:
                    row[offset : offset + size] = little_endian(sample[name]).reshape(-1).view(np.uint8)
            row[-4:] = np.frombuffer(struct.pack("<I", masked_crc(row[HEADER_BYTES:-4])), np.uint8)
            digest.add(self._length + row[-4:].tobytes())
            at += 1
            if at == len(self._rows):
                yield memoryview(self._rows.reshape(-1))
                at = 0
        if at:
            yield memoryview(self._rows[:at].reshape(-1))

    def _encode_one(self, sample: Sample, digest: ShardDigest) -> bytes:
        data = encode_example(self.schema, sample)
        _check_length(len(data))
        head, crc = frame_header(len(data)), struct.pack("<I", masked_crc(data))
        digest.add(head[:8] + crc)
        return head + data + crc


def _check_length(size: int) -> None:
    if size > MAX_RECORD_BYTES:
        msg = f"A record of these samples would have {size} bytes: no record may be longer than {MAX_RECORD_BYTES}."
        raise InputError(msg)


def iter_records(
    file: BinaryIO,
    name: str,
    *,
    check: bool = True,
    on_corrupt: Callable[[str], object] | None = None,
    most: int = MAX_RECORD_BYTES,
) -> Iterator[Record]:
    """Every record of an open, uncompressed stream.

    Args:
        file: positioned at the first record.
        name: what to call the file in a message.
        check: whether the data's CRC is checked (the length's always is: without it nothing can be read).
        on_corrupt: is told of a record whose data have a wrong CRC, which comes all the same; None raises.
        most: the longest record there may be, in bytes.

    Raises:
        DataError: a cut file, a wrong CRC or an absurd length, with file, record and byte offset.
    """
    offset = number = 0
    while header := read_exactly(file, HEADER_BYTES):
        place = f"{name}: record {number} at byte {offset}"
        record, right = _read_body(file, header, offset, place, check=check, most=most)
        if not right:
            msg = f"{place} is corrupt: the checksum of its {len(record.data)} bytes of data is wrong."
            if on_corrupt is None:
                raise DataError(msg)
            on_corrupt(msg)
        yield record
        offset += FRAME_BYTES + len(record.data)
        number += 1


def read_record(file: BinaryIO, offset: int, place: str, most: int = MAX_RECORD_BYTES) -> Record:
    """The record whose length header starts at a place in an open, uncompressed, seekable file.

    Raises:
        DataError: it is cut or corrupt; the message starts with ``place``.
    """
    file.seek(offset)
    place = f"{place} at byte {offset}"
    record, right = _read_body(file, read_exactly(file, HEADER_BYTES), offset, place, check=True, most=most)
    if not right:
        msg = f"{place} is corrupt: the checksum of its {len(record.data)} bytes of data is wrong."
        raise DataError(msg)
    return record


def _read_body(
    file: BinaryIO, header: bytes, offset: int, place: str, *, check: bool, most: int
) -> tuple[Record, bool]:
    """What follows a header, and whether its checksum is right (or was not asked for)."""
    size = check_header(header, place, most)
    # Two reads: to cut the checksum off one would copy the data.
    data = read_exactly(file, size)
    stored = read_exactly(file, 4) if len(data) == size else b""
    there = len(data) + len(stored)
    if there < size + 4:
        msg = f"{place} is cut: its header says {size} bytes, the file ends after {there} of {size + 4}."
        raise DataError(msg)
    record = Record(offset, data, int.from_bytes(stored, "little"))
    return record, not check or masked_crc(data) == record.crc


def check_header(header: bytes, place: str, most: int = MAX_RECORD_BYTES) -> int:
    """The length in a record's header.

    Raises:
        DataError: fewer than 12 bytes, a wrong CRC, or a length over ``most``.
    """
    if len(header) < HEADER_BYTES:
        msg = f"{place} is cut inside its length header: {len(header)} of {HEADER_BYTES} bytes are there."
        raise DataError(msg)
    size, crc = struct.unpack("<QI", header)
    if masked_crc(header[:8]) != crc:
        msg = f"{place} is corrupt: the checksum of its length is wrong (or the file is no TFRecord file)."
        raise DataError(msg)
    if size > most:
        msg = f"{place} claims {size} bytes: no record is longer than {most} here."
        raise DataError(msg)
    return int(size)


def read_exactly(file: BinaryIO, size: int) -> bytes:
    """``size`` bytes, or as many as there are before the end; reads in pieces so that a false size costs nothing."""
    pieces: list[Any] = []
    left = size
    while left > 0:
        piece = file.read(min(left, 1 << 24))
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def record_offsets(file: BinaryIO, name: str, size: int) -> list[int]:
    """Where the records of an open, seekable, uncompressed file of ``size`` bytes start, by their length headers alone.

    Raises:
        DataError: a header that is cut or corrupt, or a record that reaches past the end.
    """
    starts: list[int] = []
    offset = 0
    while offset < size:
        place = f"{name}: record {len(starts)} at byte {offset}"
        file.seek(offset)
        length = check_header(read_exactly(file, HEADER_BYTES), place)
        starts.append(offset)
        offset += FRAME_BYTES + length
        if offset > size:
            msg = f"{place} is cut: its header says {length} bytes, the file ends {offset - size} bytes too early."
            raise DataError(msg)
    return starts
