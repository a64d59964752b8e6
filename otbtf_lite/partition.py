"""Sharing boxes out among splits: pure arithmetic on arrays, no files and no map coordinates.

Boxes are patches on one pixel lattice, all of one size, given by their upper-left corners (row, col). Splits are
numbers from 0. :mod:`otbtf_lite.splits` turns positions into boxes and numbers into names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_ROUNDS = 12  # of sharing out anew after what was dropped at the borders; most cases settle in one to four
_PASSES = 4  # over all blocks in one search for better shares
_STRIP_CELLS = 1 << 22  # cells of the lattice painted at once: 32 MB for two splits


def near_any(corners: Floats, others: Floats, reach: Floats) -> Mask:
    """Which boxes lie nearer than ``reach`` in both axes to any one of the others.

    Args:
        corners: (n, 2) rows and columns.
        others: (m, 2) rows and columns.
        reach: (2,) the box's height and width plus the distance to keep. A difference of exactly ``reach`` is not near.

    Returns:
        (n,) True = near at least one. Takes O((n + m) log m) whatever the overlap: a dense grid of large patches has
        thousands of neighbours a box, so that pairs can't be looked at one by one.
    """
    near = np.zeros(len(corners), bool)
    if not len(corners) or not len(others):
        return near
    # Cells of one reach: what shares a cell is near, and what is near lies in one of the eight cells around. The column
    # left free at each side keeps a neighbour's number from wrapping into the next row of cells.
    base = np.minimum(corners.min(0), others.min(0))
    cells, cells_of_others = (np.floor((c - base) / reach).astype(np.int64) + 1 for c in (corners, others))
    width = max(cells[:, 1].max(), cells_of_others[:, 1].max()) + 2
    cell, cell_of_others = (c[:, 0] * width + c[:, 1] for c in (cells, cells_of_others))
    near |= np.isin(cell, cell_of_others)
    for down, right in ((r, c) for r in (-1, 0, 1) for c in (-1, 0, 1) if r or c):
        target = cell + down * width + right
        open_ = np.flatnonzero(~near & np.isin(target, cell_of_others))
        if len(open_):
            # Mirrored where the neighbour lies below or to the right, so that "near" always reads "greater than"; in
            # the same row or column of cells that axis is near already.
            sign = np.array([-1.0 if down > 0 else 1.0, -1.0 if right > 0 else 1.0])
            least = corners[open_] * sign - reach
            least[:, np.array([down, right]) == 0] = -np.inf
            near[open_] = _any_above(target[open_], least, cell_of_others, others * sign)
    return near


def _any_above(cell: Ints, least: Floats, cell_of_points: Ints, points: Floats) -> Mask:
    """For each query, whether its cell holds a point greater than ``least`` in both columns.

    Sorted by cell and first column, the points that pass in the first are a tail of the cell; the greatest second
    column of every tail is a running maximum from the cell's end.
    """
    count = len(points) + 1
    ranks, bounds = [], []
    for axis in (0, 1):
        ordered = np.sort(points[:, axis])
        ranks.append(np.searchsorted(ordered, points[:, axis], "left"))
        bounds.append(np.searchsorted(ordered, least[:, axis], "right"))  # the first rank that is greater
    key = cell_of_points * count + ranks[0]
    order = np.argsort(key, kind="stable")
    key, cells, second = key[order], cell_of_points[order], ranks[1][order]
    nth_cell = np.cumsum(np.diff(cells, prepend=cells[0]) != 0)
    lift = (nth_cell[-1] - nth_cell) * count  # later tails start above whatever the cells after them hold
    highest = np.maximum.accumulate((second + lift)[::-1])[::-1] - lift
    start = np.searchsorted(key, cell * count + bounds[0], "left")
    inside = np.minimum(start, len(key) - 1)
    found: Mask = (start < len(key)) & (cells[inside] == cell) & (highest[inside] >= bounds[1])
    return found


def keep_apart(corners: Floats, split: Ints, order: Ints, reach: Floats, sure: Mask | None = None) -> Mask:
    """Which boxes to keep so that no two of different splits are near each other.

    Args:
        corners: (n, 2) rows and columns.
        split: (n,) the split of each box.
        order: all splits; of two boxes that are too near, the one whose split comes later here is dropped.
        reach: as for :func:`near_any`.
        sure: (n,) boxes to keep whatever their split, none of which is near one of another split.

    Returns:
        (n,) True = kept.
    """
    kept = np.zeros(len(corners), bool) if sure is None else sure.copy()
    for number in order:
        mine = np.flatnonzero((split == number) & ~kept)
        kept[mine] = ~near_any(corners[mine], corners[kept & (split != number)], reach)
    return kept


def share_out(counts: Floats, fractions: Floats, rng: np.random.Generator) -> Ints:
    """Give each block to a split so that every split gets its fraction of each column of ``counts``.

    Blocks are taken in random order, and each goes where the squared error of the shares grows least, which for a
    single column is the split that lacks most. Then blocks move for as long as that makes the error smaller. No split
    is left without a block where there are enough of them.

    Args:
        counts: (blocks, columns) how many positions, and how many of each class, each block holds.
        fractions: (splits,) the wanted shares, which sum to 1.
        rng: decides the order.

    Returns:
        (blocks,) the split of each block.
    """
    order = rng.permutation(len(counts))
    weights = _weights(counts)
    lacking = fractions[:, None] * counts.sum(0)
    split = np.zeros(len(counts), np.int64)
    for block in order:
        split[block] = np.argmax(lacking @ (weights * counts[block]))
        lacking[split[block]] -= counts[block]
    for empty in np.setdiff1d(np.arange(len(fractions)), split):
        spare = order[np.bincount(split, minlength=len(fractions))[split[order]] > 1]
        if len(spare):
            split[spare[np.argmin(np.abs(counts[spare, 0] - lacking[empty, 0]))]] = empty
    return move_blocks(counts, fractions, split, rng, passes=_PASSES)


def _weights(counts: Floats) -> Floats:
    """The weight of each column's squared error; the first column (all positions) weighs as much as all classes."""
    columns = counts.shape[1]
    weights: Floats = 1.0 / np.maximum(counts.sum(0), 1.0) ** 2
    weights[0] *= max(1, columns - 1)
    return weights


