"""The whole way on a real scene: map what lies above the median elevation from the image alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notes on what this machine lacks
import demo_report
import demo_scene
import predict_map
import tensorflow as tf
import train_from_tfrecords

from otbtf_lite import parallel

SEED = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Rasters, patches, TFRecords, training, a map, and at the end what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where everything is written")
    parser.add_argument("--seed", type=int, default=SEED, help="of the splits and of the training")
    parser.add_argument("--epochs", type=int, default=20, help="at most so many")
    args = parser.parse_args(argv)
    tf.config.experimental.enable_op_determinism()  # one seed, one result
    args.out.mkdir(parents=True, exist_ok=True)
    truth, records_dir, model, zones, picture = (
        str(args.out / name) for name in ("high.tif", "records", "model", "map.tif", "demo.png")
    )
    rgb, dem = demo_scene.fetch(args.out)
    median = demo_scene.write_truth(rgb, dem, truth)
    plan = demo_scene.plan_patches(rgb, truth, args.seed)
    records = parallel.convert(plan, records_dir, overwrite=True)

    training = ["--tfrecords_dir", records_dir, "--model_dir", model, "--target", "high", "--batch_size", "16"]
    numbers = ["--nb_epochs", str(args.epochs), "--seed", str(args.seed), "--learning_rate", "0.001"]
    test = train_from_tfrecords.main([*training, *numbers])
    colors = [f"{name}={bytes(demo_scene.COLORS[value]).hex()}" for value, name in demo_scene.CLASSES.items()]
    mapping = [model, zones, f"rgb={rgb}", "--outputs", "classes", "--dtype", "uint8", "--classes", *colors]
    predict_map.main([*mapping, "--tile", "128", "--margin", "24"])
    panels = {"RGB image": rgb, f"Truth: above {median:.0f} m": truth, "Prediction from the image": zones}
    demo_report.draw(panels, picture)

    majority = demo_report.majority_share(records["test"], "high")
    print(f"""
samples        {", ".join(f"{name} {len(each)}" for name, each in records.items())}
rejected       {plan.rejections}
left out       {plan.lost_between_splits} between the splits, which share no pixel
records        {sum(len(each.shards) for each in records.values())} shards in {records_dir}
test accuracy  {test["accuracy"]:.1%} of the pixels (the majority class has {majority:.1%})
map            {zones}, shown in {picture}""")


if __name__ == "__main__":
    main()
