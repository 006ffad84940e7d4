"""What is to hold of an optimizer under TPUStrategy, layer by layer.

Each function raises an AssertionError if it does not. `test_tpu_harness.py` shows that
each is raised by an optimizer that is wrong.
"""

import functools

import keras
import tensorflow as tf

import keras_accum
from tests import graph_walk, registry, tolerances, training
from tests.integration import stepping
from tests.platforms import tpu_lowering

IN_THE_BOUNDARY = "If.then_branch"


def assert_reduces_in_the_boundary(program) -> None:
    """Traced: a collective stands in the boundary's branch, or there is none."""
    found = graph_walk.collectives(program)
    assert found, "no collective at all"
    outside = [place for place in found if IN_THE_BOUNDARY not in place[1]]
    assert not outside, f"collectives outside the boundary: {outside}"


def assert_reduces_once_per_window(emulation, steps: int) -> None:
    """Emulated: exchanges happen in the last micro step of each window only."""
    counts = emulation.num_exchanges
    in_windows = [counts[i : i + steps] for i in range(0, len(counts), steps)]
    for window in in_windows:
        *quiet, last = window
        assert not any(quiet), counts
        assert last > 0, counts


def assert_same_on_replicas(strategy, variables) -> None:
    """Emulated: the copies of a variable have the same bits."""
    for variable in variables:
        native = getattr(variable, "value", variable)
        copies = strategy.experimental_local_results(native)
        assert len({copy.numpy().tobytes() for copy in copies}) == 1, variable


def assert_static(text: str) -> None:
    """Lowered: no dimension is dynamic."""
    found = tpu_lowering.DYNAMIC.findall(text)
    assert not found, f"dynamic dimensions: {found[:3]}"


def assert_lowers_into_the_boundary(text: str) -> None:
    """Lowered: an all-reduce stands in a conditional."""
    places = tpu_lowering.Hlo(text).placed("all-reduce")
    assert places, "no all-reduce at all"
    assert all("conditional" in place for place in places), places


def momentum(**options):
    """The plain optimizer; slow, and a wrong factor shows."""
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def accumulating(surface: str, steps: int, wrapper=None, plain=None, **options):
    """The same, accumulating.

    Args:
        surface: "wrapper" or "mixin".
        steps: Micro steps per window.
        wrapper: The class of the wrapper.
        plain: Options of the plain optimizer.
        **options: Of the accumulation.
    """
    if surface == "mixin":
        return stepping.AccumulatingSGD(
            0.05, momentum=0.9, accumulation_steps=steps, **(plain or {}), **options
        )
    wrapper = wrapper or keras_accum.AccumulationOptimizer
    return wrapper(momentum(**(plain or {})), steps, **options)


def trained(strategy: str, optimizer, num_updates: int, steps: int, **network):
    """A model of `training.network` after some windows of `fit`.

    Args:
        strategy: A name in the registry.
        optimizer: Makes the optimizer.
        num_updates: Windows.
        steps: Micro steps of `training.ROWS` rows each, per window.
        **network: Arguments of `training.network`.
    """
    with registry.STRATEGIES[strategy]().scope():
        model = training.network(optimizer(), **network)
    return training.train(model, num_updates, training.ROWS, steps)


def large_batch(num_updates: int, steps: int, **options):
    """The plain optimizer on one device, an update for each window."""
    model = training.network(momentum(**options))
    return training.train(model, num_updates, training.ROWS * steps)


def assert_as_large_batch(model, expected) -> None:
    """Emulated: the variables, and the plain optimizer's, of the large batch."""
    inner = expected.optimizer.variables
    training.assert_same_variables(
        [*model.variables, *model.optimizer.variables[: len(inner)]],
        [*expected.variables, *inner],
        tolerances.BY_DTYPE["float32"],
    )


def train_step(strategy, model, features: int = training.FEATURES, rows: int = 1):
    """Keras's own train step of a built model, as a function of one global batch.

    Returns:
        The function, traced for `rows` rows on each replica, and its flat inputs.
    """
    x = tf.zeros((rows, features))
    y = tf.zeros((rows, 1))

    def on_replica(*data):
        model.train_step(data)  # its logs are not returned

    @functools.partial(tf.function, autograph=False)
    def step(x, y):
        strategy.run(on_replica, args=(x, y))

    return step.get_concrete_function(x, y), [x, y]
