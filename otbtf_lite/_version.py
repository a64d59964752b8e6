"""The version, in a module of its own so that ``setup.py`` and light imports can read it."""

__version__ = "0.1.0"
