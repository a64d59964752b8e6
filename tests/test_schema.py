from __future__ import annotations

import json
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otbtf_lite.errors import InputError
from otbtf_lite.schema import NUMERIC_DTYPES, Feature, Schema, dtype_name, key_list, nearest, numpy_dtype

XS = Feature("uint16", (4, 4, 3))
SCHEMA = Schema({"xs": XS, "label": Feature("int64", (1,)), "name": Feature("string", ())})

features = st.builds(
    Feature, st.sampled_from([*NUMERIC_DTYPES, "string"]), st.lists(st.integers(0, 9), max_size=4).map(tuple)
)
names = st.text("ab\0 /\u00e9\U0001f30d", max_size=3)
schemas = st.dictionaries(names.filter(bool), features, min_size=1, max_size=4).map(Schema)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | names | st.just("uint8")
values = st.recursive(
    leaves,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(names | st.sampled_from(["dtype", "shape", "codec"]), each)
    ),
    max_leaves=6,
)


def sample() -> dict[str, Any]:
    return {"xs": np.ones((4, 4, 3), np.uint16), "label": np.array([7]), "name": "x"}


@pytest.mark.parametrize("name", NUMERIC_DTYPES)
def test_each_type_has_one_name_in_either_byte_order(name: str) -> None:
    dtype = numpy_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype_name(dtype.newbyteorder(">")) == name
    assert dtype.itemsize == Feature(name, (3,)).nbytes / 3


def test_the_types_are_those_that_they_are_called() -> None:
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert [numpy_dtype(name) for name in ("float32", "bool", "complex128")] == [np.float32, np.bool_, np.complex128]
    assert numpy_dtype("string") == np.object_
    assert dtype_name("U5") == dtype_name("S5") == dtype_name(object) == "string"


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[D]", "g", "G", "i4,f4", "V3", ml_dtypes.float8_e5m2], ids=str)
def test_a_type_that_records_do_not_know_is_refused(dtype: Any) -> None:
    with pytest.raises(InputError, match="convert them to one of float16"):
        dtype_name(dtype)


@pytest.mark.parametrize("name", ["float", "", "datetime64", "float128"])
def test_an_unknown_name_of_a_type_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="Unknown element type"):
        numpy_dtype(name)


@pytest.mark.parametrize(
    "shape", [(-1,), (1.0,), (2.5,), (True,), ("3",), "33", None, 4, (None, 3), ((2,),), (1,) * 255, (float("nan"),)]
)
def test_a_shape_is_whole_non_negative_numbers(shape: Any) -> None:
    with pytest.raises(InputError, match="non-negative integers"):
        Feature("uint8", shape)


def test_a_shape_becomes_plain_integers() -> None:
    feature = Feature("uint8", [np.int32(3), 4])  # type: ignore[arg-type]
    assert feature.shape == (3, 4)
    assert {type(n) for n in feature.shape} == {int}
    assert (feature.size, feature.nbytes) == (12, 12)


@pytest.mark.parametrize("shape", [(1 << 30, 2), (1 << 62, 1 << 62), ((1 << 63) - 1,)])
def test_a_feature_that_no_memory_holds_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="1 GiB is the most"):
        Feature("uint8", shape)
    assert Feature("uint8", (0, *shape)).nbytes == 0
    with pytest.raises(InputError, match="1 GiB is the most"):
        Feature("uint8", (0, 1 << 63))


@pytest.mark.parametrize("name", ["", 5, None, "\ud800"])
def test_names_are_text(name: Any) -> None:
    with pytest.raises(InputError, match="must be text"):
        Schema({name: XS})


def test_a_schema_has_features() -> None:
    with pytest.raises(InputError, match="at least one feature"):
        Schema({})


