"""Numbers that are not finite, clipping, and ranks that do not do the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.lab import programs as lab
from tests.lab.gallery.bench import Bench, square
from tests.lab.healthy import Mlp

H = 8
BAD = 1


def _finite(engine: Any) -> bool:
    return all(bool(torch.isfinite(w).all()) for w in lab.weights(engine))


def non_finite(bench: Bench) -> None:
    """One loss is infinite. Wrong are weights that are not finite, or an update left out. Healthy: it is large."""
    engine = bench.build(Mlp())
    factor = 1e3 if bench.healthy else float("inf")
    with bench.guarded():
        for step in bench.steps(4):
            before = lab.weights(engine)
            engine.backward(bench.forward(step) * (factor if step == BAD else 1.0))
            engine.step()
            same = all(torch.equal(a, b) for a, b in zip(before, lab.weights(engine), strict=True))
            bench.note(1.0, wrong=same or not _finite(engine))


def overflow_then_train(bench: Bench) -> None:
    """An update is skipped because of an infinite loss; are the following ones right? Did not reproduce as a fault."""
    bench.build(Mlp(), gas=2)
    with bench.guarded():
        for step in bench.steps(4):
            for micro in range(2):
                bad = step == BAD and micro == 0 and not bench.healthy
                bench.engine.backward(4 * bench.forward(10 * step + micro) * (float("inf") if bad else 1.0))
                bench.engine.step()
                bench.expect(10 * step + micro, scale=4.0)
            if step == BAD and not bench.healthy:
                bench.reference.zero_grad()
                continue
            bench.compare()


def clip_by_hand(bench: Bench) -> None:
    """torch.nn.utils.clip_grad_norm_ between backward and step. Healthy: gradient_clipping in the configuration."""
    engine = bench.build(Mlp(), gradient_clipping=0.1 if bench.healthy else 0.0)
    with bench.guarded():
        for step in bench.steps(2):
            bench.micro(step, lambda model, x: 50 * square(model, x), step=False)
            if not bench.healthy:
                torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.1)
            engine.step()
            clipped_step(bench, 0.1)


def clipped_step(bench: Bench, limit: float) -> None:
    """Clip the mean over the ranks, which is what a step consumes."""
    step = bench.reference.optimizer.step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(bench.model.parameters(), limit)
        step()

    bench.reference.optimizer.step = clipped
    bench.compare()
    bench.reference.optimizer.step = step


def clipping_left_out(bench: Bench) -> None:
    """gradient_clipping is not in the configuration; PyTorch does not clip. Healthy: it is there, as 0."""
    bench.build(Mlp(), without="" if bench.healthy else "gradient_clipping")
    with bench.guarded():
        for step in bench.steps(3):
            bench.micro(step, lambda model, x: 50 * square(model, x))
            bench.compare()


class Pair(nn.Module):
    """Two layers of one shape, in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, x: torch.Tensor, flip: bool) -> torch.Tensor:
        return self.a(self.b(x)) if flip else self.b(self.a(x))


def rank_order(bench: Bench) -> None:
    """The second rank runs two layers the other way round, and a bucket holds one of them. Healthy: no rank does."""
    engine = bench.build(Pair(), zero={"reduce_bucket_size": H * H})
    with bench.guarded():
        for step in bench.steps(2):
            xs, x = lab.batches(step)
            flip = [not bench.healthy and bool(rank % 2) for rank in range(len(xs))]
            engine.backward(engine(x, flip[dist.get_rank()]).pow(2).mean())
            engine.step()
            for work, data, turned in zip(bench.reference.work, xs, flip, strict=True):
                work(data, turned).pow(2).mean().backward()
            bench.compare()
