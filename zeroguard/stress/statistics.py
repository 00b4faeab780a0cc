"""What a count of failures says, and what it does not."""

from __future__ import annotations

import math

__all__ = ["LEVEL", "needed", "wilson"]

#: Quantile of the normal distribution for a two-sided interval of 95 %.
_Z = 1.959963984540054
LEVEL = 0.05


def wilson(failures: int, iterations: int) -> tuple[float, float]:
    """The 95 % score interval of a rate. Source: E. B. Wilson, Probable inference, the law of succession, and
    statistical inference, Journal of the American Statistical Association 22 (1927), pages 209 to 212.

    Args:
        failures: 0 to ``iterations``.
        iterations: without any, nothing is known: (0, 1).
    """
    if iterations == 0:
        return 0.0, 1.0
    rate, square = failures / iterations, _Z * _Z / iterations
    middle = (rate + square / 2) / (1 + square)
    half = _Z * math.sqrt(rate * (1 - rate) / iterations + square / (4 * iterations)) / (1 + square)
    low = 0.0 if failures == 0 else max(0.0, middle - half)
    high = 1.0 if failures == iterations else min(1.0, middle + half)
    return low, high


def needed(rate: float) -> int | None:
    """The clean iterations in a row that luck alone gives in at most one of twenty tries, if each fails with
    probability ``rate``; None where it never fails."""
    if rate <= 0.0:
        return None
    return 1 if rate >= 1.0 else math.ceil(math.log(LEVEL) / math.log1p(-rate))
