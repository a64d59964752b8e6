"""Recipes: what their tables and keys mean. :mod:`otbtf_lite.parallel` plans and converts them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from otbtf_lite import sampling, vector
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Positions
from otbtf_lite.raster import RasterSource
from otbtf_lite.schema import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = ("seed", "output", "sources", "positions", "splits")
"""The keys of a recipe."""

METHODS: Mapping[str, Callable[..., Positions]] = {
    "on_grid": sampling.on_grid,
    "at_random": sampling.at_random,
    "from_vector": sampling.from_vector,
    "from_labels": sampling.from_labels,
    "balanced": sampling.balanced,
}
"""What draws positions, by the name in ``[positions]``."""

SELECT_KEYS = ("snap", "max_nodata")
"""Keys of ``[positions]`` that go with every method: arguments of :func:`~otbtf_lite.sampling.select`."""

BURN_KEYS = ("vector", "field", "layer", "all_touched", "background")
"""Keys of a source that is burned from polygons: arguments of :func:`~otbtf_lite.vector.burn`."""

GROUP_KEYS = ("vector", "field", "layer")
"""Keys of ``groups`` in ``[splits]``: arguments of :func:`~otbtf_lite.sampling.groups_of`."""

_RASTER_ARGUMENTS = ("mask", "labels")  # a path, or the key of a source


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


def source_keys() -> list[str]:
    """The keys of a source's table."""
    return [*inspect.signature(RasterSource).parameters, *BURN_KEYS]


def method_keys(method: str) -> list[str]:
    """The keys of ``[positions]`` that belong to one method."""
    return [name for name in inspect.signature(METHODS[method]).parameters if name not in ("source", "seed")]


def split_keys() -> list[str]:
    """The keys of ``[splits]``."""
    return [
        name for name in inspect.signature(sampling.split).parameters if name not in ("positions", "sources", "seed")
    ]


def sources(table: Mapping[str, Any], base: str, where: str) -> dict[str, RasterSource]:
    """The sources of a recipe; those with a ``vector`` are burned into the file that ``paths`` names.

    Args:
        table: ``[sources]``.
        base: the folder to which paths are relative.
        where: the recipe's name, for messages.

    Raises:
        InputError: unknown keys or values that do not fit.
        DataError: a vector can't be read, or its raster can't be written.
    """
    if not table:
        raise InputError(f"{where} names no sources: it needs at least one table such as [sources.xs].")
    out: dict[str, RasterSource] = {}
    for key, value in table.items():
        place = f"{where}: [sources.{key}]"
        settings = dict(mapping(value, place))
        refuse_unknown(settings, source_keys(), place)
        burning = {name: settings.pop(name) for name in BURN_KEYS if name in settings}
        if "paths" in settings:
            paths = settings["paths"]
            settings["paths"] = [_joined(base, p) for p in ([paths] if isinstance(paths, str) else paths)]
        if burning:
            settings["categorical"] = settings.get("categorical", True)
            _burn(burning, settings, out, base, place)
        out[key] = build(RasterSource, settings, place)
    return out


def _burn(
    burning: dict[str, Any], settings: Mapping[str, Any], known: Mapping[str, RasterSource], base: str, place: str
) -> None:
    if "vector" not in burning:
        raise InputError(f"{place} has {', '.join(burning)} but no vector, the polygons that these are about.")
    paths = settings.get("paths", [])
    if len(paths) != 1:
        raise InputError(f"{place} is burned from {burning['vector']}: paths must name the one file to burn it into.")
    if not settings["categorical"]:
        raise InputError(f"{place} is burned from {burning['vector']}: it is categorical, whatever it holds.")
    if not known:
        raise InputError(f"{place} can't be the first source: its pixels are those of the first, which must be there.")
    if Path(paths[0]).exists() and vector.burned_classes(paths[0]) is None:
        raise InputError(f"{place} would replace {paths[0]}, which was not burned from a vector: name another file.")
    burning = {**burning, "vector": _joined(base, burning["vector"])}
    reference = next(iter(known.values()))
    call(vector.burn, (), {**burning, "reference": reference, "out": paths[0]}, place)


