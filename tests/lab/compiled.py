"""Engines that are compiled, guarded and not."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

import zeroguard
from tests.lab import programs as lab
from tests.lab import two_engines

#: Who compiles, and when. ``engine.compile`` compiles the module; ``torch.compile(engine)`` also what is around it.
HOW = ("not", "engine.compile first", "engine.compile later", "torch.compile first", "torch.compile later")


def _one(stage: int, offload: bool, how: str, guarded: bool, backend: str, gas: int) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, offload, gas=gas))
    called = engine
    session: Any = None
    out: dict[str, Any] = {"error": ""}

    def compile_() -> Any:
        if how.startswith("engine"):
            engine.compile(backend=backend)
            return engine
        return torch.compile(engine, backend=backend)

    try:
        with contextlib.ExitStack() as stack:
            if how.endswith("first"):
                called = compile_()
            session = stack.enter_context(zeroguard.guard(called, two_engines.CONFIG)) if guarded else None
            if how.endswith("later"):
                called = compile_()
            for step in range(2):
                for micro in range(gas):
                    _, x = lab.batches(10 * step + micro)
                    one, two = lab.losses(called, x)
                    engine.backward(one + two)
                    engine.step()
    except Exception as error:
        out["error"] = f"{type(error).__name__}: {error}"
    out["weights"] = lab.weights(engine)
    out["frames"] = torch._dynamo.utils.counters["frames"]["ok"]
    if session is not None:
        out["findings"] = [finding.text() for finding in session.findings]
        out["events"] = {row.guard: row.events for row in session.rows}
    lab.release(engine)
    return out


def refused(stage: int) -> dict[str, Any]:
    """An engine whose configuration asks for DeepCompile, before and after it is compiled."""
    engine, _, _ = lab.build(lab.TwoHeads(), lab.ds_config(stage, False, compile={"deepcompile": True}))
    out: dict[str, Any] = {}
    try:
        zeroguard.guard(engine, {"sinks": []})
    except zeroguard.GuardUnavailableError as error:
        out["error"], out["missing"] = str(error), list(error.missing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with zeroguard.guard(engine, {"sinks": [], "on_unavailable": "warn"}) as session:
            one, two = lab.losses(engine, lab.batches(0)[1])
            engine.backward(one + two)
            engine.step()
        out["warned"] = [str(warning.message) for warning in caught]
    out["verdicts"] = sorted({row.verdict for row in session.rows})
    lab.release(engine)
    return out


def exact(stage: int, offload: bool, backend: str = "eager", gas: int = 2, how: Any = HOW) -> dict[str, Any]:
    """By who compiles: whether the guarded run gives the same weights as the unguarded one, bit by bit, and the same
    events as one that is not compiled."""
    answer: dict[str, Any] = {}
    for case in how:
        runs = [_one(stage, offload, case, guarded, backend, gas) for guarded in (False, True)]
        weights = zip(runs[0].pop("weights"), runs[1].pop("weights"), strict=True)
        answer[case] = {"same": all(torch.equal(a, b) for a, b in weights), "unguarded": runs[0], "guarded": runs[1]}
    return answer
