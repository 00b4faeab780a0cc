"""The programs: each gives, iteration by iteration, what went wrong in it, or nothing.

Every iteration sets the seed ``first + i`` first. What is right is not taken from a guard: it is the same memory after
the device was waited for, plain PyTorch, or DeepSpeed's own status of a parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zeroguard.stress import hardware
from zeroguard.stress.jobs import GAS, Job

__all__ = ["PROGRAMS", "misread"]

LR = 0.1


#: Opens a session on an engine, or does nothing.
Guarded = Callable[[Any], Any]
Program = Callable[[Job, Any, Guarded], Iterator[str]]


# -- host-read -------------------------------------------------------------------------------------------------------


def host_read(job: Job, arena: Any, guarded: Guarded) -> Iterator[str]:
    """An iteration is one backward and a read of every gradient in host memory right after it, newest copy first. bf16,
    three layers of ``size`` x ``size``, four micro-batches a step on stage 2 (the boundary's backward is not read), one
    on stages 1 and 3."""
    gas = GAS if job.stage == 2 else 1
    torch.manual_seed(job.seed)
    layers = [nn.Linear(job.size, job.size, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers).to(arena.device)
    engine = arena.engine(model, job.config(gas, True), torch.optim.SGD(model.parameters(), lr=LR))
    if job.widen:
        # Gradients arrive last layer first: whatever is copied after this one waits for the delay.
        layers[-1].weight.register_hook(lambda grad: hardware.delay())
    early: list[torch.Tensor] = []
    settled: list[torch.Tensor] = []
    pin = arena.accelerator.pin_memory
    try:
        with guarded(engine):
            for i in range(job.skip, job.iterations):
                _backward(engine, job, arena.device, i)
                _into(early, arena.host_gradients(engine), pin)
                arena.accelerator.synchronize()
                message = misread(early, arena.host_gradients(engine), settled)
                _into(settled, arena.host_gradients(engine), pin)
                engine.step()
                if gas > 1 and (i - job.skip) % (gas - 1) == gas - 2:
                    _backward(engine, job, arena.device, i)
                    arena.accelerator.synchronize()
                    _into(settled, arena.host_gradients(engine), pin)
                    engine.step()
                yield message
            for _ in range(-engine.micro_steps % gas):  # an open window would be a finding
                _backward(engine, job, arena.device, job.iterations)
                engine.step()
    finally:
        arena.release(engine)


def _backward(engine: Any, job: Job, device: str, i: int) -> None:
    torch.manual_seed(job.seed + i)
    x = torch.randn(64, job.size, device=device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().pow(2).mean() * (1 + i % GAS))


def _into(store: list[torch.Tensor], read: list[torch.Tensor], pin: Callable[..., Any]) -> None:
    """Copy what was read, host to host. Memory that is there already is used again: to allocate would give the device
    time."""
    for k, buffer in enumerate(read):
        if k == len(store):
            store.append(pin(torch.empty_like(buffer)))
        store[k].copy_(buffer)


def misread(early: list[torch.Tensor], now: list[torch.Tensor], before: list[torch.Tensor]) -> str:
    """What an early read of the buffers gave instead of what is in them ``now``; empty if it gave just that.

    Args:
        early: newest first, as read.
        now: the same buffers after the device was waited for.
        before: what they held at the previous read; empty if there was none, and then zeros are the old value.
    """
    wrong = []
    for k, (seen, right) in enumerate(zip(early, now, strict=True)):
        if torch.equal(seen, right):
            continue
        old = before[k] if before else torch.zeros_like(right)
        stale = bool(((seen == old) | (seen == right)).all())
        kind = "the old value" if torch.equal(seen, old) else "part old, part new" if stale else "neither old nor new"
        wrong.append(f"buffer {k + 1} of {len(now)} (1 is the newest copy): {kind}")
    return "; ".join(wrong)


# -- retained-graph --------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """One trunk and two heads; each of the two losses reaches one head alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.trunk, self.one, self.two = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.trunk(x).relu()
        return self.one(z).pow(2).mean(), self.two(z).pow(2).mean()


def retained_graph(job: Job, arena: Any, guarded: Guarded) -> Iterator[str]:
    """An iteration is two optimizer steps of a new engine, each with one forward and two losses that go backward one by
    one (``loss.backward(retain_graph=True)``, zero_grad between), compared with plain PyTorch after each. fp32."""
    for i in range(job.skip, job.iterations):
        torch.manual_seed(job.seed + i)
        model = TwoHeads(job.size).to(arena.device)
        plain = copy.deepcopy(model)
        engine = arena.engine(model, job.config(1, False), torch.optim.SGD(model.parameters(), lr=LR))
        optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
        try:
            with guarded(engine):
                try:
                    message = _two_steps(engine, plain, optimizer, job, arena)
                except (RuntimeError, TypeError, KeyError, AssertionError, AttributeError, IndexError) as error:
                    message = f"{type(error).__name__}: {error}"  # the fault, where it is not a silent one
            yield message
        finally:
            arena.release(engine)


def _two_steps(engine: Any, plain: nn.Module, optimizer: Any, job: Job, arena: Any) -> str:
    for step in (1, 2):
        x = torch.randn(2, job.size, device=arena.device)
        start = [p.detach().clone() for p in plain.parameters()]
        optimizer.zero_grad()
        plain(x)[1].backward()  # the first loss's gradient is cleared again
        optimizer.step()
        engine.zero_grad()
        one, two = engine(x)
        one.backward(retain_graph=True)
        engine.zero_grad()
        two.backward()
        engine.step()
        pairs = list(zip(plain.parameters(), start, strict=True))
        moved = max(float((p.detach() - s).abs().max()) for p, s in pairs)
        pairs = list(zip(arena.weights(engine), plain.parameters(), strict=True))
        apart = max(float((w - p.detach()).abs().max()) for w, p in pairs)
        if apart > 1e-6 * moved + 3e-8:
            return f"step {step}: the weights are not those of plain PyTorch"
    return ""


# -- inflight --------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Eight layers and a narrow head, so that the last prefetch reaches beyond the end."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(8))
        self.head = nn.Linear(size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).pow(2).mean()


def inflight(job: Job, arena: Any, guarded: Guarded) -> Iterator[str]:
    """An iteration is a training step and an evaluation, after which ``engine.train()`` is called and the parameters
    are looked at: none may be in flight. fp32, ZeRO-3."""
    torch.manual_seed(job.seed)
    model = Deep(job.size).to(arena.device)
    engine = arena.engine(model, job.config(1, False), torch.optim.SGD(model.parameters(), lr=LR))
    try:
        with guarded(engine):
            for _ in range(3):
                _train(engine, job, arena.device)  # DeepSpeed learns the order of the modules, and prefetches by it
            for i in range(job.skip, job.iterations):
                torch.manual_seed(job.seed + i)
                _train(engine, job, arena.device)
                engine.eval()
                with torch.no_grad():
                    engine(torch.randn(2, job.size, device=arena.device))
                engine.train()
                left = arena.in_flight(engine)
                of = len(list(model.parameters()))
                yield f"in flight after an evaluation: {len(left)} of {of} parameters" if left else ""
    finally:
        arena.release(engine)


def _train(engine: Any, job: Job, device: str) -> None:
    engine.backward(engine(torch.randn(2, job.size, device=device)))
    engine.step()


PROGRAMS: dict[str, Program] = {"host-read": host_read, "retained-graph": retained_graph, "inflight": inflight}
