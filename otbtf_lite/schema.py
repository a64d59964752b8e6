"""What a sample is made of: one schema drives the writer and the reader.

A :class:`Schema` is an ordered, frozen mapping of names to :class:`Feature`. It converts to and from the two JSON files
of OTBTF (``output_types.json`` and ``output_shapes.json``) and the ``schema`` entry of a manifest, and checks samples.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError

Sample = dict[str, npt.NDArray[Any]]
"""One sample: arrays by name. Patches are always (rows, cols, bands), also for one band."""

NUMERIC_DTYPES = (
    "float16", "float32", "float64", "bfloat16",
    "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
    "bool", "complex64", "complex128",
)  # fmt: skip
"""The fixed-size element types a record can hold, by TensorFlow's names."""

STRING = "string"
"""The element type of variable-length byte strings."""

_MAX_FEATURE_BYTES = 1 << 30
MAX_RANK = 254
"""TensorFlow's own limit on the rank of a tensor."""
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 10
_SHORT.maxstring = _SHORT.maxother = 100


def shown(value: object) -> str:
    """A value as a message shows it, shortened: a hostile file may hold a megabyte where a number should be."""
    return _SHORT.repr(value)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a TensorFlow type name.

    Args:
        name: one of :data:`NUMERIC_DTYPES` or ``"string"`` (which gives the object dtype).

    Raises:
        InputError: the name is none of those.
    """
    if name == "bfloat16":
        import ml_dtypes  # comes with TensorFlow; only this dtype needs it

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    if name == STRING:
        return np.dtype(object)
    if name not in NUMERIC_DTYPES:
        msg = f"Unknown element type {name!r}: a record holds {', '.join((*NUMERIC_DTYPES, STRING))}."
        raise InputError(msg)
    return np.dtype(name)


def dtype_name(dtype: npt.DTypeLike) -> str:
    """The TensorFlow type name of a NumPy dtype (text and objects are ``"string"``).

    Raises:
        InputError: TensorFlow has no such type (datetimes, structured arrays, long doubles).
    """
    return _name_of(np.dtype(dtype))


@functools.cache  # asked for every array of every sample, where the question costs more than the answer is worth
def _name_of(found: np.dtype[Any]) -> str:
    if found.kind in "SUO":
        return STRING
    name = str(found.newbyteorder("=")) if found.kind in "iufcb" else found.name
    if name not in NUMERIC_DTYPES:
        known = ", ".join(NUMERIC_DTYPES)
        msg = f"Arrays of dtype {found} can't be stored in a record: convert them to one of {known}."
        raise InputError(msg)
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """How a sentence about a mistyped name ends: ``"; did you mean 'x'?"``, or a full stop where no name is near."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def to_array(value: npt.ArrayLike) -> npt.NDArray[Any]:
    """What NumPy makes of a value, but for bytes: NumPy's own type for them takes zeros at the end away.

    Raises:
        InputError: lists of unequal lengths.
    """
    if isinstance(value, bytes):
        return np.asarray(value, object)
    try:
        return np.asarray(value)
    except ValueError as error:
        msg = f"NumPy can't make an array of it ({error})."
        raise InputError(msg) from error


