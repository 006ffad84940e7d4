"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import inspect

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

import keras_accum
from tests.contract import sources

GLOBALS = {"keras": keras, "tf": tf, "keras_accum": keras_accum, "np": np}


def _examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in sources.trees():
        module = importlib.import_module(sources.module_name(name))
        for found in finder.find(module, extraglobs=GLOBALS):
            if found.examples:
                yield found


def _report_of(example):
    """What doctest writes about the examples that fail: nothing if none does."""
    lines = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=lines.append, clear_globs=False)
    return "".join(lines)


class DoctestsTest(absltest.TestCase):
    def test_they_hold(self):
        for example in _examples():
            with self.subTest(example.name):
                self.assertEqual(_report_of(example), "")

    def test_every_public_class_has_one(self):
        names = {example.name.split(".")[-1] for example in _examples()}
        public = {name: getattr(keras_accum, name) for name in keras_accum.__all__}
        modules = {n: each for n, each in public.items() if inspect.ismodule(each)}
        inside = [name for module in modules.values() for name in module.__all__]
        self.assertContainsSubset([*(set(public) - set(modules)), *inside], names)

    def test_one_that_does_not_hold_is_reported(self):
        parser = doctest.DocTestParser()
        wrong = parser.get_doctest(
            ">>> np.add(1, 1).item()\n3\n", GLOBALS, "w", None, 0
        )
        self.assertIn("Expected:\n    3\nGot:\n    2", _report_of(wrong))
