"""Two losses in a Fabric loop: DeepSpeed ZeRO without and with zeroguard, beside plain PyTorch.

    python examples/fabric_loop.py

Fabric calls the ZeRO optimizer's step and never the engine's; zeroguard sees both. Everything runs on one CPU rank, on
the real Fabric and a real engine.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import _lightning  # before the others: it sets up the process
import torch
from lightning.fabric import Fabric

import zeroguard


def loop(fabric: Fabric, model: Any, optimizer: Any) -> None:
    """An ordinary loop: each loss gets a backward of its own over one graph."""
    for batch in _lightning.batches():
        loss_a, loss_b = model(batch)
        fabric.backward(loss_a, retain_graph=True)
        fabric.backward(loss_b)
        optimizer.step()
        optimizer.zero_grad()


summaries: list[str] = []


def train(stage: int, offload: bool, guarded: bool) -> torch.nn.Module:
    """One loop."""
    # On GPUs: Fabric(strategy="deepspeed_stage_2_offload")
    strategy = _lightning.FabricOnCPU(config=_lightning.config(stage, offload), logging_level=40)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    net = _lightning.TwoHeads()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=_lightning.LR))
    # {"sinks": []} keeps the findings out of the log; they are in the summary.
    with zeroguard.guard(model, {"sinks": []}) if guarded else contextlib.nullcontext() as session:
        loop(fabric, model, optimizer)
    if session is not None:
        summaries.append("\n\n".join([str(session.summary()), *(finding.text() for finding in session.findings)]))
    return net


if __name__ == "__main__":
    status = _lightning.compare(train)
    print(f"\nThe last run:\n{summaries[-1]}")
    sys.exit(status)
