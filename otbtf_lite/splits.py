"""Spatial splits: which positions train, which validate and which test, without sharing pixels."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from otbtf_lite import partition
from otbtf_lite.errors import InputError
from otbtf_lite.footprints import Footprints
from otbtf_lite.grid import MEETS_TOLERANCE, Grid, Positions
from otbtf_lite.raster import RasterSource
from otbtf_lite.sharding import generator

_log = logging.getLogger(__name__)

Strategy = Literal["blocks", "chessboard", "random", "groups"]
STRATEGIES = ("blocks", "chessboard", "random", "groups")
"""What is given to a split as a whole: a block, a field of a chessboard, a single position, a group of positions."""

_SPLIT_STREAM = 0x73706C6974  # keeps these draws apart from other uses of one seed
_SUM_TOLERANCE = 1e-6  # three thirds are no whole in floating point
_BLOCK_PATCHES = (4, 3, 2, 1)  # sides of a default block in patches, the first that gives enough blocks
_BLOCKS_PER_SHARE = 2  # enough: the smallest split could have so many blocks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Layout:
    """Patches as boxes on the reference's pixel lattice; the patches of one position in all sources make one box."""

    grid: Grid
    """The reference's grid."""
    boxes: Floats
    """(n, 4): top, left, bottom, right in pixels."""

    @property
    def corners(self) -> Floats:
        """(n, 2): top and left."""
        return self.boxes[:, :2]

    @property
    def size(self) -> Floats:
        """(2,): height and width of the largest box, in pixels."""
        size: Floats = (self.boxes[:, 2:] - self.corners).max(0)
        return size

    def pixels(self, length: float) -> Floats:
        """(2,): how many rows and how many columns are a length in map units, measured across them."""
        _, a, b, _, d, e = self.grid.geotransform
        area = abs(a * e - b * d)
        return length * np.array([math.hypot(a, d), math.hypot(b, e)]) / area

    def reach(self, buffer: float) -> Floats:
        """(2,): corners nearer than this belong to boxes that overlap or are less than ``buffer`` map units apart."""
        return self.size + self.pixels(buffer) - MEETS_TOLERANCE

    def cells(self, size: Floats) -> Ints:
        """(n, 2): row and column of the block with each box's centre; blocks start at the outermost boxes' corner."""
        centres = (self.corners + self.boxes[:, 2:]) / 2 - self.corners.min(0)
        return np.floor(centres / size).astype(np.int64)