@dataclass(frozen=True, slots=True)
class Feature:
    """One named array of a sample.

    Raises:
        InputError: an unknown element type, a dimension that is no non-negative integer, or over 1 GiB in all.
    """

    dtype: str
    """TensorFlow's type name, one of :data:`NUMERIC_DTYPES` or ``"string"``."""
    shape: tuple[int, ...]
    """Fixed shape without the batch dimension: (rows, cols, bands) for a patch, () for a scalar."""
    codec: str = "tensor"
    """How the array becomes record bytes (see :mod:`otbtf_lite.codecs`)."""

    def __post_init__(self) -> None:
        numpy_dtype(self.dtype)
        try:
            shape = tuple(-1 if isinstance(n, bool) else operator.index(n) for n in self.shape)
        except TypeError:
            shape = (-1,)
        if len(shape) > MAX_RANK or any(n < 0 for n in shape):
            given = shown(self.shape)
            msg = f"A feature's shape must be a list of at most {MAX_RANK} non-negative integers, got {given}."
            raise InputError(msg)
        object.__setattr__(self, "shape", shape)
        # Dimensions have 63 bits in TensorFlow. Of larger ones Python may take minutes for the product.
        if any(n >= 1 << 63 for n in shape) or self.nbytes > _MAX_FEATURE_BYTES:
            msg = f"A feature of shape {shown(self.shape)} and type {self.dtype} is too large: 1 GiB is the most."
            raise InputError(msg)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array in memory; of the pointers alone for strings."""
        return self.size * numpy_dtype(self.dtype).itemsize


class Schema(Mapping[str, Feature]):
    """An ordered, frozen mapping of feature names to :class:`Feature`.

    Args:
        features: the features by name.

    Raises:
        InputError: there is none, or a name is not text, is empty or can't be written as UTF-8.
    """

    __slots__ = ("_features",)

    def __init__(self, features: Mapping[str, Feature]) -> None:
        if not features:
            msg = "A schema needs at least one feature."
            raise InputError(msg)
        for name in features:
            if not isinstance(name, str) or not name or name != name.encode(errors="ignore").decode():
                msg = f"Feature names must be text that is not empty and has a form in UTF-8, got {name!r}."
                raise InputError(msg)
        self._features = dict(features)

    def __getitem__(self, name: str) -> Feature:
        """The feature of that name; an unknown name is a KeyError, as in any mapping."""
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in order."""
        return iter(self._features)

    def __len__(self) -> int:
        """The number of features."""
        return len(self._features)

    def __hash__(self) -> int:
        """Equal schemas hash alike, as frozen values do."""
        return hash(frozenset(self._features.items()))

    def __repr__(self) -> str:
        """The features with their types and shapes."""
        inner = ", ".join(f"{k}: {f.dtype}{list(f.shape)}" for k, f in self._features.items())
        return f"Schema({inner})"

    @classmethod
    def of(cls, sample: Mapping[str, npt.ArrayLike]) -> Schema:
        """The schema of one sample, each feature with the ``tensor`` codec.

        Args:
            sample: arrays, or what NumPy takes for one, by name.

        Raises:
            InputError: an array of a type that a record can't hold.
        """
        if not isinstance(sample, Mapping):
            msg = f"A sample is a dict of arrays by name, got {type(sample).__name__}."
            raise InputError(msg)
        return cls({name: _feature_of(name, value) for name, value in sample.items()})

    def with_codecs(self, codecs: Mapping[str, str] | None) -> Schema:
        """A copy in which the named features have other codecs.

        Raises:
            InputError: a name that is not in the schema.
        """
        for name in codecs or {}:
            self._known(name, "codecs")
        return Schema({k: replace(f, codec=(codecs or {}).get(k, f.codec)) for k, f in self.items()})

    def _known(self, name: str, what: str) -> None:
        if name not in self._features:
            msg = f"{what} names {name!r}, which no sample has: the keys are {sorted(self)}{nearest(name, self)}"
            raise InputError(msg)

    def check(self, sample: Mapping[str, npt.ArrayLike], where: str = "a sample") -> Sample:
        """The sample as arrays that fit the schema exactly, in the schema's order.

        Args:
            sample: arrays by name.
            where: what to call the sample in a message.

        Raises:
            InputError: a missing or unexpected key, another dtype or another shape.
        """
        if not isinstance(sample, Mapping):
            msg = f"{where} must be a dict of arrays by name, got {type(sample).__name__}."
            raise InputError(msg)
        if sample.keys() != self._features.keys():
            missing, extra = sorted(self.keys() - sample.keys()), sorted(sample.keys() - self.keys())
            msg = f"{where} does not have the keys of the others: missing {missing}, unexpected {extra}."
            raise InputError(msg)
        out: Sample = {}
        for name, feature in self._features.items():
            try:
                array = to_array(sample[name])
                same = array.shape == feature.shape and dtype_name(array.dtype) == feature.dtype
            except InputError as error:
                msg = f"{where}, {name!r}: {error}"
                raise InputError(msg) from error
            if not same:
                msg = (
                    f"{where}, {name!r}: got {array.dtype}{list(array.shape)} where all samples of this data set must"
                    f" be {feature.dtype}{list(feature.shape)}."
                )
                raise InputError(msg)
            out[name] = array
        return out

    def split_keys(
        self, target_keys: Iterable[str], input_keys: Iterable[str] | None = None
    ) -> tuple[list[str], list[str]]:
        """The input and the target keys, each in the schema's order.

        Args:
            target_keys: names of the targets.
            input_keys: names of the inputs; None takes all that are no targets.

        Raises:
            InputError: a name that no sample has, text where a list is wanted, or a name in both lists.
        """
        targets = key_list(target_keys, "target_keys")
        inputs = None if input_keys is None else key_list(input_keys, "input_keys")
        for what, names in (("target_keys", targets), ("input_keys", inputs or [])):
            for name in names:
                self._known(name, what)
        both = sorted(set(targets) & set(inputs or []))
        if both:
            msg = f"{both} are named both as inputs and as targets: a key is one or the other."
            raise InputError(msg)
        wanted = [k for k in self if k not in targets] if inputs is None else [k for k in self if k in inputs]
        return wanted, [k for k in self if k in targets]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """The manifest's form: ``{name: {"dtype": ..., "shape": [...], "codec": ...}}``."""
        return {k: {"dtype": f.dtype, "shape": list(f.shape), "codec": f.codec} for k, f in self.items()}

    @classmethod
    def from_json(cls, data: object, where: str = "the schema") -> Schema:
        """The schema that :meth:`to_json` wrote.

        Raises:
            InputError: data of another form; the message starts with ``where``.
        """
        if not isinstance(data, dict):
            msg = f"{where} has no valid schema: it must be an object of features by name, got {type(data).__name__}."
            raise InputError(msg)
        try:
            return cls({name: _feature(name, entry) for name, entry in data.items()})
        except InputError as error:
            msg = f"{where} has no valid schema: {error}"
            raise InputError(msg) from error

    def types_json(self) -> dict[str, str]:
        """What OTBTF keeps in ``output_types.json``."""
        return {k: f.dtype for k, f in self.items()}

    def shapes_json(self) -> dict[str, list[int]]:
        """What OTBTF keeps in ``output_shapes.json``."""
        return {k: list(f.shape) for k, f in self.items()}

    @classmethod
    def from_otbtf(cls, types: object, shapes: object, where: str = "the directory") -> Schema:
        """The schema of an OTBTF directory, from the contents of its two JSON files.

        Raises:
            InputError: contents of another form, or the two files name different keys.
        """
        if not isinstance(types, dict) or not isinstance(shapes, dict) or types.keys() != shapes.keys():
            msg = f"{where}: output_types.json and output_shapes.json must be objects with the same keys."
            raise InputError(msg)
        return cls.from_json({k: {"dtype": t, "shape": shapes[k], "codec": "tensor"} for k, t in types.items()}, where)


