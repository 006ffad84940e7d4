"""How far two results may lie apart, by dtype, and why."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Relative and absolute, as NumPy's `assert_allclose` takes them."""

    rtol: float
    atol: float


BY_DTYPE = {
    # A sum of N addends in another order differs by about N/2 units in the last place
    # (6e-8 each); ten updates of SGD with momentum stay below 1e-6.
    "float32": Tolerance(rtol=1e-6, atol=1e-6),
    # The same, with units of 1e-16.
    "float64": Tolerance(rtol=1e-14, atol=1e-14),
    # Ten bits of fraction: forward and backward of each micro-batch are rounded to
    # 5e-4 before anything is summed, and differently for another batch size.
    "float16": Tolerance(rtol=5e-3, atol=5e-3),
    # Seven bits of fraction: 4e-3.
    "bfloat16": Tolerance(rtol=4e-2, atol=4e-2),
}

# Optimizers that divide by the root of a squared gradient (Adam and its kin) turn a
# difference of one unit in a gradient near zero into a whole step of the learning rate.
# The suite's data keeps gradients away from zero; what is left is this.
ADAPTIVE = Tolerance(rtol=2e-5, atol=2e-5)