def split(
    positions: Positions,
    sources: Mapping[str, RasterSource],
    fractions: Mapping[str, float],
    *,
    seed: int,
    strategy: Strategy = "blocks",
    block_size: float | None = None,
    buffer: float = 0.0,
    groups: npt.ArrayLike | None = None,
) -> Positions:
    """Share positions out among named splits.

    With ``"blocks"`` and ``"chessboard"`` no pixel of a patch of one split lies in a patch of another, in any source,
    and patches of different splits are at least ``buffer`` map units apart. Positions that would break this are
    dropped: with ``"blocks"`` those of the larger split, with ``"chessboard"`` those that reach over the border of
    their field first.

    Args:
        positions: what to share out.
        sources: :class:`~otbtf_lite.RasterSource` by key, the first is the reference: they say where patches lie.
        fractions: the share of each split by name, which sum to 1. What is kept meets them to within one block. Where
            positions have labels, each split also gets about its share of every class.
        seed: decides the rest; the same on every machine.
        strategy: ``"blocks"``: squares of ``block_size``, drawn at random, where a block holds the positions whose
            patches are centred in it. ``"chessboard"``: such squares in turn, for two splits of about one half each,
            whatever the fractions. ``"random"``: single positions; nothing is dropped, and pixels that different
            splits share are logged. ``"groups"``: positions of one group stay together; likewise.
        block_size: the side of a block in map units, rounded to whole pixels of the reference; None: four times the
            largest patch, or less where that gives too few blocks.
        buffer: the distance to keep between patches of different splits, in map units. If positive, it also holds for
            ``"random"`` and ``"groups"``.
        groups: the group of each position, shape (n,), for ``"groups"``: numbers or text, such as the fields of a
            survey.

    Returns:
        The positions kept, in the order given, with ``split`` set.

    Raises:
        InputError: fractions that do not sum to 1, an unknown strategy, too few blocks, or a split that gets no
            position.
        DataError: a file that can't be opened.
    """
    names, shares = _checked_shares(fractions, strategy)
    _check_arguments(positions, strategy, block_size, buffer, groups)
    layout = _layout(positions, sources)
    rng = generator(_given(seed), _SPLIT_STREAM)
    column = None if positions.label is None else np.unique(positions.label, return_inverse=True)[1]
    reach = layout.reach(buffer)
    if strategy in ("blocks", "chessboard"):
        side = _block_side(layout, block_size, shares)
        cells = layout.cells(side)
        if strategy == "chessboard":
            number, kept = _chessboard(layout, cells, side, buffer)
        else:
            block = _numbered(cells)
            _enough(block, names, f"blocks of {_in_map_units(layout, side)} map units")
            number, kept = partition.split_blocks(layout.corners, block, column, shares, reach, rng)
    else:
        unit = np.arange(len(positions)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
        _enough(unit, names, "positions" if groups is None else "groups")
        number, kept = _by_unit(layout, unit, column, shares, reach if buffer > 0 else None, rng)
    _report(names, number, kept, positions)
    return replace(positions[kept], split=np.array(names)[number[kept]])


def _given(seed: int | None) -> int:
    if seed is None:
        raise InputError("A split needs a seed, so that it can be repeated: give an integer.")
    return seed


def _checked_shares(fractions: Mapping[str, float], strategy: str) -> tuple[list[str], Floats]:
    """The names of the splits and their shares."""
    if not isinstance(fractions, Mapping) or not fractions or not all(isinstance(k, str) and k for k in fractions):
        raise InputError(f"fractions is a dict of shares by the splits' names, got {fractions!r}.")
    try:
        shares = np.array(list(fractions.values()), np.float64)
    except (TypeError, ValueError):
        shares = np.zeros(1)
    if not ((shares > 0) & (shares <= 1)).all() or abs(shares.sum() - 1) > _SUM_TOLERANCE:
        raise InputError(f"fractions must be positive and sum to 1, got {dict(fractions)}.")
    if strategy == "chessboard" and len(shares) != 2:
        raise InputError(f"A chessboard has fields for two splits, got the names {list(fractions)}.")
    if strategy == "chessboard" and shares[0] != shares[1]:
        _log.warning("A chessboard gives each split about one half, whatever the fractions: %s.", dict(fractions))
    return list(fractions), shares / shares.sum()


def _check_arguments(
    positions: Positions, strategy: str, block_size: float | None, buffer: float, groups: npt.ArrayLike | None
) -> None:
    if not len(positions):
        raise InputError("There are no positions to split.")
    if strategy not in STRATEGIES:
        raise InputError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}.")
    if block_size is not None and not (math.isfinite(block_size) and block_size > 0):
        raise InputError(f"block_size must be a positive number of map units or None, got {block_size!r}.")
    if not (math.isfinite(buffer) and buffer >= 0):
        raise InputError(f"buffer must be a number of map units, at least 0, got {buffer!r}.")
    if (groups is not None) != (strategy == "groups"):
        raise InputError(f'groups, the group of each position, goes with the strategy "groups"; got {strategy!r}.')
    if groups is not None and np.shape(groups) != (len(positions),):
        raise InputError(f"groups has the shape {np.shape(groups)} for {len(positions)} positions: one value each.")


def _layout(positions: Positions, sources: Mapping[str, RasterSource]) -> _Layout:
    footprints = Footprints.of(positions, sources)
    boxes = np.stack([footprints.boxes(key) for key in footprints.sources])
    union = np.concatenate([boxes[..., :2].min(0), boxes[..., 2:].max(0)], axis=1)
    return _Layout(footprints.reference.grid, union)


def _numbered(cells: Ints) -> Ints:
    """Row and column of cells as numbers from 0, without gaps, row by row."""
    cells = cells - cells.min(0)
    numbers: Ints = np.unique(cells[:, 0] * (cells[:, 1].max() + 1) + cells[:, 1], return_inverse=True)[1]
    return numbers


