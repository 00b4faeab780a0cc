"""Healthy programs that look like faults: exact without zeroguard, and nothing is to be said of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.lab import programs as lab
from tests.lab.gallery.bench import Bench, square
from tests.lab.gallery.idle import adamw
from tests.lab.gallery.values import clipped_step
from tests.lab.healthy import Checkpointed, FrozenTiedUnused, Mlp


def plain(bench: Bench, gas: int = 3) -> None:
    """The documented loop with AdamW and clipping."""
    bench.build(Mlp(), adamw, gas=gas, gradient_clipping=0.05)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(gas):
                bench.micro(10 * step + micro)
            clipped_step(bench, 0.05)


def bf16(bench: Bench) -> None:
    """bf16 with two accumulation steps."""
    bench.build(Mlp(), gas=2)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(2):
                bench.micro(10 * step + micro, lambda model, x: 16 * square(model, x))
            bench.compare()


def checkpointing(bench: Bench, reentrant: bool) -> None:
    """Activation checkpoints, each block once."""
    bench.build(Checkpointed(reentrant), gas=2)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(2):
                bench.micro(10 * step + micro)
            bench.compare()


def eval_between(bench: Bench) -> None:
    """Evaluations between micro-batches, and a look at the loss in training mode."""
    engine = bench.build(Mlp(), gas=2)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(2):
                with torch.no_grad():
                    bench.forward(90)
                bench.micro(10 * step + micro, step=False)
                engine.eval()
                with torch.no_grad():
                    bench.forward(91)
                engine.train()
                engine.step()
            bench.compare()


def frozen_tied_unused(bench: Bench) -> None:
    """A layer frozen from the start, a weight that two modules share, a layer that nothing uses."""
    bench.build(FrozenTiedUnused(), gas=2)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(2):
                bench.micro(10 * step + micro)
            bench.compare()


def loss_backward(bench: Bench) -> None:
    """loss.backward(), and a backward from a tensor with a gradient of its own."""
    engine = bench.build(Mlp(), gas=2)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(2):
                _, x = lab.batches(10 * step + micro)
                y = engine(x)
                if micro:
                    y.backward(torch.full_like(y, 0.1))
                else:
                    y.pow(2).mean().backward()
                engine.step()
                bench.expect(10 * step + micro, (lambda model, x: 0.1 * model(x).sum()) if micro else square)
            bench.compare()


def handled_exception(bench: Bench) -> None:
    """A backward that breaks off before its first gradient, a zero_grad, and on with the next batch."""

    def breaks(grad: torch.Tensor) -> None:
        raise ValueError("before the first gradient")

    engine = bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(4):
            loss = bench.forward(step)
            if step == 1:
                loss.register_hook(breaks)
            try:
                engine.backward(loss)
            except ValueError:
                engine.zero_grad()
                engine.optimizer.zero_grad()
                continue
            engine.step()
            bench.expect(step)
            bench.compare()


def summed_backwards(bench: Bench) -> None:
    """Several times forward and backward before one step, on ZeRO-3, which adds them up."""
    engine = bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(3):
            for number in range(3):
                bench.micro(10 * step + number, step=False)
            engine.step()
            bench.compare()


def two_forwards(bench: Bench) -> None:
    """Two forwards, one backward of the sum of their losses."""

    def both(model: Any, x: torch.Tensor) -> torch.Tensor:
        return square(model, x) + 0.3 * model(x * 2 + 1).abs().mean()

    bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(3):
            bench.micro(step, both)
            bench.compare()