def draw(
    table: Mapping[str, Any], known: Mapping[str, RasterSource], seed: int, base: str, where: str
) -> tuple[Positions, dict[str, Any]]:
    """The positions that a recipe asks for, before any is rejected.

    Args:
        table: ``[positions]``.
        known: the sources; the first is the reference.
        seed: the recipe's seed.
        base: the folder to which paths are relative.
        where: the recipe's name, for messages.

    Returns:
        The positions, and the arguments of :func:`~otbtf_lite.sampling.select`.

    Raises:
        InputError: unknown keys or values that do not fit.
        DataError: a file can't be read.
    """
    settings = dict(table)
    place = f"{where}: [positions]"
    method = settings.pop("method", None)
    selecting = {"snap": _snap(settings.pop("snap", "coarsest"), place)}
    if "max_nodata" in settings:
        selecting["max_nodata"] = settings.pop("max_nodata")
    if method not in METHODS:
        raise InputError(
            f"{place} needs method, one of {', '.join(map(repr, METHODS))}; got {method!r}"
            f"{nearest(str(method), METHODS)}"
        )
    takes = method_keys(method)
    refuse_unknown(settings, ["method", *SELECT_KEYS, *takes], place)
    for name in _RASTER_ARGUMENTS:
        if isinstance(settings.get(name), str):
            settings[name] = known.get(settings[name]) or _joined(base, settings[name])
    if "vector" in settings:
        settings["vector"] = _joined(base, settings["vector"])
    if "seed" in inspect.signature(METHODS[method]).parameters:
        settings["seed"] = seed
    for name in ("patch_size", "stride", "offset"):
        if isinstance(settings.get(name), list):
            settings[name] = tuple(settings[name])
    return call(METHODS[method], (next(iter(known.values())),), settings, place), selecting


def _snap(value: object, where: str) -> str | None:
    if value == "coarsest":
        return "coarsest"
    if value == "none":  # TOML has no null
        return None
    raise InputError(f'{where}: snap must be "coarsest" or "none", got {value!r}.')


def split(
    table: Mapping[str, Any], positions: Positions, known: Mapping[str, RasterSource], seed: int, base: str, where: str
) -> dict[str, Positions]:
    """The positions of each split.

    Args:
        table: ``[splits]``.
        positions: those that were kept.
        known: the sources; the first is the reference.
        seed: the recipe's seed.
        base: the folder to which paths are relative.
        where: the recipe's name, for messages.

    Raises:
        InputError: unknown keys or values that do not fit.
        DataError: a file can't be read.
    """
    settings = dict(table)
    place = f"{where}: [splits]"
    refuse_unknown(settings, split_keys(), place)
    if "fractions" not in settings:
        raise InputError(f"{place} needs fractions, such as fractions = {{train = 0.8, valid = 0.2}}.")
    if "groups" in settings:
        groups = dict(mapping(settings["groups"], f"{place} groups"))
        refuse_unknown(groups, GROUP_KEYS, f"{place} groups")
        if "vector" in groups:
            groups["vector"] = _joined(base, groups["vector"])
        arguments = (positions, next(iter(known.values())))
        settings["groups"] = call(sampling.groups_of, arguments, groups, f"{place} groups")
    kept = call(sampling.split, (positions, known), {**settings, "seed": seed}, place)
    names = np.asarray(kept.split)
    return {str(name): kept[names == name] for name in settings["fractions"]}


def _joined(base: str, path: object) -> str:
    """A path of a recipe; names that only GDAL knows are left as they are."""
    text = str(path)
    is_name = text.startswith(("/vsi", "<")) or (":" in text[2:] and not Path(base, text).exists())
    return text if is_name else str(Path(base, text))


def call(function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any], where: str) -> Any:
    """``function(*args, **settings)``, where arguments that are missing are the recipe's fault."""
    try:
        inspect.signature(function).bind(*args, **settings)
    except TypeError as error:
        raise InputError(f"{where}: {error}.") from error
    return function(*args, **settings)


def build(cls: Callable[..., Any], settings: Mapping[str, Any], where: str) -> Any:
    """An object made from a table; lists become tuples."""
    refuse_unknown(settings, inspect.signature(cls).parameters, where)
    lists = {
        key: tuple(value) if isinstance(value, list) and key != "paths" else value for key, value in settings.items()
    }
    return call(cls, (), lists, where)


def table_of(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """A table of the recipe, empty where it is left out."""
    return mapping(data.get(key, {}), f"{where}: [{key}]")


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """The value, which must be a table."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a table, got {value!r}.")
    return value


def refuse_unknown(settings: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise InputError for a key that is not known, naming the nearest and all of them."""
    names = list(known)
    for key in settings:
        if key not in names:
            raise InputError(f"{where} has no key {key!r}{nearest(key, names)} The keys are {', '.join(names)}.")
