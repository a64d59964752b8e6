"""Maps whole rasters with a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from otbtf_lite import predict_raster


def main(argv: Sequence[str] | None = None) -> None:
    """Predict tile by tile and write a GeoTIFF on the first raster's grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a SavedModel directory or a .keras file")
    parser.add_argument("out", help="the GeoTIFF to write")
    parser.add_argument("rasters", nargs="+", metavar="KEY=RASTER", help="a raster for each input of the model")
    parser.add_argument("--outputs", nargs="+", help="the outputs to write, whose bands follow one another")
    parser.add_argument("--tile", type=int, default=256, help="pixels of a tile")
    parser.add_argument("--margin", type=int, default=32, help="pixels around it that the model sees too")
    parser.add_argument("--dtype", help="element type of the map")
    parser.add_argument("--nodata", type=float, help="its nodata value")
    parser.add_argument("--classes", nargs="+", metavar="NAME=RRGGBB", help="the classes' names and colours, from 0")
    args = parser.parse_args(argv)
    classes = dict(enumerate(text.rpartition("=")[::2] for text in args.classes or []))
    predict_raster(
        args.model, dict(text.split("=", 1) for text in args.rasters), args.out, tile=args.tile, margin=args.margin,
        outputs=args.outputs, dtype=args.dtype, nodata=args.nodata,
        colors={value: tuple(bytes.fromhex(color)) for value, (_, color) in classes.items()},
        categories={value: name for value, (name, _) in classes.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
