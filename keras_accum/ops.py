"""The operations of TPUs and IPUs on tensors, for every strategy.

All of them are called in replica context: without a strategy, or inside
`strategy.run(...)`.
"""

from keras_accum.cross_replica import (
    cross_replica_mean,
    cross_replica_sum,
    replication_index,
    replication_normalise,
)
from keras_accum.stateful_ops import (
    gradient_accumulator_add_with_scale,
    stateful_gradient_accumulate,
    stateful_gradient_accumulate_with_momentum,
)
from keras_accum.verified_usage import check_usage, repeat

__all__ = [
    "check_usage",
    "cross_replica_mean",
    "cross_replica_sum",
    "gradient_accumulator_add_with_scale",
    "repeat",
    "replication_index",
    "replication_normalise",
    "stateful_gradient_accumulate",
    "stateful_gradient_accumulate_with_momentum",
]
