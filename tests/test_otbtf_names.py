"""OTBTF's Python names: where they are imported from, what they take, in which order, with which defaults."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("osgeo.gdal")

ROOT = Path(__file__).resolve().parents[1]

# What OTBTF has comes first and is OTBTF's; what is more comes after it, by keyword ("*"). Methods are shown without
# self; AUTO is 0 and AUTOTUNE is -1 in TensorFlow.
SIGNATURES = {
    "dataset.Buffer": "(max_length)",
    "dataset.Buffer.size": "()",
    "dataset.Buffer.add": "(new_element)",
    "dataset.Buffer.is_complete": "()",
    "dataset.PatchesReaderBase.get_sample": "(index)",
    "dataset.PatchesReaderBase.get_stats": "()",
    "dataset.PatchesReaderBase.get_size": "()",
    "dataset.PatchesImagesReader": "(filenames_dict, use_streaming=False, scalar_dict=None)",
    "dataset.PatchesImagesReader.get_sample": "(index)",
    "dataset.PatchesImagesReader.get_stats": "()",
    "dataset.PatchesImagesReader.get_size": "()",
    "dataset.IteratorBase": "(patches_reader)",
    "dataset.RandomIterator": "(patches_reader, seed=None)",
    "dataset.RandomIterator.__iter__": "()",
    "dataset.RandomIterator.__next__": "()",
    "dataset.Dataset": (
        "(patches_reader=None, buffer_length=128, iterator_cls=RandomIterator, max_nb_of_samples=None, *, seed=None)"
    ),
    "dataset.Dataset.read_one_sample": "()",
    "dataset.Dataset.get_stats": "()",
    "dataset.Dataset.get_total_wait_in_seconds": "()",
    "dataset.Dataset.get_tf_dataset": (
        "(batch_size, drop_remainder=True, preprocessing_fn=None, targets_keys=None, *, target_keys=None,"
        " batched_preprocessing=False)"
    ),
    "dataset.Dataset.to_tfrecords": "(output_dir, n_samples_per_shard=100, drop_remainder=True, **options)",
    "dataset.Dataset.close": "()",
    "dataset.DatasetFromPatchesImages": (
        "(filenames_dict, use_streaming=False, buffer_length=128, iterator_cls=RandomIterator, *, scalar_dict=None,"
        " seed=None)"
    ),
    "utils.gdal_open": "(filename)",
    "utils.read_as_np_arr": "(gdal_ds, as_patches=True, dtype=None)",
    "tfrecords.TFRecords": "(path)",
    "tfrecords.TFRecords.ds2tfrecord": (
        "(dataset, n_samples_per_shard=100, drop_remainder=True, *, overwrite=False, resume=False, compression=None,"
        " codecs=None, progress=None)"
    ),
    "tfrecords.TFRecords.read": (
        "(batch_size, target_keys, n_workers=1, drop_remainder=True, shuffle_buffer_size=None, preprocessing_fn=None,"
        " shard_policy=0, prefetch_buffer_size=-1, num_parallel_calls=-1, *, worker_index=None, input_keys=None,"
        " seed=None, start_epoch=0, start_step=0, engine='auto', batched_preprocessing=False, verify=True,"
        " preprocessing_kwargs=None, **kwargs)"
    ),
    "tfrecords.TFRecords.parse_tfrecord": "(example, target_keys, preprocessing_fn=None, **kwargs)",
    "tfrecords.TFRecords.save": "(data, filepath)",
    "tfrecords.TFRecords.load": "(filepath)",
    "model.ModelBase": "(dataset_element_spec, input_keys=None, inference_cropping=None)",
    "model.ModelBase.get_inputs": "()",
    "model.ModelBase.normalize_inputs": "(inputs)",
    "model.ModelBase.get_outputs": "(normalized_inputs)",
    "model.ModelBase.postprocess_outputs": "(outputs, inputs=None, normalized_inputs=None)",
    "model.ModelBase.create_network": "()",
    "model.ModelBase.summary": "(strategy=None)",
    "model.ModelBase.plot": "(output_path, strategy=None, show_shapes=False)",
    "model.ModelBase.export": "(path)",
    "model.cropped_tensor_name": "(tensor_name, crop)",
    "model.is_chief": "(strategy)",
    "model._is_chief": "(strategy)",
    "layers.DilatedMask": "(nodata_value, radius, name=None, **kwargs)",
    "layers.ApplyMask": "(out_nodata, name=None, **kwargs)",
    "layers.ScalarsTile": "(name=None, **kwargs)",
    "layers.Argmax": "(name=None, expand_last_dim=True, **kwargs)",
    "layers.Max": "(name=None, **kwargs)",
    "ops.one_hot": "(labels, nb_classes)",
}

# Names in the package itself, and OTBTF's import lines, old and new.
OF_THE_PACKAGE = [
    "Buffer", "Dataset", "DatasetFromPatchesImages", "IteratorBase", "ModelBase", "PatchesImagesReader",
    "PatchesReaderBase", "RandomIterator", "TFRecords", "gdal_open", "read_as_np_arr",
]  # fmt: skip

IMPORTS = [
    "from otbtf_lite import DatasetFromPatchesImages",
    "from otbtf_lite import TFRecords",
    "from otbtf_lite import layers, ops",
    "from otbtf_lite import Buffer, PatchesReaderBase, PatchesImagesReader, IteratorBase, RandomIterator, Dataset",
    "from otbtf_lite.dataset import Buffer, PatchesReaderBase, PatchesImagesReader, IteratorBase, RandomIterator",
    "from otbtf_lite.dataset import Dataset, DatasetFromPatchesImages",
    "from otbtf_lite.dataset import gdal_open, read_as_np_arr",
    "from otbtf_lite.utils import read_as_np_arr, gdal_open",
    "from otbtf_lite.utils import _is_chief, cropped_tensor_name",
    "from otbtf_lite.tfrecords import TFRecords",
    "from otbtf_lite.model import ModelBase, cropped_tensor_name, _is_chief",
    "from otbtf_lite.layers import DilatedMask, ApplyMask, ScalarsTile, Argmax, Max",
    "from otbtf_lite.ops import one_hot",
    "import otbtf_lite as otbtf; otbtf.Dataset, otbtf.TFRecords, otbtf.ModelBase",
    "import otbtf_lite as otbtf; otbtf.layers.Argmax, otbtf.ops.one_hot",
    "import otbtf_lite as otbtf; otbtf.dataset.Dataset, otbtf.tfrecords.TFRecords, otbtf.utils.gdal_open",
    "import otbtf_lite as otbtf; otbtf.model.cropped_tensor_name, otbtf.__version__",
]


def found(path: str) -> Any:
    module, *names = path.split(".")
    value = importlib.import_module(f"otbtf_lite.{module}")
    for name in names:
        value = getattr(value, name)
    return value


def shown(function: Any, *, of_class: bool) -> str:
    """A signature without annotations, and without the self of a method."""
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    if of_class and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    for number, each in enumerate(parameters):
        if inspect.isclass(each.default) and each.default is not each.empty:
            parameters[number] = each.replace(default=Named(each.default.__name__))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


class Named(str):
    """A word that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    assert shown(found(path), of_class=path.count(".") > 1) == SIGNATURES[path]


