"""The ``otbtf-lite`` command: each subcommand is a thin layer over one call of the library.

Results go to stdout; progress, and errors of one line each, to stderr. The exit status is 0 only when all is well.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from otbtf_lite._version import __version__
from otbtf_lite.errors import DataError, Error, InputError

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_STATISTICS = ("count", "min", "p2", "p50", "p98", "max", "mean", "std")  # columns: pN is the Nth percentile
_TERMINATED = 143  # 128 + SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM, where it is caught."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the words after the command's name; None takes the process's.

    Returns:
        The exit status: 0 when all is well, 1 after an error, 130 when interrupted, 143 when terminated.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    before = _exit_on_sigterm()
    try:
        args.run(args)
        sys.stdout.flush()
    except Error as error:
        print(f"otbtf-lite: {error}", file=sys.stderr)
        return 1
    except _Terminated:
        print("otbtf-lite: terminated", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        print("otbtf-lite: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return 0


def _exit_on_sigterm() -> Any:
    """SIGTERM ends the command as Ctrl-C does: files are closed and half-written ones removed."""

    def interrupt(*_: object) -> None:
        raise _Terminated

    try:
        return signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread: whoever calls us there keeps the signals
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="otbtf-lite", description=__doc__.splitlines()[0].replace("``", ""))
    parser.add_argument("--version", action="version", version=f"otbtf-lite {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    sample = command("sample", _sample, "The positions of a recipe's patches, with class and split, as points.")
    sample.add_argument("recipe", metavar="RECIPE", help="a TOML file: sources, positions, splits")
    sample.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write, such as points.gpkg")
    sample.add_argument("--rejected", metavar="FILE", help="write the positions left out, with source and reason")

    convert = command("convert", _convert, "Rasters to directories of TFRecords, as a recipe says.")
    convert.add_argument("recipe", metavar="RECIPE", help="a TOML file: sources, positions, splits, output")
    convert.add_argument("-o", "--output", metavar="DIR", required=True, help="where to write")
    again = convert.add_mutually_exclusive_group()
    again.add_argument("--overwrite", action="store_true", help="replace what is there")
    again.add_argument("--resume", action="store_true", help="go on where a run broke off")
    convert.add_argument("--threads", type=int, metavar="N", help="threads that read rasters (default: one a core)")
    _quiet(convert)

    info = command("info", _info, "What a directory of TFRecords holds.")
    info.add_argument("directories", metavar="DIR", nargs="+")

    _take_paths(command("stats", _stats, "Statistics of bands and counts of classes, as tables."))

    verify = command("verify", _verify, "Read everything and compare it with what was written.")
    verify.add_argument("paths", metavar="DIR", nargs="+", help="directories of records, or any TFRecord files")
    verify.add_argument("--salvage", metavar="OUT", help="copy the sound records of DIR, and say which are lost")
    verify.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    verify.add_argument("--threads", type=int, metavar="N", help="shards read at once (default: one a core)")
    _quiet(verify)

    reshard = command("reshard", _reshard, "Other shards for the same records, without decoding them.")
    reshard.add_argument("directories", metavar="DIR", nargs="+", help="several of equal schemas are merged")
    reshard.add_argument("-o", "--output", metavar="OUT", help="where to write (default: in place of a single DIR)")
    size = reshard.add_mutually_exclusive_group(required=True)
    size.add_argument("--shards", type=int, metavar="N", help="so many shards")
    size.add_argument("--samples-per-shard", type=int, metavar="N", help="so many records a shard")
    size.add_argument("--suggest-for", type=int, metavar="WORKERS", help="say how many shards suit so many workers")
    reshard.add_argument("--order", choices=("kept", "shuffled"), default="kept")
    reshard.add_argument("--seed", type=int, help="of the shuffled order")
    reshard.add_argument("--compression", choices=("GZIP", "ZLIB"))
    reshard.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    _quiet(reshard)

    predict = command("predict", _predict, "Map a whole raster with a trained model.")
    predict.add_argument("model", metavar="MODEL", help="a SavedModel directory or a .keras file")
    predict.add_argument(
        "raster", metavar="RASTER", nargs="+", help="a raster, or KEY=RASTER for each input of the model"
    )
    predict.add_argument("out", metavar="OUT", help="the GeoTIFF to write")
    predict.add_argument("--tile", type=int, default=256, metavar="PIXELS", help="size of a tile (default: 256)")
    predict.add_argument("--margin", type=int, default=32, metavar="PIXELS", help="margin around a tile (default: 32)")
    predict.add_argument("--outputs", nargs="+", metavar="NAME", help="outputs of the model to write, as bands")
    predict.add_argument("--nodata", type=float, metavar="VALUE", help="nodata value of the map")
    _quiet(predict)
    return parser


def _quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _progress(args: argparse.Namespace) -> bool | None:
    return False if args.quiet else None


def _sample(args: argparse.Namespace) -> None:
    from otbtf_lite import parallel
    from otbtf_lite.vector import concat_positions, write_positions

    plan = parallel.plan(args.recipe)
    positions = concat_positions(list(plan.positions.values()))
    if positions is None:
        raise InputError(f"{args.recipe} gives no positions.")
    write_positions(positions, args.output)
    if args.rejected:
        plan.rejections.write(args.rejected)
    print(plan.rejections)
    if plan.lost_between_splits:
        print(f"{plan.lost_between_splits} positions left out between splits")
    for name, part in plan.positions.items():
        classes = "".join(f", {text} {count}" for text, count in part.class_counts().items())
        print(f"{name or args.output}: {len(part)} positions{classes}")


def _convert(args: argparse.Namespace) -> None:
    from otbtf_lite import parallel

    plan = parallel.plan(args.recipe, seed=parallel.begun_seed(args.output) if args.resume else None)
    written = parallel.convert(
        plan, args.output, overwrite=args.overwrite, resume=args.resume, threads=args.threads, progress=_progress(args)
    )
    print(plan.rejections)
    if plan.lost_between_splits:
        print(f"{plan.lost_between_splits} positions left out between splits")
    for records in written.values():
        print(f"{records.dirpath}: {len(records)} samples in {len(records.shards)} shards")


def _info(args: argparse.Namespace) -> None:
    from otbtf_lite.tfrecords import TFRecords

    for directory in args.directories:
        records = TFRecords(directory)
        manifest = records.manifest
        print(f"{directory}: {len(records)} samples in {len(records.shards)} shards")
        for key, feature in records.schema.items():
            print(f"  {key}: {feature.dtype} {list(feature.shape)}, {feature.codec}")
        if manifest is None:
            print("  no manifest (written by OTBTF): counted just now, and cut files can't be noticed")
            continue
        print(f"  compression: {manifest.compression or 'none'}")
        print(f"  seed: {'the source had an order of its own' if manifest.seed is None else manifest.seed}")
        for reason, count in manifest.dropped.items():
            print(f"  dropped, {reason.replace('_', ' ')}: {count}")
        sources = manifest.details.get("sources", {})
        for key, source in sources.items() if isinstance(sources, dict) else ():
            print(f"  source {key}: {', '.join(source.get('paths', []))}")
        print(f"  written by: {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}")


def _take_paths(stats: argparse.ArgumentParser) -> None:
    stats.add_argument("paths", metavar="DIR_OR_RASTER", nargs="+", help="directories of records, or rasters")
    stats.add_argument("--categorical", action="store_true", help="the values of rasters are classes: count them")


def _stats(args: argparse.Namespace) -> None:
    from otbtf_lite import summaries
    from otbtf_lite.storage import Directory

    for path in args.paths:
        if Directory(path).is_dir():
            found = summaries.of_records(path)
        else:
            from otbtf_lite.raster import RasterSource

            found = summaries.of_raster(RasterSource(path, 1, categorical=args.categorical), Path(path).name).to_json()
        print(path)
        for key, stats in found.get("statistics", {}).items():
            _print_table(["key", "band", *_STATISTICS], [[key, *row] for row in _band_rows(stats)])
        for key, counts in found.get("class_counts", {}).items():
            total = sum(counts.values())
            rows = [[key, number, str(count), f"{count / total:.2%}"] for number, count in counts.items()]
            _print_table(["key", "class", "count", "share"], rows)
        if not found:
            print("  no numbers in it")


def _band_rows(stats: dict[str, Any]) -> list[list[str]]:
    columns = [stats["percentiles"][name[1:]] if name.startswith("p") else stats[name] for name in _STATISTICS]
    shown = [["-" if value is None else f"{value:.7g}" for value in column] for column in columns]
    shown[0] = [str(count) for count in stats["count"]]  # in full
    return [[str(band), *row] for band, row in enumerate(zip(*shown, strict=True), 1)]


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    """Columns aligned: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]))


