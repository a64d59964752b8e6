"""The Keras model behind a ``ModelBase``: what it trains, and what it serves beyond that.

A network has two sets of outputs. Those it is trained and evaluated on are the outputs of the Keras model; those it
*serves* hold the cropped ones too, which training has no use for. Both are heads of one graph of layers.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from otbtf_lite.errors import InputError
from otbtf_lite.schema import nearest

_KERAS_FILES = (".keras", ".h5", ".hdf5")


def served_names(outputs: Mapping[str, keras.KerasTensor]) -> dict[str, str]:
    """The names under which a SavedModel returns the outputs of a network.

    Keras 2 named them by the layers that make them, and scripts and servers look those names up; Keras 3 names them by
    key.

    Args:
        outputs: symbolic tensors by key.

    Returns:
        For each key, the name of the layer that makes the output; the key itself where that layer makes two or more.

    Raises:
        InputError: two outputs would get one name.
    """
    layers = {key: str(tensor._keras_history.operation.name) for key, tensor in outputs.items()}  # noqa: SLF001  # all that tells
    counts = Counter(layers.values())
    names = {key: layer if counts[layer] == 1 else key for key, layer in layers.items()}
    for name, count in Counter(names.values()).items():
        if count > 1:
            keys = [key for key in names if names[key] == name]
            raise InputError(f"The outputs {keys} would all be served as {name!r}: name the layers otherwise.")
    return names


@keras.saving.register_keras_serializable(package="otbtf_lite")
class Network(keras.Model):
    """A functional Keras model with dictionaries of inputs and outputs, trained on some outputs and serving more.

    Beyond a ``keras.Model``:

    - losses and metrics look only at the outputs that have targets;
    - inputs are picked by key, also from a larger dictionary (Keras pairs them by their place among the sorted keys);
    - ``export`` and ``save(directory)`` write the served outputs, named as :func:`served_names` says;
    - a ``.keras`` file holds the served outputs as well.

    Args:
        inputs: ``keras.Input`` by name.
        outputs: the tensors that are trained and evaluated, by key.
        name: the model's name.
        served: the tensors that are served, by key; None: ``outputs``.
        **kwargs: those of ``keras.Model``.
    """

    def __init__(
        self,
        inputs: Mapping[str, keras.KerasTensor],
        outputs: Mapping[str, keras.KerasTensor],
        name: str | None = None,
        *,
        served: Mapping[str, keras.KerasTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(inputs=dict(inputs), outputs=dict(outputs), name=name, **kwargs)
        # These are names of layers, by which Keras 3.3 would look up losses and metrics; without them it goes by key.
        self.output_names = None
        # A view, which Keras does not take for a container of layers to track, as it would a dict.
        self._served = MappingProxyType(dict(outputs if served is None else served))
        self._compiled_for: dict[str, list[str]] = {}

    @property
    def served(self) -> Mapping[str, keras.KerasTensor]:
        """The tensors that are served, by key."""
        return self._served

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the model on a dictionary of inputs, which may hold others too.

        Raises:
            InputError: one of the model's inputs is missing.
        """
        if isinstance(inputs, dict):
            for key in self.input:
                if key not in inputs:
                    raise InputError(
                        f"Model {self.name!r} needs the input {key!r}, got {list(inputs)}{nearest(key, inputs)}"
                    )
            inputs = {key: inputs[key] for key in self.input}
        return super().__call__(inputs, *args, **kwargs)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        **kwargs: Any,
    ) -> None:
        """Sets up training as ``keras.Model.compile`` does; a dictionary may name some of the outputs only.

        Raises:
            InputError: a dictionary names something that is no output.
        """
        given = {
            "loss": loss, "loss_weights": loss_weights, "metrics": metrics, "weighted_metrics": weighted_metrics
        }  # fmt: skip
        self._compiled_for = {argument: list(value) for argument, value in given.items() if isinstance(value, dict)}
        for argument, keys in self._compiled_for.items():
            for key in keys:
                if key not in self.output:
                    raise InputError(
                        f"{argument} names {key!r}, and model {self.name!r} has the outputs "
                        f"{sorted(self.output)}{nearest(key, self.output)}"
                    )
        super().compile(optimizer=optimizer, **given, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as the saved model was, which Keras leaves to classes with a ``compile`` of their own."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)  # its saved state is loaded next, into these variables

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **kwargs: Any
    ) -> Any:
        """The loss over the outputs that have targets.

        Raises:
            InputError: no output has a target, or ``compile`` was asked for something on an output without.
        """
        y, y_pred, sample_weight = self._with_targets(y, y_pred, sample_weight)
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **kwargs)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """The metrics over the outputs that have targets.

        Raises:
            InputError: as :meth:`compute_loss`.
        """
        y, y_pred, sample_weight = self._with_targets(y, y_pred, sample_weight)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _with_targets(self, y: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """The same on the keys that targets and outputs share: Keras wants one structure on both sides."""
        if not isinstance(y, dict) or not isinstance(y_pred, dict):
            return y, y_pred, sample_weight
        keys = [key for key in y_pred if key in y]
        if not keys:
            raise InputError(f"The targets are {sorted(y)}, and model {self.name!r} has the outputs {sorted(y_pred)}.")
        for argument, wanted in self._compiled_for.items():
            for key in wanted:
                if key not in keys:
                    raise InputError(f"{argument} names {key!r}, and there are targets for {sorted(y)} only.")
        if isinstance(sample_weight, dict):
            sample_weight = {key: sample_weight.get(key) for key in keys}
        return {key: y[key] for key in keys}, {key: y_pred[key] for key in keys}, sample_weight

    def save(self, filepath: str | os.PathLike[str], overwrite: bool = True, **kwargs: Any) -> None:
        """Writes a ``.keras`` file, or, where the path has no such ending, a SavedModel directory like :meth:`export`.

        To read a ``.keras`` file back with ``keras.models.load_model``, import ``otbtf_lite.model`` first.

        Args:
            filepath: the file or directory to write.
            overwrite: whether to replace what is there.
            **kwargs: those of ``keras.Model.save``.

        Raises:
            InputError: the directory exists and may not be replaced.
        """
        path = os.fspath(filepath)
        if path.endswith(_KERAS_FILES) or kwargs.get("zipped") is not None:
            super().save(path, overwrite=overwrite, **kwargs)
            return
        if not overwrite and tf.io.gfile.exists(path):
            raise InputError(f"{path} exists: pass overwrite=True to replace it.")
        self.export(path)

    def export(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Writes the served outputs as a SavedModel, which takes images of any size.

        Its signature ``serving_default`` takes the inputs by name and returns the outputs by :func:`served_names`.

        Args:
            filepath: the directory to write.
            *args: those of ``keras.Model.export``.
            **kwargs: those of ``keras.Model.export``.
        """
        names = served_names(self.served)
        serving = keras.Model(self.input, {names[key]: tensor for key, tensor in self.served.items()}, name=self.name)
        with _without_prints():
            serving.export(os.fspath(filepath), *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The graph of all outputs, and which of them are trained and which served."""
        whole = keras.Model(self.input, {**self.served, **self.output}, name=self.name)
        own = {"trainable": self.trainable, "trained": list(self.output), "served": list(self.served)}
        return {**whole.get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Network:
        """The network of a :meth:`get_config`."""
        config = dict(config)
        trained, served = config.pop("trained"), config.pop("served")
        whole = keras.Model.from_config(config, custom_objects=custom_objects)
        outputs = {key: whole.output[key] for key in trained}
        return cls(
            whole.input,
            outputs,
            name=whole.name,
            trainable=whole.trainable,
            served={key: whole.output[key] for key in served},
        )


@contextlib.contextmanager
def _without_prints() -> Iterator[None]:
    """What Keras says goes to the log: it prints about exports, and each version takes another option against that."""
    talking = keras.config.is_interactive_logging_enabled()
    keras.config.disable_interactive_logging()
    try:
        yield
    finally:
        if talking:
            keras.config.enable_interactive_logging()
