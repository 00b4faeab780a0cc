"""Stage 0: gradients stay in ``.grad``, where zero_grad and PyTorch's own accumulation already do the right thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zeroguard.backends.base import Done

__all__ = ["Accumulators"]


class Accumulators:
    """The accumulators of an engine, and what has to be put right in them. LOCAL throughout.

    The base class does nothing: on stage 0 nothing is accumulated outside ``.grad``.

    A parameter *entered* when its gradient went into DeepSpeed's reduction in this window. ``owned`` are the
    parameters of which this rank consumes a slice.
    """

    #: attached in the middle of a window: what it reached before is not known
    unknown = False

    def __init__(self, engine: Any, names: dict[int, str]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.names = names
        #: parameters whose gradient entered in the running backward, and in this window
        self.now: set[int] = set()
        self.entered: set[int] = set()
        #: entered more than once in the running backward
        self.twice: set[int] = set()
        #: entered in this window, and thrown away by zero_grad since
        self.thrown: set[int] = set()
        self.first = True
        managed = getattr(engine, "managed_gradient_accumulation", None)
        #: the step hands over what no boundary has
        self.unmanaged = managed is not None and not managed()
        #: copies of idle parameters' slices: (place, value), and slices whose optimizer state did not exist yet
        self.shelf: list[tuple[Any, torch.Tensor]] = []
        self.stateless: list[tuple[Any, int, int]] = []

    def enter(self, param: Any) -> None:
        """Called by DeepSpeed's reduction for each gradient. Hot."""
        key = id(param)
        if key in self.now:
            self.twice.add(key)
        self.now.add(key)

    def began(self, boundary: bool) -> None:
        """A backward begins; ``first`` tells whether it overwrites or adds."""

    def reset_window(self) -> None:
        """The optimizer step consumed the gradients."""
        self.entered.clear()
        self.now.clear()
        self.twice.clear()
        self.thrown.clear()

    def discard(self) -> None:
        """zero_grad was called. Where a guard has cleared, nothing is left to be noted here."""
        self.thrown |= self.entered
        self.entered.clear()

    def named(self, keys: set[int] | Sequence[int]) -> tuple[str, ...]:
        """Names, in the model's order."""
        wanted = set(keys)
        return tuple(name for key, name in self.names.items() if key in wanted)

    def trainable(self) -> set[int]:
        """Keys of the parameters that the optimizer steps."""
        return set()

    def idle(self) -> set[int]:
        """Keys of parameters that the optimizer steps and whose gradient did not enter in this window."""
        return self.trainable() - self.entered - self.now

    def stale(self) -> set[int]:
        """Idle parameters whose slice may hold an earlier window's gradient."""
        return set()

    def uncleared(self) -> set[int]:
        """Parameters whose gradient zero_grad threw away, and the step would consume."""
        return set()

    def lost(self) -> set[int]:
        """Parameters that entered in this window and whose gradient step() would not consume."""
        return set()

    def carry(self) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.carry`."""
        return []

    def put_back(self) -> None:
        """The backward that :meth:`carry` made room for has reduced nothing: what was set aside is the gradient
        again."""

    def flush_pending(self, boundary: bool) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.flush_pending`."""
        return []

    def settle(self, boundary: bool) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.settle`."""
        return []

    def closed_backward(self, boundary: bool) -> None:
        """Bookkeeping at the end of a backward, whether or not a guard settles it."""
        self.entered |= self.now
        self.now.clear()
        self.twice.clear()

    def consumed(self) -> None:
        """The step is about to consume: what entered outside a backward (coalesced reduction) and what DeepSpeed's own
        finalization of unmanaged accumulation copied is accounted for."""
        if self.now:
            self.closed_backward(True)

    def finalizes(self) -> None:
        """engine.step() of unmanaged accumulation begins."""

    def drop_idle(self) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.drop_idle`."""
        return []

    def clear(self) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.clear`."""
        return []

    def drop_unfinished(self) -> None:
        """Forget half-reduced gradients of a backward that raised."""

    def _state_slices(self, master: Any, dest: int, numel: int) -> list[torch.Tensor]:
        """The slices of the base optimizer's state (momentum and the like) that belong to a slice of ``master``."""
        state = self.optimizer.optimizer.state.get(master, {})
        same = [v for v in state.values() if torch.is_tensor(v) and v.dim() > 0 and v.numel() == master.numel()]
        return [value.view(-1).narrow(0, dest, numel) for value in same]

    def _shelve_slice(self, master: Any, dest: int, numel: int) -> None:
        slices = self._state_slices(master, dest, numel)
        for place in (master.data.view(-1).narrow(0, dest, numel), *slices):
            self.shelf.append((place, place.clone()))
        if not slices:
            self.stateless.append((master, dest, numel))

    def _unshelve(self) -> None:
        with torch.no_grad():
            for place, value in self.shelf:
                place.copy_(value)
            for item in self.stateless:
                # The step created the optimizer's state; an untouched parameter's share of it is zero.
                for piece in self._state_slices(*item):
                    piece.zero_()
        self.shelf.clear()
        self.stateless.clear()

    def shelve_idle(self) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.shelve_idle`."""
        return []

    def unshelve_idle(self) -> list[Done]:
        """See :meth:`zeroguard.backends.base.Engine.unshelve_idle`."""
        return []
