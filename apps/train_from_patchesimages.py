"""Trains the U-Net of fcnn_model.py on patches images, as PatchesExtraction writes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import training
from training_data import OTBTF_NAMES, named, turned

from otbtf_lite import DatasetFromPatchesImages


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train and save the model; return its loss and accuracy on the test patches, where there are some."""
    parser = training.arguments(__doc__)
    for name in ("train", "valid", "test"):
        for key, what in {"xs": "images", "labels": "labels, class numbers from 0"}.items():
            help_text = f"patches images with the {what}; sorted by name"
            parser.add_argument(f"--{name}_{key}", nargs="+", required=name != "test", help=help_text)
    parser.add_argument("--use_streaming", action="store_true", help="read patches from the files each time")
    args = parser.parse_args(argv)
    if (args.test_xs is None) != (args.test_labels is None):
        parser.error("--test_xs and --test_labels go together")
    strategy, batch_size = training.devices(args)
    options = {"batch_size": batch_size, "targets_keys": [OTBTF_NAMES["labels_patches"]]}
    with ExitStack() as stack:

        def dataset(xs: list[str], labels: list[str]) -> Any:
            files = {"input_xs_patches": sorted(xs), "labels_patches": sorted(labels)}
            return stack.enter_context(DatasetFromPatchesImages(files, args.use_streaming, seed=args.seed))

        def watched(xs: list[str], labels: list[str]) -> Any:
            return dataset(xs, labels).get_tf_dataset(**options, drop_remainder=False, preprocessing_fn=named)

        train = dataset(args.train_xs, args.train_labels)
        return training.train(
            args,
            patches=train.get_tf_dataset(**options, preprocessing_fn=turned),
            valid=watched(args.valid_xs, args.valid_labels),
            test=watched(args.test_xs, args.test_labels) if args.test_xs else None,
            stats=named(train.patches_reader.band_stats()),
            nodata={},
            strategy=strategy,
        )


if __name__ == "__main__":
    main()
