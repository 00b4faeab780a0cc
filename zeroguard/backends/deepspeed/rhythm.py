"""What the guard ``accumulation`` asks of an engine: settings, and the order of gradients.

Gradients enter the reduction of stages 1 and 2 one after the other, and are added to what stands at the same place on
other ranks, whatever parameter that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zeroguard import events as ev
from zeroguard.backends.deepspeed.finite import Finite

__all__ = ["Rhythm", "loss_scale", "unasked_clipping"]

#: A rolling number of 61 bits stands for the order of gradients; reports fold it to 31.
_BASE, _MODULUS, _FOLD = 1_000_003, (1 << 61) - 1, (1 << 31) - 1
_CLIPPERS = "torch.nn.utils.clip_grad"


def loss_scale(engine: Any) -> str:
    """LOCAL. ``none``, ``static`` or ``dynamic``."""
    optimizer = engine.optimizer
    if getattr(optimizer, "torch_autocast_gradscaler", None) or getattr(engine, "torch_autocast_z0_gradscaler", None):
        return "dynamic"
    if not engine.fp16_enabled():
        return "none"
    return "dynamic" if engine.dynamic_loss_scale() else "static"


def unasked_clipping(engine: Any, config: Mapping[str, Any]) -> float:
    """LOCAL. The norm at which gradients are clipped though ``config``, where there is one, does not mention it."""
    if not config or "gradient_clipping" in config:
        return 0.0
    return float(engine.gradient_clipping() or 0.0)


class Rhythm(Finite):
    """Reads of the guard ``accumulation``, and the wrappers behind them. LOCAL throughout."""

    # -- the order of gradients --------------------------------------------------------------------------------------

    def _ordering(self, enter: Callable[[Any], None]) -> Callable[[Any], None]:
        """``enter``, which DeepSpeed's reduction calls for each gradient, and the order of these calls."""
        alone = self.facts.world_size == 1 or self.facts.layout not in (1, 2)
        # A rank's experts are its own, and what reaches them depends on its data.
        if alone or "accumulation" not in self.actions or getattr(self.optimizer, "has_moe_layers", False):
            return enter
        index = {key: number for number, key in enumerate(self.names, 1)}

        def ordered(param: Any) -> None:
            enter(param)
            self.order = (self.order * _BASE + index.get(id(param), 0)) % _MODULUS

        return ordered

    def gradient_order(self) -> int:
        return self.order % _FOLD + 1 if self.order else 0

    # -- clips -------------------------------------------------------------------------------------------------------

    def _wrap_parameters(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Whoever iterates over all parameters says by its frame whether it is a clip of PyTorch's."""

        def parameters(*args: Any, **kwargs: Any) -> Iterator[Any]:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == _CLIPPERS and not self.in_step:
                self.emit(self._clip_of(caller))
            yield from original(*args, **kwargs)

        return parameters

    def _clip_of(self, caller: Any) -> ev.GradientClip:
        limit = caller.f_locals.get("max_norm", caller.f_locals.get("clip_value"))
        name = caller.f_code.co_name
        by = f"torch.nn.utils.{name if name.startswith('clip') else 'clip_grad_value_'}"
        gradients = sum(param.grad is not None for param in self._params)
        return ev.GradientClip(by, gradients, float(limit) if isinstance(limit, int | float) else None)
