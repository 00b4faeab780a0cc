"""What older releases get wrong in ordinary gradient accumulation, and how it is put right there.

* Up to 0.18, optimizer on the CPU: only the first micro-batch of a window and the last one count, and with
  gradient_accumulation_steps = 1 a backward that is no boundary is dropped altogether. Fixed upstream by pull
  request 7967.
* 0.17.0 to 0.18.2, not offloaded: a backward that is no boundary replaces the one before (issue 7718).

Both are wrong in a plain loop without any retained graph. LOCAL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroguard.backends.deepspeed.attributes import version_tuple

__all__ = ["adds_at_boundary", "drops_micro_batches", "keep_micro_batches", "replaces_micro_batches"]


def drops_micro_batches(version: str) -> bool:
    """Whether the offloaded accumulation of this release drops micro-batches."""
    return version_tuple(version) < (0, 19, 0)


def adds_at_boundary(version: str) -> bool:
    """Whether backwards at a boundary add up in this release, on the device; in later ones the last one counts."""
    return version_tuple(version) < (0, 17, 0)


def replaces_micro_batches(version: str) -> bool:
    """Whether the accumulation on the device of this release keeps only the last non-boundary micro-batch."""
    return (0, 17, 0) <= version_tuple(version) < (0, 18, 3)


def keep_micro_batches(optimizer: Any, method: Callable[..., None], active: Callable[[], bool]) -> None:
    """Wrap the two methods that accumulate offloaded gradients so that every micro-batch counts, while ``active``."""

    def keep_sum(original: Callable[..., Any]) -> Callable[..., Any]:
        def accumulate(param: Any) -> Any:
            later = optimizer.micro_step_id > 0 and active()
            out = original(param)
            if later:
                # The release added the earlier sum to this gradient and forgot to store the result.
                total = optimizer.get_param_gradient_attribute(param).data.view(-1)
                kept = optimizer.accumulated_grads_in_cpu[optimizer.get_param_id(param)]
                if kept.numel() == total.numel():
                    kept.data.copy_(total, non_blocking=True)
            return out

        return accumulate

    def accumulate_always(original: Callable[..., Any]) -> Callable[..., Any]:
        def copy(param: Any, *args: Any) -> Any:
            more = optimizer.micro_step_id > 0 or not optimizer.is_gradient_accumulation_boundary
            if optimizer.gradient_accumulation_steps <= 1 and more and optimizer.partition_gradients and active():
                optimizer.async_accumulate_grad_in_cpu_via_gpu(param)
            return original(param, *args)

        return copy

    method(optimizer, "async_accumulate_grad_in_cpu_via_gpu", keep_sum)
    method(optimizer, "copy_grads_in_partition", accumulate_always)
