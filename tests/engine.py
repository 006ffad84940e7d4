"""The parts of the engine on their own: variables without Keras, values by replica."""

import numpy as np
import tensorflow as tf


def new_variable(
    name,
    *,
    shape=(),
    dtype="int32",
    initial=0,
    synchronization="auto",
    aggregation="none",
    keeps_largest=False,
):
    """A variable as `Window` and its kin ask for it."""
    return tf.Variable(
        tf.cast(tf.fill(shape, initial), dtype),
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization[synchronization.upper()],
        aggregation=tf.VariableAggregation[aggregation.upper()],
    )


def on_replicas(strategy, function, *by_replica):
    """Runs `function` in replica context; returns a list of results, one per replica.

    Args:
        strategy: Whose replicas run it.
        function: Takes one tensor for each of `by_replica`.
        *by_replica: Lists with a value for each replica.
    """

    def on_replica(values):
        def value(context):
            return tf.nest.map_structure(
                tf.convert_to_tensor, values[context.replica_id_in_sync_group]
            )

        return strategy.experimental_distribute_values_from_function(value)

    results = strategy.run(function, args=[on_replica(each) for each in by_replica])

    def on(replica):
        def local(result):
            # What is one object on all replicas, such as None, is not kept per replica.
            each = strategy.experimental_local_results(result)
            return each[replica] if len(each) > 1 else each[0]

        return tf.nest.map_structure(local, results)

    return [on(replica) for replica in range(strategy.num_replicas_in_sync)]


def built(loss_scale, strategy):
    """A copy of a loss scale with variables of its own, under the strategy's scope."""
    with strategy.scope():
        return loss_scale.built(new_variable)


def close_window(strategy, scale, is_clean=True, is_good=None, updates=0, **totals):
    """Ends a window of a built loss scale; returns the scale of the next.

    Args:
        strategy: What it was built under.
        scale: A built loss scale.
        is_clean: Whether nothing in the window was infinite or NaN.
        is_good: Whether it ended in an update; None is as it is clean.
        updates: Made until now.
        **totals: What rode along in the reduction, summed over the replicas.
    """
    verdict = {
        "is_clean": tf.constant(is_clean),
        "is_good": tf.constant(is_clean if is_good is None else is_good),
        **{name: tf.constant(total, tf.float32) for name, total in totals.items()},
    }
    count = tf.constant(updates, tf.int64)
    on_replicas(strategy, lambda: scale.close_window(verdict, count))
    values = {float(value) for value in copies(strategy, scale.value)}
    assert len(values) == 1, values
    return values.pop()


def copies(strategy, variable):
    """The values of a variable on the replicas."""
    local = strategy.experimental_local_results(variable)
    return [np.asarray(copy.numpy()) for copy in local]
