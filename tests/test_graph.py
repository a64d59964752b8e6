"""The parts of the graph engine; what they come to together is in test_tfrecords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from otbtf_style import all_kinds, arrays, example, example_bytes, same

from otbtf_lite import graph
from otbtf_lite.errors import InputError
from otbtf_lite.graph import Shards, Split, bind_kwargs
from otbtf_lite.schema import Feature, Schema

SCHEMA = Schema({"x": Feature("uint8", (2,)), "y": Feature("int64", ()), "z": Feature("int64", ())})
SAMPLE = {"x": 1, "y": 2, "z": 3}
KNOWN = ("batch_size", "target_keys", "shuffle_buffer_size", "seed")


@pytest.mark.parametrize(
    ("split", "inputs", "targets"),
    [
        (Split(["y"]), {"x": 1, "z": 3}, {"y": 2}),
        (Split(["z", "y"]), {"x": 1}, {"y": 2, "z": 3}),
        (Split(["y"], ["x"]), {"x": 1}, {"y": 2}),
        (Split(["y"], []), {}, {"y": 2}),
        (Split(["q"], None, lambda s: {"p": s["x"] + s["y"], "q": s["z"]}), {"p": 3}, {"q": 3}),
        (Split(["y"], ["w"], lambda s, w: {**s, "w": w}, {"w": 9}), {"w": 9}, {"y": 2}),
    ],
)
def test_a_sample_parts_into_inputs_and_targets(split: Split, inputs: dict[str, int], targets: dict[str, int]) -> None:
    assert split(SAMPLE) == (inputs, targets)


def test_only_what_is_asked_for_is_decoded() -> None:
    assert Split(["y"], ["z"]).needed(SCHEMA) == ["y", "z"]
    assert Split(["y"]).needed(SCHEMA) == ["x", "y", "z"]
    assert Split(["q"], ["p"], dict).needed(SCHEMA) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            Split(["yy"], None, dict),
            r"target_keys names 'yy', which no sample has: the keys are \['x', 'y', 'z'\]; did",
        ),
        (Split(["y"], ["q"], dict), r"input_keys names 'q', .* \['x', 'y', 'z'\]\.$"),
        (Split(["y"], None, lambda _: {"x": 1}), r"target_keys names 'y', .* \['x'\]\.$"),
        (Split(["y"], None, lambda s: (s, s)), "must return a dict of tensors by name, got tuple"),
        (Split(["y"], None, lambda _: None), "must return a dict of tensors by name, got NoneType"),
    ],
)
def test_keys_are_looked_for_after_preprocessing(split: Split, message: str) -> None:
    assert split.needed(SCHEMA) == ["x", "y", "z"]
    with pytest.raises(InputError, match=message):
        split(SAMPLE)


@pytest.mark.parametrize(
    ("targets", "inputs", "message"),
    [
        ("y", None, 'write \\["y"\\]'),
        (["y"], "x", 'write \\["x"\\]'),
        (["y"], ["x", "y"], "'y'.* both as inputs and as targets"),
        (None, None, "target_keys must be a list of keys, got None"),
    ],
)
def test_keys_are_lists_that_do_not_meet(targets: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Split(targets, inputs)


def test_without_preprocessing_keys_are_looked_for_at_once() -> None:
    with pytest.raises(InputError, match="target_keys names 'w'"):
        Split(["w"]).needed(SCHEMA)


def takes_two(sample: Any, size: int, *, seed: int = 0) -> Any:
    return sample, size, seed


def takes_any(sample: Any, **keywords: Any) -> Any:
    return sample, keywords


@pytest.mark.parametrize(
    ("function", "kwargs", "extra", "bound"),
    [
        (None, {}, None, {}),
        (dict, {"a": 1}, None, {"a": 1}),  # a built-in: it takes what it takes
        (takes_two, {"size": 1}, None, {"size": 1}),
        (takes_two, {"size": 1}, {"seed": 2}, {"size": 1, "seed": 2}),
        (takes_two, {"size": 1}, {"size": 3}, {"size": 3}),
        (takes_any, {"a": 1, "batchsize": 2}, {"b": 3}, {"a": 1, "batchsize": 2, "b": 3}),
        (lambda sample: sample, {}, {}, {}),
    ],
)
def test_keywords_are_bound(function: Any, kwargs: Any, extra: Any, bound: Any) -> None:
    assert bind_kwargs(function, kwargs, extra, KNOWN) == bound


@pytest.mark.parametrize(
    ("function", "kwargs", "extra", "message"),
    [
        (None, {"batchsize": 1}, None, "read has no argument 'batchsize'; did you mean 'batch_size'"),
        (None, {"targets": 1}, None, "read has no argument 'targets'; did you mean 'target_keys'"),
        (None, {"zzz": 1}, None, r"read has no argument 'zzz'\.$"),
        (None, {}, {"zzz": 1}, "read has no argument 'zzz'"),
        (takes_two, {"sizes": 1}, None, "Neither preprocessing_fn nor read takes an argument 'sizes'; .*'size'"),
        (takes_two, {"shuffle_buffer": 1}, None, "'shuffle_buffer'; did you mean 'shuffle_buffer_size'"),
        (takes_two, {"size": 1, "sample": 2}, None, "takes an argument 'sample'"),
        (takes_two, {}, None, r"preprocessing_fn can't take a sample and the keywords \[\]: .*'size'"),
        (takes_any, {"sample": 1}, None, "preprocessing_fn can't take a sample and the keywords .*'sample'"),
        (lambda: None, {}, None, "preprocessing_fn can't take a sample"),
    ],
)
def test_other_keywords_are_refused_with_the_nearest(
    function: Callable[..., Any] | None, kwargs: Any, extra: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bind_kwargs(function, kwargs, extra, KNOWN)


@pytest.mark.parametrize("batch", [False, True], ids=["one", "batch"])
def test_examples_are_parsed_with_their_shapes(batch: bool) -> None:
    kinds = {
        key: array for key, array in all_kinds(3).items() if key in ("patch-uint16-", "scalar-bool-", "nan", "text")
    }
    schema = Schema.of(kinds)
    records = [example(kinds).SerializeToString(), example_bytes(kinds, sorted(kinds, reverse=True))]
    for record in [records] if batch else records:
        parsed = graph.parse_example(schema, list(kinds), tf.constant(record))
        for key, array in arrays(parsed).items():
            assert same(array, np.stack([kinds[key]] * 2) if batch else kinds[key])
    assert list(graph.parse_example(schema, ["nan"], tf.constant(records[0]))) == ["nan"]


def test_each_worker_has_its_share() -> None:
    shards = Shards(["0", "1", "2", "3", "4", "5"], (1, 2, 3, 4, 5, 6), ["GZIP"] * 6)
    assert graph.share_of(shards, 2, None) is shards
    assert graph.share_of(shards, 2, 1) == Shards(["1", "3", "5"], (2, 4, 6), ["GZIP"] * 3)
    assert [graph.share_of(shards, 3, np.int64(worker)).paths for worker in range(3)] == [
        ["0", "3"],
        ["1", "4"],
        ["2", "5"],
    ]


@pytest.mark.parametrize("index", [-1, 2, True, 0.0, "0"])
def test_a_worker_that_there_is_not_is_refused(index: Any) -> None:
    with pytest.raises(InputError, match=f"worker_index must be an integer from 0 to n_workers - 1 = 1, got {index!r}"):
        graph.share_of(Shards(["0", "1"], (1, 1), [None, None]), 2, index)


@pytest.mark.parametrize("size", [0, -5, True, 2.0, "9"])
def test_a_shuffle_buffer_holds_something(size: Any) -> None:
    with pytest.raises(InputError, match="shuffle_buffer_size must be an integer of at least 1, or None"):
        graph.shuffled(Shards(["0"], (1,), [None]), size, None)
