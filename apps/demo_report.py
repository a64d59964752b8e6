"""The demo's picture and its table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from demo_scene import CLASSES, COLORS
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from otbtf_lite import RasterSource, TFRecords
from otbtf_lite.stats import ClassCounts


def draw(panels: Mapping[str, str], out: str) -> None:
    """Rasters side by side by title, on one map: class maps in their colours with a legend, and images as they are."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
    table = np.full((256, 3), 255, np.uint8)
    for value, color in COLORS.items():
        table[value] = color
    for ax, (title, path) in zip(axes, panels.items(), strict=True):
        source = RasterSource(path, 1)
        with source.open() as reader:
            values = reader.read(source.grid.window)
        left, bottom, right, top = source.grid.bounds
        ax.imshow(table[values[..., 0]] if source.count == 1 else values, extent=(left, right, bottom, top))
        ax.set(title=title, xlabel="longitude (degrees)")
        ax.ticklabel_format(useOffset=False)
    left, bottom, right, top = RasterSource(next(iter(panels.values())), 1).grid.bounds
    axes[0].set(xlim=(left, right), ylim=(bottom, top), ylabel="latitude (degrees)")
    patches = [Patch(facecolor=np.array(COLORS[value]) / 255, label=f"{name} zone") for value, name in CLASSES.items()]
    patches.append(Patch(facecolor="white", edgecolor="grey", label="no data"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(out, dpi=100)


def majority_share(records: TFRecords, target: str) -> float:
    """The share of the most frequent class among all pixels: what a map of that class alone would reach."""
    counts = ClassCounts()
    for _, targets in records.read(16, [target], drop_remainder=False):
        counts.update(targets[target].numpy())
    return max(counts.counts.values()) / counts.total
