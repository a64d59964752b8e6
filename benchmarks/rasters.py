"""Patches of a whole satellite scene: reading them, and writing them as records."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Result, compare, table

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ("sample", "raster to records", "memory")
"""What ``--only`` can name of this."""
N_PATCHES = 2000
PATCH = 64
TARGET_MB = 200


def recipe(scene: Path) -> dict[str, Any]:
    """Patches at random places of the scene."""
    return {
        "seed": 1,
        "sources": {"x": {"paths": str(scene), "patch_size": PATCH}},
        "positions": {"method": "at_random", "n": N_PATCHES},
    }


def reading(scene: Path, rounds: int) -> list[Result]:
    """Patches in memory, beside reading one by one and beside decoding each block once.

    The first contender has as much of a block cache as ours; the second GDAL's own, 5 % of the memory, which on most
    machines is more than this whole scene takes, and on none more than a data set of several.
    """
    from osgeo import gdal

    from benchmarks import baseline
    from otbtf_lite import parallel
    from otbtf_lite.grid import Grid
    from otbtf_lite.raster import BLOCK_CACHE_BYTES, block_cache
    from otbtf_lite.readers import RasterPatchesReader

    plan = parallel.plan(recipe(scene))
    positions, source = plan.positions[""], plan.sources["x"]
    grid: Grid = source.grid
    rows, cols = grid.footprint_starts(positions.x, positions.y, (PATCH, PATCH))
    blocks = needed_blocks(rows, cols, source.block_shape)
    reader = RasterPatchesReader(plan.sources, positions, threads=2)

    def naive() -> None:
        for _ in baseline.raster_patches(str(scene), PATCH, rows, cols):
            pass

    def naive_in_little_cache() -> None:
        with block_cache():
            naive()

    def decode(part: Sequence[tuple[int, int]]) -> None:
        raster = gdal.Open(str(scene))
        height, width = source.block_shape
        block = np.empty((height, width, source.count), source.dtype)
        row_step, col_step, band_step = block.strides
        for down, across in part:
            col, row = across * width, down * height
            raster.ReadRaster(
                col, row, min(width, grid.width - col), min(height, grid.height - row), buf_obj=block.reshape(-1),
                buf_pixel_space=col_step, buf_line_space=row_step, buf_band_space=band_step,
            )  # fmt: skip

    def each_block_once() -> None:
        half = len(blocks) // 2
        with block_cache(), ThreadPoolExecutor(2) as pool:
            list(pool.map(decode, [blocks[:half], blocks[half:]]))

    def ours() -> None:
        with block_cache():
            reader.get_samples(range(N_PATCHES))
        reader.close()

    little, large = f"ReadAsArray, {BLOCK_CACHE_BYTES >> 20} MB cache", "ReadAsArray, all of it cached"
    runs = {little: naive_in_little_cache, large: naive, "each block once": each_block_once, "otbtf-lite": ours}
    result = compare(f"sample {N_PATCHES} patches", runs, rounds)
    return [
        result.beside(little, f"sample, to {little}", "otbtf-lite"),
        result.beside(large, f"sample, to {large}", "otbtf-lite"),
        result.beside("each block once", "sample, to decoding each block once", "otbtf-lite"),
    ]


def needed_blocks(rows: np.ndarray, cols: np.ndarray, block: tuple[int, int]) -> list[tuple[int, int]]:
    """The blocks that patches lie in, (down, across), in the file's order."""
    corners = [
        np.stack([(rows + down) // block[0], (cols + across) // block[1]], axis=1)
        for down in (0, PATCH - 1)
        for across in (0, PATCH - 1)
    ]
    return [(int(down), int(across)) for down, across in np.unique(np.concatenate(corners), axis=0)]


def converting(scene: Path, folder: Path, rounds: int) -> list[Result]:
    """The scene to shards."""
    from benchmarks import baseline
    from otbtf_lite import parallel
    from otbtf_lite.raster import BLOCK_CACHE_BYTES, block_cache

    plan = parallel.plan(recipe(scene))
    positions, source = plan.positions[""], plan.sources["x"]
    rows, cols = source.grid.footprint_starts(positions.x, positions.y, (PATCH, PATCH))
    schema = {"x": ("uint16", source.patch_shape)}

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def theirs() -> None:
        patches = baseline.raster_patches(str(scene), PATCH, rows, cols)
        samples = baseline.ahead({"x": patch} for patch in patches)
        baseline.write(samples.__next__, N_PATCHES, schema, folder, 100)

    def theirs_in_little_cache() -> None:
        with block_cache():
            theirs()

    def ours() -> None:
        parallel.convert(plan, folder, threads=2, progress=False)

    little, large = f"OTBTF-style, {BLOCK_CACHE_BYTES >> 20} MB cache", "OTBTF-style, all of it cached"
    runs = {little: theirs_in_little_cache, large: theirs, "otbtf-lite": ours}
    result = compare("raster to records", runs, rounds, clear)
    clear()
    return [
        result.beside(little, f"raster to records, to {little}", "otbtf-lite"),
        result.beside(large, f"raster to records, to {large}", "otbtf-lite"),
    ]


def memory(scene: Path, folder: Path) -> int:
    """Peak memory of that conversion in a process of its own, above what the imports take: bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.rasters", str(scene), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  # this very module
    return int(done.stdout)


def convert_and_print_memory(scene: Path, folder: Path) -> None:
    """What :func:`memory` runs."""
    from otbtf_lite import parallel
    from otbtf_lite._gdal import module

    module("gdal")
    before = peak()
    parallel.convert(parallel.plan(recipe(scene)), folder, threads=2, progress=False)
    print(peak() - before)


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if (
        status.is_file()
    ):  # Linux: what getrusage tells there is no less than what the parent had when it started this one
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10


def main(folder: Path, rounds: int, only: str) -> None:
    """Measures and prints."""
    from benchmarks.scene import scene

    if only and not any(only in name for name in NAMES):
        return
    file = scene()
    if only in NAMES[0]:
        print(table(reading(file, rounds)), flush=True)
    if only in NAMES[1]:
        print(table(converting(file, folder / "scene", rounds)), flush=True)
    if only in NAMES[2]:
        most = memory(file, folder / "scene") / 1e6
        print(f"raster to records, memory above the imports: {most:.0f} MB (at most {TARGET_MB})")


if __name__ == "__main__":
    convert_and_print_memory(Path(sys.argv[1]), Path(sys.argv[2]))
