"""Patches images: rasters of square patches stacked in rows, as OTBTF's PatchesExtraction writes them.

An image of ``patch`` columns and ``n * patch`` rows holds n patches. A source may have several such images. Where they
lie on the map is not told by them.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.grid import Grid, Window
from otbtf_lite.raster import RasterReader, RasterSource, RasterWriter
from otbtf_lite.readers import PatchesReaderBase, check_index, summarise
from otbtf_lite.schema import STRING, Feature, Sample, Schema, dtype_name, to_array
from otbtf_lite.stats import BandStats

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 20
_IDENTITY = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)


class PatchesImagesReader(PatchesReaderBase):
    """Random access to the patches of patches images.

    No pixel is read before a sample is asked for. It can be used from several threads at once, and be pickled.

    Args:
        filenames_dict: files by source, ``{"xs": ["xs_1.tif", "xs_2.tif"], ...}``; a source's patches are those of its
            files one after the other, and all sources have the same number of patches.
        use_streaming: read patches from the files each time they are asked for; else each file is read into memory
            once, when its first patch is needed.
        scalar_dict: values that go with the patches, by key: a list of one value a file (which all patches of that file
            get, as in OTBTF), or of one a patch. Numbers, text or arrays, all of one type and shape.

    Raises:
        InputError: no sources, sources with unequal numbers of patches, files of one source whose patches differ in
            size, bands or type, a height that is no multiple of the width, or scalars that do not fit.
        DataError: a file that can't be opened.
    """

    gathers = True

    def __init__(
        self,
        filenames_dict: Mapping[str, Sequence[str | os.PathLike[str]]],
        use_streaming: bool = False,
        scalar_dict: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        if not isinstance(filenames_dict, Mapping) or not filenames_dict:
            raise InputError(
                f"filenames_dict is a dict of lists of files by source, with at least one, got {filenames_dict!r}."
            )
        self.use_streaming = use_streaming
        """Whether patches are read from the files each time."""
        self._sources = {key: _Source(key, names) for key, names in filenames_dict.items()}
        first, *others = self._sources
        for key in others:
            self._check_same_size(first, key)
        self.size: int = self._sources[first].size
        """Number of patches of each source."""
        self._scalars = {key: self._spread(key, values) for key, values in (scalar_dict or {}).items()}
        both = sorted(self._scalars.keys() & self._sources.keys())
        if both:
            raise InputError(f"{both} are keys of sources and of scalars: each needs a key of its own.")

    def _check_same_size(self, one: str, other: str) -> None:
        mine, theirs = self._sources[one], self._sources[other]
        pairs = zip(mine.images, theirs.images, strict=False)
        unlike = [f"{a.path} has {a.size} and {b.path} has {b.size}" for a, b in pairs if a.size != b.size]
        if mine.size != theirs.size:
            raise InputError(
                f"All sources must have the same number of patches, but {one!r} has {mine.size} and {other!r} has"
                f" {theirs.size}{': ' if unlike else ''}{unlike[0] if unlike else ''}."
            )
        if unlike and len(mine.images) == len(theirs.images):
            _log.warning("%s patches: are the files of %r and %r in the same order?", unlike[0], one, other)

    def _spread(self, key: str, values: Sequence[Any]) -> npt.NDArray[Any]:
        """The scalars as an array with one row a patch."""
        files = [image.size for image in next(iter(self._sources.values())).images]
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
            raise InputError(f"Scalars {key!r} must be a list of values, got {values!r}.")
        each = [to_array(value) for value in values]
        if len(each) not in (self.size, len(files)):
            raise InputError(
                f"Scalars {key!r} have {len(each)} values: give one a file ({len(files)}) or one a patch ({self.size})."
            )
        kinds = {(dtype_name(value.dtype) == STRING, value.shape) for value in each}
        if len(kinds) > 1:
            raise InputError(f"Scalars {key!r} must all be numbers or all be text, of one shape, got {list(values)!r}.")
        rows = np.stack(each)
        return rows if len(rows) == self.size else np.repeat(rows, files, axis=0)

    @property
    def schema(self) -> Schema:
        """What every sample looks like, from the files' headers: scalars first, then patches (rows, cols, bands)."""
        features = {key: Feature(dtype_name(rows.dtype), rows.shape[1:]) for key, rows in self._scalars.items()}
        for key, source in self._sources.items():
            features[key] = Feature(dtype_name(source.dtype), source.patch_shape)
        return Schema(features)

    def get_size(self) -> int:
        """Number of samples."""
        return self.size

    def get_sample(self, index: int) -> Sample:
        """One sample: ``{scalar: value, source: (rows, cols, bands)}``.

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file can't be read.
        """
        return self.get_samples([index])[0]

    def get_samples(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of those numbers, in the order asked.

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file can't be read.
        """
        batch = self.get_batch(indices)
        # The dots keep what has no axes an array.
        return [{key: rows[slot, ...] for key, rows in batch.items()} for slot in range(len(indices))]

    def get_batch(self, indices: Sequence[int]) -> Sample:
        """The samples of those numbers, stacked: each key has an array of shape (len(indices), ...).

        Raises:
            SampleIndexError: there is no such sample.
            DataError: a file can't be read.
        """
        wanted = np.array([check_index(index, self.size) for index in indices], np.int64)
        batch: Sample = {key: rows[wanted] for key, rows in self._scalars.items()}
        for key, source in self._sources.items():
            batch[key] = source.read(wanted) if self.use_streaming else source.gather(wanted)
        return batch

    def get_stats(self) -> Mapping[str, Mapping[str, npt.NDArray[np.float64]]]:
        """Statistics of each source's bands over all patches; the same in both modes, and read from the files.

        Pixels without data, scalars and complex values are left out.

        Returns:
            For each source's key ``min``, ``max``, ``mean`` and ``std``, each of shape (bands,).

        Raises:
            DataError: a file can't be read.
        """
        return summarise(self.band_stats())

    def band_stats(self) -> dict[str, BandStats]:
        """The statistics that :meth:`get_stats` gives, in a form that can be merged."""
        return {key: source.stats() for key, source in self._sources.items() if source.dtype.kind in "iufb"}

    def provenance(self) -> dict[str, Any]:
        """The sources' files with sizes and digests, for a manifest."""
        return {"sources": {key: source.describe() for key, source in self._sources.items()}}

    def close(self) -> None:
        """Closes the files and lets go of what is in memory; no other thread may be reading.

        Reading opens them again.
        """
        for source in self._sources.values():
            source.close()


@dataclass(frozen=True)
class _Image:
    """One patches image."""

    path: str
    raster: RasterSource
    size: int
    """Number of patches."""
    patch: int
    """Rows and columns of a patch."""
    bands: int
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, name: str | os.PathLike[str]) -> _Image:
        raster = RasterSource(name, 1)
        rows, cols, bands = raster.shape
        path = raster.paths[0]
        if rows % cols:
            raise InputError(
                f"{path} has {cols} columns and {rows} rows: a patches image is a column of square patches, so its"
                " height must be a multiple of its width."
            )
        return cls(path, raster, rows // cols, cols, bands, raster.dtype)

    def window(self, first: int, count: int) -> Window:
        return Window(0, first * self.patch, self.patch, count * self.patch)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Runs of patches of about 64 MB: (first, count)."""
        step = max(1, _CHUNK_BYTES // (self.patch**2 * self.bands * self.dtype.itemsize))
        return ((first, min(step, self.size - first)) for first in range(0, self.size, step))


class _Source:
    """The patches images of one source, as one sequence of patches."""

    def __init__(self, key: str, names: Sequence[str | os.PathLike[str]]) -> None:
        self.images = [_Image.of(name) for name in ([names] if isinstance(names, str | os.PathLike) else names)]
        if not self.images:
            raise InputError(f"Source {key!r} has no files.")
        first = self.images[0]
        self.dtype = first.dtype
        self.patch_shape = (first.patch, first.patch, first.bands)
        for image in self.images[1:]:
            if (image.patch, image.bands, image.dtype) != (first.patch, first.bands, first.dtype):
                raise InputError(
                    f"Source {key!r}: the patches of all files must be alike, but those of {first.path} are"
                    f" {first.dtype}{list(self.patch_shape)} and those of {image.path} are"
                    f" {image.dtype}{[image.patch, image.patch, image.bands]}."
                )
        self.starts = [0, *itertools.accumulate(image.size for image in self.images)]
        self.size = self.starts[-1]
        self._set_up()

    def _set_up(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, RasterReader] = {}
        self._in_memory: dict[int, npt.NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Everything but open files, pixels and the lock."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_open", "_in_memory")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_up()

    def _collect(
        self, indices: npt.NDArray[np.int64], copy: Callable[[int, npt.NDArray[np.int64], npt.NDArray[Any]], None]
    ) -> npt.NDArray[Any]:
        """The patches of those numbers, which ``copy`` takes from one image: its number, which patches, where to."""
        owner = np.searchsorted(self.starts, indices, "right") - 1
        out = np.empty((len(indices), *self.patch_shape), self.dtype)
        for number in np.unique(owner).tolist():
            slots = np.flatnonzero(owner == number)
            local = indices[slots] - self.starts[number]
            if len(slots) == len(out):  # all from one image, as is usual
                copy(number, local, out)
            else:
                part = np.empty((len(slots), *self.patch_shape), self.dtype)
                copy(number, local, part)
                out[slots] = part
        return out

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Patches from the files, each file read from top to bottom."""

        def copy(number: int, wanted: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
            image = self.images[number]
            with self._lock:
                if number not in self._open:
                    self._open[number] = image.raster.open()
                reader = self._open[number]
            for slot in np.argsort(wanted, kind="stable").tolist():
                reader.read(image.window(int(wanted[slot]), 1), out[slot])

        return self._collect(indices, copy)

    def gather(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Patches from memory."""

        def copy(number: int, wanted: npt.NDArray[np.int64], out: npt.NDArray[Any]) -> None:
            # The numbers are known to be right; with its own check NumPy would go through a second buffer.
            np.take(self._loaded(number), wanted, axis=0, out=out, mode="clip")

        return self._collect(indices, copy)

    def _loaded(self, number: int) -> npt.NDArray[Any]:
        """All patches of one image, read by whichever thread comes first."""
        with self._lock:
            if number not in self._in_memory:
                image = self.images[number]
                patches = np.empty((image.size, *self.patch_shape), self.dtype)
                with image.raster.open() as reader:
                    for first, count in image.chunks():
                        rows = patches[first : first + count].reshape(-1, *self.patch_shape[1:])
                        reader.read(image.window(first, count), rows)
                self._in_memory[number] = patches
            return self._in_memory[number]

    def stats(self) -> BandStats:
        stats = BandStats(self.patch_shape[-1])
        for image in self.images:
            with image.raster.open() as reader:
                for first, count in image.chunks():
                    window = image.window(first, count)
                    stats.update(reader.read(window), reader.valid(window))
        return stats

    def describe(self) -> dict[str, Any]:
        parts = [image.raster.describe() for image in self.images]
        files = {name: [value for part in parts for value in part[name]] for name in ("paths", "sizes", "digests")}
        nodata = parts[0]["nodata"] if all(part["nodata"] == parts[0]["nodata"] for part in parts) else None
        return {
            **files,
            "patches": [image.size for image in self.images],
            "patch_shape": list(self.patch_shape),
            "dtype": dtype_name(self.dtype),
            "nodata": nodata,
        }

    def close(self) -> None:
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()
            self._in_memory.clear()


def write_patches_images(
    samples: Iterable[Sample], schema: Schema, size: int, output_dir: str | os.PathLike[str], tick: Callable[[], object]
) -> dict[str, list[str]]:
    """Writes samples as one patches image a feature, ``output_dir/KEY.tif``, which QGIS and OTBTF read.

    Patches must be square; a number, or a list of them, becomes patches of one pixel with as many bands. The files
    appear when the last sample is written; after an error there are none.

    Args:
        samples: the samples.
        schema: what they look like.
        size: how many there are.
        output_dir: the folder; it is made where it is missing.
        tick: called after each sample.

    Returns:
        The files by key, as :class:`PatchesImagesReader` takes them.

    Raises:
        InputError: a feature that is no square patch nor number or of a type that GDAL can't write, keys that can't be
            names of files, or a sample that is not as the schema says.
        DataError: a file is there already, or can't be written.
    """
    shapes = {key: _patch_shape(key, feature) for key, feature in schema.items()}
    dtypes = {key: _dtype(key, feature) for key, feature in schema.items()}
    folder = Path(output_dir)
    paths = {key: folder / f"{key}.tif" for key in schema}
    for key, path in paths.items():
        if path.parent != folder:
            raise InputError(f"{key!r} can't be a file's name: rename the source.")
        if path.exists():
            raise DataError(f"{path} is there already: write elsewhere, or remove it.")
    if len({key.casefold() for key in schema}) < len(schema):
        raise InputError(f"Keys that differ only in case can't be files side by side everywhere: {sorted(schema)}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"Could not make {folder}: {error.strerror}.") from error
    with ExitStack() as stack:
        writers = {}
        for key, (patch, bands) in shapes.items():
            column = Grid("", _IDENTITY, patch, size * patch)
            writers[key] = stack.enter_context(RasterWriter(paths[key], column, bands, dtypes[key]))
        for number, sample in enumerate(samples):
            for key, array in schema.check(sample, f"sample {number}").items():
                patch, bands = shapes[key]
                window = Window(0, number * patch, patch, patch)
                writers[key].write(window, array.reshape(patch, patch, bands).astype(dtypes[key], copy=False))
            tick()
    return {key: [str(path)] for key, path in paths.items()}


def _patch_shape(key: str, feature: Feature) -> tuple[int, int]:
    """Pixels of a patch's side, and bands."""
    if len(feature.shape) == 3 and feature.shape[0] == feature.shape[1] and feature.size:
        return feature.shape[0], feature.shape[2]
    if len(feature.shape) < 2 and feature.size:
        return 1, feature.size
    raise InputError(
        f"Feature {key!r} of shape {list(feature.shape)} is no square patch (rows, cols, bands) nor a number: a patches"
        " image can't hold it."
    )


def _dtype(key: str, feature: Feature) -> np.dtype[Any]:
    """The element type of a feature's file."""
    if feature.dtype in (STRING, "bfloat16"):
        raise InputError(f"Feature {key!r} is of type {feature.dtype}, which no patches image can hold.")
    return np.dtype("uint8" if feature.dtype == "bool" else feature.dtype)
