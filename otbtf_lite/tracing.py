"""Raw TensorFlow calls on Keras' symbolic tensors, each of which becomes a small layer.

Keras 3 refuses ``tf.concat([a, b], -1)`` on the tensors that a network is built from. Inside :func:`building` such a
call is traced into a graph, and the graph becomes a :class:`TensorFlowOp` layer of the network: TensorFlow's functions
and Keras' layers mix freely, as they did in Keras 2. The layer's config holds the graph itself, so a ``.keras`` file
needs nothing but this module to be read back.

Two hooks make this work. Both are inert outside :func:`building` and in other threads:

- TensorFlow offers a call that failed for its argument types to the registered *global dispatchers*
  (``tf.__internal__.dispatch``, semi-private: ``tests/test_tracing.py`` pins what is used of it).
- The operators of ``keras.KerasTensor`` follow TensorFlow's rules. Keras' own ones differ in ways that hurt: ``x == 0``
  is Python's ``False``; ``2.0 * x`` is taken for a sparse tensor, on which a layer of one's own then fails; an array of
  float64 turns the network into float64; and ``x[:, :n]`` refuses an ``n`` that the network computes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import inspect
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from otbtf_lite.errors import InputError, MissingDependencyError

_HOST_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
"""Graph nodes that call back into this very Python process: they can be neither saved nor served."""

_HANDLER = "op_dispatch_handler"
"""TensorFlow's function around each public call: it runs the call and, where that fails, asks the dispatchers."""


class _Building(threading.local):
    """What this thread is building."""

    def __init__(self) -> None:
        self.names: list[Counter[str]] = []
        """For each network, the innermost last: how often each layer name was asked for."""
        self.tracing = False
        """Whether a call is being traced, in which symbolic tensors have no place."""

    @property
    def active(self) -> bool:
        return bool(self.names) and not self.tracing


_building = _Building()
_install_lock = threading.Lock()
_installed = False


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Raw TensorFlow calls and operators take Keras' symbolic tensors inside this ``with`` block, in this thread.

    The layers that stand for the calls are named after them (``tf.nn.softmax``, then ``tf.nn.softmax_1``), counted from
    the start of the block, or after the ``name=`` that a call was given.

    Raises:
        InputError: Keras runs on something else than TensorFlow.
        MissingDependencyError: this TensorFlow has no global dispatchers.
    """
    _install()
    _building.names.append(Counter())
    try:
        yield
    finally:
        _building.names.pop()


@keras.saving.register_keras_serializable(package="otbtf_lite")
class TensorFlowOp(keras.layers.Layer):
    """A TensorFlow computation without weights, held as its graph.

    Args:
        graph: base64 of a serialized ``tf.GraphDef``.
        arguments: names of the graph's placeholders, in the order of the layer's inputs.
        results: names of the graph's tensors that the layer returns.
        **kwargs: those of ``keras.layers.Layer``.

    Raises:
        InputError: ``graph`` is not the base64 of a graph.
    """

    def __init__(self, graph: str, arguments: Sequence[str], results: Sequence[str], **kwargs: Any) -> None:
        # Under a mixed precision policy the graph gets its inputs as they are: it was traced for their dtypes.
        super().__init__(autocast=False, **kwargs)
        self.graph = graph
        self.arguments = list(arguments)
        self.results = list(results)
        try:
            self._graph_def = tf.compat.v1.GraphDef.FromString(base64.b64decode(graph, validate=True))
            self._specs = self._argument_specs()
        except (binascii.Error, KeyError, TypeError, ValueError, _decode_error()) as error:
            raise InputError(f"The config of layer {self.name!r} holds no TensorFlow graph ({error!r}).") from error
        # A function, as importing alone would hide the ops from gradient tapes; and a wrapped one, which enters the
        # graph's own functions (its loops and branches) into the process's table, where TensorFlow looks them up.
        self._function = tf.compat.v1.wrap_function(self._import, self._specs)
        # Any op may stand in a graph, also those that XLA can't compile: Keras then leaves the model uncompiled, unless
        # told otherwise.
        self.supports_jit = False
        self.built = True

    def call(self, inputs: Sequence[Any]) -> Any:
        """Runs the graph.

        Args:
            inputs: one tensor per placeholder.

        Returns:
            The one result, or a list of them.
        """
        # Keras 3.3 takes a tensor for float16 once it went into a float16 layer, also where it is float32.
        results = self._function(*(tf.cast(x, spec.dtype) for x, spec in zip(inputs, self._specs, strict=True)))
        return results[0] if len(results) == 1 else results

    def compute_output_spec(self, inputs: Sequence[keras.KerasTensor], **_: Any) -> Any:
        """The shapes and dtypes of the results, as TensorFlow infers them from those of the inputs.

        Raises:
            InputError: the number of axes of a result is unknown.
        """
        with tf.Graph().as_default():
            results = self._import(*(tf.compat.v1.placeholder(x.dtype, x.shape) for x in inputs))
        if any(result.shape.rank is None for result in results):
            raise InputError(
                f"The number of axes of what {self.name!r} returns is unknown, and a layer's must be known: reshape to "
                "a fixed number of axes."
            )
        specs = [keras.KerasTensor(tuple(result.shape), result.dtype.name) for result in results]
        return specs[0] if len(specs) == 1 else specs

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {"graph": self.graph, "arguments": self.arguments, "results": self.results}
        return {**super().get_config(), **own}

    def _argument_specs(self) -> list[Any]:
        """What the graph's placeholders take."""
        nodes = {f"{node.name}:0": node.attr for node in self._graph_def.node}
        return [tf.TensorSpec(nodes[name]["shape"].shape, nodes[name]["dtype"].type) for name in self.arguments]

    def _import(self, *inputs: Any) -> list[Any]:
        """The results for these inputs, in the current graph."""
        tensors = dict(zip(self.arguments, inputs, strict=True))
        imported = tf.graph_util.import_graph_def(
            self._graph_def, input_map=tensors, return_elements=self.results, name="graph"
        )
        return list(imported)


