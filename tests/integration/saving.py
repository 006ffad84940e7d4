"""The formats that models are saved in, and where tests put their files."""

import os
import tempfile

import keras
import tensorflow as tf
from absl.testing import parameterized

from tests import registry
from tests.integration import stepping

SUFFIXES = {"keras": ".keras", "weights": ".weights.h5", "checkpoint": ".checkpoint"}


class TestCase(parameterized.TestCase):
    """A test that has a folder of its own."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def save(model, path: str) -> str:
    """Saves in the format that the path's ending says."""
    if path.endswith(".weights.h5"):
        model.save_weights(path)
    elif path.endswith(".keras"):
        model.save(path)
    else:
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
    return path


def restore(path: str, strategy: str, optimizer):
    """A new model, made with other weights, with what was saved in it."""
    if path.endswith(".keras"):
        with registry.STRATEGIES[strategy]().scope():
            return keras.saving.load_model(path)
    model = stepping.layered(strategy, optimizer, seed=7)
    if path.endswith(".weights.h5"):
        model.load_weights(path)
    else:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.read(path).assert_consumed()
    return model
