"""What can happen to a window: the commands that the property test draws."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

INITIAL_VALUES = (
    np.float32(1.5),
    np.array([[0.5, -0.5], [1.0, 3.0], [-2.0, 0.25]], "float32"),
)
# Which variables have a gradient. One pattern is one trace.
PATTERNS = [(True, True), (False, True), (True, False)]
STORES = ["set_weights", "weights.h5", "checkpoint"]


@dataclasses.dataclass(frozen=True)
class MicroStep:
    """Gradients of multiples of 1/4: their sums are exact in float32 in any order."""

    has_gradient: tuple
    seed: int
    weights: tuple | None
    poison: float | None
    poisoned_replica: int

    def gradients(self, num_replicas):
        random = np.random.RandomState(self.seed)
        every = [
            random.randint(-8, 9, (num_replicas, *np.shape(v))).astype("float32") / 4
            for v in INITIAL_VALUES
        ]
        if self.poison is not None:
            first = self.has_gradient.index(True)
            every[first][self.poisoned_replica].flat[-1] = self.poison
        return [
            g if present else None
            for g, present in zip(every, self.has_gradient, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class SetAccumulationSteps:
    value: int


@dataclasses.dataclass(frozen=True)
class Flush:
    pass


@dataclasses.dataclass(frozen=True)
class Reset:
    pass


@dataclasses.dataclass(frozen=True)
class SaveAndRestore:
    store: str


def tour():
    """Every command that is none of the micro steps, between windows and in one."""
    commands = []
    saves = [SaveAndRestore(store) for store in STORES]
    for seed, between in enumerate([SetAccumulationSteps(2), Flush(), Reset(), *saves]):
        steps = [
            MicroStep(pattern, 10 * seed + index, None, None, 0)
            for index, pattern in enumerate(PATTERNS)
        ]
        commands += [Reset(), between, steps[0], between, *steps]
    return commands


def sequences(num_replicas, with_weights):
    weights = st.none()
    if with_weights:
        some = st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 3.0])] * num_replicas)
        weights = st.one_of(st.none(), some, st.just((0.0,) * num_replicas))
    micro_step = st.builds(
        MicroStep,
        has_gradient=st.sampled_from(PATTERNS),
        seed=st.integers(0, 2**16),
        weights=weights,
        poison=st.sampled_from([None] * 8 + [np.nan, np.inf, -np.inf]),
        poisoned_replica=st.integers(0, num_replicas - 1),
    )
    between = st.one_of(
        st.builds(SetAccumulationSteps, st.integers(1, 4)),
        st.just(Flush()),
        st.just(Reset()),
        *[st.just(SaveAndRestore(store)) for store in STORES],
    )
    # Micro steps are the most of it, or no window would ever be filled.
    kinds = st.sampled_from([micro_step] * 2 + [between])
    return st.lists(kinds.flatmap(lambda kind: kind), min_size=8, max_size=16)
