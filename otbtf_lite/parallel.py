"""Recipe -> plan -> directories of records.

A recipe says everything that decides what a data set holds: sources, positions, splits, output. :func:`plan` opens the
rasters and settles every position; :func:`convert` then reads and writes.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from otbtf_lite import sampling, sharding
from otbtf_lite.dataset import DatasetFromRasters, RandomIterator, SequentialIterator
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Positions
from otbtf_lite.raster import RasterSource
from otbtf_lite.schema import nearest
from otbtf_lite.storage import Directory
from otbtf_lite.tfrecords import TFRecords

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_METHODS: Mapping[str, Callable[..., Positions]] = {
    name: getattr(sampling, name)
    for name in ("on_grid", "at_random", "from_vector", "from_labels", "balanced")
    if hasattr(sampling, name)
}
_SECTIONS = ("seed", "output", "sources", "positions", "splits")
_PATH_ARGUMENTS = ("mask", "labels", "vector")


@dataclass(frozen=True)
class Output:
    """How records are written."""

    samples_per_shard: int = 100
    """Records a shard."""
    drop_remainder: bool = True
    """Leave out what does not fill a last shard."""
    compression: str | None = None
    """None, ``"GZIP"`` or ``"ZLIB"``."""
    codecs: Mapping[str, str] = field(default_factory=dict)
    """Codec names by source."""
    shuffle: bool = True
    """Write in an order drawn from the seed; False keeps the order of the positions."""
    label_key: str | None = None
    """Key under which a position's class enters each sample."""


@dataclass(frozen=True)
class Plan:
    """What a recipe comes to on its rasters: nothing is left to chance from here on."""

    sources: Mapping[str, RasterSource]
    """The sources by key; the first is the reference."""
    positions: Mapping[str, Positions]
    """Positions by the name of their directory; ``""`` is the output directory itself."""
    rejections: sampling.Rejections
    """The positions that were drawn and not kept, with reasons."""
    lost_between_splits: int
    """Positions left out because they lay too near to another split."""
    output: Output
    """How records are written."""
    seed: int
    """The recipe's seed, or the one drawn where it has none."""
    sampling: Mapping[str, Any]
    """The recipe's ``positions`` and ``splits``, for the manifest."""

    @property
    def n_samples(self) -> int:
        """Samples of all directories together."""
        return sum(len(positions) for positions in self.positions.values())