def move_blocks(counts: Floats, fractions: Floats, split: Ints, rng: np.random.Generator, *, passes: int = 1) -> Ints:
    """Move single blocks to other splits while the squared error of the shares falls, but never a split's last block.

    Args:
        counts: as for :func:`share_out`.
        fractions: likewise.
        split: (blocks,) where each block is now.
        rng: decides the order in which blocks are looked at.
        passes: how often to look at all of them.

    Returns:
        (blocks,) the split of each block.
    """
    split = split.copy()
    weighted = counts * _weights(counts)
    lacking = fractions[:, None] * counts.sum(0)
    np.subtract.at(lacking, split, counts)
    held = np.bincount(split[counts[:, 0] > 0], minlength=len(fractions))
    for _ in range(passes):
        moved = False
        for block in rng.permutation(np.flatnonzero(counts[:, 0])):
            mine, count = split[block], counts[block]
            change = (lacking[mine] - lacking + count) @ weighted[block]
            change[mine] = 0.0
            best = int(change.argmin())
            if change[best] < -1e-12 and held[mine] > 1:  # less is rounding, and could go round in circles
                lacking[mine] += count
                lacking[best] -= count
                held[mine] -= 1
                held[best] += 1
                split[block] = best
                moved = True
        if not moved:
            break
    return split


def tally(block: Ints, column: Ints | None, n_blocks: int, kept: Mask | None = None) -> Floats:
    """(blocks, 1 + classes): how many boxes, and how many of each class, each block holds.

    Args:
        block: (n,) the block of each box.
        column: (n,) the class of each box, numbered from 0, or None where classes are unknown.
        n_blocks: how many blocks there are.
        kept: (n,) count only these.
    """
    some: Any = slice(None) if kept is None else kept
    total = np.bincount(block[some], minlength=n_blocks).astype(np.float64)[:, None]
    if column is None:
        return total
    n_classes = int(column.max(initial=0)) + 1
    flat = np.bincount(block[some] * n_classes + column[some], minlength=n_blocks * n_classes)
    return np.hstack([total, flat.reshape(n_blocks, n_classes)])


def excess(counts: Ints, fractions: Floats) -> float:
    """By how many positions the split that is furthest from its share misses it; counts: (splits,)."""
    return float(np.abs(counts - fractions * counts.sum()).max())


