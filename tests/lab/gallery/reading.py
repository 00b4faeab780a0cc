"""Gradients that are read, and weights and gradients that are written, past the optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad

from tests.lab import programs as lab
from tests.lab.gallery.bench import Bench
from tests.lab.healthy import Mlp


def _expected(bench: Bench, index: int = 0) -> torch.Tensor:
    """The gradient of one parameter in plain PyTorch, up to now."""
    return sum(list(work.parameters())[index].grad for work in bench.reference.work) / len(bench.reference.work)


def read_after_step(bench: Bench) -> None:
    """A callback reads a gradient after the step, and takes it for the next one. Healthy: before the step."""
    engine = bench.build(Mlp())
    param = engine.module.l[0].weight
    with bench.guarded():
        for step in bench.steps(2):
            bench.micro(step, step=False)
            expected = _expected(bench)
            if bench.healthy:
                bench.note(*_error(safe_get_full_grad(param), expected))
            engine.step()
            bench.compare()
            if not bench.healthy:
                bench.note(*_error(safe_get_full_grad(param), torch.zeros_like(expected)))


def read_in_mid_window(bench: Bench) -> None:
    """A gradient is read after the first of two micro-batches. Healthy: after the second."""
    engine = bench.build(Mlp(), gas=2)
    param = engine.module.l[0].weight
    with bench.guarded():
        for step in bench.steps(2):
            for micro in range(2):
                bench.micro(10 * step + micro, step=False)
                if micro == bench.healthy:
                    bench.note(*_error(safe_get_full_grad(param), _expected(bench)))
                engine.step()
            bench.compare()


def _error(read: torch.Tensor | None, expected: torch.Tensor) -> tuple[float, bool]:
    """Nothing is an honest answer; another gradient is not."""
    if read is None:
        return 0.0, False
    off = (read - expected).abs().max().item()
    return off, off > 1e-6


def gradient_is_set(bench: Bench) -> None:
    """safe_set_full_grad between backward and step. Did not reproduce as a fault. Healthy: nothing is set."""
    engine = bench.build(Mlp())
    with bench.guarded() as session:
        for step in bench.steps(3):
            bench.micro(step, step=False)
            for index, param in enumerate(engine.module.parameters()):
                if bench.healthy:
                    continue
                if session is not None:
                    session.expect_gradient_edit()
                bench.note(*_error(safe_get_full_grad(param), _expected(bench, index)))
                safe_set_full_grad(param, torch.full(_expected(bench, index).shape, 0.5))
                for work in bench.reference.work:
                    list(work.parameters())[index].grad.fill_(0.5)
            engine.step()
            bench.compare()


def edit_without_modifier(bench: Bench, how: str = "data") -> None:
    """Weights are written under GatheredParameters without modifier_rank, in place or through ``.data``. Healthy: with
    it, and into the master weights, too."""
    engine = bench.build(Mlp())
    params = list(engine.module.parameters())
    with bench.guarded():
        for step in bench.steps(2):
            if step == 1 and bench.healthy:
                _edit_both(bench, params)
            elif step == 1:
                with deepspeed.zero.GatheredParameters(params), torch.no_grad():
                    for param in params:
                        param.data.mul_(0.9) if how == "data" else param.mul_(0.9)
                _edit_reference(bench)
            bench.micro(step)
            bench.compare()


def edit_of_the_copy(bench: Bench) -> None:
    """Weights are written where the forward reads them and not where the optimizer keeps them, so that the next step
    undoes it. Healthy: in both places."""
    engine = bench.build(Mlp())
    params = list(engine.module.parameters())
    with bench.guarded():
        for step in bench.steps(2):
            if step == 1 and bench.healthy:
                _edit_both(bench, params)
            elif step == 1:
                _edit_copy(bench, params)
                _edit_reference(bench)
            bench.micro(step)
            bench.compare()


def _edit_copy(bench: Bench, params: list[Any]) -> None:
    gathered = deepspeed.zero.GatheredParameters(params, modifier_rank=0) if bench.stage == 3 else nullcontext()
    with gathered, torch.no_grad():
        if bench.stage < 3 or dist.get_rank() == 0:
            for param in params:
                param.data.mul_(0.9)


def _edit_both(bench: Bench, params: list[Any]) -> None:
    values = [0.9 * lab.full(param) for param in params]
    for param, value in zip(params, values, strict=True):
        safe_set_full_fp32_param(param, value)
    _edit_copy(bench, params)
    _edit_reference(bench)


def _edit_reference(bench: Bench) -> None:
    with torch.no_grad():
        for model in (bench.model, *bench.reference.work):
            for param in model.parameters():
                param.mul_(0.9)
