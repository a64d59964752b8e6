"""Interleaved timing: every contender once a round, then medians, so that a drifting machine drifts for all."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class Result:
    """Medians of one comparison."""

    name: str
    seconds: Mapping[str, float]
    """Median seconds of each contender; the first is the baseline."""
    ratios: Mapping[str, float]
    """Median over the rounds of baseline time / own time: above 1 is faster than the baseline."""
    times: Mapping[str, list[float]]
    """Seconds of each contender in each round."""

    def beside(self, key: str, name: str, *others: str) -> Result:
        """The same rounds with another of the contenders as the baseline."""
        return _result(name, {each: self.times[each] for each in (key, *others)})


def compare(
    name: str,
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> Result:
    """Runs every contender once to warm up, then once a round in turn.

    Args:
        name: what is compared.
        contenders: what to run, by name; the first is the baseline.
        rounds: counted rounds.
        before: runs before each of them, outside the time.
    """
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for number in range(rounds + 1):
        for key, run in contenders.items():
            before()
            gc.collect()
            start = time.perf_counter()
            run()
            if number:
                times[key].append(time.perf_counter() - start)
    return _result(name, times)


def _result(name: str, times: Mapping[str, list[float]]) -> Result:
    base = next(iter(times.values()))
    ratios = {key: median(b / t for b, t in zip(base, own, strict=True)) for key, own in times.items()}
    return Result(name, {key: median(own) for key, own in times.items()}, ratios, times)


def table(results: list[Result]) -> str:
    """The ratios as lines of text."""
    lines = []
    for result in results:
        others = list(result.ratios.items())[1:]
        shown = "   ".join(f"{key} {ratio:5.2f}x" for key, ratio in others)
        lines.append(f"{result.name:<34} {shown}")
    return "\n".join(lines)
