"""The commands that make, look at, check and move records: what they say, where, and with which exit status."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numbered
import numpy as np
import pytest
from numbered import contents, flat, numbers

from otbtf_lite import cli
from otbtf_lite.manifest import load_manifest
from otbtf_lite.sharding import permutation
from otbtf_lite.storage import Directory
from otbtf_lite.tfrecords import TFRecords

if TYPE_CHECKING:
    from conftest import MakeRaster

PROJECT = Path(__file__).resolve().parents[1]
Captured = pytest.CaptureFixture[str]


def run(capsys: Captured, *words: object) -> tuple[int, list[str], list[str]]:
    """Exit status, lines on stdout, lines on stderr."""
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def test_verify_of_what_is_sound(tmp_path: Path, capsys: Captured) -> None:
    one, two = numbered.write(tmp_path / "a"), numbered.write(tmp_path / "b", compression="GZIP")
    paths = [one, two, two / "0.records"]
    assert run(capsys, "verify", *paths, "--threads", 2) == (0, [f"{path}: all is well" for path in paths], [])


def test_verify_says_every_fault_and_fails(tmp_path: Path, capsys: Captured) -> None:
    one, two = numbered.write(tmp_path / "a"), numbered.write(tmp_path / "b")
    numbered.change(one / "0.records", 30)
    (one / "1.records").unlink()
    status, out, err = run(capsys, "verify", one, two)
    assert status == 1
    assert out[0] == f"{two}: all is well"
    assert [line.partition(":")[0] for line in out[1:]] == [f"{one}/0.records", f"Could not read {one}/1.records"]
    assert err == ["otbtf-lite: 2 faults were found."]
    (one / "1.records").write_bytes((two / "1.records").read_bytes())
    assert run(capsys, "verify", one)[2] == ["otbtf-lite: 1 fault was found."]
    assert run(capsys, "verify", tmp_path / "none")[:2] == (1, [f"There is no directory {tmp_path / 'none'}."])


@pytest.mark.parametrize("words", [["--threads", "0"], ["--threads", "-2"], ["x", "--salvage", "out"]])
def test_verify_says_what_it_can_not_do(tmp_path: Path, capsys: Captured, words: list[str]) -> None:
    status, out, err = run(capsys, "verify", numbered.write(tmp_path / "a"), *words)
    assert (status, out, len(err)) == (1, [], 1)
    assert err[0].startswith("otbtf-lite: ")


def test_verify_salvages(tmp_path: Path, capsys: Captured) -> None:
    folder = numbered.write(tmp_path / "a")
    out = tmp_path / "b"
    said = [f"{folder}: all is well", f"{out}: 10 sound records"]
    assert run(capsys, "verify", folder, "--salvage", out) == (0, said, [])
    numbered.change(folder / "1.records", 80 + 30)
    fault = f"{folder}/1.records: record 1 at byte 80 is corrupt: the checksum of its 64 bytes of data is wrong."
    status, lines, err = run(capsys, "verify", folder, "--salvage", out, "--overwrite")
    assert (status, err) == (1, ["otbtf-lite: 1 fault was found."])
    assert lines == [fault, f"lost: {fault.replace('bytes of data', 'bytes')}", f"{out}: 9 sound records"]
    assert flat(numbers(out)) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    status, lines, err = run(capsys, "verify", folder, "--salvage", out)
    assert status == 1
    assert len(err) == 1
    assert "already holds" in err[0]


def test_reshard(tmp_path: Path, capsys: Captured) -> None:
    one, two = numbered.write(tmp_path / "a"), numbered.write(tmp_path / "b", start=10)
    out = tmp_path / "c"
    assert run(capsys, "reshard", one, two, "-o", out, "--shards", 4) == (0, [f"{out}: 20 samples in 4 shards"], [])
    assert flat(numbers(out)) == list(range(20))
    words = ["--samples-per-shard", 20, "--order", "shuffled", "--seed", 6, "--overwrite"]
    assert run(capsys, "reshard", one, two, "-o", out, *words) == (0, [f"{out}: 20 samples in 1 shards"], [])
    assert flat(numbers(out)) == permutation(20, 6).tolist()
    assert run(capsys, "reshard", one, "--shards", 2, "--compression", "GZIP")[0] == 0
    assert len(numbers(one)) == 2
    assert run(capsys, "reshard", two, "--suggest-for", 3) == (0, ["--shards 3"], [])
    for words in ([one, two, "--shards", 2], [two, "--shards", 99], [two, "-o", out, "--shards", 2]):
        status, lines, err = run(capsys, "reshard", *words)
        assert (status, lines, len(err)) == (1, [], 1)
        assert err[0].startswith("otbtf-lite: ")


def test_info(tmp_path: Path, capsys: Captured) -> None:
    details = {"sources": {"x": {"paths": [str(tmp_path / "x.tif")]}}}
    folder = numbered.write(tmp_path / "a", details=details, dropped={"between_splits": 5})
    status, out, err = run(capsys, "info", folder)
    assert (status, err) == (0, [])
    assert out[:7] == [
        f"{folder}: 10 samples in 3 shards", "  n: int64 [], tensor", "  x: uint16 [2, 2, 1], tensor",
        "  compression: none", "  seed: 4", "  dropped, between splits: 5", "  source x: ../x.tif",
    ]  # fmt: skip
    (folder / "manifest.json").rename(folder / "manifest.json.partial")
    status, out, err = run(capsys, "info", folder)
    assert (status, out, len(err)) == (1, [], 1)
    assert "is unfinished" in err[0]


RECIPE = """
{seed}
[output]
samples_per_shard = 5
drop_remainder = false
[sources.x]
paths = ["x.tif"]
patch_size = 8
[positions]
method = "at_random"
n = 60
{splits}
"""
SPLITS = "[splits]\nfractions = {train = 0.7, valid = 0.3}\nblock_size = 160.0"


@pytest.fixture
def recipe(tmp_path: Path, make_raster: MakeRaster) -> Path:
    pytest.importorskip("osgeo.gdal").DontUseExceptions()  # a choice, as GDAL warns where none is made
    make_raster("x.tif", np.random.default_rng(0).integers(1, 99, (200, 200, 2), np.uint8))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(seed="seed = 5", splits=""))
    return path


def broken_off(monkeypatch: pytest.MonkeyPatch, recipe: Path, out: Path, name: str) -> None:
    """A conversion that dies when a file gets that name."""
    replace = Directory.replace

    def dying(directory: Directory, old: str, new: str) -> None:
        if os.path.join(directory.url, new).endswith(name):  # noqa: PTH118  # as the package joins them
            raise ZeroDivisionError
        replace(directory, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "replace", dying)
        with pytest.raises(ZeroDivisionError):
            cli.main(["convert", str(recipe), "-o", str(out), "-q"])


def test_convert_resumes(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    whole = tmp_path / "whole"
    status, out, err = run(capsys, "convert", recipe, "-o", whole)
    assert (status, out[-1], err) == (0, f"{whole}: 60 samples in 12 shards", [])
    again = tmp_path / "again"
    broken_off(monkeypatch, recipe, again, "7.records")
    capsys.readouterr()
    status, lines, err = run(capsys, "convert", recipe, "-o", again)
    assert (status, lines, len(err)) == (1, [], 1)
    assert "is unfinished" in err[0] or "already holds" in err[0]
    recipe.write_text(recipe.read_text().replace("samples_per_shard = 5", "samples_per_shard = 6"))
    status, lines, err = run(capsys, "convert", recipe, "-o", again, "--resume")
    assert (status, lines, len(err)) == (1, [], 1)
    assert "other n_samples_per_shard (then 5, now 6)" in err[0]
    recipe.write_text(recipe.read_text().replace("samples_per_shard = 6", "samples_per_shard = 5"))
    assert run(capsys, "convert", recipe, "-o", again, "--resume")[0] == 0
    assert contents(again) == contents(whole)
    assert run(capsys, "convert", recipe, "-o", again, "--resume")[0] == 0  # there is nothing left to do
    assert contents(again) == contents(whole)


@pytest.mark.parametrize("broken", ["train/3.records", "valid/1.records"])
def test_convert_resumes_a_recipe_without_a_seed(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, recipe: Path, broken: str
) -> None:
    """The seed that was drawn is in the journal, or in the manifest of a split that is finished."""
    recipe.write_text(RECIPE.format(seed="", splits=SPLITS))
    out = tmp_path / "out"
    broken_off(monkeypatch, recipe, out, broken)
    assert run(capsys, "convert", recipe, "-o", out, "--resume")[0] == 0
    manifest = load_manifest(Directory(out / "train"))
    assert manifest is not None
    recipe.write_text(RECIPE.format(seed=f"seed = {manifest.seed}", splits=SPLITS))
    whole = tmp_path / "whole"
    assert run(capsys, "convert", recipe, "-o", whole)[0] == 0
    for name in ("train", "valid"):
        assert contents(out / name) == contents(whole / name)
        TFRecords(out / name).verify()


def test_progress_shows_on_a_terminal_alone(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a")
    command = [sys.executable, "-m", "otbtf_lite", "verify", str(folder)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, check=True)
    assert done.stderr == b""
    for words, shown in (([], True), (["-q"], False)):
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        subprocess.run([*command, *words], cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=child, check=True)
        os.write(child, b"end")
        assert (b"3/3" in os.read(parent, 1 << 16)) is shown
        os.close(parent)
        os.close(child)


SLOW = """
import sys, time
from otbtf_lite import cli, verify
def slow(*_):
    print("begins", flush=True)
    time.sleep(1)
    return []
verify.shard_faults = slow
sys.exit(cli.main(["verify", sys.argv[1], "--threads", "1"]))
"""


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, b"interrupted"), (signal.SIGTERM, 143, b"terminated")]
)
def test_signals_end_verify_at_once_with_one_line(tmp_path: Path, number: int, status: int, said: bytes) -> None:
    folder = numbered.write(tmp_path / "a", 40, 1)
    command = [sys.executable, "-c", SLOW, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=PROJECT,
        stdout=pipe,
        stderr=pipe,
        preexec_fn=numbered.hearing_interrupts,  # noqa: PLW1509
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        start = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (status, b"otbtf-lite: " + said + b"\n")
    assert time.monotonic() - start < 10  # not the other 39 shards


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    folder = numbered.write(tmp_path / "a")
    for n in range(3):
        (folder / f"{n}.records").unlink()
    command = [sys.executable, "-m", "otbtf_lite", "info", *[str(folder)] * 2000]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
