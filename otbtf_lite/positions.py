"""The places where patches are taken; reached as :class:`otbtf_lite.grid.Positions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError


@dataclass(frozen=True, eq=False)
class Positions:
    """Where patches are taken: points on the map, each with optional attributes.

    ``len()`` counts them, ``positions[mask or indices]`` picks some, ``==`` compares all values.

    Raises:
        InputError: arrays of different lengths, a coordinate that is not finite, labels that are no integers or that
            have no name in ``classes``.
    """

    x: npt.NDArray[np.float64]
    """Map coordinates, shape (n,)."""
    y: npt.NDArray[np.float64]
    """Map coordinates, shape (n,)."""
    crs: str
    """The CRS of x and y, ``"EPSG:32631"`` or WKT; empty where there is none."""
    label: npt.NDArray[np.int64] | None = None
    """The class of each position, shape (n,)."""
    split: npt.NDArray[np.str_] | None = None
    """The name of each position's split, shape (n,); empty text where it has none."""
    weight: npt.NDArray[np.float64] | None = None
    """The weight of each position, shape (n,)."""
    classes: tuple[str, ...] | None = None
    """Names of the classes: label i is ``classes[i]``."""

    def __post_init__(self) -> None:
        if not isinstance(self.crs, str):
            raise InputError(
                f'The CRS of positions is text such as "EPSG:32631" or WKT (empty: none), got {self.crs!r}.'
            )
        x = np.array(self.x, np.float64, ndmin=1)
        if x.ndim != 1:
            raise InputError(f"x must have one dimension, got the shape {x.shape}.")
        columns = {
            "x": x,
            "y": np.array(self.y, np.float64, ndmin=1),
            "label": None if self.label is None else _integers(self.label),
            "split": None if self.split is None else np.array(self.split, np.str_, ndmin=1),
            "weight": None if self.weight is None else np.array(self.weight, np.float64, ndmin=1),
        }
        for name, column in columns.items():
            if column is not None and column.shape != x.shape:
                raise InputError(
                    f"Positions have {len(x)} values of x but {name} has the shape {column.shape}: one value each."
                )
            if column is not None:
                column.setflags(write=False)
            object.__setattr__(self, name, column)
        bad = np.flatnonzero(~(np.isfinite(self.x) & np.isfinite(self.y)))
        if bad.size:
            raise InputError(
                f"Position {bad[0]} lies at ({self.x[bad[0]]}, {self.y[bad[0]]}): coordinates must be finite."
            )
        if self.classes is not None:
            object.__setattr__(self, "classes", tuple(str(name) for name in self.classes))
            label = self.label if self.label is not None else np.zeros(0, np.int64)
            unnamed = label[(label < 0) | (label >= len(self.classes))]
            if unnamed.size:
                known = f"0 to {len(self.classes) - 1}, {list(self.classes)}"
                raise InputError(f"Label {unnamed[0]} has no name: classes names {known}.")

    def __len__(self) -> int:
        """How many positions there are."""
        return len(self.x)

    def class_counts(self) -> dict[str, int]:
        """How many positions each class has, by its name, or its number where it has none; empty without labels."""
        if self.label is None:
            return {}
        found, counts = np.unique(self.label, return_counts=True)
        names = [str(label) if self.classes is None else self.classes[label] for label in found.tolist()]
        return dict(zip(names, counts.tolist(), strict=True))

    def __getitem__(self, chosen: slice | npt.ArrayLike) -> Positions:
        """The positions that a mask, indices or a slice choose; always Positions, also for one index."""
        if not isinstance(chosen, slice):
            index = np.asarray(chosen)
            chosen = index.astype(np.int64) if index.size == 0 and index.dtype != np.bool_ else np.atleast_1d(index)
        return Positions(
            self.x[chosen],
            self.y[chosen],
            self.crs,
            label=None if self.label is None else self.label[chosen],
            split=None if self.split is None else self.split[chosen],
            weight=None if self.weight is None else self.weight[chosen],
            classes=self.classes,
        )

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal (a NaN weight equals another); the text of the CRS is compared."""
        if not isinstance(other, Positions):
            return NotImplemented
        if (self.crs, self.classes) != (other.crs, other.classes):
            return False
        for name in ("x", "y", "label", "split", "weight"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if (mine is None) != (theirs is None):
                return False
            if mine is not None and not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                return False
        return True

    __hash__ = None  # type: ignore[assignment]  # equal by the values of arrays, like the arrays themselves


def concat_positions(parts: Sequence[Positions | None]) -> Positions | None:
    """Positions one after the other, with the columns that all parts have.

    Returns:
        None if there is no part, a part is None, or their CRSs differ.

    Raises:
        InputError: labels that stand for different classes.
    """
    known = [part for part in parts if part is not None]
    classes = {part.classes for part in known if part.label is not None} or {None}
    if len(classes) > 1:
        raise InputError(f"The labels of these positions stand for different classes: {sorted(map(str, classes))}.")
    if not known or len(known) < len(parts) or len({part.crs for part in known}) > 1:
        return None
    columns: dict[str, Any] = {}
    for name in ("x", "y", "label", "split", "weight"):
        values = [getattr(part, name) for part in known]
        columns[name] = None if any(value is None for value in values) else np.concatenate(values)
    return Positions(crs=known[0].crs, classes=classes.pop(), **columns)


def _integers(label: npt.ArrayLike) -> npt.NDArray[np.int64]:
    values = np.array(label, ndmin=1)
    if values.size == 0:
        return values.astype(np.int64)
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64) if values.dtype.kind in "iufb" else None
    if whole is None or not np.array_equal(whole, values):
        raise InputError(
            f"Labels are integers from which classes gives the names, got {values.dtype} {values[:3].tolist()}."
        )
    return whole
