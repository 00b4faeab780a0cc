"""The host-read race on a GPU: norms read from pinned accumulators right after a backward, against the settled
values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab import programs as lab


def host_reads(
    guarded: Any,
    iterations: int = 25,
    hidden: int = 2048,
    layers: int = 3,
    gas: int = 4,
    stage: int = 2,
    overlap_comm: bool = False,
    explicit: bool = False,
) -> dict[str, Any]:
    """Counts reads of ``optimizer.accumulated_grads_in_cpu`` that differ from the same read after a device
    synchronization.

    The newest accumulator is read first: the window is the last copy. bf16, pinned, non-boundary micro-batches only.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(layers)))
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": overlap_comm}
    engine, _, _ = lab.build(model, lab.ds_config(stage, True, "bf16", gas, zero))
    wrong = reads = 0
    with lab.guard_of(engine, guarded) as session:
        for iteration in range(iterations):
            for micro in range(gas):
                x = torch.randn(64, hidden, device=lab.DEVICE, dtype=torch.bfloat16)
                loss = engine(x).float().pow(2).mean() * (1 + iteration + micro)
                engine.backward(loss)
                if micro < gas - 1:
                    if explicit:
                        session.host_read()
                    kept = engine.optimizer.accumulated_grads_in_cpu
                    seen = [v.float().norm().item() for v in reversed(list(kept.values()))]
                    torch.cuda.synchronize()
                    settled = [v.float().norm().item() for v in reversed(list(dict(kept).values()))]
                    reads += 1
                    wrong += seen != settled
                engine.step()
    out = {"reads": reads, "wrong": wrong, **lab.record(session)}
    lab.release(engine)
    return out


def version() -> dict[str, Any]:
    """The DeepSpeed release on the path."""
    import deepspeed

    return {"version": deepspeed.__version__}
