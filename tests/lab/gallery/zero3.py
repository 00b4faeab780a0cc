"""ZeRO-3: parameters that are partitioned, or on their way, where a program does not expect it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.lab import programs as lab
from tests.lab.gallery.bench import Bench, square
from tests.lab.healthy import Mlp

H = 8
#: prefetch three layers of :class:`Deep`, and release at once
PREFETCH = {"stage3_prefetch_bucket_size": 3 * 64 * 64, "stage3_max_reuse_distance": 0}


class Deep(nn.Module):
    """Six layers; a forward may leave early."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(H, 64)
        self.l = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor, layers: int = 6) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.l[:layers]:
            x = torch.tanh(layer(x))
        return x


def eval_stops_early(bench: Bench) -> None:
    """An evaluation stops part way. Wrong are parameters in flight where it is over. Healthy: no evaluation."""
    engine = bench.build(Deep(), zero=PREFETCH)
    params = list(engine.module.parameters())
    with bench.guarded():
        for step in bench.steps(3):
            bench.micro(step)
            bench.compare()
            if not bench.healthy:
                engine.eval()
                with torch.no_grad():
                    bench.forward(50, lambda model, x: model(x, 2).pow(2).mean())
                engine.train()
            flying = sum(param.ds_status.name == "INFLIGHT" for param in params)
            bench.note(flying, wrong=flying > 0)


class Frozen(nn.Module):
    """Frozen norms between trained layers, in checkpoints that are not reentrant."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(H, H)
        self.n = nn.ModuleList(nn.LayerNorm(H) for _ in range(2)).requires_grad_(not frozen)
        self.l = nn.ModuleList(nn.Linear(H, H) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for norm, layer in zip(self.n, self.l, strict=True):
            x = checkpoint(nn.Sequential(norm, layer), x, use_reentrant=False)
        return x


def frozen_in_checkpoint(bench: Bench) -> None:
    """LoRA's shape: frozen modules inside checkpoints that are not reentrant. Healthy: nothing is frozen."""
    bench.build(Frozen(frozen=not bench.healthy))
    with bench.guarded():
        for step in bench.steps(3):
            bench.micro(step)
            bench.compare()


def inference_mode(bench: Bench) -> None:
    """An evaluation under torch.inference_mode between steps. Did not reproduce as a fault. Healthy: under no_grad."""
    engine = bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(3):
            engine.eval()
            with torch.no_grad() if bench.healthy else torch.inference_mode():
                bench.forward(50 + step)
            engine.train()
            bench.micro(step)
            bench.compare()


def weight_penalty(bench: Bench) -> None:
    """A penalty over the model's parameters, which are empty after the forward. Healthy: over its outputs."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        if bench.healthy:
            y = model(x)
            return y.pow(2).mean() + 0.01 * y.pow(2).sum()
        return square(model, x) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())

    bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(3):
            bench.micro(step, loss)
            bench.compare()


class Repeated(nn.Module):
    """A layer that runs as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h, self.b = (nn.Linear(H, H) for _ in range(3))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        x = self.a(x)
        for _ in range(times):
            x = torch.tanh(self.h(x))
        return self.b(x)


def calls_differ(bench: Bench) -> None:
    """A layer runs once on the first rank and three times on the second. Healthy: three times on both."""
    engine = bench.build(Repeated())
    times = [3 if bench.healthy else 1 + 2 * rank for rank in range(dist.get_world_size())]
    with bench.guarded():
        for step in bench.steps(2):
            xs, x = lab.batches(step)
            engine.backward(engine(x, times[dist.get_rank()]).pow(2).mean())
            engine.step()
            for work, data, count in zip(bench.reference.work, xs, times, strict=True):
                work(data, count).pow(2).mean().backward()
            bench.compare()
