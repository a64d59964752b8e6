"""`ModelBase`: a Keras model from three methods, written with raw TensorFlow and Keras layers alike."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from otbtf_lite import layers  # noqa: F401  # so that Keras knows them: a .keras file may hold any of them
from otbtf_lite.errors import InputError, MissingDependencyError
from otbtf_lite.network import Network, served_names
from otbtf_lite.schema import key_list, nearest
from otbtf_lite.tracing import building

_INPUT_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.-]*")
"""The name of an operation in a graph; with others, what was trained could not be exported."""

INFERENCE_CROPPING = (16, 32, 64, 96, 128)
"""Pixels that are cut from each side of the outputs, by default."""


def cropped_tensor_name(tensor_name: str, crop: int) -> str:
    """The name of an output without its margins.

    Args:
        tensor_name: name, or key, of the whole output.
        crop: pixels cut from each of the four sides.

    Returns:
        ``"{tensor_name}_crop{crop}"``.
    """
    return f"{tensor_name}_crop{crop}"


def is_chief(strategy: Any) -> bool:
    """Whether this process is the one that prints and saves.

    Args:
        strategy: a ``tf.distribute`` strategy, or None.

    Returns:
        True for one process alone, for the task "chief" of a cluster and, in a cluster that has no chief, for worker 0.
    """
    resolver = getattr(strategy, "cluster_resolver", None)
    if resolver is None or resolver.task_type in {None, "", "chief"}:
        return True
    cluster = resolver.cluster_spec()
    return bool(resolver.task_type == "worker" and resolver.task_id == 0 and "chief" not in cluster.jobs)


_is_chief = is_chief  # OTBTF's name


class ModelBase(ABC):
    """A model that is described by what it does with its inputs.

    A subclass writes `get_outputs` and, where needed, `normalize_inputs` and `postprocess_outputs`. In these methods
    Keras layers and TensorFlow functions and operators can be mixed; TensorFlow functions that take a Python function,
    such as ``tf.map_fn``, belong into a layer of their own. Every attribute that is not found here is looked up on the
    Keras model: ``compile``, ``fit``, ``evaluate``, ``predict`` and so on.

    Inputs are float32 whatever the dataset holds, as in Keras: integers beyond 2**24 would be rounded, so override
    `get_inputs` for those. Build the model inside ``strategy.scope()`` to train it on several devices.

    Args:
        dataset_element_spec: ``element_spec`` of a batched dataset: a dictionary of input specs, or a tuple that starts
            with one (inputs, targets).
        input_keys: names of the dataset's inputs that the model takes; None: all of them.
        inference_cropping: pixels to cut from each side of the outputs, an extra output for each; None: 16, 32, 64, 96
            and 128.

    Raises:
        InputError: the specs, keys or croppings are not of this kind, or a name can't be an input's name.

    Attributes:
        model: the Keras model, a `Network`.
        inputs_shapes: shape of each input without the batch axis, by name.
        inference_cropping: as given.
    """

    def __init__(
        self,
        dataset_element_spec: Any,
        input_keys: Sequence[str] | None = None,
        inference_cropping: Sequence[int] | None = None,
    ) -> None:
        specs = _input_specs(dataset_element_spec)
        self.dataset_input_keys = _input_names(specs, input_keys)
        self.inputs_shapes = {key: _shape_of_one(key, specs[key]) for key in self.dataset_input_keys}
        self._inputs_dtypes = {key: tf.as_dtype(specs[key].dtype) for key in self.dataset_input_keys}
        self.inference_cropping = list(INFERENCE_CROPPING if inference_cropping is None else inference_cropping)
        for crop in self.inference_cropping:
            if not isinstance(crop, Integral) or crop < 1:
                raise InputError(f"inference_cropping must list whole numbers of pixels above 0, got {crop!r}.")
        self._cropped: list[keras.KerasTensor] = []
        self.model = self.create_network()

    def __getattr__(self, name: str) -> Any:
        """Looks up on the Keras model what is not found here."""
        # Without a model yet, and for protocols such as pickling that ask for special names, there is nothing to ask.
        if name.startswith("__") or "model" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the Keras model."""
        return self.model(*args, **kwargs)

    def get_inputs(self) -> dict[str, keras.KerasTensor]:
        """The inputs of the model, by name.

        Returns:
            A ``keras.Input`` for each; images, with three axes or more besides the batch, can have any number of rows
            and columns. Numbers are ``keras.config.floatx()``, float32.
        """
        inputs = {}
        for key, shape in self.inputs_shapes.items():
            dtype = self._inputs_dtypes[key]
            real = dtype.is_floating or dtype.is_integer or dtype.is_bool
            free = [None, None, *shape[2:]] if len(shape) > 2 else shape  # rows, cols, bands
            inputs[key] = keras.Input(free, dtype=keras.config.floatx() if real else dtype.name, name=key)
        return inputs

    def normalize_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Scales the inputs; to be overridden.

        Args:
            inputs: tensors by name, as `get_inputs` gives them.

        Returns:
            Tensors by name, here the inputs themselves.
        """
        return inputs

    @abstractmethod
    def get_outputs(self, normalized_inputs: dict[str, Any]) -> dict[str, Any]:
        """The network proper; to be written.

        Args:
            normalized_inputs: what `normalize_inputs` gives.

        Returns:
            Tensors by key, which is the key of their targets in the dataset. The layers that make them should be named:
            that is the outputs' name in a SavedModel.
        """

    def postprocess_outputs(
        self,
        outputs: dict[str, Any],
        inputs: dict[str, Any] | None = None,  # noqa: ARG002  # for those who override this
        normalized_inputs: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """More outputs, for inference: here, each image without its margins, where a network sees less context.

        Args:
            outputs: what `get_outputs` gives; tensors that are added to it become outputs, too.
            inputs: what `get_inputs` gives.
            normalized_inputs: what `normalize_inputs` gives.

        Returns:
            Further tensors by key. For each output of shape (batch, rows, cols, ...) and each cropping, the key is
            `cropped_tensor_name` of the output's key, and the layer's name that of its name in a SavedModel. An image
            smaller than its margins gives an empty one. These are not computed in training.
        """
        names = served_names(_checked(outputs, "postprocess_outputs must be given"))
        extra = {}
        for key, tensor in outputs.items():
            if len(tensor.shape) < 4:  # batch, rows, cols, bands
                continue
            for crop in self.inference_cropping:
                name = cropped_tensor_name(names[key], crop)
                inside = tensor[:, crop:-crop, crop:-crop]
                extra[cropped_tensor_name(key, crop)] = keras.layers.Activation("linear", name=name)(inside)
        self._cropped += extra.values()
        return extra

    def create_network(self) -> Network:
        """Builds the Keras model.

        Returns:
            The model; its outputs are those of `get_outputs` and `postprocess_outputs` without the cropped ones, and
            it serves all of them.

        Raises:
            InputError: a method gives anything but a dictionary of tensors by key.
        """
        self._cropped = []
        with building():
            inputs = _checked(self.get_inputs(), "get_inputs must return")
            normalized_inputs = self.normalize_inputs(dict(inputs))
            outputs = _checked(self.get_outputs(normalized_inputs), "get_outputs must return")
            served = dict(outputs)
            extra = self.postprocess_outputs(outputs=served, inputs=inputs, normalized_inputs=normalized_inputs)
            served.update(_checked(extra, "postprocess_outputs must return"))
        cropped = {id(tensor) for tensor in self._cropped}
        trained = {key: tensor for key, tensor in served.items() if id(tensor) not in cropped}
        served_names(served)  # finds a name that two outputs would have now, and not after the training
        return Network(inputs, trained, name=type(self).__name__, served=served)

    def summary(self, strategy: Any = None) -> None:
        """Prints the layers, in the chief process only.

        Args:
            strategy: the ``tf.distribute`` strategy that the model is trained with, or None.
        """
        if is_chief(strategy):
            self.model.summary()

    def save(self, path: str | os.PathLike[str], overwrite: bool = True, **kwargs: Any) -> None:
        """Writes a SavedModel directory, as :meth:`export` does, or a ``.keras`` file where the path ends so.

        Args:
            path: the directory or file to write.
            overwrite: whether to replace what is there.
            **kwargs: those of ``keras.Model.save``.

        Raises:
            InputError: the directory exists and may not be replaced.
        """
        self.model.save(path, overwrite=overwrite, **kwargs)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes a SavedModel directory that returns all outputs, the cropped ones among them, for any image size.

        Its signature ``serving_default`` takes the inputs by name. It returns the outputs by the names of the layers
        that make them, or by key where one layer makes several.

        Args:
            path: the directory to write.
        """
        self.model.export(path)

    def plot(self, output_path: str | os.PathLike[str], strategy: Any = None, show_shapes: bool = False) -> None:
        """Draws the layers into an image file, in the chief process only.

        Args:
            output_path: of the file to write, such as ``model.png``.
            strategy: the ``tf.distribute`` strategy that the model is trained with, or None.
            show_shapes: write the shapes of the tensors as well.

        Raises:
            MissingDependencyError: pydot or graphviz is not installed.
        """
        if not is_chief(strategy):
            return
        if importlib.util.find_spec("pydot") is None:
            raise MissingDependencyError("Drawing a model needs pydot (pip install pydot) and the program Graphviz.")
        if shutil.which("dot") is None:
            raise MissingDependencyError("Drawing a model needs the program dot on the PATH: install Graphviz.")
        keras.utils.plot_model(self.model, to_file=os.fspath(output_path), show_shapes=show_shapes)


