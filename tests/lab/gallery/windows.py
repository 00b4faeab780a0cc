"""Micro-batches, accumulation windows and steps that do not go together."""

from __future__ import annotations

import torch

from tests.lab.gallery.bench import Bench, square
from tests.lab.healthy import Mlp
from tests.lab.idle import Branch
from zeroguard import events as ev


def plain_gas_loop(bench: Bench) -> None:
    """The documented loop with four accumulation steps. Healthy: with one."""
    gas = 1 if bench.healthy else 4
    bench.build(Mlp(), gas=gas)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(gas):
                bench.micro(10 * step + micro)
            bench.compare()


def boundary_unreduced(bench: Bench) -> None:
    """bf16 whose gradients accumulate in fp32. Healthy: in bf16."""
    bench.build(Mlp(), gas=2, data_types={} if bench.healthy else {"grad_accum_dtype": "fp32"})
    with bench.guarded():
        for step in bench.steps(2):
            for micro in range(2):
                bench.micro(10 * step + micro, lambda model, x: 16 * square(model, x))
            bench.compare()


def divided_by_the_loop(bench: Bench, told: bool = False) -> None:
    """The loss is divided by the accumulation steps, and engine.backward divides again. ``told``: a trainer did it,
    whose integration says so. Healthy: only the engine divides."""
    gas = 4
    bench.build(Mlp(), gas=gas)
    with bench.guarded() as session:
        for step in bench.steps(2):
            for micro in range(gas):
                if told and session is not None and not bench.healthy:
                    session.emit(ev.LossDivided("Lightning", gas))
                bench.engine.backward(bench.forward(10 * step + micro) / (1 if bench.healthy else gas))
                bench.engine.step()
                bench.expect(10 * step + micro)
            bench.compare()


def not_to_be_divided(bench: Bench) -> None:
    """The same, with the argument that keeps the engine from dividing. Healthy: without both."""
    gas = 4
    bench.build(Mlp(), gas=gas)
    with bench.guarded():
        for step in bench.steps(2):
            for micro in range(gas):
                loss = bench.forward(10 * step + micro)
                if bench.healthy:
                    bench.engine.backward(loss)
                else:
                    bench.engine.backward(loss / gas, scale_wrt_gas=False)
                bench.engine.step()
                bench.expect(10 * step + micro)
            bench.compare()


def many_backwards_one_step(bench: Bench) -> None:
    """PyTorch's own accumulation: four times forward and backward, then a step. Healthy: once."""
    bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(2):
            for number in range(1 if bench.healthy else 4):
                bench.micro(10 * step + number, step=False)
            bench.engine.step()
            bench.compare()


def lost_at_the_boundary(bench: Bench) -> None:
    """A branch that only the window's first micro-batch uses. Healthy: all of them use it."""
    bench.build(Branch(), gas=2)
    with bench.guarded():
        for step in bench.steps(3):
            for micro in range(2):
                use = bench.healthy or micro == 0
                bench.micro(10 * step + micro, lambda model, x, use=use: model(x, use).pow(2).mean())
            bench.compare()


def epoch_ends_early(bench: Bench, clear: bool = False) -> None:
    """Epochs of six micro-batches with four accumulation steps; what is left over is to be dropped. ``clear``: the loop
    calls zero_grad there; else a trainer's integration says that the epoch is over. Healthy: epochs of eight."""
    length = 8 if bench.healthy else 6
    epochs = 6 if clear else 2
    engine = bench.build(Mlp(), gas=4)
    with bench.guarded() as session:
        for epoch in bench.steps(epochs):
            for number in range(length):
                bench.micro(10 * epoch + number)
                if number % 4 == 3:
                    bench.reference.step()
            bench.reference.zero_grad()
            bench.compare(step=False)
            if clear:
                engine.zero_grad()
                engine.optimizer.zero_grad()
            elif session is not None:
                session.emit(ev.EpochEnd())


def thrown_away(bench: Bench) -> None:
    """A backward whose gradients zero_grad throws away, then one that does not use the branch. Healthy: without it."""
    engine = bench.build(Branch())
    with bench.guarded():
        for step in bench.steps(3):
            if not bench.healthy:
                engine.backward(3 * square(engine, torch.ones(2, 8)))
                engine.zero_grad()
            bench.micro(step, lambda model, x: model(x, False).pow(2).mean())
            bench.compare()


def double_step(bench: Bench, by: str = "engine") -> None:
    """engine.step() and one step more, of the engine or of its optimizer. Healthy: one step."""
    engine = bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(3):
            bench.micro(step)
            if not bench.healthy:
                (engine if by == "engine" else engine.optimizer).step()
            bench.compare()


def skipped_batch(bench: Bench) -> None:
    """A backward, then no step but zero_grad, because the loss was bad. Did not reproduce as a fault."""
    engine = bench.build(Mlp())
    with bench.guarded():
        for step in bench.steps(5):
            bench.micro(step, step=step != 2 or bench.healthy)
            if step == 2 and not bench.healthy:
                engine.zero_grad()
                engine.optimizer.zero_grad()
                bench.reference.zero_grad()
                continue
            bench.compare()


def past_the_engine(bench: Bench) -> None:
    """The ZeRO optimizer is stepped, as Fabric does it, and never the engine. Healthy: the engine is."""
    engine = bench.build(Mlp(), gas=2)
    with bench.guarded():
        for step in bench.steps(2):
            for micro in range(2):
                bench.micro(10 * step + micro, step=bench.healthy)
            if not bench.healthy:
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            bench.compare()
