"""``python -m benchmarks [--rounds N] [--only TEXT]``: ratios to the OTBTF-style baseline, medians of one run."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import rasters
from benchmarks.harness import Result, compare, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Scene:
    """One kind of sample, and how many of them."""

    name: str
    schema: Mapping[str, tuple[str, Sequence[int]]]
    n_samples: int
    per_shard: int
    batch_size: int

    def samples(self) -> list[dict[str, np.ndarray]]:
        """A few samples of noise: the work per sample does not depend on what is in them."""
        rng = np.random.Generator(np.random.Philox(1))
        return [
            {key: rng.integers(0, 200, shape).astype(dtype) for key, (dtype, shape) in self.schema.items()}
            for _ in range(16)
        ]

    def arrays(self) -> dict[str, np.ndarray]:
        """All samples, those few again and again: shape (samples, ...) by key."""
        few = self.samples()
        return {key: np.stack([few[n % len(few)][key] for n in range(self.n_samples)]) for key in self.schema}


SMALL = Scene("S: f4 64x64x4 + u1 64x64x1", {"x": ("float32", (64, 64, 4)), "y": ("uint8", (64, 64, 1))}, 2000, 100, 32)
LARGE = Scene("L: u2 256x256x10 + u1", {"x": ("uint16", (256, 256, 10)), "y": ("uint8", (256, 256, 1))}, 100, 10, 8)


class Endless:
    """The four members of a dataset, giving the same few samples again and again at no cost of its own."""

    def __init__(self, scene: Scene) -> None:
        self.size = scene.n_samples
        self.output_types = {key: np.dtype(dtype) for key, (dtype, _) in scene.schema.items()}
        self.output_shapes = {key: tuple(shape) for key, (_, shape) in scene.schema.items()}
        self.read_one_sample = itertools.cycle(scene.samples()).__next__


def writing(scene: Scene, folder: Path, rounds: int) -> Result:
    """Samples in memory to shards."""
    from benchmarks import baseline
    from otbtf_lite import TFRecords

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def theirs() -> None:
        source = Endless(scene)
        baseline.write(source.read_one_sample, scene.n_samples, scene.schema, folder / "theirs", scene.per_shard)

    def ours() -> None:
        TFRecords(folder / "ours").ds2tfrecord(Endless(scene), scene.per_shard, progress=False)

    return compare(f"write  {scene.name}", {"OTBTF-style": theirs, "otbtf-lite": ours}, rounds, clear)


def reading(scene: Scene, folder: Path, rounds: int, shuffle: int | None) -> Result:
    """Shards to batches, each pass from the start."""
    from benchmarks import baseline
    from otbtf_lite import TFRecords

    datasets = {
        "OTBTF-style": baseline.read(folder / "ours", scene.batch_size, ["y"], shuffle),
        "otbtf-lite": TFRecords(folder / "ours").read(scene.batch_size, ["y"], shuffle_buffer_size=shuffle),
    }

    runs = {key: (lambda dataset=dataset: exhaust(dataset)) for key, dataset in datasets.items()}
    how = f"shuffle({shuffle})" if shuffle else "in order"
    return compare(f"read   {scene.name}, {how}", runs, rounds)


def write_patches_images(scene: Scene, folder: Path) -> dict[str, str]:
    """One patches image a key, uncompressed as PatchesExtraction leaves it."""
    from osgeo import gdal

    kinds = {"float32": gdal.GDT_Float32, "uint16": gdal.GDT_UInt16, "uint8": gdal.GDT_Byte}
    folder.mkdir(parents=True)
    files = {}
    for key, array in scene.arrays().items():
        dtype, (size, _, bands) = scene.schema[key]
        files[key] = str(folder / f"{key}.tif")
        raster = gdal.GetDriverByName("GTiff").Create(
            files[key], size, size * scene.n_samples, bands, kinds[dtype], ["INTERLEAVE=PIXEL"]
        )
        for band in range(bands):
            raster.GetRasterBand(band + 1).WriteArray(array[..., band].reshape(-1, size))
        raster = None  # closes it
    return files


def converting(scene: Scene, folder: Path, rounds: int) -> Result:
    """Patches images to shards, in a random order."""
    from benchmarks import baseline
    from otbtf_lite import DatasetFromPatchesImages

    files = write_patches_images(scene, folder / "images")

    def clear() -> None:
        shutil.rmtree(folder / "records", ignore_errors=True)

    def theirs() -> None:
        samples = baseline.patches(files, scene.n_samples)
        baseline.write(samples.__next__, scene.n_samples, scene.schema, folder / "records", scene.per_shard)

    def ours(*, use_streaming: bool) -> None:
        with DatasetFromPatchesImages(files, use_streaming, seed=1) as dataset:
            dataset.to_tfrecords(folder / "records", scene.per_shard, progress=False)

    runs = {
        "OTBTF-style": theirs,
        "streaming": lambda: ours(use_streaming=True),
        "in memory": lambda: ours(use_streaming=False),
    }
    result = compare(f"images {scene.name}", runs, rounds, clear)
    shutil.rmtree(folder)
    return result


def feeding(scene: Scene, rounds: int) -> Result:
    """Samples in memory to batches, in a random order."""
    from benchmarks import baseline
    from otbtf_lite import ArraysReader, Dataset

    arrays = scene.arrays()
    with Dataset(ArraysReader(arrays), seed=1) as dataset:
        datasets = {
            "OTBTF-style": baseline.in_memory(arrays, scene.batch_size, ["y"]),
            "otbtf-lite": dataset.get_tf_dataset(scene.batch_size, targets_keys=["y"]),
        }
        runs = {key: (lambda dataset=dataset: exhaust(dataset)) for key, dataset in datasets.items()}
        return compare(f"feed   {scene.name}", runs, rounds)


def exhaust(dataset: Iterable[object]) -> None:
    """One pass."""
    for _ in dataset:
        pass


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="TEXT", help="only comparisons whose name has this text")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(f"Median of {args.rounds} rounds, contenders in turn; ratios to the OTBTF-style way, above 1 is faster.\n")
    with tempfile.TemporaryDirectory() as name:
        for scene in (SMALL, LARGE) if args.only not in rasters.NAMES else ():
            folder = Path(name) / scene.name[0]
            results = [writing(scene, folder, args.rounds)]
            results += [reading(scene, folder, args.rounds, shuffle) for shuffle in (None, 64)]
            results += [feeding(scene, args.rounds), converting(scene, folder / "patches", args.rounds)]
            print(table([result for result in results if args.only in result.name]), flush=True)
        rasters.main(Path(name), args.rounds, args.only)


if __name__ == "__main__":
    main()
