"""Which samples go to which shard, which shards to which worker, and in which order: pure functions.

Nothing here reads or writes; every decision of the writer and of the readers that is plain arithmetic lives here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError

_SHARD = re.compile(r"(0|[1-9][0-9]{0,17})\.records")  # as OTBTF numbers them: without zeros in front
_MAX_SEED = 1 << 63
_ORDER_STREAM = 0x6F72646572  # keeps the permutations apart from other uses of one seed


def shard_name(index: int) -> str:
    """The file name of the shard with that number, as OTBTF names it: ``"0.records"``."""
    return f"{index}.records"


def shard_number(name: str) -> int | None:
    """The number in a shard's file name, or None where the name is not a shard's."""
    match = _SHARD.fullmatch(name)
    return int(match.group(1)) if match else None


def numeric_order(names: Iterable[str]) -> list[str]:
    """The shards among file names, in numeric order (2 before 10)."""
    numbered = [(number, name) for name in names if (number := shard_number(name)) is not None]
    return [name for _, name in sorted(numbered)]


def check_seed(seed: int | None) -> int:
    """The seed as given, or a newly drawn one for None.

    Raises:
        InputError: the seed is no integer of 0 to 2**63 - 1.
    """
    if seed is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> np.uint64(1))
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < _MAX_SEED:
        msg = f"A seed must be an integer from 0 to 2**63 - 1, got {seed!r}."
        raise InputError(msg)
    return int(seed)


def generator(seed: int, *keys: int) -> np.random.Generator:
    """A random generator that depends on the seed and the keys alone (Philox, a counter-based bit generator).

    Args:
        seed: the user's seed.
        keys: what the draw is for, such as a stream's number and an epoch: other keys, other numbers.
    """
    # As a spawn key: with the keys in one list with the seed, zeros at its end would make no difference.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(check_seed(seed), spawn_key=keys)))


def permutation(n: int, seed: int, epoch: int = 0) -> npt.NDArray[np.int64]:
    """The order of ``n`` samples in an epoch, shape (n,): a function of its arguments alone."""
    return generator(seed, _ORDER_STREAM, epoch).permutation(n).astype(np.int64, copy=False)


@dataclass(frozen=True)
class ShardPlan:
    """How many records each shard gets."""

    counts: tuple[int, ...]
    """Records of shard 0, 1, ..."""
    dropped: int
    """Samples left out at the end, fewer than a shard's worth."""

    @property
    def n_samples(self) -> int:
        """Samples in all shards together."""
        return sum(self.counts)


def plan_shards(n_samples: int, n_samples_per_shard: int, drop_remainder: bool) -> ShardPlan:  # OTBTF's argument
    """Full shards, then one for the rest unless ``drop_remainder``.

    Raises:
        InputError: no samples, a shard size below 1, or more samples a shard than there are when the rest is dropped.
    """
    if isinstance(n_samples_per_shard, bool) or not isinstance(n_samples_per_shard, int | np.integer):
        msg = f"n_samples_per_shard must be an integer, got {n_samples_per_shard!r}."
        raise InputError(msg)
    if n_samples_per_shard < 1:
        msg = f"n_samples_per_shard must be at least 1, got {n_samples_per_shard}."
        raise InputError(msg)
    if n_samples < 1:
        msg = f"There is nothing to write: the data set has {n_samples} samples."
        raise InputError(msg)
    full, rest = divmod(int(n_samples), int(n_samples_per_shard))
    if drop_remainder and full == 0:
        msg = (
            f"{n_samples} samples do not fill one shard of n_samples_per_shard={n_samples_per_shard}, so"
            f" drop_remainder=True would leave nothing: take at most {n_samples} a shard, or drop_remainder=False."
        )
        raise InputError(msg)
    counts = [int(n_samples_per_shard)] * full + ([] if drop_remainder or not rest else [rest])
    return ShardPlan(tuple(counts), rest if drop_remainder else 0)


def plan_equal_shards(n_samples: int, n_shards: int) -> ShardPlan:
    """That many shards, whose sizes differ by one at most; the larger ones come first.

    Raises:
        InputError: no shards, or fewer samples than shards.
    """
    if isinstance(n_shards, bool) or not isinstance(n_shards, int | np.integer) or n_shards < 1:
        raise InputError(f"The number of shards must be an integer of at least 1, got {n_shards!r}.")
    if n_samples < n_shards:
        raise InputError(f"{n_samples} samples can't fill {n_shards} shards: ask for at most {n_samples}.")
    each, more = divmod(int(n_samples), int(n_shards))
    return ShardPlan((each + 1,) * more + (each,) * (int(n_shards) - more), 0)


@dataclass(frozen=True)
class WorkerTrim:
    """What is left of the shards so that every worker gets as many samples as any other."""

    takes: tuple[int, ...]
    """Records read of each kept shard, from its start; the kept shards are the first ``len(takes)``."""
    per_worker: int
    """Samples that each worker gets. Worker w reads the kept shards w, w + n_workers, w + 2 * n_workers, ..."""
    lost: int
    """Samples of the directory that no worker gets."""


def check_workers(n_workers: int) -> int:
    """The number of workers as an int.

    Raises:
        InputError: it is no integer of at least 1.
    """
    return _at_least_one(n_workers, "n_workers")


def trim(counts: Sequence[int], n_workers: int) -> WorkerTrim:
    """Trims shards for workers that share them out by file: file i to worker i % n, as TensorFlow's auto-sharding does.

    The shards kept are a multiple of ``n_workers``, the last ones are left out, and the records of the last kept shards
    are cut where a worker would get more than the others. Of all such ways it takes the one that loses least.

    Args:
        counts: records of each shard, in numeric order.
        n_workers: how many workers share the shards.

    Raises:
        InputError: fewer shards than workers.
    """
    workers = check_workers(n_workers)
    if len(counts) < workers:
        msg = (
            f"{len(counts)} shards can't feed {workers} workers: each needs one of its own. Write more, smaller shards:"
            f" otbtf-lite reshard DIR --shards {workers}."
        )
        raise InputError(msg)
    sums = [0] * workers
    best, best_share = 0, -1
    for kept in range(workers, len(counts) + 1, workers):
        for worker in range(workers):
            sums[worker] += counts[kept - workers + worker]
        if min(sums) > best_share:
            best, best_share = kept, min(sums)
    takes = list(counts[:best])
    for worker in range(workers):
        left = best_share
        for shard in range(worker, best, workers):
            takes[shard] = min(takes[shard], left)
            left -= takes[shard]
    return WorkerTrim(tuple(takes), best_share, sum(counts) - best_share * workers)


def n_batches(n_samples: int, batch_size: int, drop_remainder: bool) -> int:  # OTBTF's argument
    """How many batches a pass has."""
    return n_samples // batch_size if drop_remainder else -(-n_samples // batch_size)


def check_batch_size(batch_size: int) -> int:
    """The batch size as an int.

    Raises:
        InputError: it is no integer of at least 1.
    """
    return _at_least_one(batch_size, "batch_size")


def _at_least_one(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        msg = f"{name} must be an integer of at least 1, got {value!r}."
        raise InputError(msg)
    return int(value)
