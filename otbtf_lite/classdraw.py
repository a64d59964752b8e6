"""How many positions to draw of each class, and drawing them from pixels with classes, tile by tile."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Window

_log = logging.getLogger(__name__)

ClassStrategy = Literal["all", "constant", "total", "smallest"]
CLASS_STRATEGIES = ("all", "constant", "total", "smallest")
"""How many of each class: every one; ``n`` of each; ``n`` overall, in the proportions that there are; as many as the
rarest class has."""

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_TILE = 1024  # pixels looked at at once, on each side


class ClassPixels(Protocol):
    """Pixels with classes, such as a label image or burned polygons."""

    def read(self, window: Window) -> tuple[Ints, Mask]:
        """Classes of a window's pixels, and which of them have one; both (rows, cols)."""


@dataclass(frozen=True)
class Quota:
    """What is wanted of one class, and what there is."""

    asked: int
    """How many the strategy asks for."""
    available: int
    """How many there are."""

    @property
    def drawn(self) -> int:
        """How many are drawn: what is asked for, as far as there is."""
        return min(self.asked, self.available)


def class_quotas(available: Mapping[int, int], strategy: ClassStrategy, n: int | None = None) -> dict[int, Quota]:
    """How many positions of each class a strategy draws.

    Args:
        available: how many there are of each class, by its number; classes without any are left out.
        strategy: ``"all"``: every one. ``"constant"``: ``n`` of each class, or all that it has. ``"total"``: ``n``
            overall, shared out in proportion to what there is; where ``n`` allows, no class goes empty.
            ``"smallest"``: of each class as many as the rarest has.
        n: goes with ``"constant"`` and ``"total"`` alone.

    Returns:
        The quotas by class, in the order of classes.

    Raises:
        InputError: an unknown strategy, or an ``n`` that is missing, out of place or below 1.
    """
    if strategy not in CLASS_STRATEGIES:
        raise InputError(f"strategy must be one of {', '.join(CLASS_STRATEGIES)}, got {strategy!r}.")
    takes_n = strategy in ("constant", "total")
    if takes_n and (isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1):
        what = "positions of each class" if strategy == "constant" else "positions overall"
        raise InputError(f'The strategy "{strategy}" takes n, {what}, an integer of at least 1; got {n!r}.')
    if not takes_n and n is not None:
        raise InputError(f'n goes with the strategies "constant" and "total"; "{strategy}" takes none, got {n!r}.')
    there = {label: int(count) for label, count in sorted(available.items()) if count}
    if strategy == "all" or not there:
        asked = dict(there)
    elif strategy == "smallest":
        asked = dict.fromkeys(there, min(there.values()))
    elif strategy == "constant":
        asked = dict.fromkeys(there, int(n or 0))
    else:
        asked = dict(zip(there, _proportional(list(there.values()), int(n or 0)), strict=True))
    return {label: Quota(asked[label], count) for label, count in there.items()}


def _proportional(counts: list[int], n: int) -> list[int]:
    """``n`` shared out in proportion to the counts by largest remainders, at least one each where ``n`` allows."""
    total = sum(counts)
    shares = [divmod(n * count, total) for count in counts]  # integers: no rounding, whatever the numbers
    whole = [share for share, _ in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: (-shares[i][1], i))
    for i in by_remainder[: n - sum(whole)]:
        whole[i] += 1
    if n >= len(counts):
        for i in (i for i, share in enumerate(whole) if not share):
            whole[max(range(len(whole)), key=whole.__getitem__)] -= 1
            whole[i] = 1
    return whole


def report(quotas: Mapping[int, Quota], names: Mapping[int, str], what: str) -> None:
    """Log what was asked for and what there was of each class; as a warning where it was not enough."""
    for label, quota in quotas.items():
        short = quota.drawn < quota.asked or not quota.drawn
        _log.log(
            logging.WARNING if short else logging.INFO,
            "class %s: %d asked, %d available in %s, %d drawn",
            names.get(label, str(label)) or "''", quota.asked, quota.available, what, quota.drawn,
        )  # fmt: skip


def tiles(area: Window) -> Iterator[Window]:
    """The area cut into tiles, row by row."""
    for row in range(area.row_off, area.row_off + area.height, _TILE):
        for col in range(area.col_off, area.col_off + area.width, _TILE):
            tile = Window(col, row, _TILE, _TILE).intersection(area)
            if tile is not None:
                yield tile


def count(pixels: ClassPixels, area: Window) -> list[dict[int, int]]:
    """How many pixels of each class every tile of the area holds."""
    counts = []
    for tile in tiles(area):
        labels, there = pixels.read(tile)
        found, numbers = np.unique(labels[there], return_counts=True)
        counts.append(dict(zip(found.tolist(), numbers.tolist(), strict=True)))
    return counts


def totals(counts: list[dict[int, int]]) -> dict[int, int]:
    """The counts of all tiles together, in the order of classes."""
    out: dict[int, int] = {}
    for each in counts:
        for label, number in each.items():
            out[label] = out.get(label, 0) + number
    return dict(sorted(out.items()))


def draw(
    pixels: ClassPixels,
    area: Window,
    counts: list[dict[int, int]],
    quotas: Mapping[int, Quota],
    rng: np.random.Generator,
) -> tuple[Ints, Ints, Ints]:
    """Draw pixels of each class, every one as likely as any other of its class.

    How many fall into each tile is drawn first (as many as in one draw from all), then which: so no more than a tile
    is held at once. The pixels are read a second time.

    Args:
        pixels: the classes.
        area: where to draw.
        counts: what :func:`count` gave for it.
        quotas: how many of each class.
        rng: decides which.

    Returns:
        Rows, columns and classes, in the order of rows and columns.
    """
    shares = [dict.fromkeys(each, 0) for each in counts]  # how many of each class to take from each tile
    for label, quota in quotas.items():
        has = [number for number, each in enumerate(counts) if label in each]
        for number, part in zip(has, _spread([counts[i][label] for i in has], quota.drawn, rng), strict=True):
            shares[number][label] = part
    rows, cols, labels = [], [], []
    for tile, share in zip(tiles(area), shares, strict=True):
        if not any(share.values()):
            continue
        values, there = pixels.read(tile)
        for label, number in share.items():
            places = np.flatnonzero(there & (values == label))
            if number < len(places):
                places = rng.choice(places, number, replace=False, shuffle=False)
            rows.append(places // tile.width + tile.row_off)
            cols.append(places % tile.width + tile.col_off)
            labels.append(np.full(len(places), label, np.int64))
    row, col, label_of = (np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (rows, cols, labels))
    order = np.lexsort((col, row))
    return row[order], col[order], label_of[order]


_MOST_DRAWN = 1_000_000_000  # NumPy's hypergeometric distribution takes fewer


def _spread(counts: list[int], n: int, rng: np.random.Generator) -> list[int]:
    """How many of ``n`` things drawn without replacement come from each part."""
    total = sum(counts)
    if n == total:
        return counts
    if total < _MOST_DRAWN:
        return list(rng.multivariate_hypergeometric(counts, n, method="marginals").tolist())
    ends = np.cumsum(counts)
    numbers = rng.choice(total, n, replace=False, shuffle=False)
    return list(np.bincount(np.searchsorted(ends, numbers, "right"), minlength=len(counts)).tolist())
