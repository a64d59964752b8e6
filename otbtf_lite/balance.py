"""Patches whose class populations together are balanced; reached through :mod:`otbtf_lite.sampling`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Positions, Window, rows_cols
from otbtf_lite.labelled import LabelPixels, Labels, patch_area
from otbtf_lite.raster import RasterReader, RasterSource
from otbtf_lite.sharding import generator

_log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_BALANCED_STREAM = 0x62616C616E6365  # keeps these draws apart from other uses of one seed
_MOST_PIXELS = 1 << 22  # of the source looked at at once
_MOST_CANDIDATES = 1 << 20  # patches whose populations are kept in memory


def balanced(
    source: RasterSource,
    labels: Labels,
    n: int,
    *,
    seed: int,
    patch_size: int | Sequence[int] | None = None,
    spatial_fraction: float = 0.25,
) -> Positions:
    """Positions of patches chosen for what classes they hold: partly at random, partly to even the classes out.

    The candidates are patches side by side, on a lattice whose first patch is drawn, that lie inside the raster,
    have no missing pixel in the source and at least one labelled pixel. Where these are fewer than ``n``, the lattice
    is made finer, by halves, and patches overlap. A patch's population is how many of its pixels have each class.

    First ``round(spatial_fraction * n)`` candidates are drawn, each as likely as any other: they cover the raster, and
    have its classes in their proportions. Then candidates are added one at a time, each time the one with which the
    sum of all populations comes nearest to equal numbers of every class: the angle between the two, as vectors over
    classes, is the smallest. Ties are broken at random. So ``spatial_fraction=1`` is random sampling, and 0 balances
    only. OTBTF's PatchesSelection has the same two steps and the same measure; it takes every k-th patch for the first,
    orders the candidates only once for the second, and stops where the balance stops improving instead of at ``n``.

    Args:
        source: the raster; its missing pixels keep patches out.
        labels: a label image of one band of whole numbers, of any CRS and resolution: its class at each pixel centre of
            the source counts. Its missing pixels do not.
        n: how many.
        seed: decides which; the same on every machine.
        patch_size: pixels, one integer or (rows, cols); None: the source's.
        spatial_fraction: how many of them are drawn at random, from 0 to 1.

    Returns:
        Positions in the order in which they were chosen (so that the first k of them are a choice, too), labelled with
        the class that most of the patch's pixels have, the lowest of several.

    Raises:
        InputError: fewer than ``n`` patches can be had (the message says how many), a patch larger than the raster, or
            a value that is out of range.
        DataError: a file that can't be read.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise InputError(f"n must be an integer, at least 1, got {n!r}.")
    if not 0 <= spatial_fraction <= 1:
        raise InputError(f"spatial_fraction is a number from 0 to 1, got {spatial_fraction!r}.")
    if seed is None:
        raise InputError("Sampling needs a seed, so that it can be repeated: give an integer.")
    rng = generator(seed, _BALANCED_STREAM)
    rows, cols = source.patch_size if patch_size is None else rows_cols(patch_size, "patch_size")
    name = ", ".join(source.paths)
    area = patch_area(source.grid, (rows, cols), name)
    starts = Window(0, 0, area.width, area.height)
    with LabelPixels(labels, source.grid) as pixels, source.open() as reader:
        step = (rows, cols)
        while True:
            places, classes, counts = _candidates(starts, step, (rows, cols), pixels, reader, int(n), rng)
            if len(places) >= n or step == (1, 1):
                break
            step = ((step[0] + 1) // 2, (step[1] + 1) // 2)
    if len(places) < n:
        raise InputError(
            f"{n} patches of {rows} x {cols} pixels (rows x cols) are wanted, but only {len(places)} of {name} have no "
            f"missing pixel and a pixel with a class in {pixels.name}."
        )
    if step != (rows, cols):
        _log.warning(
            "balanced: too few patches lie side by side for %d positions: they start every %d x %d pixels (rows x cols)"
            " and overlap.", n, *step,
        )  # fmt: skip
    order = rng.permutation(len(places))  # ties go to the first: at random, with the candidates in random order
    places, counts = places[order], counts[order]
    chosen = _choose(counts, int(n), round(spatial_fraction * n))
    total = counts[chosen].sum(0)
    shares = ", ".join(f"{label} {part:.1%}" for label, part in zip(classes, total / total.sum(), strict=True))
    _log.info("balanced: %d of %d patches; shares of the classes %s", n, len(places), shares)
    row, col = (places[chosen] + (rows // 2, cols // 2)).T
    label = classes[counts[chosen].argmax(1)]
    x, y = source.grid.xy(row, col)
    return Positions(x, y, source.grid.crs, label=label)


def _candidates(
    starts: Window, step: tuple[int, int], size: tuple[int, int], pixels: LabelPixels, reader: RasterReader, n: int,
    rng: np.random.Generator,
) -> tuple[Ints, Ints, Ints]:  # fmt: skip
    """The candidates on a lattice of one step.

    Returns:
        First rows and columns, (k, 2); all classes, (c,); populations, (k, c).
    """
    # The lattice's phase is drawn from those that lose no patch.
    first = [rng.integers((length - 1) % each + 1) for length, each in zip(starts.shape, step, strict=True)]
    across = np.arange(first[1], starts.width, step[1])
    down = np.arange(first[0], starts.height, step[0])
    if len(across) * len(down) < n and step != (1, 1):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    if len(across) * len(down) > _MOST_CANDIDATES:
        raise InputError(
            f"{len(across) * len(down)} patches would have to be compared, over the {_MOST_CANDIDATES} that fit into "
            "memory: choose larger patches, or a smaller n."
        )
    at_once = max(1, (_MOST_PIXELS // size[0] - size[1]) // step[1] + 1)
    places, populations = [], []
    for row in down.tolist():
        for begin in range(0, len(across), at_once):
            some = across[begin : begin + at_once]
            window = Window(int(some[0]), row, int(some[-1] - some[0]) + size[1], size[0])
            labels, there = pixels.read(window)
            valid = reader.valid(window)
            for col in some.tolist():
                part = (slice(None), slice(col - window.col_off, col - window.col_off + size[1]))
                if valid[part].all() and there[part].any():
                    places.append((row, col))
                    populations.append(np.unique(labels[part][there[part]], return_counts=True))
    classes = np.unique(np.concatenate([np.zeros(0, np.int64), *(found for found, _ in populations)]))
    counts = np.zeros((len(places), len(classes)), np.int64)
    for line, (found, numbers) in zip(counts, populations, strict=True):
        line[np.searchsorted(classes, found)] = numbers
    return np.array(places, np.int64).reshape(-1, 2), classes, counts


def _choose(counts: Ints, n: int, n_random: int) -> Ints:
    """Which candidates to take: the first, then those that even the classes out.

    Args:
        counts: populations, (k, c), in random order.
        n: how many.
        n_random: how many of them without a look at the classes.

    Returns:
        (n,) indices.
    """
    chosen = np.arange(n)
    left = np.arange(n_random, len(counts))
    weights = counts[n_random:].astype(np.float64)
    sizes, squares = weights.sum(1), (weights**2).sum(1)
    total = counts[:n_random].sum(0).astype(np.float64)
    for number in range(n_random, n):
        # The cosine of the angle to equal numbers is sum / (length * sqrt(classes)), of every sum that could be next.
        lengths = np.sqrt(total @ total + 2 * (weights @ total) + squares)
        best = int(((total.sum() + sizes) / lengths).argmax())
        chosen[number] = left[best]
        total += weights[best]
        sizes[best] = -np.inf  # taken
    return chosen
