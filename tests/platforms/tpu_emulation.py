"""TPUStrategy, traced as on a TPU and then run on the CPU: a thread for each replica.

Of the strategy one thing is replaced, on the instance: `extended.tpu_run`. The step is
traced by TensorFlow's own TPU code, cut into one program per replica
(`tpu_programs.py`), and each runs in a thread. A collective waits until all replicas
have come to it. One that never will, because a replica took another branch, is an error
at once, and not a hang.

TensorFlow must have more inter-op threads than replicas (`tests/conftest.py`): one that
waits keeps its thread.
"""

import functools
import threading
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.ops import script_ops

from tests.platforms import tpu_programs, tpu_stand_in

TIME_LIMIT_S = 20.0


class PartedWaysError(RuntimeError):
    """A collective that some replicas came to, and others did not."""


class Rendezvous:
    """Where the replicas of one run exchange values."""

    def __init__(self, num_replicas: int, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._num_replicas = num_replicas
        self._time_limit_s = time_limit_s
        self._condition = threading.Condition()
        self._visits: dict = {}
        self._values: dict = {}
        self._ended: set[int] = set()
        self.num_exchanges = 0

    def exchange(self, place: str, replica: int, value) -> list[np.ndarray]:
        """Waits for all replicas at `place`; returns the values of all, in order."""
        with self._condition:
            visit = self._visits.get((place, replica), 0)  # in a loop it comes again
            self._visits[place, replica] = visit + 1
            values = self._values.setdefault((place, visit), {})
            values[replica] = np.array(value)
            if len(values) == self._num_replicas:
                self.num_exchanges += 1
            self._condition.notify_all()

            def is_decided() -> bool:
                missing = set(range(self._num_replicas)) - set(values)
                return not missing or bool(missing & self._ended)

            in_time = self._condition.wait_for(is_decided, self._time_limit_s)
            if len(values) < self._num_replicas:
                why = "ended without it" if in_time else "did not come in time"
                missing = sorted(set(range(self._num_replicas)) - set(values))
                raise PartedWaysError(
                    f"Replica {replica} waits at {place}, replicas {missing} {why}."
                )
            return [values[r] for r in range(self._num_replicas)]

    def end(self, replica: int) -> None:
        """Replica `replica` has come to the end of its program."""
        with self._condition:
            self._ended.add(replica)
            self._condition.notify_all()


class Emulation:
    """Runs one traced program on all replicas.

    Args:
        traced: The concrete function of `strategy.run`.
        num_replicas: Threads.
    """

    def __init__(self, traced, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.num_exchanges: list[int] = []  # of each run
        self._rendezvous = Rendezvous(num_replicas)
        self._kept: list = []  # TensorFlow holds Python functions weakly
        self._replica_of_outputs = tpu_programs.replica_of_outputs(traced)
        self._programs = [
            tpu_programs.replica_program(
                traced,
                replica,
                num_replicas,
                {
                    "CrossReplicaSum": functools.partial(self._sum, replica),
                    "AllToAll": functools.partial(self._all_to_all, replica),
                    "XlaSetDynamicDimensionSize": self._cut,
                },
            )
            for replica in range(num_replicas)
        ]

    def __call__(self, arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        """Takes the flat inputs of the traced function, returns its flat outputs."""
        self._rendezvous = Rendezvous(self.num_replicas)
        results: list = [None] * self.num_replicas
        errors: list[Exception] = []

        def run(replica: int) -> None:
            try:
                with tf.device("CPU:0"):
                    results[replica] = execute.execute(
                        self._programs[replica],
                        len(self._replica_of_outputs),
                        arguments,
                        attrs=(),
                        ctx=context.context(),
                    )
            except Exception as error:
                errors.append(error)
            finally:
                self._rendezvous.end(replica)

        threads = [
            threading.Thread(target=run, args=(replica,), daemon=True)
            for replica in range(self.num_replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.num_exchanges.append(self._rendezvous.num_exchanges)
        if errors:
            # What failed by itself says more than who waited for it.
            own = [e for e in errors if "PartedWaysError" not in str(e)]
            raise (own or errors)[0]
        return [
            results[replica][index]
            for index, replica in enumerate(self._replica_of_outputs)
        ]

    def _as_python(self, node, function, inputs, control, dtypes_in, dtype_out) -> None:
        self._kept.append(function)
        tpu_programs.become(
            node,
            "PyFunc",
            [*inputs, *control],
            token=script_ops._py_funcs.insert(function),
            Tin=dtypes_in,
            Tout=[dtype_out],
        )

    def _exchanged(self, function, replica: int, node, place: str, previous) -> None:
        """A collective: `function` of the values of the replicas of a group."""
        dtype = node.attr["T"].type
        inputs, control = tpu_programs.data_and_control(node)
        if previous is not None:  # in one order on all replicas
            control.append(f"^{previous}")
        as_numpy = tf.as_dtype(dtype).as_numpy_dtype

        def exchanged(value, group_assignment):
            values = self._rendezvous.exchange(place, replica, value)
            (group,) = [g for g in group_assignment.tolist() if replica in g]
            own = [values[member] for member in group]
            return np.asarray(function(own, group.index(replica)), as_numpy)

        dtypes = [dtype, tf.int32.as_datatype_enum]
        self._as_python(node, exchanged, inputs, control, dtypes, dtype)

    def _sum(self, replica: int, node, place: str, previous: str | None) -> None:
        self._exchanged(sum_in_order, replica, node, place, previous)

    def _all_to_all(self, replica: int, node, place: str, previous: str | None) -> None:
        names = ("concat_dimension", "split_dimension", "split_count")
        concat, split, parts = (node.attr[name].i for name in names)

        def all_to_all(values, place_in_group):
            own = [np.split(v, parts, axis=split)[place_in_group] for v in values]
            return np.concatenate(own, axis=concat)

        self._exchanged(all_to_all, replica, node, place, previous)

    def _cut(self, node, place: str, previous: str | None) -> None:
        """A dimension of bounded size: on a TPU the rows after the size are padding."""
        dtype = node.attr["T"].type
        inputs, control = tpu_programs.data_and_control(node)

        def cut(x, dimension, size):
            return np.take(x, np.arange(int(size)), axis=int(dimension))

        int32 = tf.int32.as_datatype_enum
        self._as_python(node, cut, inputs, control, [dtype, int32, int32], dtype)


def sum_in_order(values: list[np.ndarray], place_in_group: int) -> np.ndarray:
    """In the order of the replicas, so that all have the same bits."""
    return functools.reduce(np.add, values)


class Recorder:
    """What an emulated strategy has traced and run.

    `programs` are the traced functions, `emulations` what runs them, in one order.
    """

    def __init__(self) -> None:
        self.programs: list = []
        self.emulations: list[Emulation] = []


def strategy(num_replicas: int) -> tf.distribute.TPUStrategy:
    """A TPUStrategy whose steps run on the CPU; it has a `recorder`."""
    made = tpu_stand_in.strategy(num_replicas)
    made.recorder = Recorder()
    emulations: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def emulation_of(traced) -> Emulation:
        if traced not in emulations:
            emulations[traced] = Emulation(traced, num_replicas)
            made.recorder.programs.append(traced)
            made.recorder.emulations.append(emulations[traced])
        return emulations[traced]

    def tpu_run(function, args, kwargs, options=None):
        kwargs = kwargs or {}
        creator = made.extended._tpu_function_creator(function, options)
        if tf.executing_eagerly():
            traced = creator.get_concrete_function(args, kwargs)
            flat = emulation_of(traced)([*_tensors(args, kwargs), *_captured(traced)])
        else:
            traced = tf.function(creator, autograph=False).get_concrete_function(
                args, kwargs
            )
            flat = _in_graph(emulation_of(traced), traced, _tensors(args, kwargs))
        return _structured(traced, flat)

    made.extended.tpu_run = tpu_run
    return made


def _tensors(args, kwargs) -> list[tf.Tensor]:
    flat = tf.nest.flatten((args, kwargs), expand_composites=True)
    return [each for each in flat if isinstance(each, tf.Tensor)]


def _captured(traced) -> list:
    return list(traced.captured_inputs)


def _is_of_a_graph(tensor) -> bool:
    return not hasattr(tensor, "numpy")


def _in_graph(emulation: Emulation, traced, arguments: list[tf.Tensor]) -> list:
    """The run as one operation of the graph that is being traced."""
    captured = _captured(traced)
    places = [i for i, each in enumerate(captured) if _is_of_a_graph(each)]

    def run(*values):
        own = list(captured)
        for place, value in zip(places, values[len(arguments) :], strict=True):
            own[place] = value
        results = emulation([*values[: len(arguments)], *own])
        return results or [tf.constant(0)]

    inputs = [*arguments, *(captured[place] for place in places)]
    dtypes = [tensor.dtype for tensor in traced.graph.outputs]
    results = tf.py_function(run, inputs, dtypes or [tf.int32])
    for result, output in zip(results, traced.graph.outputs, strict=False):
        result.set_shape(output.shape)
    return list(results) if dtypes else []


def _structured(traced, flat: list):
    """The results as `strategy.run` returns them; what is no tensor stays as it is."""
    results = iter(flat)
    leaves = tf.nest.flatten(traced.structured_outputs, expand_composites=True)
    return tf.nest.pack_sequence_as(
        traced.structured_outputs,
        [next(results) if _is_tensor(leaf) else leaf for leaf in leaves],
        expand_composites=True,
    )


def _is_tensor(leaf) -> bool:
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec))