def load_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The recipe in a TOML file.

    Raises:
        DataError: the file can't be read or is not TOML.
    """
    where = os.fspath(path)
    try:
        with Path(where).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise DataError(f"Could not read the recipe {where}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"The recipe {where} is not valid TOML: {error}.") from error


def plan(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> Plan:
    """Settles every position of a recipe.

    Args:
        recipe: a TOML file, whose paths are relative to it, or the same as a dict, whose paths are relative to the
            working directory.

    Raises:
        InputError: unknown keys, missing ones, values that do not fit, or no position left.
        DataError: a raster or the recipe can't be read.
    """
    if isinstance(recipe, Mapping):
        data, base, where = dict(recipe), "", "the recipe"
    else:
        data, base, where = load_recipe(recipe), str(Path(recipe).parent), os.fspath(recipe)
    _refuse_unknown(data, _SECTIONS, where)
    seed = sharding.check_seed(data.get("seed"))
    output = _build(Output, _table(data, "output", where), f"{where}: [output]")
    sources = _sources(_table(data, "sources", where), base, where)
    drawn, snap = _draw(_table(data, "positions", where), sources, seed, base, where)
    kept, rejections = sampling.select(drawn, sources, snap=snap)
    splits, lost = {"": kept}, 0
    if "splits" in data:
        splits = _split(_table(data, "splits", where), kept, sources, seed, where)
        lost = len(kept) - sum(map(len, splits.values()))
    settings: dict[str, Any] = {key: data[key] for key in ("positions", "splits") if key in data}
    return Plan(sources, splits, rejections, lost, output, seed, settings)


def convert(
    plan: Plan,
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    resume: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> dict[str, TFRecords]:
    """Reads the patches of a plan and writes its directories, each under ``output_dir``.

    Args:
        plan: what to read.
        output_dir: where to write; with splits, each has a directory of its name in it.
        overwrite: replace what those directories hold.
        resume: go on where a run with the same recipe broke off; directories that are finished are left as they are.
        threads: threads that read rasters; None takes one a core.
        progress: show progress bars; None does so on a terminal.

    Returns:
        The directories by name.

    Raises:
        InputError: a split without samples, or too few for one shard.
        DataError: a directory that holds a data set already, or a raster that can't be read.
    """
    base = Directory(output_dir)
    written: dict[str, TFRecords] = {}
    jobs = {}
    for name, positions in plan.positions.items():
        try:
            sharding.plan_shards(len(positions), plan.output.samples_per_shard, plan.output.drop_remainder)
        except InputError as error:
            raise InputError(f"{name or 'The data set'}: {error}") from error
        records = TFRecords(base.path(name) if name else base.url)
        written[name] = records
        if not (resume and Directory(records.dirpath).is_dir() and _finished(records)):
            jobs[name] = records
    for name, records in jobs.items():
        with DatasetFromRasters(
            plan.sources, plan.positions[name], seed=plan.seed, threads=threads, label_key=plan.output.label_key,
            iterator_cls=RandomIterator if plan.output.shuffle else SequentialIterator,
        ) as dataset:  # fmt: skip
            dataset.details["sampling"] = {**plan.sampling, **({"split": name} if name else {})}
            dataset.dropped.update({"rejected": plan.rejections.counts()} if len(plan.rejections) else {})
            dataset.dropped.update({"between_splits": plan.lost_between_splits} if plan.lost_between_splits else {})
            begun = resume and Directory(records.dirpath).is_dir() and bool(Directory(records.dirpath).names())
            records.ds2tfrecord(
                dataset, plan.output.samples_per_shard, plan.output.drop_remainder, overwrite=overwrite, resume=begun,
                compression=plan.output.compression, codecs=plan.output.codecs, progress=progress,
            )  # fmt: skip
    return written


def _finished(records: TFRecords) -> bool:
    try:
        return records.manifest is not None
    except DataError:  # unfinished: that is what resume is for
        return False


def _sources(table: Mapping[str, Any], base: str, where: str) -> dict[str, RasterSource]:
    if not table:
        raise InputError(f"{where} names no sources: it needs at least one table such as [sources.xs].")
    out = {}
    for key, value in table.items():
        settings = dict(_mapping(value, f"{where}: [sources.{key}]"))
        if "paths" in settings:
            paths = settings["paths"]
            settings["paths"] = [str(Path(base, str(p))) for p in ([paths] if isinstance(paths, str) else paths)]
        out[key] = _build(RasterSource, settings, f"{where}: [sources.{key}]")
    return out


def _draw(
    table: Mapping[str, Any], sources: Mapping[str, RasterSource], seed: int, base: str, where: str
) -> tuple[Positions, Literal["coarsest"] | None]:
    settings = dict(table)
    place = f"{where}: [positions]"
    method = settings.pop("method", None)
    snap = _snap(settings.pop("snap", "coarsest"), place)
    if method not in _METHODS:
        raise InputError(
            f"{place} needs method, one of {', '.join(map(repr, _METHODS))}; got {method!r}"
            f"{nearest(str(method), _METHODS)}."
        )
    draw = _METHODS[method]
    takes = inspect.signature(draw).parameters
    _refuse_unknown(settings, [name for name in takes if name not in ("source", "seed")], place)
    for name in _PATH_ARGUMENTS:
        value = settings.get(name)
        if isinstance(value, str):
            settings[name] = sources.get(value) or str(Path(base, value))
    if "seed" in takes:
        settings["seed"] = seed
    for name in ("patch_size", "stride", "offset"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    return _call(draw, (next(iter(sources.values())),), settings, place), snap


def _snap(value: object, where: str) -> Literal["coarsest"] | None:
    if value == "coarsest":
        return "coarsest"
    if value == "none":  # TOML has no null
        return None
    raise InputError(f'{where}: snap must be "coarsest" or "none", got {value!r}.')


def _split(
    table: Mapping[str, Any], positions: Positions, sources: Mapping[str, RasterSource], seed: int, where: str
) -> dict[str, Positions]:
    settings = dict(table)
    place = f"{where}: [splits]"
    takes = [
        name for name in inspect.signature(sampling.split).parameters if name not in ("positions", "sources", "seed")
    ]
    _refuse_unknown(settings, takes, place)
    if "fractions" not in settings:
        raise InputError(f"{place} needs fractions, such as fractions = {{train = 0.8, valid = 0.2}}.")
    kept = _call(sampling.split, (positions, sources), {**settings, "seed": seed}, place)
    names = np.asarray(kept.split)
    return {str(name): kept[names == name] for name in settings["fractions"]}


def _call(function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any], where: str) -> Any:
    try:
        inspect.signature(function).bind(*args, **settings)
    except TypeError as error:
        raise InputError(f"{where}: {error}.") from error
    return function(*args, **settings)


def _build(cls: Callable[..., Any], settings: Mapping[str, Any], where: str) -> Any:
    known = list(inspect.signature(cls).parameters)
    _refuse_unknown(settings, known, where)
    lists = {
        key: tuple(value) if isinstance(value, list) and key != "paths" else value for key, value in settings.items()
    }
    return _call(cls, (), lists, where)


def _table(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    return _mapping(data.get(key, {}), f"{where}: [{key}]")


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a table, got {value!r}.")
    return value


def _refuse_unknown(settings: Mapping[str, Any], known: Any, where: str) -> None:
    for key in settings:
        if key not in known:
            raise InputError(f"{where} has no key {key!r}{nearest(key, known)}. The keys are {', '.join(known)}.")