def _decode_error() -> type[Exception]:
    """What protobuf raises for bytes that are no message."""
    from google.protobuf.message import DecodeError

    return DecodeError  # type: ignore[no-any-return]  # protobuf is untyped


def as_layer(function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Makes a layer of a call that has symbolic tensors among its arguments, and calls it on them.

    Args:
        function: takes TensorFlow tensors in place of the symbolic ones; it is called here alone, to be traced.
        name: the call's name in messages, and the layer's name unless ``kwargs`` has a ``name``.
        args: positional arguments; symbolic tensors may stand at any depth of lists, tuples, dicts and slices.
        kwargs: keyword arguments, likewise.

    Returns:
        What ``function`` returns, with a symbolic tensor in place of each tensor.

    Raises:
        InputError: TensorFlow refuses the call, or the call holds a variable or a Python callback.
    """
    structure = _without_slices((tuple(args), kwargs))
    leaves = tf.nest.flatten(structure)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, keras.KerasTensor)]
    symbols = [leaves[place] for place in places]

    def call(*tensors: Any) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        called_args, called_kwargs = _with_slices(tf.nest.pack_sequence_as(structure, filled))
        return function(*called_args, **called_kwargs)

    concrete = _trace(call, name, symbols)
    results = tf.nest.flatten(concrete.structured_outputs)
    tensors = [place for place, result in enumerate(results) if tf.is_tensor(result)]
    if not tensors:
        raise InputError(f"{name} returns no tensor, so it can't be a part of the network: call it elsewhere.")
    layer = TensorFlowOp(
        base64.b64encode(_portable(concrete, name)).decode("ascii"),
        [tensor.name for tensor in concrete.inputs[: len(symbols)]],
        [results[place].name for place in tensors],
        name=_layer_name(kwargs.get("name") or name),
    )
    for place, symbol in zip(tensors, tf.nest.flatten(layer(symbols)), strict=True):
        results[place] = symbol
    return tf.nest.pack_sequence_as(concrete.structured_outputs, results)


def _trace(call: Callable[..., Any], name: str, symbols: Sequence[keras.KerasTensor]) -> Any:
    """A concrete function of one tensor per symbolic tensor.

    Under a mixed precision policy float16 layers meet float32 inputs. Where TensorFlow refuses to mix them, all
    floating-point tensors are cast to the wider dtype, which is Keras' rule.
    """
    specs = [tf.TensorSpec(x.shape, x.dtype, name=f"input_{place}") for place, x in enumerate(symbols)]
    floats = {str(x.dtype) for x in symbols if keras.backend.is_float_dtype(x.dtype)}

    def widened(*tensors: Any) -> Any:
        dtype = keras.backend.result_type(*floats)
        return call(*(tf.cast(x, dtype) if x.dtype.is_floating else x for x in tensors))

    def traced(function: Callable[..., Any]) -> Any:
        return tf.function(function, autograph=False).get_concrete_function(*specs)

    _building.tracing = True
    try:
        try:
            return traced(call)
        except (TypeError, ValueError):
            if len(floats) < 2:
                raise
        return traced(widened)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
        given = ", ".join(f"{x.dtype}{list(x.shape)}" for x in symbols)
        raise InputError(f"{name} can't be applied to {given} here: {error}") from error
    finally:
        _building.tracing = False


class _Slice(NamedTuple):
    """A slice that ``tf.nest`` looks into, since its bounds may be symbolic tensors."""

    start: Any
    stop: Any
    step: Any


def _without_slices(structure: Any) -> Any:
    """The structure with a `_Slice` in place of each slice."""
    return tf.nest.map_structure(
        lambda leaf: _Slice(leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else leaf, structure
    )


def _with_slices(structure: Any) -> Any:
    """The structure with slices again."""
    if isinstance(structure, _Slice):
        return slice(*structure)
    if isinstance(structure, dict):
        return {key: _with_slices(value) for key, value in structure.items()}
    if type(structure) in (tuple, list):
        return type(structure)(_with_slices(value) for value in structure)
    return structure


def _layer_name(name: str) -> str:
    """The name, numbered from its second use in the network on; Keras takes no "/" in names."""
    name = name.replace("/", "_")
    counts = _building.names[-1]
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}_{counts[name] - 1}"


def _portable(concrete: Any, name: str) -> bytes:
    """The graph of a traced call, serialized so that any process can import it beside any others.

    Four things tie a graph to its process: values captured from outside (they become constants), device names, the
    number under which a custom gradient is registered (without it TensorFlow differentiates the ops themselves), and
    the names of its functions, numbered through the process (they get a name made from the contents).
    """
    graph_def = concrete.graph.as_graph_def()
    functions = graph_def.library.function
    nodes = [*graph_def.node, *(node for function in functions for node in function.node_def)]
    by_name = {node.name: node for node in graph_def.node}
    for value, placeholder in concrete.graph.captures:
        if value.dtype in (tf.resource, tf.variant):
            raise InputError(
                f"{name} holds a variable, which no layer of the network would own, train and save: write this part as "
                "a keras.layers.Layer that creates it."
            )
        node = by_name[placeholder.op.name]
        node.op = "Const"
        node.attr.clear()
        node.attr["dtype"].type = value.dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value.numpy()))
    for node in nodes:
        if node.op in _HOST_OPS:
            raise InputError(
                f"{name} calls back into Python, so the network could be neither saved nor served: use TensorFlow's "
                "functions instead."
            )
        node.device = ""
        node.attr.pop("_gradient_op_type", None)
    digest = hashlib.sha256(graph_def.library.SerializeToString(deterministic=True)).hexdigest()[:16]
    renamed = {function.signature.name: f"{function.signature.name}_{digest}" for function in functions}
    for function in functions:
        function.signature.name = renamed[function.signature.name]
    for node in nodes:
        node.op = renamed.get(node.op, node.op)
        for attribute in node.attr.values():
            for called in (*([attribute.func] if attribute.HasField("func") else []), *attribute.list.func):
                called.name = renamed.get(called.name, called.name)
    return bytes(graph_def.SerializeToString(deterministic=True))


def _api_name(function: Callable[..., Any]) -> str:
    """``"tf.nn.softmax"`` for the function of that name."""
    plain = inspect.unwrap(function)
    names = getattr(plain, "_tf_api_names", None) or [getattr(plain, "__name__", "op")]
    return f"tf.{names[0]}"


def _nested_call() -> bool:
    """Whether the call that TensorFlow asks about was made by another of its public functions.

    ``tf.image.resize`` first converts its image, which fails. Were the conversion made a layer, it would go on with a
    symbolic tensor and fail for good at the next line. So a failure is left to reach the outermost call, which is
    traced whole.
    """
    handlers = 0
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # nothing else says who called
    while frame is not None and handlers < 2:  # the first is the call's own
        handlers += frame.f_code.co_name == _HANDLER
        frame = frame.f_back
    return handlers > 1


def _register_dispatcher() -> None:
    """Has failed TensorFlow calls on symbolic tensors become layers while a network is being built."""
    try:
        base = tf.__internal__.dispatch.GlobalOpDispatcher
    except AttributeError as error:
        raise MissingDependencyError(
            f"TensorFlow {tf.__version__} has no tf.__internal__.dispatch.GlobalOpDispatcher, by which calls become "
            "layers: install a version that has it, such as 2.21."
        ) from error

    class Dispatcher(base):  # type: ignore[misc, valid-type, unused-ignore]  # TensorFlow is untyped
        def handle(self, op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not _building.active or _nested_call():
                return self.NOT_SUPPORTED
            leaves = tf.nest.flatten(_without_slices((args, kwargs)))
            if not any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return self.NOT_SUPPORTED
            return as_layer(op, _api_name(op), args, kwargs)

    Dispatcher().register()


_OPERATORS = {
    name: getattr(operator, name)
    for name in ("abs", "neg", "invert", "lt", "le", "gt", "ge", "eq", "ne", "getitem")
}  # fmt: skip
"""What follows TensorFlow's rules on symbolic tensors, by the name of its method."""

_REFLECTED = {
    name: getattr(operator, f"__{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
}
"""Likewise, the operators that have a second method for a tensor on the right."""


def _overload(method: str, name: str, function: Callable[..., Any]) -> None:
    """Has a method of ``keras.KerasTensor`` make a layer, called ``name``, while a network is being built."""
    theirs = getattr(keras.KerasTensor, method)

    def call(self: keras.KerasTensor, *operands: Any) -> Any:
        # Keras' own code may ask whether a tensor is in a list: there "==" means the same tensor.
        if not _building.active or sys._getframe(1).f_globals.get("__name__", "").startswith("keras."):  # noqa: SLF001
            return theirs(self, *operands)
        return as_layer(function, name, (self, *operands), {})

    call.__name__ = method
    setattr(keras.KerasTensor, method, call)


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda right, left: function(left, right)


def _extend(method: str, function: Callable[..., Any]) -> None:
    """Gives ``keras.KerasTensor`` a method while a network is being built, and what it had before otherwise."""
    theirs = getattr(keras.KerasTensor, method, None)

    def get(self: keras.KerasTensor) -> Callable[..., Any]:
        chosen = function if _building.active else theirs
        if chosen is None:
            raise AttributeError(f"'KerasTensor' object has no attribute {method!r}")
        return functools.partial(chosen, self)

    setattr(keras.KerasTensor, method, property(get))


def _refuse_iteration(_: keras.KerasTensor) -> Any:
    # Keras raises NotImplementedError, after which TensorFlow would not ask the dispatchers.
    raise TypeError("A symbolic tensor can't be iterated over: use tf.unstack or tf.split.")


def _install() -> None:
    """Hooks into TensorFlow and Keras, once in a process.

    Raises:
        InputError: Keras runs on something else than TensorFlow.
        MissingDependencyError: this TensorFlow has no global dispatchers.
    """
    global _installed  # noqa: PLW0603  # as global as the hooks, which TensorFlow has no way to take out again
    with _install_lock:
        if _installed:
            return
        if keras.backend.backend() != "tensorflow":
            raise InputError(
                f"Keras runs on {keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow before Keras is imported."
            )
        _register_dispatcher()
        for name, function in _OPERATORS.items():
            _overload(f"__{name}__", f"tf.operators.{name}", function)
        for name, function in _REFLECTED.items():
            _overload(f"__{name}__", f"tf.operators.{name}", function)
            _overload(f"__r{name}__", f"tf.operators.{name}", _swapped(function))
        _extend("get_shape", lambda tensor: tf.TensorShape(tensor.shape))
        _extend("__iter__", _refuse_iteration)
        # NumPy then leaves ``array * tensor`` to the tensor, as it does for TensorFlow's own.
        keras.KerasTensor.__array_priority__ = 100
        _installed = True
