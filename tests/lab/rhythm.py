"""Loops in which a trainer and DeepSpeed both divide a loss, or step without the other's knowing."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad

from tests.lab import programs as lab
from zeroguard import events as ev

#: of the guard under test only, so that nothing else is put right
ALONE = {"guards": [{"name": "accumulation"}], "on_violation": "record"}


def divided_twice(stage: int, offload: bool, guarded: Any = None, gas: int = 2) -> dict[str, Any]:
    """The loop divides the loss by its micro-batches, as Lightning does, and leaves engine.backward to do so again."""
    torch.manual_seed(0)
    engine, model, optimizer = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload, gas=gas))
    reference = lab.Reference(model, optimizer, torch.float32)
    differences: list[float] = []
    with lab.guard_of(engine, guarded) as session:
        for step in range(3):
            for micro in range(gas):
                xs, x = lab.batches(10 * step + micro)
                if session is not None:
                    session.emit(ev.LossDivided("Lightning", gas))
                engine.backward(sum(lab.losses(engine, x)) / gas)
                engine.step()
                for work, data in zip(reference.work, xs, strict=True):
                    (sum(lab.losses(work, data)) / gas).backward()
            reference.step()
            differences.append(lab.difference(engine, model))
    out = {"differences": differences, **lab.record(session)}
    lab.release(engine)
    return out


def step_inside_backward(stage: int, offload: bool, guarded: Any = None, summed: bool = False) -> dict[str, Any]:
    """Accelerate's backward steps by itself: two losses are two steps. ``summed`` is the healthy program."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    error = ""
    session = None
    try:
        with lab.guard_of(engine, guarded) as session:
            for step in range(2):
                _, x = lab.batches(step)
                one, two = lab.losses(engine, x)
                for loss in [one + two] if summed else [one, two]:
                    engine.backward(loss, retain_graph=loss is one)
                    engine.step()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    out = {"error": error, "steps": engine.global_steps, **lab.record(session)}
    lab.release(engine)
    return out


def read_gradient(stage: int, offload: bool, late: bool, guarded: Any = None) -> dict[str, Any]:
    """The gradient of one parameter, between backward and step, or after the step."""
    torch.manual_seed(0)
    engine, model, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    param = engine.module.a.weight
    xs, x = lab.batches(0)
    sum(sum(lab.losses(model, data)) / len(xs) for data in xs).backward()
    seen: list[float] = []
    error = ""
    session = None
    try:
        with lab.guard_of(engine, guarded) as session:
            engine.backward(sum(lab.losses(engine, x)))
            if not late:
                seen.append(float(safe_get_full_grad(param).norm()))
            engine.step()
            if late:
                gradient = safe_get_full_grad(param)
                seen.append(-1.0 if gradient is None else float(gradient.norm()))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    out = {"error": error, "seen": seen, "true": float(model.a.weight.grad.norm()), **lab.record(session)}
    lab.release(engine)
    return out


def bypass(stage: int, offload: bool, gas: int = 1, guarded: Any = None, by: str = "optimizer") -> dict[str, Any]:
    """Fabric steps the ZeRO optimizer, never the engine."""
    torch.manual_seed(0)
    engine, model, optimizer = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload, gas=gas))
    reference = lab.Reference(model, optimizer, torch.float32)
    differences: list[float] = []
    error = ""
    session = None
    try:
        with lab.guard_of(engine, guarded) as session:
            for step in range(2):
                for micro in range(gas):
                    xs, x = lab.batches(10 * step + micro)
                    engine.backward(sum(lab.losses(engine, x)))
                    if by == "engine":
                        engine.step()
                    for work, data in zip(reference.work, xs, strict=True):
                        (sum(lab.losses(work, data)) / gas).backward()
                if by == "optimizer":
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                reference.step()
                differences.append(lab.difference(engine, model))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    out = {"error": error, "differences": differences, "global_steps": engine.global_steps, **lab.record(session)}
    lab.release(engine)
    return out
