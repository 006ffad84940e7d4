"""How Graphcore calls the reduction over micro-batches."""

from __future__ import annotations

import enum
from typing import Any


class GradientAccumulationReductionMethod(enum.Enum):
    """How the micro-batches of a window combine.

    Example:

    >>> GradientAccumulationReductionMethod.parse("running_mean")
    <GradientAccumulationReductionMethod.RUNNING_MEAN: 2>
    """

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, reduction_method: Any) -> GradientAccumulationReductionMethod:
        """The member that a member, or its name in any case, says.

        Raises:
            ValueError: It is neither.
        """
        if isinstance(reduction_method, cls):
            return reduction_method
        name = reduction_method.upper() if isinstance(reduction_method, str) else ""
        if name not in cls.__members__:
            raise ValueError(
                f"Cannot parse reduction_method={reduction_method!r} as one of "
                f"{list(cls.__members__)}. Received: "
                f"reduction_method={reduction_method!r}. Pass a "
                "GradientAccumulationReductionMethod, or its name in any case."
            )
        return cls[name]
