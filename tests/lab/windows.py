"""Loops whose backwards, boundaries and steps do not go together, and the nearest healthy loop of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad

from tests.lab import programs as lab
from tests.lab.healthy import Mlp
from zeroguard import events as ev

#: plain SGD, and one whose state and decay move a parameter that received no gradient
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=lab.LR),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).dtype)).float().pow(2).mean()


class Loop:
    """An engine beside plain PyTorch. ``error`` is what the loop raised, ``differences`` one number a comparison."""

    def __init__(
        self, stage: int, offload: bool, gas: int = 1, optimizer: str = "sgd", dtype: str = "fp32", **config: Any
    ) -> None:
        torch.manual_seed(0)
        make = OPTIMIZERS[optimizer]
        settings = lab.ds_config(stage, offload, dtype, gas, **config)
        self.engine, self.model, optim = lab.build(Mlp(), settings, make)
        self.reference = lab.Reference(self.model, optim, lab.DTYPES[dtype])
        self.gas = gas
        self.differences: list[float] = []
        self.extra: dict[str, Any] = {}

    def forward(self, seed: int) -> torch.Tensor:
        _, x = lab.batches(seed)
        return _loss(self.engine, x)

    def micro(self, seed: int, scale: float = 1.0, step: bool = True) -> None:
        """One micro-batch on the engine, and on the reference without its step."""
        self.engine.backward(self.forward(seed) * scale)
        self.expect(seed, scale)
        if step:
            self.engine.step()

    def expect(self, seed: int, scale: float = 1.0) -> None:
        xs, _ = lab.batches(seed)
        for work, data in zip(self.reference.work, xs, strict=True):
            (_loss(work, data) * scale / self.gas).backward()

    def compare(self) -> None:
        self.differences.append(lab.difference(self.engine, self.model))

    def run(self, guarded: Any, loop: Callable[[Any], None]) -> dict[str, Any]:
        """The loop under guard; what it raised is in ``error``."""
        error = ""
        session = None
        try:
            with lab.guard_of(self.engine, guarded) as session:
                loop(session)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        engine = self.engine
        out = {
            "error": error,
            "differences": self.differences,
            "global_steps": engine.global_steps,
            "skipped": engine.skipped_steps,
            **self.extra,
            **lab.record(session),
        }
        lab.release(engine)
        return out


def one_step_of_many(stage: int, offload: bool, gas: int = 1, more: int = 3, guarded: Any = None) -> dict[str, Any]:
    """The last micro-batch of each window is followed by ``more`` others before its step: manual accumulation."""
    loop = Loop(stage, offload, gas)

    def body(session: Any) -> None:
        for window in range(2):
            for micro in range(gas + more):
                loop.micro(10 * window + micro, step=micro < gas - 1)
            loop.engine.step()
            loop.reference.step()
            loop.compare()

    return loop.run(guarded, body)


def step_again(
    stage: int,
    offload: bool,
    by: str = "engine",
    clear: bool = False,
    forward: bool = False,
    optimizer: str = "sgd",
    dtype: str = "fp32",
    guarded: Any = None,
    **config: Any,
) -> dict[str, Any]:
    """A step without a backward, right after one with; ``clear`` calls zero_grad before it, as PyTorch's loops do,
    ``forward`` looks at a batch first, as a loop does that skips a bad loss."""
    loop = Loop(stage, offload, optimizer=optimizer, dtype=dtype, **config)

    def body(session: Any) -> None:
        for step in range(3):
            loop.micro(step)
            loop.reference.step()
            if step == 1:
                if clear:
                    loop.engine.zero_grad()
                if forward:
                    loop.forward(50)
                (loop.engine if by == "engine" else loop.engine.optimizer).step()
            loop.compare()

    return loop.run(guarded, body)


def epochs(
    stage: int, offload: bool, length: int = 6, say: bool = False, drop: bool = False, guarded: Any = None
) -> dict[str, Any]:
    """Two epochs of ``length`` micro-batches at 4 accumulation steps, with an evaluation after each. Reference: what is
    left of an epoch is dropped. ``say``: the loop tells of each epoch's end, as an integration does; ``drop``: it drops
    what is left, as the finding's remedy has it."""
    loop = Loop(stage, offload, gas=4)
    engine = loop.engine

    def body(session: Any) -> None:
        for epoch in range(2):
            loop.reference.zero_grad()
            for number in range(length):
                loop.micro(10 * epoch + number)
                if (number + 1) % 4 == 0:
                    loop.reference.step()
            engine.eval()
            with torch.no_grad():
                loop.forward(99)
            engine.train()
            if drop:
                engine.zero_grad()
                engine.micro_steps -= engine.micro_steps % 4
            if say and session is not None:
                session.emit(ev.EpochEnd())
        loop.compare()

    return loop.run(guarded, body)


def clear_inside(
    stage: int, offload: bool, gas: int = 4, every: bool = True, windows: int = 4, guarded: Any = None
) -> dict[str, Any]:
    """zero_grad before every micro-batch; or once, in the second window, as a loop does that skips a bad batch. The
    reference does not clear."""
    loop = Loop(stage, offload, gas)

    def body(session: Any) -> None:
        for window in range(windows):
            for micro in range(gas):
                if every or (micro == 1 and window == 1):
                    loop.engine.zero_grad()
                loop.micro(10 * window + micro)
            loop.reference.step()
            loop.compare()

    return loop.run(guarded, body)


