"""The exceptions that otbtf-lite raises on purpose.

Each one is also the built-in that callers would catch anyway, so ``except ValueError`` and ``except OSError`` keep
working. A message is one sentence that names the file, the key and the values, and says what to do.
"""

from __future__ import annotations


class Error(Exception):
    """The base of every error that otbtf-lite raises on purpose."""


class InputError(Error, ValueError):
    """What the caller asked for can't be done: an argument, a recipe, a combination of sources."""


class DataError(Error, OSError):
    """What lies on disk can't be read or written as asked: a missing, damaged or unfinished file."""


class MissingDependencyError(Error, ImportError):
    """An optional package that this call needs is not installed; the message says how to get it."""
