"""The only door to DeepSpeed.

``deepspeed`` itself is never imported here: an engine can only exist where it already is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from zeroguard.backends.base import EngineFacts
from zeroguard.backends.deepspeed.adapter import DeepSpeedBackend
from zeroguard.backends.deepspeed.attributes import TABLE, VERIFIED, missing, trains, version_tuple
from zeroguard.backends.deepspeed.finite import checks_gradients
from zeroguard.backends.deepspeed.older import adds_at_boundary
from zeroguard.backends.deepspeed.rhythm import loss_scale, unasked_clipping

__all__ = [
    "TABLE",
    "VERIFIED",
    "DeepSpeedBackend",
    "cannot_announce",
    "cannot_guard",
    "config_of",
    "facts_of",
    "find_engine",
    "missing",
    "open_backend",
]


def find_engine(candidate: Any) -> tuple[Any, list[str]]:
    """LOCAL. The DeepSpeed engine that ``candidate`` is or leads to, and where was looked; None if there is none."""
    looked = [f"the object itself ({type(candidate).__module__}.{type(candidate).__qualname__})"]
    if _is_engine(candidate):
        return candidate, looked
    paths = (
        "deepspeed_engine_wrapped.engine",
        "accelerator.deepspeed_engine_wrapped.engine",
        "strategy.deepspeed_engine",
        "strategy.model",
        "_forward_module",
        "model_wrapped",
        "deepspeed",
        "_orig_mod",
    )
    for path in paths:
        found = candidate
        for part in path.split("."):
            found = getattr(found, part, None)
        looked.append(f".{path}")
        if _is_engine(found):
            return found, looked
    return None, looked


def _is_engine(candidate: Any) -> bool:
    module = sys.modules.get("deepspeed")
    kind = getattr(module, "DeepSpeedEngine", None)
    return kind is not None and isinstance(candidate, kind)


def _accelerator() -> Any:
    return sys.modules["deepspeed"].accelerator.get_accelerator()


def config_of(engine: Any) -> Mapping[str, Any]:
    """LOCAL. The DeepSpeed configuration that the engine was made with, as a dict; empty if it cannot be read."""
    # Some releases keep the path where a file was given, and the dict only in the object that they parsed it into.
    for found in (getattr(engine, "config", None), getattr(getattr(engine, "_config", None), "_param_dict", None)):
        if isinstance(found, Mapping):
            return found
    return {}


def facts_of(engine: Any) -> EngineFacts:
    """LOCAL. What is known of an engine at attach."""
    import torch
    import torch.distributed as dist

    optimizer = engine.optimizer
    stage = int(engine.zero_optimization_stage())
    offload, pinned = _offload(engine, stage)
    accelerator = _accelerator()
    managed = getattr(engine, "managed_gradient_accumulation", None)
    param = next(iter(engine.module.parameters()), None)
    version = sys.modules["deepspeed"].__version__
    return EngineFacts(
        stage=stage,
        offload_optimizer=offload,
        pin_memory=pinned,
        overlap_comm=bool(getattr(optimizer, "overlap_comm", False)),
        accumulation_steps=int(engine.gradient_accumulation_steps()),
        managed_accumulation=True if managed is None else bool(managed()),
        dtype="unknown" if param is None else str(param.dtype).removeprefix("torch."),
        world_size=int(getattr(engine, "dp_world_size", None) or 1),
        rank=dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,
        accelerator=accelerator.device_name(),
        # Releases before this method existed knew only accelerators that do not resolve dependencies, and the CPU.
        resolves_data_dependency=bool(getattr(accelerator, "resolves_data_dependency", lambda: False)()),
        optimizer=type(optimizer).__name__,
        deepspeed_version=version,
        torch_version=torch.__version__,
        # By the release too: where the attribute has another name, the guard is unavailable, and not left out.
        output_hooks=hasattr(engine, "_backward_prologue_per_tensor") or version_tuple(version) >= (0, 18),
        own_copy_events=hasattr(optimizer, "_pending_offload_events"),
        trains=trains(optimizer),
        loss_scale=loss_scale(engine),
        unasked_clipping=unasked_clipping(engine, config_of(engine)),
        checks_gradients=checks_gradients(engine),
        adds_at_boundary=adds_at_boundary(sys.modules["deepspeed"].__version__),
    )


def _offload(engine: Any, stage: int) -> tuple[str, bool]:
    optimizer = engine.optimizer
    if stage in (1, 2) and getattr(optimizer, "cpu_offload", False):
        return "cpu", bool(optimizer.cpu_offload_pin_memory)
    if stage == 3 and getattr(optimizer, "offload_optimizer", False):
        device = "nvme" if getattr(optimizer, "swap_optimizer", False) else "cpu"
        return device, bool(getattr(optimizer, "offload_optimizer_pin_memory", False))
    return "none", False


def cannot_guard(engine: Any) -> str:
    """LOCAL. Why no guard can act on this engine; empty where they can."""
    if any(getattr(engine, name, bool)() for name in ("is_deepcompile_enabled", "is_deepcompile_active")):
        return (
            "DeepCompile (compile.deepcompile in the DeepSpeed configuration) replaces the hooks and reduction that "
            "guards watch. Leave it out; engine.compile() and torch.compile(engine) are guarded"
        )
    return ""


def cannot_announce(facts: EngineFacts) -> str:
    """LOCAL. Why this engine can only be guarded by wrapping it; empty where the loop's own calls are enough."""
    return DeepSpeedBackend.cannot_announce(facts.deepspeed_version, facts.offload)


def open_backend(engine: Any, facts: EngineFacts) -> DeepSpeedBackend:
    """LOCAL. The backend of one engine, not attached yet."""
    return DeepSpeedBackend(engine, facts, _accelerator)
