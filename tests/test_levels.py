"""The rules that hold the modules together, read from their syntax trees."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "otbtf_lite"

# A module imports only from lower levels. A fraction is a helper of the next level up; helpers build on each other.
LEVELS = {
    "_version": -1,
    "errors": -1,
    "schema": 0,
    "positions": -0.5,
    "grid": 0,
    "sharding": 0,
    "partition": 0,
    "progress": 0,
    "_gdal": 0.2,
    "_spec": 0.2,
    "_warp": 0.4,
    "_opened": 0.6,
    "geotiff": 0.6,
    "storage": 0.6,
    "_features": 0.6,
    "raster": 1,
    "vector": 1,
    "codecs": 1,
    "stats": 1,
    "records": 1.5,
    "footprints": 1.5,
    "handles": 1.5,
    "selection": 1.7,
    "reader_base": 1.7,
    "splits": 1.7,
    "classdraw": 1.5,
    "lookup": 1.7,
    "labelled": 1.8,
    "balance": 1.9,
    "sampling": 2,
    "readers": 2,
    "patches_images": 2.2,
    "compression": 2.2,
    "manifest": 2.2,
    "shards": 2.4,
    "verify": 2.5,
    "salvage": 3.6,
    "writing": 2.6,
    "graph": 2.6,
    "tfrecords": 3,
    "earthengine": 3,
    "layers": 3.5,
    "ops": 3.5,
    "tracing": 3.5,
    "network": 3.5,
    "reshard": 3.5,
    "summaries": 3.5,
    "iterators": 3.5,
    "dataset": 4,
    "pipeline": 4,
    "model": 4,
    "utils": 4.5,
    "predictor": 4.5,
    "scene": 4.5,
    "inference": 5,
    "recipe": 4.8,
    "parallel": 5,
    "classification": 5,
    "preview": 5,
    "cli": 6,
    "testing": 7,
    "__init__": 7,
    "__main__": 7,
}

# Only these import osgeo, so that all the rest runs where there is no GDAL.
WITH_GDAL = {"_gdal", "raster", "vector"}

# Up to this level, importing a module loads neither GDAL nor TensorFlow: workers would pay for them in seconds and
# memory, and compute centres have TensorFlow alone.
LIGHT = 3

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))


def tree_of(module: str) -> ast.Module:
    path = PACKAGE / f"{module}.py"
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted name, split, of every import wherever it stands: in a function, or for the type checker alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = [PACKAGE.name] * (node.level > 0) + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, [*origin, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield node.lineno, ast.unparse(node.args[0]).strip("f'").split(".")  # of an f-string: what it begins with


def own_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and module of every import from the package; a name that is the package's own comes from ``__init__``."""
    for line, (package, *names) in imports(tree):
        if package == PACKAGE.name:
            yield line, names[0] if names and names[0] in {*LEVELS, *MODULES} else "__init__"


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The public classes, functions and methods without a docstring."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        # An overload and a setter speak through the function and the getter of the same name.
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        if ast.get_docstring(node) is None and not decorators & {"overload", "setter", "deleter"}:
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node.body, f"{prefix}{node.name}.")


def test_every_module_has_a_level() -> None:
    unknown = set(MODULES) - set(LEVELS)
    assert not unknown, f"give {sorted(unknown)} a level in {Path(__file__).name}"
    assert not [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"], "modules are flat"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module: str) -> None:
    upward = [
        f"line {line}: {module} (level {LEVELS.get(module)}) imports {other} (level {LEVELS.get(other)})"
        for line, other in own_imports(tree_of(module))
        if not LEVELS.get(other, math.inf) < LEVELS.get(module, math.inf)
    ]
    assert not upward


@pytest.mark.parametrize("module", MODULES)
def test_osgeo_is_imported_where_rasters_and_vectors_are_read(module: str) -> None:
    found = "osgeo" in {package for _, (package, *_) in imports(tree_of(module))}
    assert not found or module in WITH_GDAL


@pytest.mark.parametrize("module", MODULES)
def test_testing_is_imported_by_no_module(module: str) -> None:
    assert "testing" not in {other for _, other in own_imports(tree_of(module))}


@pytest.mark.parametrize("module", MODULES)
def test_errors_are_raised_and_caught_by_name(module: str) -> None:
    faults = [
        f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}"
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.ExceptHandler) and node.type is None)
    ]
    assert not faults


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    tree = tree_of(module)
    assert ast.get_docstring(tree) is not None
    assert not list(undocumented(tree.body))


@pytest.mark.parametrize(
    "modules",
    [["__init__"], [module for module in MODULES if LEVELS.get(module, 0) <= LIGHT]],
    ids=["the package", "its modules"],
)
def test_neither_tensorflow_nor_gdal_is_loaded(modules: list[str]) -> None:
    statements = [f"import {PACKAGE.name}" + f".{module}" * (module != "__init__") for module in modules]
    statements.append("import sys; print(*{'keras', 'osgeo', 'tensorflow'} & set(sys.modules))")
    command = [sys.executable, "-c", "; ".join(statements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