def test_a_schema_is_a_frozen_mapping_in_order() -> None:
    assert list(SCHEMA) == ["xs", "label", "name"]
    assert SCHEMA["xs"] is XS
    with pytest.raises(KeyError):
        SCHEMA["ys"]
    with pytest.raises(TypeError):
        SCHEMA["xs"] = XS  # type: ignore[index]
    copy = pickle.loads(pickle.dumps(SCHEMA))  # noqa: S301  # our own
    assert copy == SCHEMA
    assert hash(copy) == hash(SCHEMA)
    assert Schema({"xs": XS}) != SCHEMA
    assert repr(SCHEMA) == "Schema(xs: uint16[4, 4, 3], label: int64[1], name: string[])"


def test_a_schema_is_read_off_a_sample() -> None:
    assert Schema.of(sample()) == SCHEMA
    assert Schema.of({"a": 1.5, "b": [[True]]}) == Schema({"a": Feature("float64", ()), "b": Feature("bool", (1, 1))})


@pytest.mark.parametrize("bad", [np.array("2020", "M8[s]"), [[1], [1, 2]]], ids=["date", "ragged"])
def test_a_sample_that_records_do_not_take_is_refused_by_key(bad: Any) -> None:
    with pytest.raises(InputError, match="Feature 'when'"):
        Schema.of({"when": bad})
    with pytest.raises(InputError, match="sample 3, 'label'"):
        SCHEMA.check({**sample(), "label": bad}, "sample 3")


@pytest.mark.parametrize("other", [None, [1, 2], np.zeros(3)])
def test_a_sample_is_a_dict(other: Any) -> None:
    with pytest.raises(InputError, match="dict of arrays"):
        Schema.of(other)
    with pytest.raises(InputError, match="sample 0 must be a dict of arrays"):
        SCHEMA.check(other, "sample 0")


def test_check_gives_arrays_in_the_schemas_order() -> None:
    checked = SCHEMA.check(dict(reversed(sample().items())))
    assert list(checked) == ["xs", "label", "name"]
    assert all(isinstance(array, np.ndarray) for array in checked.values())


def test_check_keeps_zeros_at_the_end_of_bytes() -> None:
    text = SCHEMA.check({**sample(), "name": b"png\0\0"})["name"]
    assert text.item() == b"png\0\0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"xs": np.ones((4, 4, 3), np.int16)}, r"'xs': got int16\[4, 4, 3\] .* must be uint16\[4, 4, 3\]"),
        ({"xs": np.ones((4, 4), np.uint16)}, r"got uint16\[4, 4\]"),
        ({"label": 7}, r"'label': got int64\[\]"),
        ({"name": 7}, r"'name': got int64\[\]"),
        ({"extra": 7}, r"missing \[\], unexpected \['extra'\]"),
    ],
)
def test_check_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^sample 5.*{message}"):
        SCHEMA.check({**sample(), **change}, "sample 5")


def test_check_names_a_missing_key() -> None:
    with pytest.raises(InputError, match=r"missing \['xs'\], unexpected \[\]"):
        SCHEMA.check({"label": 1, "name": ""})


def test_codecs_replace_those_named() -> None:
    changed = SCHEMA.with_codecs({"xs": "raw"})
    assert {key: feature.codec for key, feature in changed.items()} == {
        "xs": "raw",
        "label": "tensor",
        "name": "tensor",
    }
    assert SCHEMA.with_codecs(None) == SCHEMA
    with pytest.raises(InputError, match=r"codecs names 'xy', which no sample has: .*did you mean 'xs'"):
        SCHEMA.with_codecs({"xy": "raw"})


@pytest.mark.parametrize(
    ("targets", "inputs", "expected"),
    [
        (["label"], None, (["xs", "name"], ["label"])),
        (["name", "label", "name"], None, (["xs"], ["label", "name"])),
        (["label"], ["xs"], (["xs"], ["label"])),
        (("label",), ("name", "xs"), (["xs", "name"], ["label"])),
        ([], None, (["xs", "label", "name"], [])),
    ],
)
def test_keys_are_split_in_the_schemas_order(targets: Any, inputs: Any, expected: Any) -> None:
    assert SCHEMA.split_keys(targets, inputs) == expected


