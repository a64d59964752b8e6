"""Progress bars, the same everywhere: on a terminal's stderr, silent elsewhere or when told so."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def bar(total: int, what: str, unit: str, progress: bool | None = None) -> Any:
    """A tqdm bar.

    Args:
        total: how many units there are.
        what: what is being done, before the bar.
        unit: what is counted, such as ``"sample"``.
        progress: True shows it, False does not, None shows it where stderr is a terminal.
    """
    return tqdm(total=total, desc=what, unit=unit, disable=None if progress is None else not progress)
