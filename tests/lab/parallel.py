"""Engines whose parameters, or batches, are split over ranks in another way than by data parallelism alone."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

import zeroguard
from tests.lab import programs as lab
from tests.lab.healthy import Mlp

H = 8
AUDITED = {
    "guards": [{"name": "automatic"}, {"name": "gradient_audit", "elements_per_parameter": "all"}],
    "sinks": [],
}


class Experts(nn.Module):
    """A layer of two experts, on ``ranks`` ranks each pair."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.a = nn.Linear(H, H)
        self.moe = MoE(H, nn.Linear(H, H), num_experts=2, ep_size=ranks, k=1, capacity_factor=4.0, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, loss, _ = self.moe(self.a(x))
        return out.pow(2).mean() + 0.01 * loss


def _moe(ranks: int) -> Any:
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Experts(ranks)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters", "lr": lab.LR}
    )
    optimizer = torch.optim.SGD(groups, lr=lab.LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=lab.ds_config(2, False, "bf16"))[0]


def _sequence() -> Any:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lab.LR)
    config = lab.ds_config(2, False, sequence_parallel_size=2, data_parallel_size=1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mesh_param=(1, 2))[0]


def audited(kind: str) -> dict[str, Any]:
    """Two steps under the audit: what the summary says of it."""
    torch.manual_seed(0)
    engine = {"experts": lambda: _moe(2), "experts on each rank": lambda: _moe(1), "sequence": _sequence}[kind]()
    dtype = next(engine.module.parameters()).dtype
    with zeroguard.guard(engine, AUDITED) as session:
        for step in range(2):
            out = engine(lab.batches(step)[1].to(dtype))
            engine.backward(out if out.dim() == 0 else out.float().pow(2).mean())
            engine.step()
        row = next(row for row in session.rows if row.guard == "gradient_audit")
        text = str(session.summary())
    out = {"verdict": row.verdict, "note": row.note, "text": text, **lab.record(session)}
    lab.release(engine)
    return out