def never_step(stage: int, offload: bool, backwards: int = 12, how: str = "", guarded: Any = None) -> dict[str, Any]:
    """Backwards and no step; ``how`` is what a look at gradients does after each: ``clear`` or ``read``."""
    loop = Loop(stage, offload)

    def body(session: Any) -> None:
        for number in range(backwards):
            loop.engine.backward(loop.forward(number))
            if how == "read":
                safe_get_full_grad(loop.engine.module.l[0].weight)
            if how == "clear":
                loop.engine.zero_grad()

    return loop.run(guarded, body)


def non_finite(
    stage: int,
    offload: bool,
    dtype: str = "fp32",
    bad: tuple[int, ...] = (2,),
    steps: int = 5,
    guarded: Any = None,
    **config: Any,
) -> dict[str, Any]:
    """The loss of some steps is infinite."""
    loop = Loop(stage, offload, dtype=dtype, **config)
    engine = loop.engine
    seen = loop.extra["seen"] = []

    def body(session: Any) -> None:
        for step in range(steps):
            loss = loop.forward(step) * (float("inf") if step in bad else 1.0)
            engine.backward(loss)
            engine.step()
            overflow = getattr(engine.optimizer, "overflow", None)
            finite = all(bool(torch.isfinite(w).all()) for w in lab.weights(engine))
            applied = getattr(engine, "was_step_applied", lambda: None)()
            seen.append([None if overflow is None else bool(overflow), applied, finite])

    return loop.run(guarded, body)


def clip_by_hand(stage: int, offload: bool, how: str = "engine", guarded: Any = None) -> dict[str, Any]:
    """torch.nn.utils.clip_grad_norm_ between backward and step; ``how`` says whose parameters."""
    loop = Loop(stage, offload)
    engine = loop.engine
    norms = loop.extra["norms"] = []

    def body(session: Any) -> None:
        for step in range(2):
            loop.micro(step, scale=50.0, step=False)
            if how == "late":
                engine.step()
            params = {
                "engine": engine.parameters,
                "module": engine.module.parameters,
                "late": engine.parameters,
                "list": lambda: list(engine.module.parameters()),
            }[how]()
            norms.append(float(torch.nn.utils.clip_grad_norm_(params, 0.1)))
            if how != "late":
                engine.step()
            loop.reference.step()
            loop.compare()

    return loop.run(guarded, body)


def default_clip(
    stage: int, offload: bool, scale: float = 50.0, configured: bool = False, dtype: str = "fp32", guarded: Any = None
) -> dict[str, Any]:
    """gradient_clipping is left out of the configuration, or set to what is then the default."""
    torch.manual_seed(0)
    config = lab.ds_config(stage, offload, dtype)
    del config["gradient_clipping"]
    if configured:
        config["gradient_clipping"] = 1.0
    engine, model, optimizer = lab.build(Mlp(), config)
    reference = lab.Reference(model, optimizer, lab.DTYPES[dtype])
    differences: list[float] = []
    with lab.guard_of(engine, guarded) as session:
        for step in range(3):
            xs, x = lab.batches(step)
            engine.backward(_loss(engine, x) * scale)
            engine.step()
            for work, data in zip(reference.work, xs, strict=True):
                (_loss(work, data) * scale).backward()
            reference.step()
            differences.append(lab.difference(engine, model))
    norm = engine.get_global_grad_norm()
    clip = engine.gradient_clipping()
    out = {"differences": differences, "norm": None if norm is None else float(norm), "clip": clip}
    out |= lab.record(session)
    lab.release(engine)
    return out


def switched(
    stage: int,
    offload: bool,
    what: str = "freeze",
    optimizer: str = "adamw",
    at: int = 2,
    dtype: str = "fp32",
    guarded: Any = None,
    **config: Any,
) -> dict[str, Any]:
    """A layer is frozen, or one that was frozen is trained, from step ``at`` on; 0 is between initialize and the first
    step. ``toggle`` freezes it for one backward only, ``none`` does nothing to a model with a frozen layer."""
    torch.manual_seed(0)
    net = Mlp()
    if what in ("unfreeze", "none"):
        net.l[1].requires_grad_(False)
    engine, model, optim = lab.build(net, lab.ds_config(stage, offload, dtype, **config), OPTIMIZERS[optimizer])
    reference = lab.Reference(model, optim, lab.DTYPES[dtype])
    differences: list[float] = []
    with lab.guard_of(engine, guarded) as session:
        for step in range(12):
            frozen = {"freeze": step >= at, "unfreeze": step < at, "toggle": step == at, "none": True}[what]
            for module in (engine.module, *reference.work, model):
                module.l[1].requires_grad_(not frozen)
            xs, x = lab.batches(step)
            engine.backward(_loss(engine, x))
            if what == "toggle":
                engine.module.l[1].requires_grad_(True)
            engine.step()
            for work, data in zip(reference.work, xs, strict=True):
                _loss(work, data).backward()
            reference.step()
            differences.append(lab.difference(engine, model))
    out = {"differences": differences, **lab.record(session)}
    lab.release(engine)
    return out
