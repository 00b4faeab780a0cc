"""What the guard ``accumulation`` asks of an engine: settings, which parameters it holds, the order of gradients.

A parameter that is frozen at initialize is left out of ZeRO's flat partitions (runtime/zero/stage_1_and_2.py and
stage3.py look at requires_grad there, and nowhere later), and one that is not stays in them. Gradients enter the
reduction of stages 1 and 2 one after the other, and are added to what stands at the same place on other ranks,
whatever parameter that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.base import Switched
from zeroguard.backends.deepspeed.state import BackendState

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


class Rhythm(BackendState):
    """Reads of the guard ``accumulation``, and the wrappers behind them. LOCAL throughout."""

    #: the parameters when the engine was guarded, those frozen then, and how far it had been trained by then
    _params: Sequence[Any] = ()
    _frozen_first: frozenset[int] = frozenset()
    _steps_first = 0
    #: key -> the parameter group that steps it
    _groups_of: dict[int, Mapping[str, Any]] | None = None

    def _note_frozen(self) -> None:
        self._params = list(self.engine.module.parameters())  # to iterate over a list is 30 times as fast
        self._frozen_first = frozenset(id(p) for p in self._params if not p.requires_grad)
        self._steps_first = self.steps

    # -- which parameters are trained --------------------------------------------------------------------------------

    def _held(self) -> dict[int, Mapping[str, Any]]:
        if self._groups_of is None:
            opt = self.optimizer
            base = getattr(getattr(opt, "optimizer", opt), "param_groups", [])
            owner: Mapping[int, int] = {}
            if self.facts.layout in (1, 2):
                lists = opt.bit16_groups
            elif self.facts.layout == "bf16":
                lists = opt.bf16_groups
            elif self.facts.layout == 3:
                lists, owner = opt.fp16_groups, getattr(opt, "sub_group_to_group_id", {})
            else:
                lists = getattr(opt, "fp16_groups", None) or [group["params"] for group in base]
            self._groups_of = {}
            for number, params in enumerate(lists):
                place = owner.get(number, number)
                group = base[place] if place < len(base) else {}
                self._groups_of.update((id(param), group) for param in params)
        return self._groups_of

    def switched_parameters(self) -> Switched:
        held, first = self._held(), self._frozen_first
        frozen, unfrozen = [], []
        for param in self._params:
            key = id(param)
            if param.requires_grad:
                if key in first and key not in held:
                    unfrozen.append(key)
            elif key in held:
                frozen.append(key)
        if frozen:
            moving = self._moving()
            frozen = [key for key in frozen if moving(key, held[key])]
        return Switched(self.accumulators.named(frozen), self.accumulators.named(unfrozen))

    def _moving(self) -> Callable[[int, Mapping[str, Any]], bool]:
        """Whether a step moves a frozen parameter that is held."""
        opt = self.optimizer
        # Where parameters are not flattened, the optimizer passes over one without a gradient, as plain PyTorch does.
        flat = self.facts.layout != 0 or hasattr(opt, "fp16_groups")
        stale = self.facts.offload and self.actions.get("accumulator_reset") != "repair"
        states = getattr(getattr(opt, "optimizer", opt), "state", {})
        momentum = any(torch.is_tensor(v) and v.dim() > 0 for state in states.values() for v in state.values())

        def moves(key: int, group: Mapping[str, Any]) -> bool:
            if not flat or self.shelves_idle or not group.get("lr", 1.0):
                return False
            trained = key not in self._frozen_first or self._steps_first > 0
            return bool(group.get("weight_decay")) or (trained and (momentum or stale))

        return moves

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