def _input_specs(element_spec: Any) -> Mapping[str, Any]:
    """The part of a dataset's ``element_spec`` that describes the inputs."""
    specs = element_spec[0] if isinstance(element_spec, tuple | list) and element_spec else element_spec
    if not isinstance(specs, Mapping) or not specs:
        raise InputError(
            "dataset_element_spec must be a dictionary of inputs, or a tuple that starts with one, as a dataset of "
            f"(inputs, targets) has it, got {element_spec!r}."
        )
    return specs


def _input_names(specs: Mapping[str, Any], input_keys: Sequence[str] | None) -> list[str]:
    """The names of the model's inputs."""
    names = list(specs) if input_keys is None else key_list(input_keys, "input_keys")
    if not names:
        raise InputError(f"input_keys must name at least one of the dataset's inputs {list(specs)}, got none.")
    for name in names:
        if name not in specs:
            raise InputError(f"input_keys names {name!r}, and the dataset has {list(specs)}{nearest(name, specs)}")
        if not _INPUT_NAME.fullmatch(name) or keyword.iskeyword(name) or name == "self":
            raise InputError(
                f"{name!r} can't be an input's name in TensorFlow, which takes letters, digits, '_', '-' and '.' ('/' "
                "separates names), with no '_' first, and no word of Python's: rename it in the dataset."
            )
    return names


def _shape_of_one(key: str, spec: Any) -> list[int | None]:
    """The shape of one sample."""
    shape = tf.TensorShape(spec.shape)
    if shape.rank is None or shape.rank < 1:
        raise InputError(f"Input {key!r} must have a shape that is known and starts with the batch, got {shape}.")
    return list(shape[1:])


def _checked(tensors: Any, what: str) -> dict[str, Any]:
    """A dictionary of symbolic tensors by key, which this is."""
    if not isinstance(tensors, dict):
        raise InputError(f"{what} a dictionary of tensors by key, got {tensors!r}.")
    for key, value in tensors.items():
        if not isinstance(key, str) or not isinstance(value, keras.KerasTensor):
            raise InputError(f"{what} tensors made from the model's inputs by key, got {key!r}: {value!r}.")
    return tensors
