"""Trains the U-Net of fcnn_model.py on TFRecords: train/ and valid/ in one directory, and test/ where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import training
from training_data import OTBTF_NAMES, band_stats, named, nodata_values, turned

from otbtf_lite import TFRecords


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and save the model; return its loss and accuracy on the test records, where there are some."""
    parser = training.arguments(__doc__)
    parser.add_argument("--tfrecords_dir", type=Path, required=True)
    parser.add_argument("--target", default="labels_patches", help="key of the labels, class numbers from 0")
    args = parser.parse_args(argv)
    strategy, batch_size = training.devices(args)
    train, valid, test = (TFRecords(args.tfrecords_dir / name) for name in ("train", "valid", "test"))

    shared = {"batch_size": batch_size, "target_keys": [OTBTF_NAMES.get(args.target, args.target)]}
    plain = {**shared, "preprocessing_fn": named, "drop_remainder": False}
    return training.train(
        args,
        patches=train.read(**shared, shuffle_buffer_size=1000, seed=args.seed, preprocessing_fn=turned),
        valid=valid.read(**plain),
        test=test.read(**plain) if Path(test.dirpath).is_dir() else None,
        stats=band_stats(train.read(**plain)),
        nodata=named(nodata_values(train)),
        strategy=strategy,
    )


if __name__ == "__main__":
    main()
