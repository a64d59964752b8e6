"""Patches images, as PatchesExtraction writes them, to TFRecords."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from otbtf_lite import DatasetFromPatchesImages


def main(argv: Sequence[str] | None = None) -> None:
    """Write one pass over the patches, in the order that the seed gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--xs", nargs="+", required=True, help="patches images with the images; sorted by name")
    parser.add_argument("--labels", nargs="+", required=True, help="patches images with the labels; sorted by name")
    parser.add_argument("--outdir", required=True, help="where to write the records")
    parser.add_argument("--n_samples_per_shard", type=int, default=100, help="the last shard has what remains")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    args = parser.parse_args(argv)
    files = {"input_xs_patches": sorted(args.xs), "labels_patches": sorted(args.labels)}
    with DatasetFromPatchesImages(files, use_streaming=True, seed=args.seed) as dataset:
        dataset.to_tfrecords(args.outdir, args.n_samples_per_shard, drop_remainder=False, overwrite=args.overwrite)
        print(f"{dataset.size} samples, {args.outdir}")


if __name__ == "__main__":
    main()
