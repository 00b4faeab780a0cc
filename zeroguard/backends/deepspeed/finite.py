"""Weights that a step has made inf or NaN, by a few elements of each flat partition.

Where DeepSpeed looks for an overflow itself, it leaves the step out and there is nothing to look for. Where it does not
(fp32; bf16 without ``check_grad_overflow``), its gradient norm does not tell either: releases up to 0.19.2 put -1 in
the place of a norm that is not finite, and take the square of that. One gradient that is not finite makes every weight
of its parameter so, and the next step all of them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from zeroguard.backends.deepspeed.moving import Moving

__all__ = ["Finite", "checks_gradients"]

#: Flat tensors that are looked at, and elements of each, at equal distances.
_FLATS, _ELEMENTS = 8, 16


def checks_gradients(engine: Any) -> bool:
    """LOCAL. Whether DeepSpeed leaves a step out by itself where a gradient is not finite. Read from the releases
    0.16.9 to 0.19.8: in fp16; on stages 1 and 2 where ``check_grad_overflow`` says so; and by a function that newer
    ones have, which reads the norm, on stage 3, and on stages 1 and 2 but for bf16."""
    if engine.fp16_enabled() or getattr(engine.optimizer, "check_grad_overflow", False):
        return True
    stage = int(engine.zero_optimization_stage())
    reads_norm = hasattr(sys.modules.get("deepspeed.runtime.utils"), "is_invalid_grad_norm")
    return reads_norm and (stage == 3 or (stage in (1, 2) and not engine.bfloat16_enabled()))


class Finite(Moving):
    """A look at samples of the master weights. LOCAL. On an accelerator a look waits for nothing: its answer is on the
    host by the next one."""

    #: which samples were finite before the first step; None before that
    _finite_first: torch.Tensor | None = None
    #: samples on their way to the host, with their event, and the step after which they were taken
    _on_the_way: tuple[torch.Tensor, Any, int] | None = None
    _page_locked: torch.Tensor | None = None

    def spoiled_step(self, *, last: bool = False) -> int:
        with torch.no_grad():
            return self._arrived() if last else self._look()

    def _look(self) -> int:
        if self._finite_first is None:
            samples = self._weight_samples()
            self._finite_first = torch.empty(0) if samples is None else torch.isfinite(samples.cpu())
            return 0
        if not self._finite_first.numel():
            return 0
        found = self._arrived()
        samples = self._weight_samples()
        if samples is None or samples.numel() != self._finite_first.numel():
            return found  # loaded anew, or swapped out meanwhile
        self._send(samples)
        return found or (self._arrived() if samples.device.type == "cpu" else 0)

    def _weight_samples(self) -> torch.Tensor | None:
        flats = [flat for flat in self._flats() if flat.numel()]
        flats = [flat.detach().view(-1) for flat in flats if flat.device == flats[0].device and flat.is_contiguous()]
        if not flats:
            return None
        chosen = flats[:: -(-len(flats) // _FLATS)]
        return torch.cat([flat[:: -(-flat.numel() // _ELEMENTS)] for flat in chosen])

    def _flats(self) -> list[torch.Tensor]:
        if self.facts.layout == 0:
            flats = getattr(self.optimizer, "fp32_groups_flat", None)
            return list(self._params if flats is None else flats)
        return self.master_weights()

    def _send(self, samples: torch.Tensor) -> None:
        if samples.device.type == "cpu":
            self._on_the_way = (samples, None, self.steps)
            return
        accelerator = self.accelerator()
        if self._page_locked is None or self._page_locked.numel() != samples.numel():
            self._page_locked = accelerator.pin_memory(torch.empty_like(samples, device="cpu"))
        self._page_locked.copy_(samples, non_blocking=True)
        event = accelerator.Event()
        event.record(accelerator.current_stream())
        self._on_the_way = (self._page_locked, event, self.steps)

    def _arrived(self) -> int:
        """The step after which the samples that were sent were taken, if one has become inf or NaN since the first
        look; else 0. On an accelerator a step has passed, and its event with it."""
        if self._on_the_way is None or self._finite_first is None:
            return 0
        samples, event, step = self._on_the_way
        self._on_the_way = None
        if event is not None:
            event.synchronize()
        return step if bool((self._finite_first & ~torch.isfinite(samples)).any()) else 0
