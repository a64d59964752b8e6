"""Which positions can be used: all of their patches lie inside, hold data and can be read."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.footprints import Footprints, pixel_map
from otbtf_lite.grid import MEETS_TOLERANCE, Positions, Window
from otbtf_lite.handles import Handles
from otbtf_lite.raster import RasterReader, RasterSource
from otbtf_lite.vector import write_positions

_log = logging.getLogger(__name__)

REASONS = ("outside", "nodata", "masked", "unreadable")
"""Why a position is rejected: its patch reaches beyond the raster, holds nodata values or NaN, is masked (by a mask or
alpha band, or where a warped source has nothing), or can't be read."""

_PART = 256  # positions that one thread checks before it takes the next ones


class Reason(NamedTuple):
    """Why one position was rejected."""

    source: str
    """The key of the first source that spoke against it."""
    reason: str
    """One of :data:`REASONS`."""


@dataclass(frozen=True, eq=False)
class Rejections:
    """The positions that were left out; ``str()`` sums them up by reason."""

    positions: Positions
    """The positions, as they were given."""
    reasons: tuple[Reason, ...]
    """For each of them, which source and why."""
    indices: npt.NDArray[np.int64]
    """For each of them, its number among all positions, shape (n,)."""
    n_positions: int
    """How many positions there were in all."""

    def __len__(self) -> int:
        """The number of rejected positions."""
        return len(self.reasons)

    def counts(self) -> dict[str, int]:
        """How many positions were rejected for each reason; only the reasons that occur."""
        found = Counter(each.reason for each in self.reasons)
        return {reason: found[reason] for reason in REASONS if found[reason]}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Save them as points with the columns ``source`` and ``reason``; :func:`~otbtf_lite.vector.write_positions`.

        Raises:
            InputError: an extension of no known format.
            DataError: the file can't be written.
        """
        sources, reasons = [each.source for each in self.reasons], [each.reason for each in self.reasons]
        write_positions(self.positions, path, columns={"source": sources, "reason": reasons})

    def __str__(self) -> str:
        """For example ``5 of 90 positions rejected: 3 outside (xs 3), 2 nodata (xs 1, dem 1)``."""
        if not self.reasons:
            return f"none of {self.n_positions} positions rejected"
        by_source = Counter(self.reasons)
        keys = list(dict.fromkeys(each.source for each in self.reasons))
        parts = []
        for reason, number in self.counts().items():
            sources = [f"{key} {by_source[Reason(key, reason)]}" for key in keys if by_source[Reason(key, reason)]]
            parts.append(f"{number} {reason} ({', '.join(sources)})")
        return f"{len(self)} of {self.n_positions} positions rejected: {', '.join(parts)}"


def select(
    positions: Positions,
    sources: Mapping[str, RasterSource],
    *,
    snap: Literal["coarsest"] | None = None,
    max_nodata: float = 0.0,
) -> tuple[Positions, Rejections]:
    """The positions whose patches can be used in all sources, and the others with the reasons.

    Every pixel of every patch is read, in the order of the reference's blocks and on several threads.

    Args:
        positions: where patches are wanted.
        sources: :class:`~otbtf_lite.RasterSource` by key; the first is the reference.
        snap: ``"coarsest"`` moves positions so that the patches of all sources have the same centre on the map, which
            with equal ground sizes means the same footprint: the patch of the source with the largest pixels stays
            where the position puts it. Moved positions are in the reference's CRS. With None positions stay, and how
            far the footprints of a position are apart is logged.
        max_nodata: the fraction of a patch's pixels that may be without data, from 0 (none) to 1.

    Returns:
        The positions kept, in the order given, and the rejections.

    Raises:
        InputError: no position is left (the message sums the rejections up), the sources do not fit together, or
            snapping can't bring the patches together.
        DataError: a file that can't be opened.
    """
    if snap not in (None, "coarsest"):
        raise InputError(f'snap must be None or "coarsest", got {snap!r}.')
    if not 0 <= max_nodata <= 1:
        raise InputError(f"max_nodata is a fraction from 0 to 1, got {max_nodata!r}.")
    footprints = Footprints.of(positions, sources)
    _report_sizes(footprints)
    wanted = positions
    if snap is not None:
        wanted, footprints = _snapped(positions, footprints)
    verdicts = np.full((len(positions), 2), -1, np.int64)  # which source and which reason, -1: none
    for number, key in enumerate(footprints.sources):
        verdicts[~footprints.inside(key) & (verdicts[:, 0] < 0)] = number, REASONS.index("outside")
    _report_distances(footprints, verdicts[:, 0] < 0)
    _check_pixels(footprints, verdicts, max_nodata)
    kept = verdicts[:, 0] < 0
    rejected = np.flatnonzero(~kept)
    keys = list(footprints.sources)
    reasons = tuple(Reason(keys[source], REASONS[reason]) for source, reason in verdicts[rejected].tolist())
    rejections = Rejections(positions[rejected], reasons, rejected, len(positions))
    if not kept.any():
        raise InputError(f"No position is left: {rejections}.")
    _log.info("%s", rejections)
    return wanted[kept], rejections


def _check_pixels(footprints: Footprints, verdicts: npt.NDArray[np.int64], max_nodata: float) -> None:
    """Read the patches that lie inside, and enter what speaks against them into ``verdicts``."""
    inside = np.flatnonzero(verdicts[:, 0] < 0)
    order, _ = footprints.block_order(inside)
    ordered = inside[order]

    handles = Handles(footprints.sources)

    def check(part: npt.NDArray[np.int64]) -> None:
        for index in part.tolist():
            for number, (key, reader) in enumerate(handles.readers.items()):
                reason = _fault(reader, footprints.window(key, index), max_nodata)
                if reason:
                    verdicts[index] = number, REASONS.index(reason)
                    break

    try:
        handles.map(check, [ordered[start : start + _PART] for start in range(0, len(ordered), _PART)])
    finally:
        handles.close()


def _fault(reader: RasterReader, window: Window, max_nodata: float) -> str:
    """What speaks against one patch: one of the reasons, or nothing."""
    try:
        patch = reader.read(window)
        missing = ~reader.valid(window, patch)
    except DataError:
        return "unreadable"
    most = max_nodata * missing.size
    if np.count_nonzero(missing) <= most:
        return ""
    by_value = np.isnan(patch) if patch.dtype.kind in "fc" else np.zeros(patch.shape, bool)
    for band, value in enumerate(reader.source.nodata_values or ()):
        if value is not None:
            by_value[..., band] |= patch[..., band] == value
    return "nodata" if np.count_nonzero(by_value.any(-1)) > most else "masked"


def _ground(size: tuple[float, float]) -> str:
    return f"{size[0]:.10g} x {size[1]:.10g}"


def _report_sizes(footprints: Footprints) -> None:
    """Log sources whose patches cover more or less ground than the reference's."""
    size = footprints.ground_size(footprints.first)
    for key in footprints.sources:
        other = footprints.ground_size(key)
        if not np.allclose(other, size, rtol=1e-3, atol=0):
            _log.warning(
                "Patches of %r cover %s map units and those of %r %s (height x width).",
                footprints.first, _ground(size), key, _ground(other),
            )  # fmt: skip


