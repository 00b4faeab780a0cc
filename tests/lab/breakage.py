"""A guard's handler raises on one rank; beside it the same training without zeroguard, bit by bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import zeroguard
from tests.lab import programs as lab
from zeroguard import events as ev

GUARDS = [{"name": "automatic"}, {"name": "gradient_audit", "warmup_steps": 10**6}]


def _break(session: Any, guard: str, event: type[ev.Event]) -> None:
    """Have this handler raise whenever it is called."""

    def boom(happened: ev.Event) -> Any:
        raise RuntimeError(f"boom in {type(happened).__name__}")
        yield

    rows = session._table[event]
    session._table[event] = [(g, s, boom if g.name == guard else handler) for g, s, handler in rows]


def _window(engine: Any, session: Any, gas: int, seed: int) -> None:
    kind = next(engine.module.parameters()).dtype
    for micro in range(gas):
        _, x = lab.batches(100 * seed + micro)
        one, two = lab.losses(engine, x, kind)
        engine.backward(one + two)
        if session is not None and micro == gas - 1:
            session.host_read()
            list(engine.module.parameters())
        engine.step()
    engine.eval()
    with torch.no_grad():
        engine(x.to(kind))
    engine.train()


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(lab.weights(one), lab.weights(other), strict=True))


def every_handler(
    stage: int, offload: bool, dtype: str = "fp32", config: dict[str, Any] | None = None, rank: int = 1
) -> dict[str, Any]:
    """One session after the other on one engine, each with another handler that raises on ``rank`` alone."""
    gas, engines = 2, []
    for _ in range(2):
        torch.manual_seed(0)
        engines.append(lab.build(lab.TwoHeads(), lab.ds_config(stage, offload, dtype, gas))[0])
    plain, guarded = engines
    made = {"guards": GUARDS, "sinks": [], **(config or {})}
    with zeroguard.guard(guarded, made) as probe:
        pairs = [(g.name, event) for event, rows in probe._table.items() for g, _, _ in rows]
    rows, seed = [], 0
    for guard, event in sorted(pairs, key=str):
        with zeroguard.guard(guarded, made) as session:
            if dist.get_rank() == rank:
                _break(session, guard, event)
            for _ in range(2):
                seed += 1
                _window(plain, None, gas, seed)
                _window(guarded, session, gas, seed)
        rows.append(
            {
                "guard": guard,
                "event": event.__name__,
                "same": _same(plain, guarded),
                "found": [(f.guard, f.kind, f.severity, f.step) for f in session.findings],
                "verdict": {row.guard: row.verdict for row in session.rows}[guard],
            }
        )
    for engine in engines:
        lab.release(engine)
    return {"rows": rows}