def _block_side(layout: _Layout, block_size: float | None, shares: Floats) -> Floats:
    """(2,): height and width of a block in whole pixels of the reference."""
    if block_size is not None:
        side = layout.pixels(block_size).round()
        if side.min() < 1:
            dx, dy = layout.grid.pixel_size
            raise InputError(f"block_size {block_size:.10g} is below a pixel of the reference, {dx:.10g} x {dy:.10g}.")
        return side
    patch = np.full(2, (layout.size / layout.pixels(1.0)).max()) * layout.pixels(1.0)  # square on the map
    for patches in _BLOCK_PATCHES:
        side = np.ceil(patches * patch - MEETS_TOLERANCE)
        if _numbered(layout.cells(side)).max() + 1 >= _BLOCKS_PER_SHARE / shares.min():
            break
    return side


def _in_map_units(layout: _Layout, side: Floats) -> str:
    dx, dy = layout.grid.pixel_size
    return f"{side[0] * dy:.10g} x {side[1] * dx:.10g}"


def _enough(unit: Ints, names: list[str], what: str) -> None:
    n_units = int(unit.max()) + 1
    if n_units < len(names):
        raise InputError(
            f"The positions fall into {n_units} {what}, which can't be shared out among {len(names)} splits "
            f"({', '.join(names)}): there must be more of them, such as smaller blocks."
        )


def _chessboard(layout: _Layout, cells: Ints, side: Floats, buffer: float) -> tuple[Ints, Mask]:
    """Fields in turn. What stays within its field, half the buffer inside, is kept first: both splits lose alike."""
    number = cells.sum(1) % 2
    margin = layout.pixels(buffer) / 2 - MEETS_TOLERANCE
    top_left = layout.corners - layout.corners.min(0) - cells * side
    bottom_right = top_left + layout.size
    sure = (top_left >= margin).all(1) & (bottom_right <= side - margin).all(1)
    return number, partition.keep_apart(layout.corners, number, np.arange(2), layout.reach(buffer), sure)


def _by_unit(
    layout: _Layout, unit: Ints, column: Ints | None, shares: Floats, reach: Floats | None, rng: np.random.Generator
) -> tuple[Ints, Mask]:
    """Units shared out wherever they lie; with a reach boxes are dropped as with blocks, else shared pixels logged."""
    if reach is not None:
        return partition.split_blocks(layout.corners, unit, column, shares, reach, rng)
    counts = partition.tally(unit, column, int(unit.max()) + 1)
    number = partition.share_out(counts, shares, rng)[unit]
    edges = layout.boxes
    pixels = np.concatenate([np.floor(edges[:, :2] + MEETS_TOLERANCE), np.ceil(edges[:, 2:] - MEETS_TOLERANCE)], axis=1)
    shared = partition.shared_cells(pixels.astype(np.int64), number, len(shares))
    if shared:
        _log.warning(
            "Leak: %d pixels of the reference lie in patches of more than one split; blocks or a buffer prevent that.",
            shared,
        )
    return number, np.ones(len(unit), bool)


def _report(names: list[str], number: Ints, kept: Mask, positions: Positions) -> None:
    """Log what each split got, in all and of each class.

    Raises:
        InputError: a split got nothing.
    """
    counts = np.bincount(number[kept], minlength=len(names))
    text = ", ".join(f"{name} {count}" for name, count in zip(names, counts.tolist(), strict=True))
    dropped = np.count_nonzero(~kept)
    if not counts.all():
        raise InputError(
            f"{names[int(counts.argmin())]!r} gets no position ({text}; {dropped} of {len(kept)} dropped for lying too "
            "near to another split): choose another block size, a smaller buffer, or more positions."
        )
    _log.info("split: %s; %d of %d dropped for lying too near to another split", text, dropped, len(kept))
    if positions.label is not None:
        label = positions.label[kept]
        for value in np.unique(label).tolist():
            of_class = np.bincount(number[kept][label == value], minlength=len(names))
            parts = zip(names, of_class / of_class.sum(), strict=True)
            name = value if positions.classes is None else positions.classes[value]
            _log.info("class %s: %s", name, ", ".join(f"{split_name} {part:.1%}" for split_name, part in parts))
