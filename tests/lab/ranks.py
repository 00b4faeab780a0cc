"""Programs in which ranks do not do the same, and the nearest healthy ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.lab import programs as lab

H = 8


class Layers(nn.Module):
    """Two layers of one shape, in either order or only one of them, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            x = torch.tanh(getattr(self, name)(x))
        return self.c(x)


#: what each rank runs
ORDERS = {
    "same": ("ab", "ab"),
    "flip": ("ab", "ba"),
    "branch": ("a", "b"),
    "less": ("ab", "a"),
}


def orders(
    stage: int,
    offload: bool,
    how: str,
    gas: int = 1,
    zero: dict[str, Any] | None = None,
    guarded: Any = None,
    steps: int = 3,
) -> dict[str, Any]:
    """The ranks run the layers in different orders, or one of them only."""
    torch.manual_seed(0)
    engine, model, optimizer = lab.build(Layers(), lab.ds_config(stage, offload, gas=gas, zero=zero))
    reference = lab.Reference(model, optimizer, torch.float32)
    differences: list[float] = []
    error = ""
    session = None
    plans = ORDERS[how]
    try:
        with lab.guard_of(engine, guarded) as session:
            for step in range(steps):
                for micro in range(gas):
                    xs, x = lab.batches(10 * step + micro)
                    engine.backward(engine(x, plans[dist.get_rank() % 2]).pow(2).mean())
                    engine.step()
                    for rank, (work, data) in enumerate(zip(reference.work, xs, strict=True)):
                        (work(data, plans[rank % 2]).pow(2).mean() / gas).backward()
                reference.step()
                differences.append(lab.difference(engine, model))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    out = {"error": error, "differences": differences, **lab.record(session)}
    lab.release(engine)
    return out


def boundaries(
    stage: int, offload: bool, differ: bool = True, guarded: Any = None, steps: int = 3, gas: int = 2
) -> dict[str, Any]:
    """Two backwards a step; the first is a boundary on the second rank only."""
    torch.manual_seed(0)
    engine, model, optimizer = lab.build(Layers(), lab.ds_config(stage, offload, gas=gas))
    reference = lab.Reference(model, optimizer, torch.float32)
    differences: list[float] = []
    error = ""
    session = None
    try:
        with lab.guard_of(engine, guarded) as session:
            for step in range(steps):
                for micro in range(2):
                    xs, x = lab.batches(10 * step + micro)
                    engine.set_gradient_accumulation_boundary(micro == 1 or (differ and dist.get_rank() == 1))
                    engine.backward(engine(x, "ab").pow(2).mean())
                    if micro == 1:
                        engine.step()
                    for work, data in zip(reference.work, xs, strict=True):
                        (work(data, "ab").pow(2).mean() / gas).backward()
                reference.step()
                differences.append(lab.difference(engine, model))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    out = {"error": error, "differences": differences, **lab.record(session)}
    lab.release(engine)
    return out
