"""Maps from models: tiles with margins go through the model, their cores go into a georeferenced raster.

The raster is covered by tiles that lie edge to edge. The model sees each with ``margin`` pixels more on every side, and
what it says about the margin is thrown away: near the edge of what it sees, a convolution works with padding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from otbtf_lite.errors import InputError
from otbtf_lite.grid import Window, rows_cols
from otbtf_lite.predictor import Predictor, as_predictor
from otbtf_lite.progress import bar
from otbtf_lite.raster import RasterSource, RasterWriter
from otbtf_lite.scene import Scene, as_sources
from otbtf_lite.schema import key_list, nearest

_log = logging.getLogger("otbtf_lite")

BLENDS = ("crop",)
"""How neighbouring tiles come together: ``"crop"`` keeps each tile's core."""

_STRIDES = (1, 2, 4, 8, 16, 32, 64)


def predict_raster(
    model: Any,
    sources: Mapping[str, Any] | RasterSource | str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    tile: int | Sequence[int],
    margin: int | Sequence[int],
    outputs: str | Sequence[str] | None = None,
    blend: str = "crop",
    nodata: float | None = None,
    batch_size: int = 4,
    dtype: npt.DTypeLike | None = None,
    colors: Mapping[int, Sequence[int]] | None = None,
    categories: Mapping[int, str] | None = None,
    descriptions: Sequence[str] | None = None,
    progress: bool | None = None,
) -> None:
    """Run a model over whole rasters and write what it says as a GeoTIFF, tile by tile.

    The output has the size, grid and CRS of the first source, the reference. The model always sees windows of one size:
    the tile with its margins, and beyond the raster's edge the mirrored raster. Where a model takes only multiples of a
    number (a U-Net of three poolings: 8), the windows grow at the right and the bottom to the next multiple of 2, 4, 8,
    ... 64 that it takes. Its output may be smaller by the same number of pixels on every side (convolutions without
    padding), down to the tile.

    Args:
        model: a Keras model; an object with one under ``.model``; the path of a SavedModel directory or of a ``.keras``
            file; or a callable that takes ``{key: (batch, rows, cols, bands)}`` and returns an array of (batch, rows,
            cols, bands), one of (batch, rows, cols), which is one band, or a dict of such arrays.
        sources: ``{key: RasterSource or path or list of paths}``, or one of these alone, which goes to the model's only
            input, whatever its name (a callable gets it as ``"image"``). The keys are the names of the model's inputs;
            it gets no others. Pixel sizes may differ by whole ratios; then windows are smaller or larger by that ratio.
            Where a source does not cover the reference, it is nodata (0 where it has none).
        out_path: the GeoTIFF to write; it appears, or replaces an older one, when it is complete.
        tile: pixels of the reference that one tile gives to the output, one integer or (rows, cols).
        margin: pixels of the reference around the tile that the model sees too, likewise; half the width of what one
            output pixel depends on makes the tiles' borders vanish.
        outputs: the name of the output to write, or several, whose bands follow one another; None: the only one.
        blend: how tiles come together, one of :data:`BLENDS`.
        nodata: the output's nodata value; None: the reference's (that of its first band). Pixels where every source has
            no data get it, whatever the model says.
        batch_size: tiles per call of the model.
        dtype: the element type to write, to which integers are rounded and clipped; None: the model's, but uint8 for
            bool and float32 for floats of 16 bits.
        colors: a colour table, ``{value: (red, green, blue[, alpha])}``, for one band of uint8 or uint16.
        categories: ``{value: name}`` of the first band.
        descriptions: the name of each band.
        progress: show a progress bar; None does so on a terminal.

    Raises:
        InputError: sources whose grids do not meet, a tile that the pixel size ratio does not divide, keys that are not
            the model's, an unknown output, a model that fails on the windows or gives other sizes back, a nodata value
            that the output's type can't hold.
        DataError: a raster or a model that can't be read, or an output that can't be written.
    """
    if blend not in BLENDS:
        raise InputError(f"blend must be one of {list(BLENDS)}, got {blend!r}{nearest(str(blend), BLENDS)}")
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size!r}.")
    path = os.fspath(out_path)
    chosen = None if outputs is None else [outputs] if isinstance(outputs, str) else key_list(outputs, "outputs")
    predictor = as_predictor(model)
    known = as_sources(sources, predictor.inputs)
    for key, source in known.items():
        if os.path.realpath(path) in map(os.path.realpath, source.paths):
            raise InputError(f"{path} is what source {key!r} reads: write the output elsewhere.")
    with ExitStack() as stack:
        scene = Scene.open(known, rows_cols(tile, "tile"), rows_cols(margin, "margin", least=0), stack)
        nodata = scene.nodata if nodata is None else nodata
        cores = list(scene.cores())
        shown = stack.enter_context(bar(len(cores), "predicting", "tile", progress))
        output: _Output | None = None
        for start in range(0, len(cores), batch_size):
            batch = cores[start : start + batch_size]
            voids = [None if nodata is None else scene.void(core) for core in batch]
            if output is None:  # the first prediction says what bands there are, and of what type
                scene, values = _first_batch(scene, predictor, batch, chosen)
                kind = _output_dtype(values.dtype, dtype)
                _check_nodata(nodata, kind)
                writer = RasterWriter(
                    path, scene.grid, values.shape[-1], kind,
                    nodata=nodata, colors=colors, categories=categories, descriptions=descriptions,
                )  # fmt: skip
                output = _Output(stack.enter_context(writer), values.shape[-1], kind, nodata)
            elif all(void is not None and void.all() for void in voids):
                values = np.zeros((len(batch), *scene.tile, output.count), kind)  # all of it becomes nodata
            else:
                values = _crop(_bands(predictor(scene.batch(batch)), chosen), scene, len(batch))
            for core, block, void in zip(batch, values, voids, strict=True):
                output.write(core, block, void)
            shown.update(len(batch))
    if output is not None and output.collisions:
        _log.warning(
            "%s: the model gave the nodata value %s to %d pixels that have data, which read as nodata; nodata= takes "
            "another.",
            path, nodata, output.collisions,
        )  # fmt: skip


