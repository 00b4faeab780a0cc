"""What a user is told who attaches twice, or to something that cannot be guarded."""

from __future__ import annotations

from typing import Any

import torch

import zeroguard
from tests.lab import idle
from tests.lab import programs as lab


def attach_twice() -> dict[str, Any]:
    engine, _, _ = lab.build(idle.Branch(), lab.ds_config(2, False))
    out: dict[str, Any] = {}
    with zeroguard.guard(engine, {"sinks": []}):
        try:
            zeroguard.guard(engine)
        except zeroguard.AlreadyGuardedError as error:
            out["error"] = str(error)
    with zeroguard.guard(engine, {"sinks": []}):
        out["after_close"] = "attached"
    lab.release(engine)
    return out


def errors() -> dict[str, Any]:
    """What a user is told: no engine, a guard that cannot act, a missing attribute."""
    engine, _, _ = lab.build(idle.Branch(), lab.ds_config(1, False))
    out: dict[str, Any] = {}
    for name, call in {
        "no_engine": lambda: zeroguard.guard(torch.nn.Linear(2, 2)),
        "not_applicable": lambda: zeroguard.guard(engine, {"guards": [{"name": "param_status"}]}),
    }.items():
        try:
            call()
            out[name] = "nothing raised"
        except zeroguard.ZeroGuardError as error:
            out[name] = f"{type(error).__name__}: {error}"
    own = vars(engine.optimizer).pop("params_in_partition")
    try:
        zeroguard.guard(engine, {"sinks": []})
    except zeroguard.GuardUnavailableError as error:
        out["missing"] = f"{error} | {error.guard} | {error.missing}"
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = zeroguard.guard(engine, {"sinks": [], "on_unavailable": "warn"})
        out["warned"] = [str(w.message) for w in caught]
        out["selected"] = list(session.selection.selected)
        out["verdicts"] = {row.guard: row.verdict for row in session.rows}
        session.close()
    engine.optimizer.params_in_partition = own
    with zeroguard.guard(engine, {"sinks": []}) as session:
        out["selection"] = str(session.selection)
    lab.release(engine)
    return out
