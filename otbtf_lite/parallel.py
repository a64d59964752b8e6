"""Recipe -> plan -> directories of records.

A recipe says everything that decides what a data set holds: sources, positions, splits, output. :func:`plan` opens the
rasters and settles every position; :func:`convert` then reads and writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otbtf_lite import recipe as recipes
from otbtf_lite import sampling, sharding
from otbtf_lite.dataset import Dataset
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Positions
from otbtf_lite.iterators import BlockIterator, SequentialIterator, chunk_length
from otbtf_lite.manifest import Journal, load_journal, load_manifest
from otbtf_lite.raster import RasterSource, block_cache
from otbtf_lite.readers import RasterPatchesReader
from otbtf_lite.recipe import SECTIONS, load_recipe, refuse_unknown, table_of
from otbtf_lite.storage import Directory
from otbtf_lite.tfrecords import TFRecords
from otbtf_lite.vector import burned_classes
from otbtf_lite.writing import check_free

__all__ = ["Output", "Plan", "begun_seed", "convert", "load_recipe", "plan"]

_log = logging.getLogger(__name__)


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
    """Write region by region, these and the samples of each in an order drawn from the seed
    (:class:`~otbtf_lite.dataset.BlockIterator`); False keeps the order of the positions."""
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
    """For the manifest: the recipe's ``positions`` and ``splits``, and under ``burned`` the sources burned from
    polygons with the names of their classes."""

    @property
    def n_samples(self) -> int:
        """Samples of all directories together."""
        return sum(len(positions) for positions in self.positions.values())


def begun_seed(output_dir: str | os.PathLike[str]) -> int | None:
    """The seed with which a conversion into a directory was begun; None where nothing is there.

    Raises:
        DataError: a journal or a manifest there is not valid.
    """
    base = Directory(output_dir)
    for directory in (base, *(Directory(base.path(name)) for name in base.names())):
        if not directory.is_dir():
            continue
        known = load_journal(directory) or load_manifest(directory)
        seed = known.settings.get("seed") if isinstance(known, Journal) else known.seed if known is not None else None
        if isinstance(seed, int):
            return seed
    return None


@block_cache()
def plan(recipe: str | os.PathLike[str] | Mapping[str, Any], *, seed: int | None = None) -> Plan:
    """Settles every position of a recipe.

    A source with a ``vector`` is burned into the file that its ``paths`` names, anew each time: a label raster that can
    be looked at, and that the manifest describes as any other source.

    Args:
        recipe: a TOML file, whose paths are relative to it, or the same as a dict, whose paths are relative to the
            working directory.
        seed: of a recipe that has none; None draws one.

    Raises:
        InputError: unknown keys, missing ones, values that do not fit, or no position left.
        DataError: a raster or the recipe can't be read.
    """
    if isinstance(recipe, Mapping):
        data, base, where = dict(recipe), "", "the recipe"
    else:
        data, base, where = load_recipe(recipe), str(Path(recipe).parent), os.fspath(recipe)
    refuse_unknown(data, SECTIONS, where)
    seed = sharding.check_seed(data.get("seed", seed))
    output = recipes.build(Output, table_of(data, "output", where), f"{where}: [output]")
    sources = recipes.sources(table_of(data, "sources", where), base, where)
    drawn, selecting = recipes.draw(table_of(data, "positions", where), sources, seed, base, where)
    kept, rejections = sampling.select(drawn, sources, **selecting)
    splits, lost = {"": kept}, 0
    if "splits" in data:
        splits = recipes.split(table_of(data, "splits", where), kept, sources, seed, base, where)
        lost = len(kept) - sum(map(len, splits.values()))
    settings: dict[str, Any] = {key: data[key] for key in ("positions", "splits") if key in data}
    burned = {
        key: {**table, "classes": {str(k): name for k, name in (burned_classes(sources[key].paths[0]) or {}).items()}}
        for key, table in data["sources"].items()
        if "vector" in table
    }
    settings.update({"burned": burned} if burned else {})
    return Plan(sources, splits, rejections, lost, output, seed, settings)


@block_cache()
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

    The positions that were rejected are saved too, with source and reason: as ``rejected.gpkg`` in ``output_dir`` where
    that holds the splits' directories. Without splits it is a directory of records, which holds nothing else: then the
    file lies beside it, ``<output_dir>.rejected.gpkg``. Remote directories (``gs://``) get none.

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
    _check_names(plan.positions)
    written: dict[str, TFRecords] = {}
    jobs = {}
    for name, positions in plan.positions.items():
        try:
            sharding.plan_shards(len(positions), plan.output.samples_per_shard, plan.output.drop_remainder)
        except InputError as error:
            raise InputError(f"{name or 'The data set'}: {error}") from error
        records = TFRecords(base.path(name) if name else base.url)
        written[name] = records
        place = Directory(records.dirpath)
        begun = resume and bool(place.names())
        if not (begun and _finished(records)):
            # All are asked before the first is written: half of the splits is no use to anyone.
            check_free(place, overwrite=overwrite, resume=begun)
            jobs[name] = records, begun
    for name, (records, begun) in jobs.items():
        reader = RasterPatchesReader(
            plan.sources, plan.positions[name], threads=threads, label_key=plan.output.label_key
        )
        iterator_cls = BlockIterator if plan.output.shuffle else SequentialIterator
        with Dataset(reader, chunk_length(reader), iterator_cls, seed=plan.seed) as dataset:
            dataset.details["sampling"] = {**plan.sampling, **({"split": name} if name else {})}
            dataset.dropped.update({"rejected": plan.rejections.counts()} if len(plan.rejections) else {})
            dataset.dropped.update({"between_splits": plan.lost_between_splits} if plan.lost_between_splits else {})
            records.ds2tfrecord(
                dataset, plan.output.samples_per_shard, plan.output.drop_remainder, overwrite=overwrite, resume=begun,
                compression=plan.output.compression, codecs=plan.output.codecs, progress=progress,
            )  # fmt: skip
    _save_rejections(plan, base)
    return written


def _check_names(names: Iterable[str]) -> None:
    """Splits become directories: each a plain name, and no two that a file system may take for one."""
    known: dict[str, str] = {}
    for name in names:
        if name and (name.startswith(".") or any(sign in name for sign in "/\\:") or not name.isprintable()):
            raise InputError(f"A split named {name!r} can't be a directory's name: use letters, digits, - and _.")
        if name.lower() in known:
            raise InputError(f"The splits {known[name.lower()]!r} and {name!r} differ only in case: rename one.")
        known[name.lower()] = name


def _save_rejections(plan: Plan, base: Directory) -> None:
    if base.remote:
        _log.info("%s is remote: the rejected positions are not saved.", base.url)
        return
    has_splits = "" not in plan.positions
    file = Path(base.path("rejected.gpkg") if has_splits else f"{base.url.rstrip(os.sep)}.rejected.gpkg")
    if len(plan.rejections):
        plan.rejections.write(file)
    else:
        file.unlink(missing_ok=True)  # of another recipe


def _finished(records: TFRecords) -> bool:
    try:
        return records.manifest is not None
    except DataError:  # unfinished: that is what resume is for
        return False
