"""Loops in which a trainer and DeepSpeed both divide a loss, or step without the other's knowing."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
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


def read_early(stage: int, offload: bool, guarded: Any = None) -> dict[str, Any]:
    """The gradient of one parameter after the first of two micro-batches, and after the second, in two windows:
    whether each is the mean over the ranks of the sum so far."""
    torch.manual_seed(0)
    engine, model, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload, gas=2))
    out: dict[str, Any] = {"early": [], "full": [], "own": [], "error": ""}
    with lab.guard_of(engine, guarded) as session:
        for step in range(2):
            work = [copy.deepcopy(model) for _ in lab.batches(0)[0]]
            for name, _, value in [(n, p, lab.full(p)) for n, p in engine.module.named_parameters()]:
                for each in work:
                    each.get_parameter(name).data.copy_(value)
            for micro in range(2):
                xs, x = lab.batches(10 * step + micro)
                engine.backward(sum(lab.losses(engine, x)))
                for each, data in zip(work, xs, strict=True):
                    (sum(lab.losses(each, data)) / 2).backward()
                grads = [each.a.weight.grad for each in work]
                try:
                    read = safe_get_full_grad(engine.module.a.weight)
                except ValueError as error:
                    out["error"] = str(error)
                    continue
                finally:
                    engine.step()
                out["full" if micro else "early"].append(bool((read - sum(grads) / len(grads)).abs().max() < 1e-6))
                if not micro:
                    out["own"].append(bool((read - grads[dist.get_rank()]).abs().max() < 1e-6))
    lab.release(engine)
    return out | lab.record(session)


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
