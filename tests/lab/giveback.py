"""What was wrapped is given back, by identity, whatever happened in between."""

from __future__ import annotations

from typing import Any

import torch

import zeroguard
from tests.lab import idle
from tests.lab import programs as lab

#: Every guard at work, also host_read's replaced containers, which the plain CPU accelerator would not need.
BACKEND_PARTS = ("engine", "optimizer", "module", "params", "mappings", "hook_state", "classes", "package")


def _snapshot(engine: Any) -> dict[str, dict[str, int]]:
    """Names to object identities of everything that could be wrapped."""
    import deepspeed

    def ids(obj: Any) -> dict[str, int]:
        return {name: id(value) for name, value in vars(obj).items() if callable(value) or _container(value)}

    optimizer = engine.optimizer
    out = {"engine": ids(engine), "optimizer": ids(optimizer), "module": ids(engine.module)}
    out["params"] = {f"{n}.{k}": id(v) for n, p in engine.module.named_parameters() for k, v in vars(p).items()}
    mappings = ((n, getattr(p, "_hp_mapping", None)) for n, p in engine.module.named_parameters())
    out["mappings"] = {n: id(m.offload_gradient_dict) for n, m in mappings if m is not None}
    state = getattr(optimizer, "_backward_hook_state", None)
    out["hook_state"] = {} if state is None else ids(state)
    out["classes"] = {
        c.__name__: hash(tuple(sorted(vars(c)))) for c in (*type(engine).__mro__, *type(optimizer).__mro__)
    }
    out["package"] = {n: id(v) for n, v in vars(deepspeed.runtime.engine).items() if callable(v)}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    out["hooks"] = {
        f"{n}.{h}": len(getattr(m, h)) for n, m in (("engine", engine), *engine.module.named_modules()) for h in hooks
    }
    return out


def _container(value: Any) -> bool:
    return isinstance(value, dict | list | set)


#: What DeepSpeed itself replaces while it trains.
MOVING = {
    "averaged_gradients",
    "norm_for_param_grads",
    "_offload_accumulated_param_ids",
    "_offload_boundary_param_ids",
    "zeroed",
    "persistent_parameters",
    "losses",
    "summary_events",
    "ds_status",
    "grads_in_ipg_bucket",
    "params_in_ipg_bucket",
}


def _changed(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    out = []
    for part, names in before.items():
        for name in names.keys() | after[part].keys():
            if name.split(".")[-1] in MOVING:
                continue
            if names.get(name) != after[part].get(name):
                out.append(f"{part}.{name}")
    return out


def round_trip(
    stage: int, offload: bool, fail: str = "", dtype: str = "fp32", extra: dict | None = None
) -> dict[str, Any]:
    """Attach, train (and fail in a phase), close; compare identities; then train unguarded."""
    torch.manual_seed(0)
    engine, _, _ = lab.build(idle.Breaking(), lab.ds_config(stage, offload, dtype, **(extra or {})))
    kind = next(engine.module.parameters()).dtype
    _, x = lab.batches(0)

    def train(boom: str = "") -> None:
        engine.backward(engine(x.to(kind), boom).float().pow(2).mean())
        engine.step()

    train()
    train()
    before = _snapshot(engine)
    raised = ""
    session = zeroguard.guard(engine, {"sinks": []})
    try:
        with session:
            train()
            if fail == "step":
                base = engine.optimizer.optimizer if hasattr(engine.optimizer, "optimizer") else engine.optimizer

                def broken(*args: Any, **kwargs: Any) -> None:
                    raise ValueError("boom in step")

                vars(base)["step"], own = broken, vars(base).get("step")
                try:
                    train()
                finally:
                    if own is None:
                        vars(base).pop("step")
                    else:
                        vars(base)["step"] = own
            else:
                train(fail)
    except ValueError as error:
        raised = str(error)
    session.close()
    session.close()  # a second time is nothing
    changed = _changed(before, _snapshot(engine))
    again = ""
    if fail in ("", "forward"):
        train()
        second = zeroguard.guard(engine, {"sinks": []})
        again = "guarded again"
        second.close()
    answer = {"changed": changed, "raised": raised, "again": again, **lab.record(session)}
    lab.release(engine)
    return answer


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
