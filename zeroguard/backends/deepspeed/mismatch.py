"""What kind of wrong a gradient is: the simplest explanation that fits all samples within their limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroguard.backends.base import Mismatch

__all__ = ["Seen", "classify"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One parameter's samples, float64, on the host.

    Attributes:
        expected: the mean over the ranks of the sum over the backwards of what autograd delivered.
        limit: how far ``consumed`` may be from that.
        last: what the last backward alone would give.
        mine: what this rank alone delivered.
        consumed: what the optimizer is about to consume.
    """

    expected: torch.Tensor
    limit: torch.Tensor
    last: torch.Tensor
    mine: torch.Tensor
    consumed: torch.Tensor

    @property
    def right(self) -> bool:
        """Whether they agree within rounding."""
        return self.fits(self.expected)

    def fits(self, other: torch.Tensor, slack: float = 1.0) -> bool:
        """Whether the optimizer consumes ``other``, within ``slack`` limits."""
        return bool(((self.consumed - other).abs() <= slack * self.limit).all())


def classify(name: str, seen: Seen, *, backwards: int, ranks: int, floor: float) -> Mismatch:
    """Name what is wrong with samples that are not :attr:`Seen.right`.

    Args:
        name: the parameter's.
        seen: its samples.
        backwards: of the window.
        ranks: that gradients are averaged over.
        floor: the limit where nothing was delivered.
    """
    e, s, mine = seen.expected, seen.consumed, seen.mine
    size = max(float(e.norm()), float(s.norm()))
    error = float((s - e).norm()) / size if size > 0 else 0.0
    if not bool(torch.isfinite(s).all()):
        return Mismatch(name, "not_finite", error=float("inf"))
    if bool((e == 0).all()) and bool((seen.limit <= 2 * floor).all()):
        return Mismatch(name, "stale", error=error)
    if not bool(s.any()):
        return Mismatch(name, "lost", error=error, factor=0.0)
    if backwards > 1 and seen.fits(seen.last):
        return Mismatch(name, "overwritten", error=error)
    if ranks > 1:
        if seen.fits(mine / ranks, ranks) or seen.fits(mine, ranks):
            return Mismatch(name, "not_reduced", error=error)
        if seen.fits(e - mine / ranks, 2.0):
            return Mismatch(name, "missing_on_rank", error=error)
    factor = float(s @ e) / float(e @ e) if bool(e.any()) else 0.0
    if factor and seen.fits(factor * e, 2 * max(1.0, abs(factor))):
        return Mismatch(name, "duplicated" if abs(factor - 2) < 0.02 else "scaled", error=error, factor=factor)
    return Mismatch(name, "differs", error=error)
