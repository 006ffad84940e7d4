"""Package metadata of keras_accum. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Reads the version from the package without importing TensorFlow."""
    source = (ROOT / "keras_accum" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError(
            'Expected a line `__version__ = "..."` in keras_accum/__init__.py.'
        )
    return match.group(1)


def read_description() -> str:
    """Reads the README, which a package index shows."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


PLOT = [
    "matplotlib",  # `AccumulationMonitor.plot_history`, and the examples' curves
]

EXAMPLES = [
    "scikit-learn",  # the handwritten digits, which its wheel carries
    *PLOT,
]

TEST = [
    "pytest",
    "pytest-xdist",  # one process per core; each has its own MirroredStrategy
    "hypothesis",  # random sequences of micro steps against a NumPy oracle
    "tensorboard",  # its callback is tested; TensorFlow 2.21 does not bring it
    *EXAMPLES,  # the examples are tested
]

TPU_AOT = [
    "jax[tpu]==0.10.2",  # libtpu and the way to it; of Python 3.11
    *TEST,
]

DEV = [
    "ruff",  # lint and format
    "pyright[nodejs]",  # types; the extra brings the Node.js that it runs on
    "build",  # sdist and wheel
    *TEST,
]

setup(
    name="keras_accum",
    version=read_version(),
    description="Exact gradient accumulation for Keras 3 on TensorFlow",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    author="The keras_accum authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["keras_accum", "keras_accum.*"]),
    package_data={"keras_accum": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "tensorflow>=2.16",  # the first release whose Keras is Keras 3
        "keras>=3.10",  # the oldest whose optimizers the tests have run on
        "absl-py",  # logging in the format of TensorFlow and Keras
    ],
    extras_require={
        "plot": PLOT,
        "examples": EXAMPLES,
        "test": TEST,
        "tpu-aot": TPU_AOT,
        "dev": DEV,
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
