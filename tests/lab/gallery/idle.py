"""Parameters that a step does not reach."""

from __future__ import annotations

from typing import Any

import torch

from tests.lab.gallery.bench import Bench
from tests.lab.idle import OPTIMIZERS, Branch


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def left_out(bench: Bench, optimizer: str = "sgd") -> None:
    """A branch is used in the first two steps, and left out from then on. Healthy: used in all of them."""
    bench.build(Branch(), adamw if optimizer == "adamw" else OPTIMIZERS[optimizer])
    with bench.guarded():
        for step in bench.steps(5):
            use = bench.healthy or step < 2
            bench.micro(step, lambda model, x, use=use: model(x, use).pow(2).mean())
            bench.compare()


def frozen_in_mid_run(bench: Bench, optimizer: str = "sgd") -> None:
    """A branch is frozen after two steps. Healthy: before deepspeed.initialize."""
    net = Branch()
    net.v.requires_grad_(not bench.healthy)
    bench.build(net, adamw if optimizer == "adamw" else OPTIMIZERS[optimizer])
    with bench.guarded():
        for step in bench.steps(12 if optimizer == "adamw" else 5):
            for module in (bench.engine.module, *bench.reference.work):
                module.v.requires_grad_(not bench.healthy and step < 2)
            bench.micro(step)
            bench.compare()
