"""Reads of gradients between backward and step, beside the gradients of plain PyTorch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroguard
from tests.lab import programs as lab

H = 8


class Odd(nn.Module):
    """Sizes that no number of ranks divides, down to one element, a tied weight, a frozen layer, and a branch that may
    be idle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.v, self.b, self.frozen = (nn.Linear(H, H) for _ in range(4))
        self.down, self.up = nn.Linear(H, 5), nn.Linear(5, H, bias=False)
        self.b.weight = self.a.weight
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.a(x)))
        if use:
            h = h + self.v(h)
        return self.gain * self.b(h + self.up(self.down(h)))


def two_groups(params: Any) -> torch.optim.Optimizer:
    """Matrices, and the rest at another rate, as trainers do it; the model's order interleaves them."""
    params = list(params)
    wide, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    return torch.optim.SGD([{"params": wide}, {"params": rest, "lr": lab.LR / 2}], lr=lab.LR)


def loss_of(model: Any, x: torch.Tensor, kind: torch.dtype, use: bool = True) -> torch.Tensor:
    return model(x.to(kind), use).float().pow(2).mean()


def truth(reference: lab.Reference, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Name -> mean over the ranks; without those that PyTorch has None for."""
    models = [dict(model.named_parameters()) for model in reference.work]
    out = {}
    for name in models[0]:
        grads = [model[name].grad for model in models]
        if grads[0] is not None:
            out[name] = factor * sum(g.float() for g in grads) / len(grads)
    return out


def clipped(reference: lab.Reference, expected: dict[str, torch.Tensor], clip: float) -> None:
    """What DeepSpeed does to the gradients in its step."""
    total = sum(g.norm().item() ** 2 for g in expected.values()) ** 0.5
    for model in reference.work:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(min(1.0, clip / (total + 1e-6)))


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except zeroguard.GradientsUnavailableError as error:
        return str(error)
    return "not refused"


def compare(session: Any, expected: dict[str, torch.Tensor], stage0: bool) -> dict[str, Any]:
    """The largest errors of what the session reads, relative to the largest gradient."""
    norms, whole = session.grad_norms(per="parameter"), session.gradients()
    if stage0:  # DeepSpeed gives idle parameters zeros there
        for read in (norms, whole):
            for name in [n for n in read if n not in expected and not torch.as_tensor(read[n]).any()]:
                del read[name]
    largest = max(g.abs().max().item() for g in expected.values())
    picked = session.gradients([*expected][:-3:-1])
    modules = session.grad_norms(per="module")
    of_a = sum(expected[n].norm().item() ** 2 for n in ("a.weight", "a.bias")) ** 0.5
    return {
        "names": list(norms) == list(expected) == list(whole),
        "shapes": all(whole[n].shape == g.shape and whole[n].dtype == torch.float32 for n, g in expected.items()),
        "whole": max((whole[n] - g).abs().max().item() for n, g in expected.items() if n in whole) / largest,
        "norms": max(abs(norms[n] - g.norm().item()) for n, g in expected.items() if n in norms) / largest,
        "module": abs(modules["a"] - of_a) / of_a,
        "total": abs(session.grad_norms() - sum(g.norm().item() ** 2 for g in expected.values()) ** 0.5) / largest,
        "picked": list(picked) == [*expected][:-3:-1] and all(torch.equal(picked[n], whole[n]) for n in picked),
        "again": session.grad_norms(per="parameter") == session.grad_norms(per="parameter"),
        "bits": sorted((n, v) for n, v in norms.items()),
    }


def read(
    stage: int,
    offload: bool = False,
    dtype: str = "fp32",
    gas: int = 1,
    by: str = "engine",
    zero: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    guards: list[Any] | None = None,
    factor: float = 1.0,
    own: bool = False,
    clip: float = 0.0,
) -> dict[str, Any]:
    """Read in three windows; the branch is idle in the second. Between them, every moment at which there is nothing.

    ``own``: also what DeepSpeed's own reader returns.
    """
    torch.manual_seed(0)
    kind = lab.DTYPES[dtype]
    settings = {"gradient_clipping": clip, **(extra or {})}
    engine, model, ref_opt = lab.build(Odd(), lab.ds_config(stage, offload, dtype, gas, zero, **settings), two_groups)
    reference = lab.Reference(model, ref_opt, kind)
    config: dict[str, Any] = {"sinks": []} if guards is None else {"sinks": [], "guards": guards}
    out: dict[str, Any] = {"windows": [], "refused": {}, "optimizer": type(engine.optimizer).__name__}
    refused = out["refused"]
    with zeroguard.guard(engine, config) as session:
        inside = engine.module.a.bias.register_hook(lambda grad: refused.update(inside=refusal(session.gradients)))
        session.watch_norms("parameter")
        refused["before"] = refusal(session.grad_norms)
        for step in range(3):
            use = step != 1
            for micro in range(gas):
                xs, x = lab.batches(10 * step + micro)
                loss = loss_of(engine, x, kind, use)
                lab._run(engine, loss, by, False)
                inside.remove()
                for work, data in zip(reference.work, xs, strict=True):
                    (loss_of(work, data, kind, use) / gas).backward()
                if micro < gas - 1:
                    refused["middle"] = refusal(session.gradients)
                    engine.step()
            expected = truth(reference, factor)
            window = compare(session, expected, stage == 0)
            if own:
                window["own"] = own_error(engine, expected)
            out["windows"].append(window)
            engine.step()
            window["watched"] = sorted(session.last_grad_norms.items()) == window["bits"] or stage == 0
            refused["after"] = refusal(lambda: session.grad_norms("module"))
            if clip:
                clipped(reference, expected, clip)
            reference.step()
        out["findings"] = [f.kind for f in session.findings]
        out["difference"] = lab.difference(engine, model)
    lab.release(engine)
    return out


def small_buckets(stage: int, offload: bool, most: int, alone: int) -> dict[str, Any]:
    """As :func:`read`, with buckets of ``most`` elements and parameters of ``alone`` elements by themselves."""
    from zeroguard.backends.deepspeed import reading

    kept = reading.BUCKET_CPU, reading.ALONE
    reading.BUCKET_CPU, reading.ALONE = most, alone
    try:
        return read(stage, offload, gas=2)
    finally:
        reading.BUCKET_CPU, reading.ALONE = kept


def own_error(engine: Any, expected: dict[str, torch.Tensor]) -> float:
    from deepspeed.utils import safe_get_full_grad

    largest = max(g.abs().max().item() for g in expected.values())
    read = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    return max((read[n].float() - g).abs().max().item() for n, g in expected.items()) / largest


def clearing(stage: int, offload: bool) -> dict[str, Any]:
    """zero_grad, then a read; then a window that counts; then a backward that raises."""
    from tests.lab.idle import Breaking

    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Breaking(), lab.ds_config(stage, offload))
    reference = lab.Reference(model, ref_opt, torch.float32)
    out: dict[str, Any] = {}
    with zeroguard.guard(engine, {"sinks": []}) as session:
        xs, x = lab.batches(0)
        engine.backward(engine(x).pow(2).mean() * 3)
        engine.zero_grad()
        out["cleared"] = refusal(session.grad_norms)
        engine.backward(engine(x).pow(2).mean())
        for work, data in zip(reference.work, xs, strict=True):
            work(data).pow(2).mean().backward()
        expected = truth(reference)
        read = session.gradients()
        out["error"] = max((read[n] - g).abs().max().item() for n, g in expected.items())
        engine.step()
        with contextlib.suppress(ValueError):
            engine.backward(engine(x, "backward").pow(2).mean())
        out["raised"] = refusal(session.grad_norms)
        engine.zero_grad()
        engine.backward(engine(x).pow(2).mean())
        out["after"] = session.grad_norms()
        engine.step()
    lab.release(engine)
    return out


def names(stage: int) -> dict[str, Any]:
    """What is asked for wrongly."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(Odd(), lab.ds_config(stage, False))
    out: dict[str, Any] = {}
    with zeroguard.guard(engine, {"sinks": []}) as session:
        _, x = lab.batches(0)
        engine.backward(loss_of(engine, x, torch.float32, False))
        for key, asked in (("unknown", ["a.wieght"]), ("frozen", ["frozen.weight"])):
            try:
                session.gradients(asked)
            except zeroguard.ZeroGuardError as error:
                out[key] = f"{type(error).__name__}: {error}"
        out["idle"] = list(session.gradients(["v.weight", "a.bias"]))
        out["empty"] = list(session.gradients([]))
        engine.step()
    try:
        session.gradients()
    except zeroguard.SessionClosedError as error:
        out["closed"] = str(error)
    lab.release(engine)
    return out


def two_losses(stage: int, offload: bool, pattern: str) -> dict[str, Any]:
    """After each pattern of two losses over one forward."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload))
    reference = lab.Reference(model, ref_opt, torch.float32)
    errors = []
    with zeroguard.guard(engine, {"sinks": []}) as session:
        step = engine.step
        for number in range(2):
            xs, x = lab.batches(number)
            lab.reference_micro_step(reference, pattern, xs, 1)
            engine.step = lambda: None
            lab.micro_step(engine, pattern, x, torch.float32, True)
            engine.step = step
            expected, read, norms = truth(reference), session.gradients(), session.grad_norms("parameter")
            errors.append(max((read[n] - g).abs().max().item() for n, g in expected.items()))
            errors.append(max(abs(norms[n] - g.norm().item()) for n, g in expected.items()))
            same = list(read) == list(expected) == list(norms)
            engine.step()
            reference.step()
        out = {"errors": errors, "same": same, "difference": lab.difference(engine, model)}
    lab.release(engine)
    return out


def watched(stage: int, offload: bool, extra: dict[str, Any] | None = None, unmanaged: bool = False) -> dict[str, Any]:
    """Norms read inside engine.step(): with clipping, without a boundary of DeepSpeed's own, by a loop's calls."""
    from zeroguard.integrations.base import Keeper

    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Odd(), lab.ds_config(stage, offload, **(extra or {})), two_groups)
    reference = lab.Reference(model, ref_opt, torch.float32)
    keeper = Keeper({"sinks": []}, grad_norms="module")
    out: dict[str, Any] = {"errors": []}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        session = keeper.open(engine)
        for number in range(2):
            xs, x = lab.batches(number)
            engine.backward(loss_of(engine, x, torch.float32))
            if unmanaged:
                out["early"] = refusal(session.grad_norms)
            engine.step()
            for work, data in zip(reference.work, xs, strict=True):
                loss_of(work, data, torch.float32).backward()
            metrics = keeper.metrics()
            expected = truth(reference)
            got = metrics["zeroguard/grad_norm/down"]
            of_down = sum(expected[n].norm().item() ** 2 for n in ("down.weight", "down.bias")) ** 0.5
            out["errors"].append(abs(got - of_down) / of_down)
            out["root"] = abs(metrics["zeroguard/grad_norm/(root)"] - expected["gain"].norm().item())
            reference.zero_grad()
            with torch.no_grad():
                for work in reference.work:
                    for p, q in zip(work.parameters(), lab.weights(engine), strict=True):
                        p.copy_(q)
        out["warnings"] = [str(w.message) for w in told if "watch_norms" in str(w.message)]
        keeper.close()
    lab.release(engine)
    return out


def announced(stage: int, offload: bool) -> dict[str, Any]:
    """Nothing is wrapped: the loop's own calls say when gradients are there."""
    from zeroguard.integrations.loop import LoopCallback

    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Odd(), lab.ds_config(stage, offload, gas=2), two_groups)
    reference = lab.Reference(model, ref_opt, torch.float32)
    out: dict[str, Any] = {"errors": [], "middle": [], "watched": []}
    with LoopCallback(engine, {"sinks": []}, wrap=False) as loop:
        loop.session.watch_norms()
        for step in range(2):
            for micro in range(2):
                xs, x = lab.batches(10 * step + micro)
                loop.on_step_begin()
                loss = loss_of(engine, x, torch.float32, step == 0)
                loop.on_before_backward()
                engine.backward(loss)
                loop.on_after_backward()
                for work, data in zip(reference.work, xs, strict=True):
                    (loss_of(work, data, torch.float32, step == 0) / 2).backward()
                if micro == 0:
                    out["middle"].append(refusal(loop.session.grad_norms))
                else:
                    window = compare(loop.session, truth(reference), stage == 0)
                    out["errors"] += [window["whole"], window["norms"]]
                    total = loop.session.grad_norms()
                loop.on_before_optimizer_step()
                engine.step()
                loop.on_step_end()
            out["watched"].append(abs(loop.session.last_grad_norms["total"] - total))
            reference.step()
    lab.release(engine)
    return out