@pytest.mark.parametrize(
    ("targets", "inputs", "message"),
    [
        (["labels"], None, "target_keys names 'labels', .* \\['label', 'name', 'xs'\\]; did you mean 'label'"),
        (["label"], ["zzz"], "input_keys names 'zzz', .*\\.$"),
        (["label"], ["label", "xs"], "'label'.* both as inputs and as targets"),
        ("label", None, 'write \\["label"\\]'),
        (["label"], "xs", 'input_keys .* write \\["xs"\\]'),
        (None, None, "target_keys must be a list of keys, got None"),
        ([["label"]], None, "target_keys must be a list of keys"),
        ([1], None, "target_keys must be a list of keys"),
    ],
)
def test_wrong_keys_are_named(targets: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SCHEMA.split_keys(targets, inputs)


def test_key_lists_have_no_repeats() -> None:
    assert key_list(iter("abca"), "keys") == ["a", "b", "c"]


def test_the_nearest_name_ends_the_sentence() -> None:
    assert nearest("batchsize", ["batch_size", "seed"]) == "; did you mean 'batch_size'?"
    assert nearest("zzz", ["batch_size", "seed"]) == "."


@given(schemas)
def test_both_forms_in_json_are_read_back(schema: Schema) -> None:
    data = json.loads(json.dumps(schema.to_json()))
    assert Schema.from_json(data) == schema
    assert list(Schema.from_json(data)) == list(schema)
    types, shapes = json.loads(json.dumps([schema.types_json(), schema.shapes_json()]))
    assert Schema.from_otbtf(types, shapes) == schema


def test_otbtfs_json_is_what_otbtf_writes() -> None:
    assert SCHEMA.types_json() == {"xs": "uint16", "label": "int64", "name": "string"}
    assert SCHEMA.shapes_json() == {"xs": [4, 4, 3], "label": [1], "name": []}


GOOD = {"dtype": "uint8", "shape": [2], "codec": "tensor"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "an object of features by name, got NoneType"),
        ([], "got list"),
        ({}, "at least one feature"),
        ({"": GOOD}, "must be text"),
        ({"a": 5}, "'a' must be an object"),
        ({"a": {"dtype": "uint8", "shape": [2]}}, "'a' must be an object with dtype, shape and codec"),
        ({"a": {**GOOD, "dtype": 4}}, "'a' must have text"),
        ({"a": {**GOOD, "dtype": "u1"}}, "'a': Unknown element type 'u1'"),
        ({"a": {**GOOD, "shape": 2}}, "a list as shape"),
        ({"a": {**GOOD, "shape": {"0": 2}}}, "a list as shape"),
        ({"a": {**GOOD, "shape": [None]}}, "'a': A feature's shape"),
        ({"a": {**GOOD, "shape": [1e400]}}, "'a': A feature's shape"),
        ({"a": {**GOOD, "shape": [1 << 40]}}, "'a': .* 1 GiB"),
        ({"a": {**GOOD, "codec": None}}, "'a' must have text"),
    ],
)
def test_json_of_another_form_is_refused_with_the_files_name(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^m.json has no valid schema: .*{message}") as caught:
        Schema.from_json(data, "m.json")
    assert ".." not in str(caught.value)


@given(values, values)
def test_any_other_json_is_an_input_error(some: Any, other: Any) -> None:
    with pytest.raises(InputError):
        Schema.from_json({"a": some, "b": other})
    with pytest.raises(InputError):
        Schema.from_otbtf(some, other)


def test_otbtfs_files_must_name_the_same_keys() -> None:
    with pytest.raises(InputError, match=r"folder: .* the same keys"):
        Schema.from_otbtf({"a": "uint8"}, {"b": [1]}, "folder")
