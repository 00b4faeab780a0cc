"""Two engines under guard at once: neither sees the other. Beside them the same training without zeroguard, bit by bit,
and in plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import deepspeed
import torch
from torch import nn

import zeroguard
from tests.lab import programs as lab

CONFIG = {"sinks": [], "guards": [{"name": "automatic"}, {"name": "gradient_audit"}]}


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _train(g: Any, d: Any, step: Any, through: str) -> None:
    """Three rounds of a generator ``g`` and a discriminator ``d``."""
    for number in range(3):
        _, noise = lab.batches(2 * number)
        _, real = lab.batches(2 * number + 1)
        loss = d(real).pow(2).mean() + (d(g(noise).detach()) - 1).pow(2).mean()
        step(d, loss)
        judge = d if through == "engine" else getattr(d, "module", d)
        for param in judge.parameters():
            param.requires_grad_(False)
        step(g, judge(g(noise)).pow(2).mean())
        for param in judge.parameters():
            param.requires_grad_(True)


def _on_engine(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)
    engine.step()


def gan(stage: int, offload: bool, through: str) -> dict[str, Any]:
    """The generator's loss runs through the discriminator's engine, or through its module."""
    answer: dict[str, Any] = {}
    weights = {}
    for guarded in (False, True):
        torch.manual_seed(0)
        made = [lab.build(_net(), lab.ds_config(stage, offload)) for _ in range(2)]
        engines = [engine for engine, _, _ in made]
        if not guarded:
            steps = {id(model): optimizer for _, model, optimizer in made}
            plain = [model for _, model, _ in made]

            def step(model: Any, loss: torch.Tensor, steps: Any = steps) -> None:
                steps[id(model)].zero_grad()
                loss.backward()
                steps[id(model)].step()

            _train(*plain, step, "module")
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(zeroguard.guard(engine, CONFIG)) for engine in engines if guarded]
            try:
                _train(*engines, _on_engine, through)
            except Exception as error:
                answer["error guarded" if guarded else "error unguarded"] = f"{type(error).__name__}: {error}"
        weights[guarded] = [weight for engine in engines for weight in lab.weights(engine)]
        if guarded:
            answer["findings"] = [finding.text() for session in sessions for finding in session.findings]
            answer["repairs"] = [repair.text() for session in sessions for repair in session.repairs]
        expected = [p.detach() for model in plain for p in model.parameters()]
        pairs = list(zip(weights[guarded], expected, strict=True))
        answer["guarded" if guarded else "unguarded"] = max((a - b).abs().max().item() for a, b in pairs)
        for engine in engines:
            lab.release(engine)
    answer["same"] = all(torch.equal(a, b) for a, b in zip(weights[False], weights[True], strict=True))
    return answer


def frozen_reference(stage: int) -> dict[str, Any]:
    """A policy that is trained against a frozen copy of itself, which has an engine without an optimizer."""
    answer: dict[str, Any] = {}
    weights = {}
    for guarded in (False, True):
        torch.manual_seed(0)
        net = _net()
        frozen = copy.deepcopy(net).requires_grad_(False)
        policy, _, _ = lab.build(net, lab.ds_config(stage, False))
        zero = 3 if stage == 3 else 0
        reference, *_ = deepspeed.initialize(model=frozen, config=lab.ds_config(zero, False))
        reference.eval()
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(zeroguard.guard(e, CONFIG)) for e in (policy, reference) if guarded]
            for number in range(3):
                _, x = lab.batches(number)
                with torch.no_grad():
                    target = reference(x)
                policy.backward((policy(x) - target - 1).pow(2).mean())
                policy.step()
        weights[guarded] = [*lab.weights(policy), *lab.weights(reference)]
        if guarded:
            answer["findings"] = [finding.text() for session in sessions for finding in session.findings]
            answer["selected"] = [list(session.selection.selected) for session in sessions]
        for engine in (policy, reference):
            lab.release(engine)
    answer["same"] = all(torch.equal(a, b) for a, b in zip(weights[False], weights[True], strict=True))
    return answer
