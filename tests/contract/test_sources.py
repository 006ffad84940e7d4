"""What every file of the package keeps to: length, docstrings, no `assert`."""

import ast
import importlib
import inspect

from absl.testing import absltest

from tests.contract import sources

MOST_LINES = 300


def _asserts(tree):
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def _public_objects(module):
    """Names and values of the public classes and functions that a module defines."""
    for name, value in vars(module).items():
        is_defined = inspect.isclass(value) or inspect.isfunction(value)
        if is_defined and value.__module__ == module.__name__ and name[0] != "_":
            yield name, value
            if inspect.isclass(value):
                for member, attribute in vars(value).items():
                    function = getattr(attribute, "__func__", attribute)
                    if member[0] != "_" and (
                        inspect.isfunction(function) or isinstance(function, property)
                    ):
                        yield f"{name}.{member}", getattr(value, member)


def _undocumented(module):
    """Names of what has no docstring, neither its own nor one it inherits."""
    missing = [name for name, value in _public_objects(module) if not _doc(value)]
    return missing if module.__doc__ else ["the module", *missing]


def _doc(value):
    return (inspect.getdoc(value) or "").strip()


class SourcesTest(absltest.TestCase):
    def test_no_file_is_too_long(self):
        lengths = {
            path.name: len(path.read_text(encoding="utf-8").splitlines())
            for path in sources.ROOT.rglob("*.py")
        }
        self.assertNotEmpty(lengths)
        too_long = {name: n for name, n in lengths.items() if n > MOST_LINES}
        self.assertEmpty(too_long)

    def test_no_assert(self):
        for module, tree in sources.trees().items():
            self.assertEmpty(_asserts(tree), module)
        self.assertEqual(_asserts(ast.parse("x = 1\nassert x")), [2])

    def test_everything_public_has_a_docstring(self):
        for name in sources.trees():
            module = importlib.import_module(sources.module_name(name))
            self.assertEmpty(_undocumented(module), name)

    def test_what_has_none_is_found(self):
        module = type(ast)("bare")
        source = (
            "class A:\n"
            "    '''Has one.'''\n"
            "    def method(self): pass\n"
            "    @property\n"
            "    def value(self): pass\n"
            "    @classmethod\n"
            "    def make(cls): pass\n"
            "    def _private(self): pass\n"
            "def function(): pass\n"
        )
        exec(source, module.__dict__)
        for value in (module.A, module.function):
            value.__module__ = "bare"
        self.assertEqual(
            _undocumented(module),
            ["the module", "A.method", "A.value", "A.make", "function"],
        )