def second_pass(stage: int, offload: bool) -> dict[str, Any]:
    """torch.autograd.grad with respect to an input, after the boundary backward: the gradients are still there."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Odd(), lab.ds_config(stage, offload))
    reference = lab.Reference(model, ref_opt, torch.float32)
    with zeroguard.guard(engine, {"sinks": []}) as session:
        xs, x = lab.batches(0)
        x = x.clone().requires_grad_()
        loss = loss_of(engine, x, torch.float32)
        engine.backward(loss, retain_graph=True)
        for work, data in zip(reference.work, xs, strict=True):
            loss_of(work, data, torch.float32).backward()
        before = session.grad_norms("parameter")
        torch.autograd.grad(loss, x)
        expected = truth(reference)
        read = session.gradients()
        out = {
            "same": session.grad_norms("parameter") == before,
            "error": max((read[n] - g).abs().max().item() for n, g in expected.items()),
        }
        engine.step()
        reference.step()
        out["difference"] = lab.difference(engine, model)
    lab.release(engine)
    return out


def chunks() -> dict[str, Any]:
    """A parameter of which a plain float32 sum of squares is visibly wrong on a CPU."""
    torch.manual_seed(0)
    model = nn.Linear(2000, 2000, bias=False)
    engine, _, _ = lab.build(model, lab.ds_config(2, False))
    with zeroguard.guard(engine, {"sinks": []}) as session:
        x = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)) + 1
        engine.backward(engine(x).pow(2).mean() * 1e6)
        grad = session.gradients()["weight"]
        right = grad.double().norm().item()
        out = {"error": abs(session.grad_norms() - right) / right, "plain": abs(grad.norm().item() - right) / right}
        engine.step()
    lab.release(engine)
    return out


def experts() -> dict[str, Any]:
    """An engine whose parameters are averaged over other ranks than its data-parallel group, as experts are."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(Odd(), lab.ds_config(2, False))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    out: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as told, zeroguard.guard(engine, {"sinks": []}) as session:
        warnings.simplefilter("always")
        _, x = lab.batches(0)
        session.watch_norms()
        real = engine.optimizer.real_dp_process_group
        for _ in range(2):
            engine.backward(loss_of(engine, x, torch.float32))
            engine.optimizer.real_dp_process_group = [alone for _ in real]
            out["refused"] = refusal(session.gradients)
            session.before_step()
            engine.optimizer.real_dp_process_group = real
            out["watched"] = session.last_grad_norms
            session.watch_norms(None)
            engine.step()
        out["warnings"] = [str(w.message) for w in told if "watch_norms" in str(w.message)]
    lab.release(engine)
    return out


def coalesced(stage: int, offload: bool) -> dict[str, Any]:
    """Two backwards inside engine.coalesce_grad_reduction(): DeepSpeed reduces when the block ends."""
    torch.manual_seed(0)
    engine, model, ref_opt = lab.build(Odd(), lab.ds_config(stage, offload, gas=2), two_groups)
    reference = lab.Reference(model, ref_opt, torch.float32)
    out: dict[str, Any] = {}
    with zeroguard.guard(engine, {"sinks": []}) as session:
        session.watch_norms("parameter")
        with engine.coalesce_grad_reduction():
            for micro in range(2):
                xs, x = lab.batches(micro)
                engine.backward(loss_of(engine, x, torch.float32, micro == 1))
                for work, data in zip(reference.work, xs, strict=True):
                    (loss_of(work, data, torch.float32, micro == 1) / 2).backward()
        out["early"] = refusal(session.grad_norms)
        expected = truth(reference)
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        norms = session.last_grad_norms
        out["error"] = max(abs(norms[n] - g.norm().item()) for n, g in expected.items()) if norms else None
        out["names"] = list(norms) == list(expected)
        reference.step()
        out["difference"] = lab.difference(engine, model)
    lab.release(engine)
    return out
