"""What the gallery's programs stand on: an engine, plain PyTorch beside it, and a record of what was seen when."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroguard
from tests.lab import programs as lab

Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def square(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of most programs; it casts to the model's own dtype."""
    kind = next(model.parameters()).dtype
    return model(x.to(kind)).float().pow(2).mean()


class Bench:
    """One run of one program.

    Attributes:
        healthy: run the nearest healthy program.
        now: the number of the step that the loop is at, from 1; what guards report is noted with it.
        measured: (step, size, wrong or not) of everything that was compared.
    """

    def __init__(self, stage: int, offload: bool, dtype: str, healthy: bool, guarded: Any) -> None:
        torch.manual_seed(0)
        self.stage, self.offload, self.dtype = stage, offload, dtype
        self.healthy, self.config = healthy, guarded
        self.gas = 1
        self.now = 0
        self.measured: list[tuple[int, float, bool]] = []
        self.heard: list[tuple[int, str, str, str, bool]] = []
        self.engine: Any = None
        self.session: Any = None
        self.loss: Loss = square

    # -- what a program is made of -------------------------------------------------------------------------------------

    def build(
        self,
        model: nn.Module,
        optimizer: Any = None,
        gas: int = 1,
        zero: dict[str, Any] | None = None,
        without: str = "",
        **config: Any,
    ) -> Any:
        """The engine, and the same in plain PyTorch. ``without`` is a key to leave out of the configuration."""
        self.gas = gas
        settings = lab.ds_config(self.stage, self.offload, self.dtype, gas, zero, **config)
        settings.pop(without, None)
        self.engine, self.model, made = lab.build(model, settings, optimizer)
        self.reference = lab.Reference(self.model, made, lab.DTYPES[self.dtype])
        self.start = [p.detach().clone() for p in self.model.parameters()]
        return self.engine

    @contextlib.contextmanager
    def guarded(self) -> Iterator[Any]:
        """The loop runs in here."""
        if self.config is None:
            yield None
            return
        with zeroguard.guard(self.engine, {"sinks": [], **self.config}, sinks=[self._hear]) as self.session:
            yield self.session

    def steps(self, number: int) -> Iterator[int]:
        """Count the loop's steps."""
        for step in range(number):
            self.now = step + 1
            yield step

    def forward(self, seed: int, loss: Loss | None = None) -> torch.Tensor:
        """The loss of this rank's batch on the engine."""
        return (loss or self.loss)(self.engine, lab.batches(seed)[1])

    def expect(self, seed: int, loss: Loss | None = None, scale: float = 1.0) -> None:
        """The same backward, divided as it should be, in plain PyTorch."""
        for work, x in zip(self.reference.work, lab.batches(seed)[0], strict=True):
            ((loss or self.loss)(work, x) * scale / self.gas).backward()

    def micro(self, seed: int, loss: Loss | None = None, step: bool = True) -> None:
        """Forward, backward and engine.step() of one micro-batch, and its backward in plain PyTorch."""
        self.engine.backward(self.forward(seed, loss))
        if step:
            self.engine.step()
        self.expect(seed, loss)

    def compare(self, step: bool = True) -> None:
        """Step plain PyTorch, and compare all parameters."""
        if step:
            self.reference.step()
        moved = max(
            (p.detach() - s).abs().max().item() for p, s in zip(self.model.parameters(), self.start, strict=True)
        )
        off = lab.difference(self.engine, self.model)
        # fp32: a millionth of the update, or one rounding of a weight; bf16: the rounding of the gradients.
        limit = max(1e-6 * moved, 3e-8) if self.dtype == "fp32" else 2e-2 * moved
        self.note(off, not off <= limit)

    def note(self, size: float, wrong: bool) -> None:
        """Something other than parameters was measured. LOCAL."""
        self.measured.append((self.now, size, bool(wrong)))

    # -- what is seen --------------------------------------------------------------------------------------------------

    def _hear(self, record: Any) -> None:
        if isinstance(record, zeroguard.Finding):
            self.heard.append((self.now, record.guard, record.kind, record.severity, record.repaired))

    def answer(self, error: str) -> dict[str, Any]:
        wrong = [(step, size) for step, size, bad in self.measured if bad]
        return {
            "status": "crash" if error else "wrong" if wrong else "exact",
            "first": self.now if error and not wrong else wrong[0][0] if wrong else 0,
            "off": max((size for _, size in wrong), default=max((size for _, size, _ in self.measured), default=0.0)),
            "compared": len(self.measured),
            "error": error,
            "heard": self.heard,
            "repairs": sorted({r.kind for r in self.session.repairs}) if self.session else [],
            "texts": [f.text() for f in self.session.findings] if self.session else [],
        }


def run(
    program: str,
    stage: int,
    offload: bool = False,
    dtype: str = "fp32",
    healthy: bool = False,
    guarded: Any = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run ``<module>.<function>`` of the gallery. ``guarded``: None for no guard, or a configuration."""
    module, name = program.split(".")
    bench = Bench(stage, offload, dtype, healthy, guarded)
    error = trace = ""
    try:
        getattr(importlib.import_module(f"tests.lab.gallery.{module}"), name)(bench, **(options or {}))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}".splitlines()[0]
        trace = traceback.format_exc()
    if os.environ.get("GALLERY_TRACE") and trace:
        traceback.print_exc()
    out = bench.answer(error) | {"trace": trace, "ranks": dist.get_world_size()}
    lab.release(bench.engine)
    _spare_imports()
    return out


@cache
def _spare_imports() -> None:
    """Once, after the first engine has imported what it needs: each engine collects garbage several times, and every
    collection walks all that was imported."""
    gc.collect()
    gc.freeze()
