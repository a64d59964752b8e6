"""Rasters to TFRecords, as a recipe says: what to read, where patches are taken, how they are split."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from otbtf_lite import parallel


def main(argv: Sequence[str] | None = None) -> None:
    """Settle the positions, say what was rejected, write one directory for each split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="a TOML file")
    parser.add_argument("outdir", help="where to write: a directory for each split, or the records themselves")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    args = parser.parse_args(argv)
    plan = parallel.plan(args.recipe)
    print(plan.rejections)
    for name, records in parallel.convert(plan, args.outdir, overwrite=args.overwrite).items():
        print(f"{name or 'all'}: {len(records)} samples in {len(records.shards)} shards, {records.dirpath}")


if __name__ == "__main__":
    main()
