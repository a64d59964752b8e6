"""Real conversions of real rasters, killed, interrupted, starved of disk and doubled: nothing wrong is left unsaid."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numbered
import numpy as np
import pytest

from otbtf_lite import parallel
from otbtf_lite.errors import DataError
from otbtf_lite.manifest import JOURNAL, MANIFEST, SHAPES_FILE, TYPES_FILE
from otbtf_lite.shards import open_finished
from otbtf_lite.storage import LOCK_NAME, Directory
from otbtf_lite.verify import directory_faults

pytest.importorskip("osgeo")

PROJECT = Path(__file__).resolve().parents[1]
RECIPE = """
{seed}
[output]
samples_per_shard = 10
drop_remainder = false
compression = "{compression}"
[sources.xs]
paths = ["{folder}/B02.tif", "{folder}/B08.tif"]
patch_size = 32
[sources.scl]
paths = ["{folder}/SCL.tif"]
patch_size = 32
categorical = true
[positions]
method = "at_random"
n = 600
snap = "none"
"""


@dataclass(frozen=True)
class Conversion:
    """A recipe, and what comes of it when nothing disturbs it."""

    recipe: Path
    files: dict[str, bytes]
    seconds: float
    """From the first change of the directory to the last."""

    def command(self, out: Path, *words: str) -> list[str]:
        return [sys.executable, "-m", "otbtf_lite", "convert", str(self.recipe), "-o", str(out), *words]

    def start(self, out: Path, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(out, *words), cwd=PROJECT, stdout=pipe, stderr=pipe, **options)

    def run(self, out: Path, *words: str, **options: Any) -> tuple[int, bytes]:
        """Exit status and stderr."""
        with self.start(out, *words, **options) as process:
            _, err = process.communicate(timeout=120)
        return process.returncode, err

    @cached_property
    def plan(self) -> parallel.Plan:
        return parallel.plan(self.recipe)

    def resume(self, out: Path) -> None:
        """In this process, which need not start anew for it; :meth:`check` follows."""
        parallel.convert(self.plan, out, resume=True)
        self.check(out)

    def check(self, out: Path) -> None:
        """All files are those of the undisturbed run, but for what begins with a dot."""
        assert {k: v for k, v in contents(out).items() if not k.startswith(".")} == self.files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def one_line(err: bytes, words: str = "") -> None:
    text = err.decode()
    assert text.count("\n") == 1, text
    assert text.startswith("otbtf-lite: ")
    assert words in text


@pytest.fixture(scope="module")
def conversion(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    folder = tmp_path_factory.mktemp("crash")
    scene = shared_data / "s2_l2a_scl" / "S2A_33TWL_20230818_0_L2A"
    recipe = folder / "recipe.toml"
    text = RECIPE.format(folder=scene, seed="seed = 11", compression="GZIP").replace('compression = "GZIP"\n', "")
    recipe.write_text(text)
    whole = folder / "whole"
    empty = Conversion(recipe, {}, 0)
    with empty.start(whole) as process:
        while not (whole / JOURNAL).exists():
            assert process.poll() is None
            time.sleep(0.005)
        begun = time.monotonic()
        assert process.wait() == 0
    conversion = Conversion(recipe, contents(whole), time.monotonic() - begun)
    assert len(conversion.files) == 64
    return conversion


def watch(out: Path, whole: dict[str, bytes]) -> None:
    """What readers would take the directory for just now; finished only if it is."""
    sizes = {}
    with contextlib.suppress(FileNotFoundError):
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(out)}
    try:
        found = open_finished(Directory(out))
    except DataError:
        pass
    else:
        assert found.manifest is not None
        assert (out / MANIFEST).read_bytes() == whole[MANIFEST]
    # OTBTF's reader takes two JSON files and the shards beside them, and knows no journal.
    if {TYPES_FILE, SHAPES_FILE} <= sizes.keys():
        for name, data in whole.items():
            assert not name.endswith(".records") or sizes.get(name) == len(data)


def begun(process: subprocess.Popen[bytes], out: Path, whole: dict[str, bytes], seconds: float) -> None:
    """Watches until that long after the first change of the directory, or until the process ends."""
    while not (out / JOURNAL).exists() and process.poll() is None:
        watch(out, whole)
        time.sleep(0.005)
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        watch(out, whole)
        time.sleep(0.005)


def kill_and_resume(conversion: Conversion, out: Path, rng: np.random.Generator) -> bool:
    """Whether the run was still going on when it was killed."""
    alive = False
    # One in four twice: the run that goes on is killed as well.
    for words in ([], ["--resume"])[: 1 + int(rng.integers(4) == 0)]:
        with conversion.start(out, *words) as process:
            begun(process, out, conversion.files, float(rng.uniform(0, conversion.seconds * 1.1)))
            alive = alive or process.poll() is None
            process.kill()
        watch(out, conversion.files)
    conversion.resume(out)
    shutil.rmtree(out)
    return alive


def test_a_killed_conversion_is_resumed_to_the_same_bytes(tmp_path: Path, conversion: Conversion) -> None:
    rng = np.random.default_rng(0)
    alive = [kill_and_resume(conversion, tmp_path / "out", rng) for _ in range(5)]
    assert any(alive)


@pytest.mark.slow
def test_a_hundred_killed_conversions_are_resumed_to_the_same_bytes(tmp_path: Path, conversion: Conversion) -> None:
    rng = np.random.default_rng(1)
    alive = [kill_and_resume(conversion, tmp_path / "out", rng) for _ in range(100)]
    assert sum(alive) > 50


def look(out: Path) -> str:
    try:
        found = open_finished(Directory(out))
    except DataError as error:
        return "unfinished" if "is unfinished" in str(error) else "being written"
    assert found.manifest is not None
    return f"seed {found.manifest.seed}"


def test_while_it_is_overwritten_it_is_never_taken_for_finished(tmp_path: Path, conversion: Conversion) -> None:
    """By a reader in another process, at any moment: the old one, unfinished, or the new one."""
    out = tmp_path / "out"
    shutil.copytree(conversion.recipe.parent / "whole", out)
    old = dict(conversion.files)
    text = conversion.recipe.read_text().replace("seed = 11", "seed = 12")
    recipe = conversion.recipe.with_name("other.toml")
    recipe.write_text(text)
    other = Conversion(recipe, {}, 0)
    seen: set[str] = set()
    with other.start(out, "--overwrite") as process:
        while process.poll() is None:
            seen.add(look(out))
            time.sleep(0.001)
    assert process.returncode == 0
    assert {"seed 11", "unfinished"} <= seen <= {"seed 11", "unfinished", "being written", "seed 12"}
    assert contents(out).keys() == old.keys()
    assert directory_faults(Directory(out)) == []


@pytest.mark.parametrize(
    ("number", "status", "share"),
    [(signal.SIGINT, 130, 0.3), (signal.SIGTERM, 143, 0.3)]
    + [
        pytest.param(*each, share, marks=pytest.mark.slow)
        for each in ((2, 130), (15, 143))
        for share in (0.0, 0.1, 0.6)
    ],
)
def test_a_signal_ends_it_with_one_line_and_it_is_resumed(
    tmp_path: Path, conversion: Conversion, number: int, status: int, share: float
) -> None:
    out = tmp_path / "out"
    with conversion.start(out, preexec_fn=numbered.hearing_interrupts) as process:
        begun(process, out, conversion.files, share * conversion.seconds)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    if (out / MANIFEST).exists():  # the signal came after the end
        conversion.check(out)
        return
    assert process.returncode == status
    one_line(err, {130: "interrupted", 143: "terminated"}[status])
    if out.exists():  # it had a shard, or left nothing
        assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
        watch(out, conversion.files)
    conversion.resume(out)


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [10, 20_000, 60_000])
def test_a_full_disk_is_told_in_one_line(tmp_path: Path, conversion: Conversion, size: int) -> None:
    """The journal, a shard and the positions do not fit, in turn."""
    out = tmp_path / "out"
    status, err = conversion.run(out, preexec_fn=limited(size))
    assert status == 1
    one_line(err, "File too large" if size < 60_000 else "positions.gpkg")
    if size < 3_000:
        assert not out.exists()
    elif out.exists():
        watch(out, conversion.files)
        with pytest.raises(DataError, match="is unfinished"):
            open_finished(Directory(out))
    conversion.resume(out)


def without_privileges() -> None:
    """Root may write whatever the permissions say, unless it lacks this capability (capability number 1, prctl 24)."""
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(24, 1, 0, 0, 0):
        os._exit(77)


@pytest.mark.parametrize("there", [True, False], ids=["in it", "under it"])
def test_a_read_only_directory_is_told_in_one_line(tmp_path: Path, conversion: Conversion, there: bool) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    out = folder if there else folder / "out"
    status, err = conversion.run(out, preexec_fn=without_privileges)
    if status == 77:
        pytest.skip("this root user can't give up its right to write anywhere")
    assert status == 1
    one_line(err, "Permission denied")
    assert list(folder.iterdir()) == []


def race(conversion: Conversion, out: Path, words: list[str], pause: float) -> None:
    with conversion.start(out, *words) as one:
        time.sleep(pause)
        with conversion.start(out, *words) as two:
            results = [(process, *process.communicate(timeout=120)) for process in (one, two)]
    lost = [err for process, _, err in results if process.returncode]
    if not lost:  # the second began after the first had ended; with overwrite or resume it may
        assert words
    else:
        (err,) = lost
        one_line(err)
        assert any(text in err.decode() for text in ("is being written by someone else", "already holds"))
    conversion.check(out)
    assert LOCK_NAME not in contents(out)
    assert directory_faults(Directory(out)) == []
    shutil.rmtree(out)


def moments(number: int, seconds: float) -> Iterator[tuple[list[str], float]]:
    rng = np.random.default_rng(2)
    for index in range(number):
        yield ([], ["--overwrite"], ["--resume"])[index % 3], float(rng.uniform(0, seconds / 2)) if index else 0.0


def test_of_two_writers_one_is_told(tmp_path: Path, conversion: Conversion) -> None:
    for words, pause in moments(3, conversion.seconds):
        race(conversion, tmp_path / "out", words, pause)


@pytest.mark.slow
def test_of_two_writers_one_is_told_twenty_times(tmp_path: Path, conversion: Conversion) -> None:
    for words, pause in moments(20, conversion.seconds):
        race(conversion, tmp_path / "out", words, pause)


@pytest.mark.slow
def test_a_killed_conversion_without_a_seed_goes_on_with_the_one_it_drew(
    tmp_path: Path, conversion: Conversion
) -> None:
    recipe = conversion.recipe.with_name("no-seed.toml")
    recipe.write_text(conversion.recipe.read_text().replace("seed = 11", ""))
    seedless, out = Conversion(recipe, {}, 0), tmp_path / "out"
    with seedless.start(out) as process:
        while len(list(out.glob("*.records"))) < 5 and process.poll() is None:
            time.sleep(0.005)
        process.kill()
    drawn = json.loads((out / (MANIFEST if (out / MANIFEST).exists() else JOURNAL)).read_text().splitlines()[0])
    assert seedless.run(out, "--resume") == (0, b"")
    seed = json.loads((out / MANIFEST).read_text())["seed"]
    assert seed == drawn["settings"]["seed"]
    again = conversion.recipe.with_name("seed.toml")
    again.write_text(conversion.recipe.read_text().replace("seed = 11", f"seed = {seed}"))
    assert Conversion(again, {}, 0).run(tmp_path / "again") == (0, b"")
    Conversion(again, contents(tmp_path / "again"), 0).check(out)
