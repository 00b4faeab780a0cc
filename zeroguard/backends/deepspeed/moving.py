"""Parameters that a step moves, or leaves, other than requires_grad and the backwards say.

A parameter that is frozen at initialize is left out of ZeRO's flat partitions (runtime/zero/stage_1_and_2.py and
stage3.py look at requires_grad there, and nowhere later), and one that is not stays in them. What stands in a flat
partition is stepped with it: where no gradient came, with zeros, and with whatever momentum and weight decay make of
zeros. PyTorch passes over a parameter whose ``.grad`` is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zeroguard.backends.base import Switched
from zeroguard.backends.deepspeed.state import BackendState

__all__ = ["Moving"]

#: What PyTorch's, Apex's and DeepSpeed's optimizers call a first moment; second moments alone move nothing.
_MOMENTA = ("exp_avg", "momentum_buffer")
_NONE = Switched()


class Moving(BackendState):
    """Which parameters the optimizer holds, and moves. LOCAL throughout."""

    #: the parameters when the engine was guarded, those frozen then, and how far it had been trained by then
    _params: Sequence[Any] = ()
    _frozen_first: frozenset[int] = frozenset()
    _steps_first = 0
    #: key -> the parameter group that steps it
    _groups_of: dict[int, Mapping[str, Any]] | None = None
    _by_key: Mapping[int, Any] | None = None
    #: parameters without a gradient that were looked at and are at rest, until a gradient comes
    _at_rest: frozenset[int] = frozenset()

    def _note_frozen(self) -> None:
        self._params = list(self.engine.module.parameters())  # to iterate over a list is 30 times as fast
        self._frozen_first = frozenset(id(p) for p in self._params if not p.requires_grad)
        self._steps_first = self.steps

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

    # -- frozen, unfrozen, and without a gradient ----------------------------------------------------------------------

    def switched_parameters(self, *, every: bool = True) -> Switched:
        idle = self._without_gradient()
        self._at_rest = frozenset() if every else self._at_rest & idle
        frozen, unfrozen = self._look_at_all() if every else (self._frozen_of(idle), [])
        if not (idle or frozen or unfrozen):
            return _NONE
        named = self.accumulators.named
        left_out = self._pushed(idle - set(frozen))
        return Switched(named(self._moved(frozen)), named(unfrozen), named(left_out))

    def _without_gradient(self) -> set[int]:
        """Held, and not reached by a backward of this window, if that is known: at no cost where all were reached."""
        entered, held = self.accumulators.entered, self._held()
        joined = self.accumulators.unknown or (self.joined_in_window and not self.tracker.steps)
        if not entered or len(entered) >= len(held) or joined:
            return set()
        return held.keys() - entered

    def _frozen_of(self, keys: Iterable[int]) -> list[int]:
        if self._by_key is None:
            self._by_key = {id(param): param for param in self._params}
        table = self._by_key
        return [key for key in keys if key in table and not table[key].requires_grad]

    def _look_at_all(self) -> tuple[list[int], list[int]]:
        held, first = self._held(), self._frozen_first
        frozen, unfrozen = [], []
        for param in self._params:
            key = id(param)
            if param.requires_grad:
                if key in first and key not in held:
                    unfrozen.append(key)
            elif key in held:
                frozen.append(key)
        return frozen, unfrozen

    def _moved(self, frozen: Sequence[int]) -> list[int]:
        """Of those that are frozen, and held, the ones that the step will move."""
        stale = self.facts.offload and self.actions.get("accumulator_reset") != "repair"
        old = [key for key in frozen if stale and self._steps_with(key) and self._trained(key)]
        return old or self._pushed(frozen)

    def _trained(self, key: int) -> bool:
        return key not in self._frozen_first or self._steps_first > 0

    def _steps_with(self, key: int) -> bool:
        """Whether the step reaches a parameter of its own that has no gradient."""
        # Where parameters are not flattened, the optimizer passes over one without a gradient, as plain PyTorch does.
        flat = self.facts.layout != 0 or hasattr(self.optimizer, "fp16_groups")
        return flat and not self.shelves_idle and bool(self._held().get(key, {}).get("lr", 1.0))

    def _pushed(self, keys: Iterable[int]) -> list[int]:
        """Those that momentum or weight decay moves, by what this rank holds of them. Waits for the device, once for
        each parameter that is at rest."""
        pushed: list[int] = []
        asked = [key for key in keys if key not in self._at_rest and self._steps_with(key)]
        asked = [key for key in asked if self._decays(key) or self._has_momentum(key)]
        if not asked:
            return pushed
        parts = self._parts_of()
        for key in asked:
            held = self._weight(key, parts) if self._decays(key) else []
            if self._has_momentum(key):
                held += self._momenta(key, parts)
            if any(bool(values.any()) for values in held):
                pushed.append(key)
            else:
                self._at_rest = self._at_rest | {key}
        return pushed

    def _decays(self, key: int) -> bool:
        return bool(self._held().get(key, {}).get("weight_decay"))

    def _has_momentum(self, key: int) -> bool:
        group = self._held().get(key, {})
        return bool(group.get("momentum", 1.0)) and bool(group.get("betas", (1.0,))[0])

    def _parts_of(self) -> dict[int, tuple[torch.Tensor, int, int]]:
        """Parameter -> the flat master weights in which this rank holds its part, where that begins, and elements."""
        opt = self.optimizer
        if self.facts.layout == 0:
            flats = getattr(opt, "fp32_groups_flat", [])
            offsets: dict[int, tuple[torch.Tensor, int, int]] = {}
            for flat, params in zip(flats, getattr(opt, "fp16_groups", []), strict=False):
                start = 0
                for param in params:
                    offsets[id(param)] = (flat, start, param.numel())
                    start += param.numel()
            return offsets
        table = zip(self.master_weights(), self.reading.partition(), strict=False)
        return {
            id(part.param): (flat, part.dest, part.numel)
            for flat, parts in table
            for part in parts
            if flat.numel() >= part.dest + part.numel  # else it is swapped out
        }

    def _weight(self, key: int, parts: Mapping[int, tuple[torch.Tensor, int, int]]) -> list[torch.Tensor]:
        if key in parts:
            flat, start, numel = parts[key]
            return [flat.detach().view(-1).narrow(0, start, numel)]
        # Another rank steps it; on stages 1 and 2 the weights themselves are here.
        return [param.detach() for param in self._params if id(param) == key and self.facts.stage < 3]

    def _momenta(self, key: int, parts: Mapping[int, tuple[torch.Tensor, int, int]]) -> list[torch.Tensor]:
        if key not in parts:
            return []
        flat, start, numel = parts[key]
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        state = getattr(base, "state", {}).get(flat, {})
        momenta = [state.get(name) for name in _MOMENTA]
        return [
            value.detach().view(-1).narrow(0, start, numel)
            for value in momenta
            if torch.is_tensor(value) and value.numel() == flat.numel()
        ]
