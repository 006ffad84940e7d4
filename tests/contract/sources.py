"""The package's source files, wherever the package is installed, and their syntax."""

import ast
import functools
import pathlib

import keras_accum

ROOT = pathlib.Path(keras_accum.__file__).parent


@functools.cache
def trees():
    """Module names, without that of the package, and their syntax trees."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(
            path.read_text(encoding="utf-8"), filename=str(path)
        )
        for path in sorted(ROOT.rglob("*.py"))
    }


def module_name(name):
    """The full name to import one of `trees()` by."""
    parts = ["keras_accum", *name.split(".")]
    return ".".join(part for part in parts if part != "__init__")


def imported(tree):
    """Full names of the modules that a syntax tree imports, with what it names there.

    `from keras_accum import boundary` gives `keras_accum.boundary`, and
    `from keras_accum.window import Window` gives `keras_accum.window.Window`.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def imported_parts(tree):
    """Which of `trees()` a syntax tree imports; of a package, the module named."""
    parts = {module_name(part): part for part in trees() if part != "__init__"}
    found = set()
    for name in imported(tree):
        full = [each for each in parts if name == each or name.startswith(each + ".")]
        if full:
            found.add(parts[max(full, key=len)])
    return found
