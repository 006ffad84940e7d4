"""Packages that only some users need, imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any


def imported(module: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: Its dotted name.
        extra: The extra of keras_accum that brings it.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(
            f"{package} is needed for this, and cannot be imported. Install it with "
            f"`pip install keras_accum[{extra}]` or `pip install {package}`."
        ) from error
