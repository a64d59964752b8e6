"""The package's metadata: what it needs, what is optional, and the command it installs.

The version is read as text from ``otbtf_lite/_version.py``: importing the package would need what is not installed yet.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

VERSION = re.search(r'__version__ = "(.+)"', (HERE / "otbtf_lite" / "_version.py").read_text(encoding="utf-8"))
if VERSION is None:
    raise SystemExit('otbtf_lite/_version.py has no line of the form: __version__ = "1.2.3".')

OPTIONAL = {
    # `gdal` and `gdal-wheel` both own the folder `osgeo`, so one must never be installed over the other. The wheel is
    # for Python 3.12 and later; below that (and where no wheel fits) GDAL is the system's, with bindings built from
    # source to match its libgdal, which no requirement can express: scripts/setup-env does it.
    "gdal": ['gdal-wheel; python_version >= "3.12"'],
    "fast": ["isal"],
    "dask": ["dask"],
    # tensorflow-datasets imports importlib_resources without requiring it.
    "tfds": ["tensorflow-datasets", "importlib_resources"],
    "stac": ["pystac"],
    "preview": ["matplotlib"],
}

# Linters are pinned to a minor release: a new one brings new rules, and `select = ["ALL"]` would take them at once.
DEVELOPMENT = {
    "docs": ["mkdocs>=1.6,<2"],
    "dev": ["pytest>=8", "hypothesis>=6.131", "ruff==0.17.*", "mypy==2.4.*", "tensorboard"],
}

setup(
    name="otbtf-lite",
    version=VERSION.group(1),
    description="Georeferenced rasters to TFRecords, training on them, and maps back from models, without OTB",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["otbtf_lite", "otbtf_lite.*"]),
    package_data={"otbtf_lite": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "tensorflow>=2.16",
        "numpy",
        "tqdm",
        "crc32c",
        'tomli; python_version < "3.11"',  # tomllib, part of Python from 3.11 on
    ],
    extras_require={
        **OPTIONAL,
        **DEVELOPMENT,
        "all": sorted({requirement for group in OPTIONAL.values() for requirement in group}),
    },
    entry_points={"console_scripts": ["otbtf-lite = otbtf_lite.cli:main"]},
    keywords="remote sensing, deep learning, TFRecord, TensorFlow, GDAL, OTBTF, Earth Engine",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: GIS",
        "Typing :: Typed",
    ],
)
