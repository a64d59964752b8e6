"""Framing and record bytes against TensorFlow's writer, reader and protocol buffers."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from otbtf_style import all_kinds, example, example_bytes, same, same_samples

from otbtf_lite import records
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.records import RecordEncoder, RecordLayout, ShardDigest, decode_example, encode_example, iter_records
from otbtf_lite.schema import Feature, Sample, Schema

KINDS = all_kinds(2)
NUMBERS = {key: array for key, array in KINDS.items() if array.dtype != object}


def encode(schema: Schema, samples: list[Sample], digest: ShardDigest | None = None) -> bytes:
    return b"".join(map(bytes, RecordEncoder(schema).encode(iter(samples), digest or ShardDigest())))


def framed(path: Path, data: list[bytes]) -> bytes:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for each in data:
            writer.write(each)
    return path.read_bytes()


def read(data: bytes, **options: Any) -> list[records.Record]:
    return list(iter_records(io.BytesIO(data), "0.records", **options))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Three records, as TensorFlow writes them."""
    return framed(tmp_path_factory.mktemp("shard") / "0.records", [b"", b"one", bytes(range(40))])


@pytest.mark.parametrize("sample", [KINDS, NUMBERS], ids=["with strings", "numbers alone"])
def test_record_bytes_are_deterministic_protocol_buffers(sample: Sample) -> None:
    assert encode_example(Schema.of(sample), sample) == example(sample).SerializeToString(deterministic=True)


@given(st.sets(st.text("aZ\u00e9\u4e2d\U0001f30d0-_/ ", min_size=1, max_size=4), min_size=1, max_size=6))
def test_keys_come_in_the_order_of_deterministic_protocol_buffers(keys: set[str]) -> None:
    """It is the order of their bytes, where none begins another; what begins with another comes first there."""
    sample: Sample = {key: np.array(n) for n, key in enumerate(keys)}
    data = encode_example(Schema.of(sample), sample)
    theirs = example(sample)
    if not any(a != b and b.startswith(a) for a, b in itertools.permutations(keys, 2)):
        assert data == theirs.SerializeToString(deterministic=True)
    assert tf.train.Example.FromString(data) == theirs


@pytest.mark.parametrize("sample", [KINDS, NUMBERS], ids=["with strings", "numbers alone"])
def test_a_shard_is_what_tensorflows_writer_writes(sample: Sample, tmp_path: Path) -> None:
    seeds = range(3)
    samples = [{key: all_kinds(seed)[key] for key in sample} for seed in seeds]
    theirs = framed(tmp_path / "0.records", [example(each).SerializeToString(deterministic=True) for each in samples])
    assert encode(Schema.of(sample), samples) == theirs