def _centres(footprints: Footprints, key: str) -> npt.NDArray[np.float64]:
    boxes = footprints.boxes(key)
    return (boxes[:, :2] + boxes[:, 2:]) / 2


def _report_distances(footprints: Footprints, inside: npt.NDArray[np.bool_]) -> None:
    """Log sources whose patches are not centred where the reference's are, and patches that occur twice."""
    dx, dy = footprints.reference.grid.pixel_size
    centres = _centres(footprints, footprints.first)[inside]
    for key in footprints.sources:
        apart = np.abs(_centres(footprints, key)[inside] - centres)
        off = (apart > MEETS_TOLERANCE).any(1)
        if off.any():
            most = apart.max(0)
            _log.warning(
                "Patches of %r and %r at one position are centred up to %.10g x %.10g map units (along rows x columns) "
                'apart, at %d of %d positions: snap="coarsest" moves the positions so that they coincide.',
                footprints.first, key, most[1] * dx, most[0] * dy, np.count_nonzero(off), len(off),
            )  # fmt: skip
    starts = np.hstack([starts[inside] for starts in footprints.starts.values()])
    repeated = len(starts) - len(np.unique(starts, axis=0))
    if repeated:
        _log.warning("%d of %d positions have the very same patches as another one.", repeated, len(starts))


def _snapped(positions: Positions, footprints: Footprints) -> tuple[Positions, Footprints]:
    """Positions at which the patches of all sources share their centre, and their footprints.

    For each source the pixel that a position must lie in follows from the wanted first row and column by the
    footprint rule. All of these pixels hold or touch the common centre, so they overlap, and the middle of what they
    have in common is the new position: with equal ground sizes, the centre of the finest source's pixel.
    """
    reference = footprints.reference.grid
    coarsest = max(footprints.sources, key=lambda key: np.prod(footprints.sources[key].grid.pixel_size))
    centres = _centres(footprints, coarsest)
    low, high = np.full(centres.shape, -np.inf), np.full(centres.shape, np.inf)
    starts = {}
    for key, source in footprints.sources.items():
        scale, shift = pixel_map(source.grid, reference)
        size = np.array(source.patch_size)
        exact = (centres - shift) / scale - size / 2
        starts[key] = exact.round().astype(np.int64)
        apart = np.abs(exact - starts[key]).max(0, initial=0.0)
        if (apart > MEETS_TOLERANCE).any():
            dx, dy = source.grid.pixel_size
            raise InputError(
                f"Patches of {coarsest!r} and {key!r} can't have one centre: they stay {apart[1] * dx:.10g} x "
                f"{apart[0] * dy:.10g} map units (along rows x columns) apart, since {key!r} has patches of "
                f"{size[0]} x {size[1]} pixels; choose patch sizes of equal ground size, or snap=None."
            )
        pixels = (starts[key] + size // 2) * scale + shift
        low, high = np.maximum(low, pixels), np.minimum(high, pixels + scale)
    middle = (low + high) / 2
    x, y = reference.xy(middle[:, 0] - 0.5, middle[:, 1] - 0.5)
    return replace(positions, x=x, y=y, crs=reference.crs), replace(footprints, starts=starts)
