"""Healthy programs: nothing may be flagged, and guarded runs are the same bits as unguarded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.lab import programs as lab

H = 8
STEPS = 5


class Mlp(nn.Module):
    """Three layers."""

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(H, H) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.l:
            x = torch.tanh(layer(x))
        return x


class FrozenTiedUnused(nn.Module):
    """A frozen layer, a weight that two modules share, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.fz, self.b, self.spare = (nn.Linear(H, H) for _ in range(4))
        self.b.weight = self.a.weight
        self.fz.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.fz(self.a(x))))


class Checkpointed(nn.Module):
    """Activation checkpointing, each block once."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inp, self.out = nn.Linear(H, H), nn.Linear(H, H)
        self.l = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.l:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.out(x)


def _square(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


def _twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    return _square(model, x) + 0.3 * model((x * 2 + 1).to(next(model.parameters()).dtype)).float().abs().mean()


class Program:
    """A model, an optimizer, and what one micro-batch does with the engine."""

    model: Callable[[], nn.Module] = Mlp
    gas = 2
    config: dict[str, Any] = {}

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lab.LR)

    def loss(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        return _square(model, x)

    def micro(self, engine: Any, x: torch.Tensor) -> None:
        engine.backward(self.loss(engine, x))
        engine.step()


class SingleLoss(Program):
    gas = 1


class Accumulation(Program):
    gas = 3
    config = {"gradient_clipping": 0.05}

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


class Frozen(Program):
    model = FrozenTiedUnused


class CheckpointReentrant(Program):
    model = staticmethod(lambda: Checkpointed(True))


class CheckpointNonReentrant(Program):
    model = staticmethod(lambda: Checkpointed(False))


class EvalBetween(Program):
    def micro(self, engine: Any, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.loss(engine, x)
        engine.backward(self.loss(engine, x))
        engine.eval()
        with torch.no_grad():
            self.loss(engine, x)
            self.loss(engine, x)
        engine.train()
        engine.step()


class LossBackward(Program):
    """loss.backward() and a backward from a tensor with a gradient of its own."""

    def micro(self, engine: Any, x: torch.Tensor) -> None:
        kind = next(engine.module.parameters()).dtype
        y = engine(x.to(kind))
        if int(engine.micro_steps) % 2:
            y.backward(torch.ones_like(y) * 0.1)
        else:
            y.float().pow(2).mean().backward()
        engine.step()


class TwoForwardsSummed(Program):
    gas = 1

    def loss(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        return _twice(model, x)


class ZeroGradAfterStep(Program):
    """The order that Hugging Face's trainer uses."""

    def micro(self, engine: Any, x: torch.Tensor) -> None:
        engine.backward(self.loss(engine, x))
        last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if last:
            engine.optimizer.zero_grad()
            engine.zero_grad()


class ZeroGradBeforeBackward(Program):
    """The order that Lightning uses: after the forward, before the first backward of a window."""

    gas = 1

    def micro(self, engine: Any, x: torch.Tensor) -> None:
        loss = self.loss(engine, x)
        engine.module.zero_grad()
        engine.backward(loss)
        engine.step()


PROGRAMS = {
    "single_loss": SingleLoss,
    "accumulation_adamw_clipping": Accumulation,
    "frozen_tied_unused": Frozen,
    "checkpoint_reentrant": CheckpointReentrant,
    "checkpoint_non_reentrant": CheckpointNonReentrant,
    "eval_between": EvalBetween,
    "loss_backward": LossBackward,
    "two_forwards_summed": TwoForwardsSummed,
    "zero_grad_after_step": ZeroGradAfterStep,
    "zero_grad_before_backward": ZeroGradBeforeBackward,
}


def _engine(program: Program, stage: int, offload: bool, dtype: str) -> Any:
    torch.manual_seed(0)
    config = lab.ds_config(stage, offload, dtype, program.gas, **program.config)
    engine, _, _ = lab.build(program.model(), config, program.optimizer)
    return engine


def _train(program: Program, engine: Any, steps: int) -> Iterator[None]:
    for number in range(steps * program.gas):
        _, x = lab.batches(7 * number)
        program.micro(engine, x)
        yield


def run(program: str, stage: int, offload: bool, dtype: str = "fp32", guarded: Any = True) -> dict[str, Any]:
    """Train unguarded and guarded, and compare bit for bit."""
    kind = PROGRAMS[program]()
    engine = _engine(kind, stage, offload, dtype)
    for _ in _train(kind, engine, STEPS):
        pass
    plain = lab.weights(engine)
    lab.release(engine)
    engine = _engine(kind, stage, offload, dtype)
    with lab.guard_of(engine, guarded) as session:
        for _ in _train(kind, engine, STEPS):
            pass
    same = all(torch.equal(a, b) for a, b in zip(plain, lab.weights(engine), strict=True))
    answer = {"same": same, **lab.record(session)}
    lab.release(engine)
    return answer


def two_engines(stage: int, offload: bool) -> dict[str, Any]:
    """Two engines trained in turns, both guarded, against the same two unguarded."""
    results = []
    records: list[dict[str, Any]] = []
    for guarded in (False, True):
        kind = SingleLoss()
        engines = [_engine(kind, stage, offload, "fp32") for _ in range(2)]
        with lab.guard_of(engines[0], guarded) as one, lab.guard_of(engines[1], guarded) as two:
            for number in range(STEPS):
                _, x = lab.batches(number)
                for engine in engines:
                    kind.micro(engine, x)
            records = [lab.record(one), lab.record(two)]
        results.append([w for engine in engines for w in lab.weights(engine)])
        for engine in engines:
            lab.release(engine)
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return {"same": same, "records": records}
