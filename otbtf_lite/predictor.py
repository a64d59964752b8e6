"""Any model as one function: Keras models, what holds one, saved ones, and plain callables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.schema import Sample


@dataclass(frozen=True)
class Predictor:
    """A model as one function, whatever it was."""

    call: Callable[[Sample], Mapping[str, Any]]
    """Arrays of (batch, rows, cols, bands) by key -> outputs by name ("" where the model names none)."""
    inputs: tuple[str, ...] | None
    """The names it takes; None: any."""

    def __call__(self, arrays: Sample) -> dict[str, npt.NDArray[Any]]:
        """The outputs as arrays, by name."""
        return {name: np.asarray(value) for name, value in self.call(arrays).items()}


def as_predictor(model: Any) -> Predictor:
    """A model as a :class:`Predictor`.

    Args:
        model: a Keras model, an object that holds one as ``.model``, a loaded SavedModel, the path of a SavedModel or
            of a ``.keras`` file, or a callable.

    Raises:
        InputError: it is none of these.
        DataError: the path holds no model, or one that can't be loaded.
    """
    if isinstance(model, str | os.PathLike):
        return _load(Path(model))
    inner = getattr(model, "model", None)
    for candidate in (inner, model):
        if hasattr(candidate, "predict_on_batch"):
            return _keras_model(candidate)
    if hasattr(model, "signatures"):
        return _signature(model, "the SavedModel")
    if callable(model):
        return Predictor(lambda arrays: _named(model(arrays)), None)
    raise InputError(
        "model must be a Keras model, the path of one, or a callable that takes arrays by key, got "
        f"{type(model).__name__}."
    )


def _load(path: Path) -> Predictor:
    """The model at a path."""
    is_saved_model = (path / "saved_model.pb").is_file()
    if not is_saved_model and not (path.is_file() and path.suffix in (".keras", ".h5")):
        raise DataError(
            f"{path} is no model: it must be a SavedModel directory (one that holds saved_model.pb) or a .keras file."
        )
    import keras  # TensorFlow is loaded only where a path needs it
    import tensorflow as tf

    import otbtf_lite.model  # noqa: F401  # a .keras file may hold what it registers with Keras

    try:
        if is_saved_model:
            return _signature(tf.saved_model.load(str(path)), str(path))
        return _keras_model(keras.saving.load_model(path, compile=False))
    except (OSError, ValueError, TypeError, tf.errors.OpError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} can't be loaded as a model: {error}") from error


def _keras_model(model: Any) -> Predictor:
    """A built Keras model; a subclassed one without symbolic inputs gets the arrays by key."""
    tensors = getattr(model, "inputs", None)
    if not tensors:
        return Predictor(lambda arrays: _named(model.predict_on_batch(arrays)), None)
    structure = model.input  # as the model was built: a dict, a list or one tensor
    names = tuple(structure) if isinstance(structure, Mapping) else tuple(tensor.name for tensor in tensors)

    def call(arrays: Sample) -> Mapping[str, Any]:
        # Only these, and in this order: Keras pairs inputs by position, and an extra one would take another's place.
        feed = [arrays[name] for name in names]
        given = dict(zip(names, feed, strict=True)) if isinstance(structure, Mapping) else feed
        result = model.predict_on_batch(given if len(feed) > 1 or isinstance(given, dict) else feed[0])
        return _named(result, getattr(model, "output_names", None))

    return Predictor(call, names)


def _signature(loaded: Any, where: str) -> Predictor:
    """The serving signature of a SavedModel."""
    signatures = dict(loaded.signatures)
    if not signatures:
        raise DataError(f"{where} has no signature to call: write it with model.export(path).")
    import tensorflow as tf

    serve = signatures.get("serving_default") or next(iter(signatures.values()))
    specs = serve.structured_input_signature[1]

    def call(arrays: Sample) -> Mapping[str, Any]:
        _ = loaded  # it owns the variables, which a signature does not keep alive
        return _named(serve(**{name: tf.cast(arrays[name], spec.dtype) for name, spec in specs.items()}))

    return Predictor(call, tuple(specs))


def _named(result: Any, names: Sequence[str] | None = None) -> Mapping[str, Any]:
    """What a model returned, by name."""
    if isinstance(result, Mapping):
        return result
    if isinstance(result, list | tuple):
        return dict(zip(names or map(str, range(len(result))), result, strict=True))
    return {names[0] if names else "": result}