def test_defaults_are_tensorflows_own() -> None:
    import tensorflow as tf

    defaults = {name: p.default for name, p in inspect.signature(found("tfrecords.TFRecords.read")).parameters.items()}
    assert tf.data.experimental.AutoShardPolicy(defaults["shard_policy"]) is tf.data.experimental.AutoShardPolicy.AUTO
    assert defaults["prefetch_buffer_size"] == defaults["num_parallel_calls"] == tf.data.AUTOTUNE


@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_the_package_has_the_same_objects(name: str) -> None:
    package = importlib.import_module("otbtf_lite")
    homes = [path for path in SIGNATURES if path.split(".")[1] == name]
    assert name in package.__all__
    for path in homes or [f"dataset.{name}"]:
        assert getattr(package, name) is found(".".join(path.split(".")[:2]))


@pytest.mark.parametrize("line", IMPORTS)
def test_import_line(line: str) -> None:
    exec(line, {})  # noqa: S102  # written above


def test_static_methods_need_no_object() -> None:
    for name in ("save", "load"):
        assert isinstance(inspect.getattr_static(found("tfrecords.TFRecords"), name), staticmethod)


@pytest.mark.parametrize("name", ["PatchesReaderBase", "IteratorBase"])
def test_base_classes_are_abstract(name: str) -> None:
    base = found(f"dataset.{name}")
    assert inspect.isabstract(base)
    with pytest.raises(TypeError, match="abstract"):
        base() if name == "PatchesReaderBase" else base(None)


def test_modelbase_is_abstract_in_its_outputs_alone() -> None:
    assert found("model.ModelBase").__abstractmethods__ == {"get_outputs"}


def test_reader_base_asks_for_otbtfs_three_methods() -> None:
    assert found("dataset.PatchesReaderBase").__abstractmethods__ == {"get_sample", "get_stats", "get_size"}


# Attributes that scripts read; the rest of the members is above.
def test_attributes_of_a_dataset_and_its_reader(tmp_path: Path) -> None:
    import tensorflow as tf

    import otbtf_lite as otbtf

    path = tmp_path / "xs.tif"
    column = otbtf.Grid("", (0.0, 1.0, 0.0, 0.0, 0.0, 1.0), width=4, height=12)
    otbtf.raster.write_raster(path, np.zeros((12, 4, 2), np.uint16), column)
    with otbtf.DatasetFromPatchesImages(filenames_dict={"xs": [str(path)]}) as dataset:
        assert dataset.size == dataset.patches_reader.size == 3
        assert dataset.output_types == {"xs": tf.uint16}
        assert dataset.output_shapes == {"xs": (4, 4, 2)}
        assert isinstance(dataset.patches_reader, otbtf.PatchesImagesReader)
        assert isinstance(dataset.iterator, otbtf.RandomIterator)
        assert dataset.tf_dataset.element_spec == {"xs": tf.TensorSpec((4, 4, 2), tf.uint16)}
        dataset.to_tfrecords(output_dir=str(tmp_path / "records"), drop_remainder=False)
    records = otbtf.TFRecords(str(tmp_path / "records"))
    assert records.dirpath == str(tmp_path / "records")
    assert records.output_types == otbtf.TFRecords.load(records.output_types_file) == {"xs": "uint16"}
    assert records.output_shapes == otbtf.TFRecords.load(records.output_shapes_file) == {"xs": [4, 4, 2]}
    buffer = otbtf.Buffer(max_length=1)
    buffer.add("x")
    assert (buffer.container, buffer.size(), buffer.is_complete()) == (["x"], 1, True)


def test_names_of_the_model_are_loaded_from_utils_only_when_asked_for() -> None:
    code = (
        "import sys, otbtf_lite.utils as utils; before = 'tensorflow' in sys.modules;"
        " from otbtf_lite.utils import cropped_tensor_name as name;"
        " print(before, name('a', 16), hasattr(utils, 'other'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.stdout.split() == ["False", "a_crop16", "False"]
