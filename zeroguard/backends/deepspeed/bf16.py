"""BF16_Optimizer: ZeRO-1 with bf16 parameters and fp32 gradient accumulation, not offloaded.

Read from DeepSpeed's runtime/bf16_optimizer.py: every backward is added to fp32 gradients that live beside the
parameters; only ``clear_hp_grads`` clears them, and the preprocess of a backward (not run for a second one over the
same forward) clears the bf16 gradients that would otherwise be added twice.
"""

from __future__ import annotations

from typing import Any

from zeroguard.backends.base import Done
from zeroguard.backends.deepspeed.plain import Accumulators

__all__ = ["Bf16Accumulators"]


class Bf16Accumulators(Accumulators):
    """Accumulators of BF16_Optimizer."""

    def __init__(self, engine: Any, names: dict[int, str]) -> None:
        super().__init__(engine, names)
        self.cleared = False  # by us, and no backward since
        self.params = {id(p): (p, g) for g, group in enumerate(self.optimizer.bf16_groups) for p in group}

    def trainable(self) -> set[int]:
        return set(self.params)

    def closed_backward(self, boundary: bool) -> None:
        for params, flags in zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_has_gradients, strict=True):
            self.now.update(id(p) for p, has in zip(params, flags, strict=True) if has)
        super().closed_backward(boundary)

    def discard(self) -> None:
        super().discard()
        held: set[int] = set()
        for params, flags in zip(self.optimizer.bf16_groups, self.optimizer.fp32_groups_has_gradients, strict=True):
            held.update(id(p) for p, has in zip(params, flags, strict=True) if has)
        self.thrown &= held

    def uncleared(self) -> set[int]:
        return set(self.thrown)

    def consumed(self) -> None:
        super().consumed()
        flags = self.optimizer.fp32_groups_has_gradients
        if self.cleared and not any(map(any, flags)):
            # A step after zero_grad without a backward: DeepSpeed takes no norm of nothing, but one of zeros.
            flags[:] = [[True] * len(group) for group in flags]

    def reset_window(self) -> None:
        super().reset_window()
        self.cleared = False

    def clear(self) -> list[Done]:
        had = self.named(self.entered | self.now)
        self.optimizer.clear_lp_grads(set_to_none=True)
        self.optimizer.clear_hp_grads()
        self.reset_window()
        self.cleared = True
        return [Done("accumulators_cleared", had, "zero_grad cleared what ZeRO had accumulated outside .grad.")]

    def shelve_idle(self) -> list[Done]:
        for key in self.idle():
            param, group = self.params[key]
            self.shelf.append((param.data, param.data.clone()))
            if param._hp_mapping is not None:
                place = param._hp_mapping.hp_fragment_address
                self._shelve_slice(self.optimizer.fp32_groups_flat_partition[group], place.start, place.numel)
        return []

    def unshelve_idle(self) -> list[Done]:
        self._unshelve()
        return []
