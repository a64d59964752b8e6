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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the words after the command's name; None takes the process's.

    Returns:
        The exit status: 0 when all is well, 1 after an error, 130 when interrupted.
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
        raise KeyboardInterrupt

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

    verify = command("verify", _verify, "Read everything and compare it with what was written.")
    verify.add_argument("paths", metavar="DIR", nargs="+", help="directories of records, or any TFRecord files")
    verify.add_argument(
        "--salvage", metavar="OUT", help="copy the sound records of DIR, and say which are lost"
    )
    verify.add_argument("--overwrite", action="store_true", help="replace what OUT holds")
    verify.add_argument("--threads", type=int, metavar="N", help="shards read at once (default: one a core)")
    _quiet(verify)

    reshard = command("reshard", _reshard, "Other shards for the same records, without decoding them.")
    reshard.add_argument(
        "directories", metavar="DIR", nargs="+", help="several of equal schemas are merged"
    )
    reshard.add_argument("-o", "--output", metavar="OUT", help="where to write (default: in place of a single DIR)")
    size = reshard.add_mutually_exclusive_group(required=True)
    size.add_argument("--shards", type=int, metavar="N", help="so many shards")
    size.add_argument("--samples-per-shard", type=int, metavar="N", help="so many records a shard")
    size.add_argument(
        "--suggest-for", type=int, metavar="WORKERS", help="say how many shards suit so many workers"
    )
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


def _convert(args: argparse.Namespace) -> None:
    from otbtf_lite import parallel

    plan = parallel.plan(args.recipe)
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


def _verify(args: argparse.Namespace) -> None:
    from otbtf_lite.salvage import salvage
    from otbtf_lite.tfrecords import TFRecords
    from otbtf_lite.verify import file_faults

    if args.salvage:
        if len(args.paths) != 1:
            raise InputError("--salvage takes one directory at a time.")
        saved = salvage(args.paths[0], args.salvage, overwrite=args.overwrite, progress=_progress(args))
        for loss in saved.lost:
            print(f"lost: {loss}")
        print(f"{args.salvage}: {saved.manifest.n_samples} sound records")
        return
    faults: list[str] = []
    for path in args.paths:
        if Path(path).is_file():
            own = file_faults(path)
        else:
            own = TFRecords(path).faults(threads=args.threads, progress=_progress(args))
        faults += own
        if not own:
            print(f"{path}: all is well")
    for fault in faults:
        print(fault)
    if faults:
        raise DataError(f"{len(faults)} faults were found.")


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
    output = args.output or f"{os.fspath(args.directories[0]).rstrip(os.sep)}.resharding"
    manifest = reshard.reshard(
        args.directories, output, n_shards=args.shards, n_samples_per_shard=args.samples_per_shard, seed=args.seed,
        shuffle=args.order == "shuffled", compression=args.compression, overwrite=args.overwrite or args.output is None,
        progress=_progress(args),
    )  # fmt: skip
    if args.output is None:
        reshard.replace_directory(args.directories[0], output)
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
