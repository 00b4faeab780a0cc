"""By identity, what of an engine could be wrapped: fewer places than tests/lab/snapshot.py looks at, and fast."""

from __future__ import annotations

from typing import Any


def snapshot(engine: Any) -> dict[str, dict[str, int]]:
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


def changed(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    out = []
    for part, names in before.items():
        for name in names.keys() | after[part].keys():
            if name.split(".")[-1] in MOVING:
                continue
            if names.get(name) != after[part].get(name):
                out.append(f"{part}.{name}")
    return out
