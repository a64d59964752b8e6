from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otbtf_lite.errors import DataError, InputError
from otbtf_lite.storage import LOCK_NAME, Directory, WriteLock, temporary_name

PROJECT = Path(__file__).resolve().parents[1]
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture(params=["local", "ram"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """One that is not there yet, on the disk and in TensorFlow's memory file system."""
    if request.param == "local":
        return Directory(tmp_path / "a" / "b")
    pytest.importorskip("tensorflow")
    return Directory(f"ram://{tmp_path.name}/a/b")


def test_a_path_is_text_or_a_path(tmp_path: Path) -> None:
    assert Directory(tmp_path).url == Directory(str(tmp_path)).url == str(tmp_path)
    assert Directory("x").path("0.records") == os.path.join("x", "0.records")  # noqa: PTH118  # as it says
    assert Directory("gs://bucket/x/").path("0.records") == "gs://bucket/x/0.records"


@pytest.mark.parametrize("path", ["", b"x", None, 5])
def test_other_paths_are_refused(path: Any) -> None:
    with pytest.raises(InputError, match="A directory must be given as text"):
        Directory(path)


def test_files_are_written_read_renamed_and_removed(directory: Directory) -> None:
    assert not directory.is_dir()
    assert directory.names() == []
    directory.make()
    directory.make()
    assert directory.is_dir()
    directory.write("a.json", b"one")
    directory.write("a.json", b"two!")
    directory.append("a.json", b"+")
    assert directory.read("a.json", 5) == b"two!+"
    assert directory.size("a.json") == 5
    directory.write("b.json", b"")
    directory.replace("a.json", "b.json")
    assert directory.names() == ["b.json"]
    assert directory.exists("b.json")
    assert not directory.exists("a.json")
    with directory.open("b.json") as file:
        assert (file.read(2), file.read(9), file.read(1)) == (b"tw", b"o!+", b"")
    directory.remove("b.json")
    directory.remove("b.json")
    assert directory.names() == []


def test_large_data_are_written_whole(directory: Directory) -> None:
    directory.make()
    data = bytes(range(256)) * 20_000
    with directory.create("x") as file:
        file.write(b"what was there before")
    with directory.create("x") as file:
        file.write(memoryview(data))
        file.write(b"")
        file.write(data)
        assert file.bytes == 2 * len(data)
    assert directory.read("x", 1 << 24) == 2 * data


def test_errors_name_the_file_and_what_was_tried(directory: Directory) -> None:
    directory.make()
    path = directory.path("x")
    with pytest.raises(DataError, match=f"Could not read {path}: "):
        directory.read("x", 10)
    with pytest.raises(DataError, match=f"Could not read {path}: "), directory.open("x") as file:
        file.read(1)
    with pytest.raises(DataError, match=f"Could not write {directory.path('y')}: "):
        directory.replace("x", "y")


def test_a_file_longer_than_it_may_be_is_not_read(directory: Directory) -> None:
    directory.make()
    directory.write("x", b"12345")
    with pytest.raises(DataError, match="has 5 bytes, more than the 4"):
        directory.read("x", 4)


@pytest.mark.parametrize("error", [OSError("the reader's own"), KeyboardInterrupt(), ValueError("other")], ids=repr)
def test_a_file_is_removed_and_the_error_passes_as_it_is(directory: Directory, error: BaseException) -> None:
    directory.make()
    with pytest.raises(type(error)) as caught, directory.create("x") as file:  # noqa: PT012  # both belong to the block
        file.write(b"half")
        raise error
    assert caught.value is error
    assert directory.names() == []


def test_a_small_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(tmp_path)
    directory.write("x", b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match=r"Could not write .*x: No space left on device\."):
        directory.write("x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/dev/full")
    full = r"Could not write .*x: No space left on device\."
    with pytest.raises(DataError, match=full):
        Directory(tmp_path).append("x", b"data")
    with pytest.raises(DataError, match=full), Directory(tmp_path).create("x") as file:
        file.write(b"data")


def test_only_what_was_made_is_unmade(tmp_path: Path) -> None:
    deep = Directory(tmp_path / "a" / "b" / "c")
    made = deep.make()
    assert made == [str(tmp_path / name) for name in ("a/b/c", "a/b", "a")]
    (tmp_path / "a" / "kept").touch()
    deep.unmake(made)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "kept"]
    assert Directory(tmp_path / "a").make() == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    directory = Directory(tmp_path / "x")
    assert not directory.is_dir()
    assert directory.names() == []
    with pytest.raises(DataError, match=r"Could not make .*x: File exists"):
        directory.make()


@pytest.mark.skipif(ROOT, reason="root may write anywhere")
def test_a_read_only_directory_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="Permission denied"), WriteLock(Directory(tmp_path)):
        pass
    with pytest.raises(DataError, match="Permission denied"):
        Directory(tmp_path).write("x", b"")


def test_temporary_names_are_dot_files() -> None:
    assert temporary_name("0.records") == ".0.records.tmp"


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    with WriteLock(directory), pytest.raises(DataError, match="is being written by someone else"), WriteLock(directory):
        pass
    assert directory.names() == []
    with WriteLock(directory):
        assert directory.names() == [LOCK_NAME]
    assert directory.names() == []


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom otbtf_lite.storage import Directory, WriteLock\n"
        "with WriteLock(Directory(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DataError, match="is being written by someone else"), WriteLock(Directory(tmp_path)):
            pass
        holder.kill()
    assert Directory(tmp_path).names() == [LOCK_NAME]
    with WriteLock(Directory(tmp_path)):
        pass
    assert Directory(tmp_path).names() == []


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last holder removes the file: whoever had opened it before would hold a lock that nobody else sees."""
    opened = os.open
    calls: list[int] = []

    def remove_at_first(path: str, *args: Any) -> int:
        fd = opened(path, *args)
        calls.append(fd)
        if len(calls) == 1:
            Path(path).unlink()
        return fd

    monkeypatch.setattr(os, "open", remove_at_first)
    with WriteLock(Directory(tmp_path)):
        assert len(calls) == 2
        with pytest.raises(DataError, match="someone else"), WriteLock(Directory(tmp_path)):
            pass


def test_a_file_system_without_locks_is_written_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with WriteLock(Directory(tmp_path)):
        pass
    assert "No locks available" in caplog.text


def test_remote_directories_have_no_lock(tmp_path: Path) -> None:
    directory = Directory(f"ram://{tmp_path.name}")
    with WriteLock(directory), WriteLock(directory):
        assert directory.names() == []