def _verify(args: argparse.Namespace) -> None:
    from otbtf_lite.salvage import salvage
    from otbtf_lite.verify import file_faults

    if args.salvage and len(args.paths) != 1:
        raise InputError("--salvage takes one directory at a time.")
    faults: list[str] = []
    for path in args.paths:
        own = file_faults(path) if Path(path).is_file() else _directory_faults(path, args)
        faults += own
        if not own:
            print(f"{path}: all is well")
    for fault in faults:
        print(fault)
    lost = 0
    if args.salvage:
        saved = salvage(args.paths[0], args.salvage, overwrite=args.overwrite, progress=_progress(args))
        lost = len(saved.lost)
        for loss in saved.lost:
            print(f"lost: {loss}")
        print(f"{args.salvage}: {saved.manifest.n_samples} sound records")
    if faults or lost:
        raise DataError(f"{len(faults) or lost} fault{'s were' if (len(faults) or lost) > 1 else ' was'} found.")


def _directory_faults(path: str, args: argparse.Namespace) -> list[str]:
    from otbtf_lite.tfrecords import TFRecords

    return TFRecords(path).faults(threads=args.threads, progress=_progress(args))


def _reshard(args: argparse.Namespace) -> None:
    from otbtf_lite import reshard
    from otbtf_lite.tfrecords import TFRecords

    if args.suggest_for is not None:
        opened = [TFRecords(directory) for directory in args.directories]
        total = sum(map(len, opened))
        sample_bytes = sum(feature.nbytes for feature in opened[0].schema.values())
        shards = reshard.suggest_shards(total, sample_bytes, args.suggest_for)
        print(f"--shards {shards}")
        return
    if args.output is None and len(args.directories) > 1:
        raise InputError("Several directories are merged into a new one: name it with -o OUT.")
    options: dict[str, Any] = {
        "n_shards": args.shards, "n_samples_per_shard": args.samples_per_shard, "seed": args.seed,
        "shuffle": args.order == "shuffled", "compression": args.compression, "progress": _progress(args),
    }  # fmt: skip
    if args.output is None:
        manifest = reshard.reshard_in_place(args.directories[0], **options)
    else:
        manifest = reshard.reshard(args.directories, args.output, overwrite=args.overwrite, **options)
    print(f"{args.output or args.directories[0]}: {manifest.n_samples} samples in {len(manifest.shards)} shards")


def _predict(args: argparse.Namespace) -> None:
    from otbtf_lite.inference import predict_raster

    named = [text.partition("=") for text in args.raster]
    if len(named) == 1 and not named[0][1]:
        sources: Any = args.raster[0]
    elif all(equals for _, equals, _ in named):
        sources = {key: path for key, _, path in named}
    else:
        raise InputError("Several rasters need the names of the model's inputs: write KEY=RASTER for each.")
    predict_raster(
        args.model, sources, args.out, tile=args.tile, margin=args.margin, outputs=args.outputs, nodata=args.nodata,
        progress=_progress(args),
    )  # fmt: skip
    print(args.out)


if __name__ == "__main__":
    sys.exit(main())
