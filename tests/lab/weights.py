"""What a step, and what a loop, do to weights: left out, frozen, spoiled, written while they are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.lab import programs as lab
from tests.lab.healthy import Mlp
from tests.lab.idle import Branch

ALONE = {"guards": [{"name": "accumulation"}], "on_violation": "record", "sinks": []}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam, no first moment": lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.0, 0.9)),
    "adam, lr 0": lambda params: torch.optim.Adam(params, lr=0.0),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


def without_gradient(stage: int, offload: bool, how: str, optimizers: list[str], guarded: Any = True) -> dict[str, Any]:
    """A branch that is left out of (``drop``), or frozen for, all steps, or all but the first two, of each optimizer
    (none named: of all of them): whether it moved then, and what was found."""
    out: dict[str, Any] = {}
    for optimizer in optimizers or OPTIMIZERS:
        make = OPTIMIZERS[optimizer]
        for used in (0, 2):
            torch.manual_seed(0)
            engine, _, _ = lab.build(Branch(), lab.ds_config(stage, offload), make)
            with lab.guard_of(engine, guarded) as session:
                for step in range(4):
                    use = step < used
                    if step == used:
                        before = [lab.full(p).clone() for p in engine.module.v.parameters()]
                    engine.module.v.requires_grad_(use or how == "drop")
                    engine.backward(engine(lab.batches(step)[1], use or how == "freeze").pow(2).mean())
                    engine.step()
            after = [lab.full(p) for p in engine.module.v.parameters()]
            moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            out[f"{optimizer}, used {used}"] = {"moved": moved, **lab.record(session)}
            lab.release(engine)
    return out


def spoiled(stage: int, dtype: str = "fp32", bad: int = 1, guarded: Any = None, **config: Any) -> dict[str, Any]:
    """The loss of one step is infinite."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(Mlp(), lab.ds_config(stage, False, dtype, **config))
    kind = lab.DTYPES[dtype]
    with lab.guard_of(engine, ALONE if guarded is None else guarded) as session:
        for step in range(3):
            loss = engine(lab.batches(step)[1].to(kind)).float().pow(2).mean()
            engine.backward(loss * (float("inf") if step == bad else 1.0))
            engine.step()
    finite = all(bool(torch.isfinite(w).all()) for w in lab.weights(engine))
    out = {"finite": finite, **lab.record(session)}
    lab.release(engine)
    return out


def gathered(offload: bool = False, dtype: str = "fp32") -> dict[str, Any]:
    """What is done to gathered weights, each in a session of its own: the findings, and whether the weights changed."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(Mlp(), lab.ds_config(3, offload, dtype))
    params = list(engine.module.parameters())
    partition = params[0].partition
    delta = [torch.full(p.ds_shape, 0.3).to(p.dtype) for p in params]
    root = dist.get_rank() == 0

    def merged() -> None:
        for param, change in zip(params, delta, strict=True):
            param.data.add_(change)
        for param, change in zip(params, delta, strict=True):
            param.data.sub_(change)

    def swapped() -> None:
        kept = [param.data.clone() for param in params]
        for param in params:
            param.data.zero_()
        for param, value in zip(params, kept, strict=True):
            param.data.copy_(value)

    todo: dict[str, tuple[int | None, Callable[[], Any]]] = {
        "read": (None, lambda: [param.norm().item() for param in params]),
        "merged and taken out again": (None, merged),
        "swapped and put back": (None, swapped),
        "written by rank 0": (0, lambda: root and params[0].data.mul_(0.5)),
        "written": (None, lambda: params[1].data.mul_(0.9)),
        "written in place": (None, lambda: params[1].mul_(0.9)),
        "the last element": (None, lambda: params[-2].data.view(-1)[-1:].fill_(7.0)),
        "NaN": (None, lambda: params[1].data.fill_(float("nan"))),
    }
    out: dict[str, Any] = {}
    for name, (modifier, change) in todo.items():
        before = [param.ds_tensor.clone() for param in params]
        with lab.guard_of(engine, ALONE) as session:
            with deepspeed.zero.GatheredParameters(params, modifier_rank=modifier), torch.no_grad():
                change()
            engine.backward(engine(lab.batches(0)[1].to(lab.DTYPES[dtype])).float().pow(2).mean() * 0.0)
        changed = any(not torch.equal(p.ds_tensor, b) for p, b in zip(params, before, strict=True))
        out[name] = {"changed": changed, "given back": params[0].partition is partition, **lab.record(session)}
    lab.release(engine)
    return out