def _bands(results: Mapping[str, npt.NDArray[Any]], chosen: list[str] | None) -> npt.NDArray[Any]:
    """The chosen outputs of a model as one array of (batch, rows, cols, bands)."""
    if chosen is None:
        if len(results) != 1:
            raise InputError(f"The model has the outputs {sorted(results)}: say by outputs= which to write.")
        chosen = list(results)
    for name in chosen:
        if name not in results:
            raise InputError(f"The model has no output {name!r}: it has {sorted(results)}{nearest(name, results)}")
    bands = [results[name][..., None] if results[name].ndim == 3 else results[name] for name in chosen]
    if any(band.ndim != 4 for band in bands) or len({band.shape[:3] for band in bands}) != 1:
        shapes = {name: results[name].shape for name in chosen}
        raise InputError(f"Outputs must be (batch, rows, cols, bands) of one size, the model gave {shapes}.")
    return bands[0] if len(bands) == 1 else np.concatenate(bands, axis=-1)


def _crop(values: npt.NDArray[Any], scene: Scene, n: int) -> npt.NDArray[Any]:
    """The cores of a batch of windows: (batch, tile rows, tile cols, bands).

    Raises:
        InputError: the model gave neither the size of the windows nor one smaller by the same on every side.
    """
    lost = [seen - given for seen, given in zip(scene.seen, values.shape[1:3], strict=True)]
    fits = len(values) == n and all(
        loss == 0 or (loss > 0 and loss % 2 == 0 and loss // 2 <= margin)
        for loss, margin in zip(lost, scene.margin, strict=True)
    )
    if not fits:
        raise InputError(
            f"The model gave {values.shape} for {n} windows of {scene.seen} pixels, each a tile of {scene.tile} in a "
            f"margin of {scene.margin}: it must give the windows' size, or less by the same on every side."
        )
    (row, rows), (col, cols) = (
        (margin - loss // 2, size) for margin, loss, size in zip(scene.margin, lost, scene.tile, strict=True)
    )
    return values[:, row : row + rows, col : col + cols]


def _first_batch(
    scene: Scene, predictor: Predictor, batch: list[Window], chosen: list[str] | None
) -> tuple[Scene, npt.NDArray[Any]]:
    """The scene with windows of a size that the model takes, and the cores of the first batch.

    Sizes that give an output as large as the input come first: after poolings that drop a rest, the output is smaller
    too, but at the right and the bottom alone, which its size does not tell.
    """
    failure: Exception | None = None
    misfit: InputError | None = None
    smaller: npt.NDArray[Any] | None = None
    for candidate in dict.fromkeys(scene.grown(stride) for stride in _STRIDES):
        arrays = candidate.batch(batch)
        try:
            results = predictor(arrays)
        except Exception as error:  # noqa: BLE001  # whatever a model raises
            failure = failure or error
            continue
        values = _bands(results, chosen)
        if values.shape[:3] == (len(batch), *candidate.seen):
            return candidate, _crop(values, candidate, len(batch))
        if candidate == scene:
            try:
                smaller = _crop(values, scene, len(batch))
            except InputError as error:
                misfit = error
    if smaller is not None:
        return scene, smaller
    if failure is None and misfit is not None:
        raise misfit
    shapes = {layer.key: layer.shape_of(scene.seen) for layer in scene.layers}
    raise InputError(
        f"The model fails on windows of {shapes} (rows, cols, bands), and on larger ones too: "
        f"{type(failure).__name__}: {failure}"
    ) from failure


@dataclass
class _Output:
    """The raster being written."""

    writer: RasterWriter
    count: int
    dtype: np.dtype[Any]
    nodata: float | None
    collisions: int = 0
    """Pixels that have data and got the nodata value."""

    def write(self, core: Window, values: npt.NDArray[Any], void: npt.NDArray[np.bool_] | None) -> None:
        """Write what the model says of a tile, (rows, cols, bands), as far as it lies in the raster.

        Args:
            core: the tile.
            values: what the model says.
            void: where no source has data, (rows, cols) of the part in the raster; None: nothing is nodata.
        """
        inside = core.intersection(self.writer.grid.window)
        if inside is None:
            return
        rows, cols = inside.row_off - core.row_off, inside.col_off - core.col_off
        block = _cast(values[rows : rows + inside.height, cols : cols + inside.width], self.dtype)
        if void is not None:
            nodata = self.dtype.type(self.nodata)
            is_nodata = np.isnan(block) if np.isnan(nodata) else block == nodata
            self.collisions += int(np.count_nonzero(is_nodata.all(axis=-1) & ~void))
            block = np.where(void[..., None], nodata, block)
        self.writer.write(inside, block)


def _output_dtype(given: np.dtype[Any], wanted: npt.DTypeLike | None) -> np.dtype[Any]:
    """The element type to write."""
    if wanted is not None:
        return np.dtype(wanted)
    if given.kind == "b":
        return np.dtype(np.uint8)
    return np.dtype(np.float32) if given.itemsize == 2 and given.kind not in "iu" else given


def _cast(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Values in another element type: integers rounded and clipped."""
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        values = np.clip(np.rint(values) if values.dtype.kind == "f" else values, limits.min, limits.max)
    return values.astype(dtype)


def _check_nodata(nodata: float | None, dtype: np.dtype[Any]) -> None:
    """Refuse a nodata value that the output can't hold: it may be the reference's, which the caller never named."""
    if nodata is None or dtype.kind not in "iu":
        return
    limits = np.iinfo(dtype)
    if not (limits.min <= nodata <= limits.max and nodata == int(nodata)):
        raise InputError(f"The nodata value {nodata} does not fit into an output of {dtype}: give another by nodata=.")
