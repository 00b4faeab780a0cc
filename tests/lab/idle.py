"""Parameters that a window does not reach, zero_grad that clears, backwards that raise, and training inside a
forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.lab import programs as lab

H = 8


class Branch(nn.Module):
    """A branch that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.v, self.b = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h + self.v(h) if use else h)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=lab.LR),
    "momentum": lambda params: torch.optim.SGD(params, lr=lab.LR, momentum=0.9, weight_decay=0.1),
}


def idle(
    stage: int,
    offload: bool,
    how: str = "drop",
    guarded: Any = True,
    optimizer: str = "sgd",
    dtype: str = "fp32",
    gas: int = 1,
    persist: bool = False,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The branch is used in steps 0, 1 and 5, and idle in between: left out (drop) or frozen in mid-run (freeze)."""
    torch.manual_seed(0)
    kind = lab.DTYPES[dtype]
    zero = {"stage3_param_persistence_threshold": 10**6} if persist else None
    config = lab.ds_config(stage, offload, dtype, gas, zero, **(extra or {}))
    engine, model, ref_opt = lab.build(Branch(), config, OPTIMIZERS[optimizer])
    reference = lab.Reference(model, ref_opt, kind)
    start = [p.detach().clone() for p in model.parameters()]
    differences: list[float] = []
    norms: list[float] = []
    with lab.guard_of(engine, guarded) as session:
        for step in range(6):
            use = step in (0, 1, 5)
            for module in (engine.module, *reference.work) if how == "freeze" else ():
                module.v.requires_grad_(use)
            for micro in range(gas):
                xs, x = lab.batches(10 * step + micro)
                call = use or how == "freeze"
                engine.backward(engine(x.to(kind), call).float().pow(2).mean())
                engine.step()
                for work, data in zip(reference.work, xs, strict=True):
                    (work(data.to(kind), call).float().pow(2).mean() / gas).backward()
            reference.step()
            differences.append(lab.difference(engine, model))
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    moved = max((p.detach() - s).abs().max().item() for p, s in zip(model.parameters(), start, strict=True))
    out = {"differences": differences, "update": moved, "norms": norms, **lab.record(session)}
    lab.release(engine)
    return out


def zero_grad(stage: int, offload: bool, by: str, gas: int = 1, guarded: Any = True) -> dict[str, Any]:
    """A backward that is thrown away by one of the three zero_grads, then one that counts; also a step without any."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Branch(), lab.ds_config(stage, offload, gas=gas))
    reference = lab.Reference(model, ref_opt, torch.float32)
    owner = {"engine": engine, "optimizer": engine.optimizer, "module": engine.module}[by]
    differences: list[float] = []
    with lab.guard_of(engine, guarded) as session:
        for step in range(3):
            for _ in range(1 if gas == 1 else gas - 1):  # gas - 1: the thrown-away window never reaches its boundary
                _, x = lab.batches(50 + step)
                engine.backward(engine(x, True).pow(2).mean() * 3)
            owner.zero_grad()
            for micro in range(gas):
                xs, x = lab.batches(10 * step + micro)
                engine.backward(engine(x, step != 1).pow(2).mean())
                engine.step()
                for work, data in zip(reference.work, xs, strict=True):
                    (work(data, step != 1).pow(2).mean() / gas).backward()
            reference.step()
            differences.append(lab.difference(engine, model))
    out = {"differences": differences, **lab.record(session)}
    lab.release(engine)
    return out


def step_after_zero_grad(stage: int, offload: bool) -> dict[str, Any]:
    """backward, zero_grad, step: in PyTorch nothing moves."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(Branch(), lab.ds_config(stage, offload))
    with lab.guard_of(engine, True) as session:
        _, x = lab.batches(0)
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        before = lab.weights(engine)
        engine.backward(engine(x).pow(2).mean())
        engine.zero_grad()
        engine.step()
        after = lab.weights(engine)
        engine.backward(engine(x).pow(2).mean())
        engine.step()
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    moved = not all(torch.equal(a, b) for a, b in zip(after, lab.weights(engine), strict=True))
    out = {"same": same, "moved": moved, **lab.record(session)}
    lab.release(engine)
    return out


class Boom(torch.autograd.Function):
    """Raises in backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boom: bool) -> torch.Tensor:
        ctx.boom = boom
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.boom:
            raise ValueError("boom in backward")
        return grad, None


class Breaking(Branch):
    """Raises in forward or in the middle of the backward."""

    def forward(self, x: torch.Tensor, boom: str = "") -> torch.Tensor:  # type: ignore[override]
        h = Boom.apply(torch.tanh(self.a(x)), boom == "backward")
        if boom == "forward":
            raise ValueError("boom in forward")
        return self.b(h + self.v(h))


def skip_batch(stage: int, offload: bool, where: str, clear: bool = True, guarded: Any = True) -> dict[str, Any]:
    """A batch whose forward or backward raises is skipped, as a try/except around the batch does it."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Breaking(), lab.ds_config(stage, offload))
    reference = lab.Reference(model, ref_opt, torch.float32)
    differences: list[float] = []
    raised = 0
    try:
        with lab.guard_of(engine, guarded) as session:
            for step in range(4):
                xs, x = lab.batches(step)
                bad = step == 1
                try:
                    engine.backward(engine(x, where if bad else "").pow(2).mean())
                except ValueError:
                    raised += 1
                    if clear:
                        engine.zero_grad()
                    continue
                engine.step()
                for work, data in zip(reference.work, xs, strict=True):
                    work(data).pow(2).mean().backward()
                reference.step()
                differences.append(lab.difference(engine, model))
    except Exception as error:
        lab.release(engine)
        return {"status": "crash", "error": f"{type(error).__name__}: {error}", "raised": raised}
    out = {"status": "ran", "differences": differences, "raised": raised, **lab.record(session)}
    lab.release(engine)
    return out


def inside_forward(stage: int, offload: bool, guarded: Any = True) -> dict[str, Any]:
    """Lightning's manual optimization: both backwards and the step run inside one engine.forward."""
    torch.manual_seed(0)
    model = lab.TwoHeads()
    holder: dict[str, Any] = {}

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = lab.losses(self.net, x)
            if self.training and torch.is_grad_enabled() and "engine" in holder:
                engine = holder["engine"]
                engine.backward(one, retain_graph=True)
                engine.backward(two)
                engine.step()
            return one.detach()

    engine, ref, ref_opt = lab.build(Step(), lab.ds_config(stage, offload))
    holder["engine"] = engine
    reference = lab.Reference(ref.net, ref_opt, torch.float32)
    differences: list[float] = []
    try:
        with lab.guard_of(engine, guarded) as session:
            for step in range(3):
                xs, x = lab.batches(step)
                engine(x)
                for work, data in zip(reference.work, xs, strict=True):
                    sum(lab.losses(work, data)).backward()
                reference.step()
                differences.append(lab.difference(engine, ref))
    except Exception as error:
        lab.release(engine)
        return {"status": "crash", "error": f"{type(error).__name__}: {error}", "differences": differences}
    out = {"status": "ran", "differences": differences, **lab.record(session)}
    lab.release(engine)
    return out
