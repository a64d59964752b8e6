"""Training the U-Net of fcnn_model.py: the arguments, and what is done with patches, wherever they come from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from fcnn_model import FCNNModel

from otbtf_lite.stats import BandStats


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that both scripts take; OTBTF's have OTBTF's defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model_dir", type=Path, required=True, help="for the SavedModel and best.keras")
    parser.add_argument("--nb_classes", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8, help="samples a step on each device")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--nb_epochs", type=int, default=100, help="at most so many")
    parser.add_argument("--steps_per_epoch", type=int, help="default: one pass over the patches")
    parser.add_argument("--patience", type=int, default=8, help="epochs without a lower validation loss")
    parser.add_argument("--log_dir", help="for TensorBoard")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def devices(args: argparse.Namespace) -> tuple[tf.distribute.Strategy, int]:
    """All GPUs there are, or the CPU, and the samples of a step on all of them together."""
    keras.utils.set_random_seed(args.seed)
    several = len(tf.config.list_logical_devices("GPU")) > 1
    strategy = tf.distribute.MirroredStrategy() if several else tf.distribute.get_strategy()
    return strategy, args.batch_size * strategy.num_replicas_in_sync


def train(
    args: argparse.Namespace, patches: tf.data.Dataset, valid: tf.data.Dataset, test: tf.data.Dataset | None,
    stats: Mapping[str, BandStats], nodata: Mapping[str, list[float]], strategy: tf.distribute.Strategy,
) -> dict[str, float]:  # fmt: skip
    """Train and save the model; return its loss and accuracy on the test patches, where there are some."""
    with strategy.scope():
        model = FCNNModel(patches.element_spec, args.nb_classes, stats, nodata)
        loss = {model.target: "sparse_categorical_crossentropy"}
        model.compile(keras.optimizers.Adam(args.learning_rate), loss, metrics={model.target: "accuracy"})
    best = keras.callbacks.ModelCheckpoint(args.model_dir / "best.keras", save_best_only=True)
    callbacks: list[Any] = [best, keras.callbacks.EarlyStopping(patience=args.patience, restore_best_weights=True)]
    if args.log_dir:
        callbacks.append(keras.callbacks.TensorBoard(args.log_dir))
    options = {"epochs": args.nb_epochs, "steps_per_epoch": args.steps_per_epoch, "callbacks": callbacks}
    patches = patches.repeat() if args.steps_per_epoch else patches
    model.fit(patches, validation_data=valid, verbose=2, shuffle=False, **options)  # they are shuffled already
    model.save(args.model_dir)
    return {} if test is None else model.evaluate(test, return_dict=True, verbose=2)
