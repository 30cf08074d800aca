"""Fixed-point numbers: secure aggregation turns values into integers and adds them modulo 2**32 or 2**64.

A client turns the value x with the weight w into the integer round(w x 2^k). The exponent k is so small that no sum of
the cohort can leave the range of the integers, whatever the values are. W and Q are the sum of the weights and the
largest value, each rounded up to a power of two:

    W * Q * 2^k = 2^(bits - 2)

A value beyond `range` could make a sum wrap around unnoticed, so the client refuses to send it. Rounding changes the
product w x of a client by at most 2^-(k + 1). The mean of n clients therefore changes by at most n 2^-(k + 1) / (sum of
weights).
"""

import math
from dataclasses import dataclass

import numpy as np

UNSIGNED = {32: np.uint32, 64: np.uint64}
SIGNED = {32: np.int32, 64: np.int64}
"""The integer types by number of bits. In NumPy, sums of unsigned integers wrap around, and masks need this."""

STATISTIC_RANGE = 2.0**30
"""Largest absolute value of a statistic, such as a loss or a number of rows. Statistics take 64 bits. With 2^20 rows in
a cohort, 12 binary digits therefore remain after the point. Sums of whole numbers are exact."""


@dataclass(frozen=True)
class Scale:
    """The rule that turns a field into integers.

    Attributes:
        bits: 32 or 64.
        limit: largest absolute value that a client may send.
        exponent: k, the number of binary digits after the point.
    """

    bits: int
    limit: float
    exponent: int

    @classmethod
    def fitting(cls, bits: int, limit: float, weight_bits: int) -> "Scale":
        """Return the finest scale for weights that add up to at most 2^weight_bits.

        Raises:
            ValueError: `bits` is too small for values of up to `limit` and weights of up to 2^weight_bits.
        """
        exponent = bits - 2 - weight_bits - math.ceil(math.log2(limit))
        if exponent < 0:
            raise ValueError(
                f"weights of up to 2^{weight_bits} times values of up to {limit:g} do not fit into {bits} bits; set "
                "[secure_aggregation] bits = 64, or a smaller range"
            )
        return cls(bits, limit, exponent)

    def integers(self, values: np.ndarray, weight: float, where: str) -> np.ndarray:
        """Return round(weight x values x 2^k) modulo 2^bits as unsigned integers, where k is `exponent`.

        Args:
            values: real numbers or integers.
            weight: the weight, 0 or more.
            where: the name of the values, for the error text.

        Raises:
            ValueError: a value is beyond the range, or not finite.
        """
        peak = float(np.abs(values).max(initial=0))
        if not peak <= self.limit:  # also true for NaN
            # the text goes to the server, so it must not hold the value
            raise ValueError(f"{where} holds a value beyond {self.limit:g}, the largest that can be summed")
        whole = np.rint(values.astype(np.float64) * (weight * 2.0**self.exponent)).astype(np.int64)
        return np.asarray(whole).astype(SIGNED[self.bits]).view(UNSIGNED[self.bits])

    def real(self, sums: np.ndarray) -> np.ndarray:
        """Convert sums of unsigned integers to the real numbers that these integers encode, in float64."""
        return np.asarray(sums.view(SIGNED[self.bits]).astype(np.float64) * 2.0**-self.exponent)

    def error(self, num: int) -> float:
        """Return the largest error of a sum of `num` clients."""
        return num * 2.0 ** -(self.exponent + 1)
