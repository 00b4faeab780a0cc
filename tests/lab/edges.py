"""Edges: copies of a guarded module, closing in a hook, attaching in mid-window, engines on some of the ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

import zeroguard
from tests.lab import idle
from tests.lab import programs as lab


def deep_copy(stage: int, offload: bool) -> dict[str, Any]:
    """An EMA copy of a guarded module, then eval() and zero_grad() on the copy in the middle of a window."""
    torch.manual_seed(0)
    results = []
    for guarded in (False, True):
        torch.manual_seed(0)
        engine, _, _ = lab.build(idle.Branch(), lab.ds_config(stage, offload, gas=2))
        with lab.guard_of(engine, guarded):
            for number in range(4):
                _, x = lab.batches(number)
                engine.backward(engine(x).pow(2).mean())
                engine.step()
                if number == 2:
                    ema = copy.deepcopy(engine.module)
                    ema.zero_grad()
                    ema.eval()
                    modes = (engine.module.training, ema.training)
        results.append((modes, lab.weights(engine)))
        lab.release(engine)
    same = all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    return {"same": same, "modes": [list(r[0]) for r in results]}


def close_in_hook(stage: int, offload: bool) -> dict[str, Any]:
    """The session is closed inside a backward; that step and the next are exact all the same."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(idle.Branch(), lab.ds_config(stage, offload))
    reference = lab.Reference(model, ref_opt, torch.float32)
    session = zeroguard.guard(engine, {"sinks": []})
    differences = []
    for step in range(3):
        xs, x = lab.batches(step)
        out = engine(x)
        if step == 1:
            out.register_hook(lambda grad: session.close())
        engine.backward(out.pow(2).mean())
        engine.step()
        for work, data in zip(reference.work, xs, strict=True):
            work(data).pow(2).mean().backward()
        reference.step()
        differences.append(lab.difference(engine, model))
    lab.release(engine)
    return {"differences": differences, "findings": len(session.findings)}


def attach_mid_window(stage: int, offload: bool) -> dict[str, Any]:
    """Attached after the first of two micro-batches, which alone reached the branch."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(idle.Branch(), lab.ds_config(stage, offload, gas=2))
    reference = lab.Reference(model, ref_opt, torch.float32)
    session = None
    differences = []
    for step in range(3):
        for micro in range(2):
            xs, x = lab.batches(10 * step + micro)
            if step == 1 and micro == 1:
                session = zeroguard.guard(engine, {"sinks": []})
            use = micro == 0
            engine.backward(engine(x, use).pow(2).mean())
            engine.step()
            for work, data in zip(reference.work, xs, strict=True):
                (work(data, use).pow(2).mean() / 2).backward()
        reference.step()
        differences.append(lab.difference(engine, model))
    session.close()
    lab.release(engine)
    return {"differences": differences, **lab.record(session)}


def spare_layer(stage: int, offload: bool, action: str) -> dict[str, Any]:
    """Attached to a model that has trained for two steps and has a layer that nothing uses."""
    from tests.lab.healthy import FrozenTiedUnused

    torch.manual_seed(0)
    engine, _, _ = lab.build(FrozenTiedUnused(), lab.ds_config(stage, offload))

    def train() -> None:
        engine.backward(engine(lab.batches(0)[1]).pow(2).mean())
        engine.step()

    train()
    train()
    with lab.guard_of(engine, {"guards": [{"name": "accumulator_reset", "action": action}]}) as session:
        train()
        train()
    lab.release(engine)
    return lab.record(session)
