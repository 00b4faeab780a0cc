"""ZeRO-3: weights that are written while they are gathered, and dropped with the gathered copy.

Without ``modifier_rank``, the end of ``GatheredParameters`` (runtime/zero/partition_parameters.py) frees the gathered
copy and goes back to the partitions. It calls ``partition`` of its first parameter for all of them, which is where the
two are compared. A write through ``.data`` moves no version counter, so values are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.deepspeed.state import BackendState

__all__ = ["Edits"]

#: Where GatheredParameters is, and nothing else that partitions a parameter once the engine is there.
_GATHERED = "deepspeed.runtime.zero.partition_parameters"
#: Roundings, of the parameter's largest weight, that are no edit: an adapter that was merged and taken out again.
_ROUNDINGS = 4


class Edits(BackendState):
    """Wrappers of ``partition``, and the comparison. LOCAL, stage 3."""

    def _attach_edits(self) -> None:
        # Quantized or secondary partitions are not what was gathered, to the bit.
        quantized = getattr(self.engine, "zero_quantized_weights", lambda: False)()
        quantized = quantized or getattr(self.engine, "zero_quantized_nontrainable_weights", lambda: False)()
        secondary = getattr(self.engine, "zero_hpz_partition_size", lambda: 1)() > 1
        if self.facts.stage != 3 or quantized or secondary:
            return
        partition = self._partition  # one bound method for all of them
        for param in self.engine.module.parameters():
            if hasattr(param, "ds_tensor"):
                self.patches.shared(param, "partition", partition)

    def _partition(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # DeepSpeed's own calls, one a parameter and pass, only pay for this look at the caller.
        if sys._getframe(2).f_globals.get("__name__") == _GATHERED and self._drops(kwargs):
            names = self._edited_of(kwargs.get("param_list") or ())
            if names:
                self.emit(ev.EditLost(names))
        return original(*args, **kwargs)

    def _drops(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether this is the end of the user's own gathering, and drops the gathered copy."""
        return not (self.busy or self.in_step or self.step_depth or kwargs.get("has_been_updated"))

    def _edited_of(self, params: Iterable[Any]) -> tuple[str, ...]:
        """Waits for the device, once."""
        with torch.no_grad():
            pairs = list(self._pairs(params))
            if not pairs:
                return ()
            differ = torch.stack([whole.ne(kept).any() for _, whole, kept in pairs]).tolist()
            suspects = [pair for pair, differs in zip(pairs, differ, strict=True) if differs]
            edited = {id(param) for param, whole, kept in suspects if not _rounded(whole, kept)}
        return tuple(name for key, name in self.names.items() if key in edited)

    def _pairs(self, params: Iterable[Any]) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """This rank's part of what is gathered, and its partition, where both are in memory."""
        for param in params:
            kept = getattr(param, "ds_tensor", None)
            if kept is None or param.ds_status.name != "AVAILABLE" or param.numel() != param.ds_numel:
                continue
            size = param.partition_numel()
            start = torch.distributed.get_rank(param.ds_process_group) * size
            count = min(size, param.ds_numel - start)
            if count > 0 and kept.numel() >= count and kept.dtype == param.dtype:
                whole = param.detach().reshape(-1).narrow(0, start, count)
                yield param, whole, kept.detach().view(-1).narrow(0, 0, count).to(whole.device)


def _rounded(whole: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether they are the same but for a few roundings. NaN is NaN."""
    same = (whole == kept) | (whole.isnan() & kept.isnan())
    off = torch.where(same, 0.0, (whole.double() - kept.double()).abs()).max()
    largest = torch.where(kept.isfinite(), kept.double().abs(), 0.0).max()
    return bool(off <= _ROUNDINGS * torch.finfo(kept.dtype).eps * largest)