def _feature_of(name: object, value: npt.ArrayLike) -> Feature:
    try:
        array = to_array(value)
        return Feature(dtype_name(array.dtype), array.shape)
    except InputError as error:
        msg = f"Feature {name!r}: {error}"
        raise InputError(msg) from error


def _feature(name: object, entry: object) -> Feature:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "codec"}:
        msg = f"feature {name!r} must be an object with dtype, shape and codec, got {shown(entry)}."
        raise InputError(msg)
    dtype, shape, codec = entry["dtype"], entry["shape"], entry["codec"]
    if not isinstance(dtype, str) or not isinstance(shape, list | tuple) or not isinstance(codec, str):
        msg = f"feature {name!r} must have text as dtype and codec and a list as shape, got {shown(entry)}."
        raise InputError(msg)
    try:
        return Feature(dtype, tuple(shape), codec)
    except InputError as error:
        msg = f"feature {name!r}: {error}"
        raise InputError(msg) from error


def key_list(keys: Iterable[str], what: str) -> list[str]:
    """The keys as a list without repeats.

    Raises:
        InputError: one text, or something else, where a list of texts is wanted.
    """
    if isinstance(keys, str):
        msg = f'{what} must be a list of keys, got the text {keys!r}: write ["{keys}"].'
        raise InputError(msg)
    listed = list(keys) if isinstance(keys, Iterable) else [keys]
    if not isinstance(keys, Iterable) or not all(isinstance(key, str) for key in listed):
        msg = f"{what} must be a list of keys, got {keys!r}."
        raise InputError(msg)
    return list(dict.fromkeys(listed))