def split_blocks(
    corners: Floats, block: Ints, column: Ints | None, fractions: Floats, reach: Floats, rng: np.random.Generator
) -> tuple[Ints, Mask]:
    """Share whole blocks out, and drop the boxes that come too near to one of another split.

    Of two such boxes the one of the larger split is dropped: it misses it least, and the smaller split then needs fewer
    blocks, so that there is less border. What is dropped shifts the shares, so blocks move again, by what is left in
    each, until the shares of what is kept are right to one block. Where they can't be (blocks hardly larger than the
    boxes), some boxes of the fuller splits are left out as well.

    Args:
        corners: (n, 2) rows and columns of the boxes.
        block: (n,) the block of each box, numbered from 0.
        column: (n,) the class of each box, numbered from 0, or None.
        fractions: (splits,) the wanted shares, which sum to 1.
        reach: as for :func:`near_any`.
        rng: decides all that is left open.

    Returns:
        The split of each box, and which to keep; a split of which none can be kept is left empty.
    """
    n_blocks, n_splits = int(block.max()) + 1, len(fractions)
    counts = tally(block, column, n_blocks)
    splits = share_out(counts, fractions, rng)
    order = np.argsort(fractions, kind="stable")
    tries: list[tuple[int, float, Ints, Mask]] = []
    for _ in range(_ROUNDS):
        of_box = splits[block]
        kept = keep_apart(corners, of_box, order, reach)
        left = tally(block, column, n_blocks, kept)
        shares = np.bincount(of_box[kept], minlength=n_splits)
        empty, error = int(np.count_nonzero(shares == 0)), excess(shares, fractions)
        tries.append((empty, error, of_box, kept))
        if not empty and error <= left[:, 0].max():
            break
        moved = move_blocks(left, fractions, splits, rng)
        splits = share_out(counts, fractions, rng) if np.array_equal(moved, splits) else moved
    empty, error, of_box, kept = min(tries, key=lambda t: t[:2])
    if not empty:
        kept = thin(of_box, kept, fractions, float(np.bincount(block[kept]).max()), rng)
    return of_box, kept


def thin(split: Ints, kept: Mask, fractions: Floats, tolerance: float, rng: np.random.Generator) -> Mask:
    """Leave out boxes of the fullest splits, drawn at random, until all shares are right to ``tolerance`` boxes."""
    counts = np.bincount(split[kept], minlength=len(fractions))
    wanted = counts.copy()
    while excess(wanted, fractions) > tolerance:
        surplus = wanted - fractions * wanted.sum()
        fullest = int(surplus.argmax())
        wanted[fullest] -= max(1, int((surplus[fullest] - tolerance) / (1 - fractions[fullest])))
    kept = kept.copy()
    for number in np.flatnonzero(wanted < counts):
        mine = np.flatnonzero(kept & (split == number))
        kept[rng.choice(mine, counts[number] - wanted[number], replace=False)] = False
    return kept


def shared_cells(boxes: Ints, split: Ints, n_splits: int) -> int:
    """How many cells of the lattice lie in boxes of more than one split.

    Args:
        boxes: (n, 4) first row, first column, last row + 1, last column + 1.
        split: (n,) the split of each box.
        n_splits: how many splits there are.
    """
    top, left = boxes[:, :2].min(0)
    bottom, right = boxes[:, 2:].max(0)
    height = max(1, _STRIP_CELLS // int(right - left + 1))
    shared = 0
    for start in range(int(top), int(bottom), height):
        owners = np.zeros((min(height, int(bottom) - start), int(right - left)), np.int32)
        for number in range(n_splits):
            mine = boxes[(split == number) & (boxes[:, 0] < start + height) & (boxes[:, 2] > start)]
            owners += _painted(mine, start, int(left), owners.shape)
        shared += int(np.count_nonzero(owners > 1))
    return shared


def _painted(boxes: Ints, top: int, left: int, shape: tuple[int, ...]) -> Mask:
    """Which cells of a (rows, cols) strip lie in a box: each box's corners are marked, and two running sums fill it."""
    marks = np.zeros((shape[0] + 1, shape[1] + 1), np.int32)
    rows = (boxes[:, 0::2] - top).clip(0, shape[0])
    cols = (boxes[:, 1::2] - left).clip(0, shape[1])
    for row, col, sign in ((0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1)):
        np.add.at(marks, (rows[:, row], cols[:, col]), sign)
    painted: Mask = marks.cumsum(0).cumsum(1)[:-1, :-1] > 0
    return painted
