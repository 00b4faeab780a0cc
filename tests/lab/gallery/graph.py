"""Several backwards over one graph, parts of a graph that are computed again, and backwards that break off."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.lab import programs as lab
from tests.lab.gallery.bench import Bench
from tests.lab.idle import OPTIMIZERS, Breaking

H = 8
MOMENTUM = OPTIMIZERS["momentum"]


def summed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(lab.losses(model, x))


def two_losses(bench: Bench, by: str = "engine") -> None:
    """One forward, two losses, a backward for each. Healthy: one backward of their sum."""
    engine = bench.build(lab.TwoHeads())
    with bench.guarded():
        for step in bench.steps(3):
            one, two = lab.losses(engine, lab.batches(step)[1])
            if bench.healthy:
                engine.backward(one + two)
            elif by == "engine":
                engine.backward(one, retain_graph=True)
                engine.backward(two)
            else:
                one.backward(retain_graph=True)
                two.backward()
            engine.step()
            bench.expect(step, summed)
            bench.compare()


def step_between(bench: Bench) -> None:
    """What accelerator.backward makes of two losses: a step after each. Healthy: it is given their sum."""
    engine = bench.build(lab.TwoHeads(), MOMENTUM)
    with bench.guarded():
        for step in bench.steps(2):
            one, two = lab.losses(engine, lab.batches(step)[1])
            for loss in [one + two] if bench.healthy else [one, two]:
                engine.backward(loss, retain_graph=loss is one)
                engine.step()
            bench.expect(step, summed)
            bench.compare()


class Shared(nn.Module):
    """An encoder that runs twice in a forward, each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp, self.head = nn.Linear(H, H), nn.Linear(H, H)
        self.enc = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        a, b = (checkpoint(self.enc, v, use_reentrant=self.reentrant) for v in (h, h * 0.5 + 1))
        return self.head(a) + (a - b)


def shared_checkpoint(bench: Bench) -> None:
    """A module twice in reentrant checkpoints: its gradients come in parts. Healthy: checkpoints that are not."""
    bench.build(Shared(reentrant=not bench.healthy))
    with bench.guarded():
        for step in bench.steps(2):
            bench.micro(step)
            bench.compare()


def backward_raises(bench: Bench) -> None:
    """A backward that breaks off half way; the loop catches it, clears and goes on. Healthy: it knows, and leaves that
    batch out."""
    engine = bench.build(Breaking())
    with bench.guarded():
        for step in bench.steps(5):
            if step == 2 and bench.healthy:
                continue
            try:
                engine.backward(engine(lab.batches(step)[1], "backward" if step == 2 else "").pow(2).mean())
            except ValueError:
                engine.zero_grad()
                engine.optimizer.zero_grad()
                continue
            engine.step()
            bench.expect(step)
            bench.compare()
