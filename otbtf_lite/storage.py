"""The files of one directory, on a local disk or wherever ``tf.io.gfile`` reaches (``gs://``, ``ram://``).

TensorFlow is imported for remote paths only. On a local POSIX disk ``replace`` is atomic and a :class:`WriteLock` keeps
a second writer out; remote stores have neither, and there the manifest is simply written last.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from otbtf_lite.errors import DataError, InputError

_log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
"""The file that a writer holds locked; it goes when the writer is done."""


def temporary_name(name: str) -> str:
    """Where a file is written before it gets its name: a dot file in the same directory."""
    return f".{name}.tmp"


class Directory:
    """Plain file operations in one directory. Constructing one touches nothing.

    Args:
        path: a str, an ``os.PathLike``, or a URL that ``tf.io.gfile`` knows.

    Raises:
        InputError: the path is empty or is not text.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.url = os.fspath(path)
        except TypeError as error:
            msg = f"A directory must be given as text or a path, got {type(path).__name__}."
            raise InputError(msg) from error
        if not isinstance(self.url, str) or not self.url:
            msg = f"A directory must be given as text that is not empty, got {self.url!r}."
            raise InputError(msg)
        self.remote = "://" in self.url

    def path(self, name: str) -> str:
        """The path or URL of a file in the directory."""
        return f"{self.url.rstrip('/')}/{name}" if self.remote else os.path.join(self.url, name)

    def is_dir(self) -> bool:
        """Whether the directory is there."""
        return bool(_gfile().isdir(self.url)) if self.remote else os.path.isdir(self.url)

    def make(self) -> list[str]:
        """Makes the directory and its parents, where they are missing.

        Returns:
            The directories that were made, the innermost first; none for remote ones.

        Raises:
            DataError: it can't be made.
        """
        made: list[str] = []
        with self.naming("make", self.url):
            if self.remote:
                _gfile().makedirs(self.url)
            else:
                path = os.path.abspath(self.url)
                while not os.path.isdir(path) and path != os.path.dirname(path):
                    made.append(path)
                    path = os.path.dirname(path)
                os.makedirs(self.url, exist_ok=True)
        return made

    @staticmethod
    def unmake(made: list[str]) -> None:
        """Removes what :meth:`make` made, as far as nothing is in it."""
        with contextlib.suppress(OSError):  # not empty, or gone
            for path in made:
                os.rmdir(path)

    def names(self) -> list[str]:
        """The names in the directory, sorted; none where there is no directory.

        Raises:
            DataError: it can't be listed.
        """
        if not self.is_dir():
            return []
        with self.naming("list", self.url):
            found = _gfile().listdir(self.url) if self.remote else os.listdir(self.url)
        return sorted(str(name).rstrip("/") for name in found)

    def exists(self, name: str) -> bool:
        """Whether a file of that name is there."""
        return bool(_gfile().exists(self.path(name))) if self.remote else os.path.exists(self.path(name))

    def size(self, name: str) -> int:
        """The size of a file in bytes.

        Raises:
            DataError: it is not there.
        """
        with self.naming("read", name):
            return int(_gfile().stat(self.path(name)).length) if self.remote else os.stat(self.path(name)).st_size

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file opened for reading bytes.

        Raises:
            DataError: it can't be opened or read.
        """
        with self.naming("read", name):
            opened = _gfile().GFile if self.remote else open
            with opened(self.path(name), "rb") as file:
                yield cast("BinaryIO", file)

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a small file.

        Raises:
            DataError: it can't be read, or has over ``most`` bytes.
        """
        size = self.size(name)
        if size > most:
            msg = f"{self.path(name)} has {size} bytes, more than the {most} that such a file may have."
            raise DataError(msg)
        with self.open(name) as file:
            return file.read(size)  # not `most`: Python makes room for as much as is asked for

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file under a temporary name, then gives it its own.

        Raises:
            DataError: it can't be written.
        """
        with self.create(temporary_name(name), name) as file:
            file.write(data)

    @contextlib.contextmanager
    def create(self, name: str, final: str | None = None) -> Iterator[FileWriter]:
        """A new file opened for writing; it is removed again where the block raises, and the error passes as it is.

        Args:
            name: where it is written.
            final: the name that it gets at the end; None: it keeps the first.

        Raises:
            DataError: it can't be written.
        """
        writer = None
        try:
            writer = FileWriter(self, name)
            yield writer
            writer.close()
            if final is not None:
                self.replace(name, final)
        except BaseException:  # an interrupt at any moment, also just before the renaming
            with contextlib.suppress(DataError):  # the first error is the one to tell
                if writer is not None:
                    writer.close()
            with contextlib.suppress(DataError):
                self.remove(name)
            raise

    def append(self, name: str, data: bytes) -> None:
        """Appends to a file, in one write where the data are short.

        Raises:
            DataError: it can't be written.
        """
        with self.naming("write", name):
            if self.remote:  # object stores have no append; a journal is small enough to be written anew
                with self.open(name) as file:
                    data = file.read() + data
                self.write(name, data)
            else:
                with open(self.path(name), "ab") as file:  # buffered: a full disk is an error then, no short write
                    file.write(data)

    def replace(self, old: str, new: str) -> None:
        """Renames a file over another (atomic on a local disk).

        Raises:
            DataError: it can't be renamed.
        """
        with self.naming("write", new):
            if self.remote:
                _gfile().rename(self.path(old), self.path(new), overwrite=True)
            else:
                os.replace(self.path(old), self.path(new))

    def remove(self, name: str) -> None:
        """Removes a file, where it is there.

        Raises:
            DataError: it can't be removed.
        """
        with self.naming("remove", name):
            if self.remote:
                if _gfile().exists(self.path(name)):
                    _gfile().remove(self.path(name))
            else:
                Path(self.path(name)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def naming(self, what: str, name: str) -> Iterator[None]:
        """Any error of the file system within names the file and says what failed."""
        path = name if name == self.url else self.path(name)
        try:
            yield
        except DataError:
            raise
        except OSError as error:
            msg = f"Could not {what} {path}: {error.strerror or error}."
            raise DataError(msg) from error
        except Exception as error:
            if not type(error).__module__.startswith("tensorflow"):
                raise
            msg = f"Could not {what} {path}: {error}."
            raise DataError(msg) from error


class FileWriter:
    """A new file to write bytes to, without a buffer of its own.

    Args:
        directory: where it lies.
        name: its name.

    Raises:
        DataError: it can't be opened.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory = directory
        self._name = name
        if directory.remote:
            directory.remove(name)  # ram:// goes on at the end of a file that is there
        with directory.naming("write", name):
            # No context manager: the file outlives this method.
            opened = _gfile().GFile if directory.remote else _open_raw
            self._file: Any = opened(directory.path(name), "wb")
        self.bytes = 0
        """Bytes written so far."""

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of the data.

        Raises:
            DataError: it can't be written.
        """
        with self._directory.naming("write", self._name):
            if self._directory.remote:
                self._file.write(bytes(data))
                self.bytes += len(data)
                return
            view = memoryview(data)
            while view:
                done = self._file.write(view)
                self.bytes += done
                view = view[done:]

    def close(self) -> None:
        """Closes the file; more than once does no harm.

        Raises:
            DataError: the last bytes of a remote file can't be written.
        """
        with self._directory.naming("write", self._name):
            self._file.close()


class WriteLock:
    """Keeps a second writer out of a local directory; the operating system lets go of it when its holder dies.

    Args:
        directory: where to write. Remote directories have no lock.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._fd: int | None = None

    def __enter__(self) -> WriteLock:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Takes the lock at once.

        Raises:
            DataError: another writer holds it, or the directory can't be written.
        """
        if self._directory.remote:
            return self
        path = self._directory.path(LOCK_NAME)
        while True:
            with self._directory.naming("lock", LOCK_NAME):
                fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _try_lock(fd):
                os.close(fd)
                msg = f"{self._directory.url} is being written by someone else: wait for them, or write elsewhere."
                raise DataError(msg)
            # Its last holder may have removed the file between our open and our lock: then the lock is worth nothing.
            try:
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    self._fd = fd
                    return self
            except FileNotFoundError:
                pass
            os.close(fd)

    def __exit__(self, *_: object) -> None:
        """Removes the lock file, then lets go."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # on Windows an open file can't be removed; an empty lock file may stay
                os.unlink(self._directory.path(LOCK_NAME))
            os.close(self._fd)
            self._fd = None


def _try_lock(fd: int) -> bool:
    try:
        import fcntl  # POSIX only
    except ImportError:
        import msvcrt  # Windows only

        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network disks know no locks; to write is better than never to be able to
        _log.warning("The file system has no locks (%s): make sure that nobody else writes the directory.", error)
    return True


def _open_raw(path: str, mode: str) -> Any:
    return open(path, mode, buffering=0)


def _gfile() -> Any:  # TensorFlow has no type stubs
    import tensorflow as tf  # remote paths alone need it

    return tf.io.gfile