@pytest.mark.parametrize("rows", [1, 100, 500])
def test_buffers_are_filled_and_used_again(rows: int) -> None:
    """Records of 1, 77 and 386 KB: many in a buffer of 1 MB, 13, and two."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = [
        {"x": rng.integers(0, 255, (rows, 386, 2), np.uint8), "y": np.array([n], np.int64)} for n in range(29)
    ]
    schema = Schema.of(samples[0])
    digest = ShardDigest()
    found = read(encode(schema, samples, digest))
    assert same_samples([decode_example(schema, record.data) for record in found], samples)
    assert digest.records == len(samples)
    assert digest.first_crc == found[0].crc


def test_a_buffer_can_be_used_for_the_next_shard() -> None:
    encoder = RecordEncoder(Schema({"x": Feature("uint8", (100_000,))}))
    samples = [{"x": np.full(100_000, n, np.uint8)} for n in range(25)]
    first = b"".join(map(bytes, encoder.encode(iter(samples[:12]), ShardDigest())))
    second = b"".join(map(bytes, encoder.encode(iter(samples[12:]), ShardDigest())))
    assert first + second == encode(encoder.schema, samples)


def test_layouts_are_of_fixed_sizes() -> None:
    layout = RecordLayout.of(Schema.of(NUMBERS))
    assert layout is not None
    assert {key: size for key, (_, size) in layout.gaps.items()} == {key: each.nbytes for key, each in NUMBERS.items()}
    assert RecordLayout.of(Schema.of(KINDS)) is None


def test_views_are_written_like_copies() -> None:
    whole = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
    view = whole.transpose(1, 0, 2)[::2]
    schema = Schema.of({"x": view})
    written = {
        encode(schema, [{"x": each}]) for each in (view, view.copy(), view.astype(">f4"), np.asfortranarray(view))
    }
    assert len(written) == 1


def test_the_digest_counts_every_byte_in_through_the_checksums() -> None:
    def digest(samples: list[Sample]) -> str:
        found = ShardDigest()
        encode(Schema.of(samples[0]), samples, found)
        return found.hexdigest()

    numbers: list[Sample] = [{"x": np.array(n)} for n in range(3)]
    assert digest(numbers) == digest(list(numbers))
    others = [numbers[:2], [*numbers, numbers[0]], [numbers[1], numbers[0], numbers[2]], [*numbers[:2], numbers[1]]]
    assert len({digest(each) for each in [numbers, *others]}) == 5


@pytest.mark.parametrize("count", [2, 3])
def test_a_record_that_nobody_can_read_is_not_written(count: int) -> None:
    schema = Schema({f"x{n}": Feature("uint8", (1 << 30,)) for n in range(count)})
    with pytest.raises(InputError, match="no record may be longer than 2147483647"):
        RecordEncoder(schema)


def test_a_wrong_string_is_told_with_its_key() -> None:
    with pytest.raises(InputError, match="Feature 'name': A string feature holds text or bytes, got float"):
        encode(Schema({"name": Feature("string", ())}), [{"name": np.array(1.5, object)}])


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_read_in_any_order(seed: int) -> None:
    keys = [str(key) for key in np.random.default_rng(seed).permutation(list(KINDS))]
    data = example_bytes(KINDS, keys)
    decoded = decode_example(Schema.of(KINDS), data)
    assert list(decoded) == list(KINDS)
    assert same_samples([decoded], [KINDS])


def test_a_key_that_is_not_asked_for_is_passed_over() -> None:
    assert list(decode_example(Schema.of({"word": KINDS["word"]}), example_bytes(KINDS, list(KINDS)))) == ["word"]


def test_of_two_features_of_one_name_the_last_counts() -> None:
    """As in protocol buffers, whose maps are repeated entries."""
    one, two = ({"x": np.array(n)} for n in (1, 2))
    data = example_bytes(one, ["x"]) + example_bytes(two, ["x"])
    assert tf.train.Example.FromString(data) == example(two)
    assert decode_example(Schema.of(one), data)["x"] == 2
    none = tf.train.Example(features=tf.train.Features(feature={"x": tf.train.Feature()}))
    with pytest.raises(DataError, match="has no feature 'x'"):
        decode_example(Schema.of(one), data + none.SerializeToString())


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (None, r"has no feature 'x': it has \['y'\]"),
        (tf.train.Feature(int64_list=tf.train.Int64List(value=[1])), r"has no feature 'x': it has \['y'\]"),
        (tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"b"])), r"has no feature 'x': it has \['y'\]"),
        (tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"zzz"])), "feature 'x' .* claims 122 bytes"),
        (tf.train.Feature(bytes_list=tf.train.BytesList(value=[b""])), "feature 'x' holds type -1"),
    ],
)
def test_what_does_not_fit_is_named(feature: tf.train.Feature | None, message: str) -> None:
    features = {"y": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"y"]))}
    if feature is not None:
        features["x"] = feature
    data = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    with pytest.raises(DataError, match=message):
        decode_example(Schema({"x": Feature("uint8", ())}), data)


@given(st.binary(max_size=80))
def test_any_bytes_are_an_example_or_a_data_error(data: bytes) -> None:
    with pytest.raises(DataError):
        decode_example(Schema({"x": Feature("uint8", ())}), data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_one_changed_byte_is_decoded_or_told(at: int, value: int) -> None:
    schema = Schema.of(KINDS)
    data = bytearray(encode_example(schema, KINDS))
    data[at % len(data)] = value
    try:
        decoded = decode_example(schema, bytes(data))
    except DataError:
        return
    assert Schema.of(decoded) == schema


def test_tensorflows_records_are_read(shard: bytes) -> None:
    found = read(shard)
    assert [record.data for record in found] == [b"", b"one", bytes(range(40))]
    assert [record.offset for record in found] == [0, 16, 35]
    assert len(records.record_offsets(io.BytesIO(shard), "0.records", len(shard))) == 3
    for record in found:
        assert shard[record.offset :].startswith(records.frame_header(len(record.data)) + record.data)
        assert record.crc == records.masked_crc(record.data)


def test_a_shard_cut_anywhere_is_told_but_between_records(shard: bytes) -> None:
    """Only the manifest's counts catch a cut between records."""
    whole = {0: 0, 16: 1, 35: 2}
    for size in range(len(shard)):
        if size in whole:
            assert len(read(shard[:size])) == whole[size]
            continue
        with pytest.raises(DataError, match=r"0.records: record [012] at byte (0|16|35) is cut"):
            read(shard[:size])
        with pytest.raises(DataError, match="is cut"):
            records.record_offsets(io.BytesIO(shard[:size]), "0.records", size)


def flips(shard: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(8 * len(shard)):
        changed = bytearray(shard)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit // 8, bytes(changed)


def test_every_flipped_bit_is_found(shard: bytes) -> None:
    for byte, changed in flips(shard):
        number = 0 if byte < 16 else 1 if byte < 35 else 2
        with pytest.raises(DataError, match=f"0.records: record {number} at byte .* is corrupt: the checksum of its"):
            read(changed)


def test_without_check_the_lengths_are_checked_still(shard: bytes) -> None:
    lengths = [*range(12), *range(16, 28), *range(35, 47)]
    for byte, changed in flips(shard):
        if byte in lengths:
            with pytest.raises(DataError, match="checksum of its length"):
                read(changed, check=False)
        else:
            assert len(read(changed, check=False)) == 3


@pytest.mark.parametrize("size", [1 << 31, 1 << 63, (1 << 64) - 1])
def test_an_absurd_length_is_refused(size: int) -> None:
    data = records.frame_header(size) + b"abc"
    with pytest.raises(DataError, match=f"claims {size} bytes: no record is longer than 2147483647"):
        read(data)


def test_a_false_length_costs_no_memory() -> None:
    class Short(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 <= size <= 1 << 24
            return super().read(size)

    with pytest.raises(DataError, match="says 2147483647 bytes, the file ends after 3"):
        list(iter_records(Short(records.frame_header((1 << 31) - 1) + b"abc"), "0.records"))


def test_other_files_are_no_records() -> None:
    with pytest.raises(DataError, match="or the file is no TFRecord file"):
        read(b"II*\0" + bytes(100))


def test_arrays_of_decoded_records_keep_their_types() -> None:
    decoded = decode_example(Schema.of(KINDS), encode_example(Schema.of(KINDS), KINDS))
    assert all(same(decoded[key], KINDS[key]) for key in KINDS)
