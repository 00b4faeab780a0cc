"""ZeRO-3 parameter status: what is in flight, what contradicts the registry, what stays gathered. LOCAL throughout.

Waiting for a gather that was already launched is no new collective: every rank launched its part of it.
"""

from __future__ import annotations

from typing import Any

from zeroguard.backends.base import Done, ParamStatus

__all__ = ["ParamWatch"]

_RELEASE = "_PartitionedParameterCoordinator__release_param"


class ParamWatch:
    """The status of one ZeRO-3 engine's parameters."""

    def __init__(self, engine: Any) -> None:
        self.module = engine.module
        self.optimizer = engine.optimizer
        self.params = [(name, p) for name, p in engine.module.named_parameters() if hasattr(p, "ds_status")]
        first = self.params[0][1] if self.params else None
        status = type(first.ds_status) if first is not None else None
        self.in_flight = getattr(status, "INFLIGHT", None)
        self.available = getattr(status, "AVAILABLE", None)

    @property
    def registry(self) -> Any:
        """Running gathers: parameter -> handle."""
        return self.module.ds_inflight_param_registry

    def look(self, scan: bool = True) -> ParamStatus:
        """The status now; without ``scan`` only the registry's size."""
        registry = self.registry
        if not scan:
            return ParamStatus(registry=len(registry))
        if not registry and self._quiet():
            return _REST
        flying, available = self.in_flight, self.available
        in_flight: list[tuple[str, Any]] = []
        active: list[str] = []
        gathered: list[tuple[str, int]] = []
        for name, param in self.params:
            status = param.ds_status
            if status is flying:
                in_flight.append((name, param))
            elif status is available and not param.ds_persist:
                gathered.append((name, param.ds_numel * param.element_size()))
            if param.ds_active_sub_modules:
                active.append(name)
        names = {id(p): n for n, p in self.params}
        return ParamStatus(
            in_flight=tuple(n for n, _ in in_flight),
            registry=len(registry),
            orphans=tuple(n for n, p in in_flight if p not in registry),
            contradictions=tuple(
                names.get(id(p), "?") for p, h in registry.items() if p.ds_status is not flying and not _complete(h)
            ),
            active=tuple(active),
            gathered=tuple(gathered),
        )

    def partitioned(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Parameters of that shape that are partitioned now; only the frozen ones, if there are any."""
        away = getattr(type(self.in_flight), "NOT_AVAILABLE", None)
        found = [(name, p) for name, p in self.params if p.ds_status is away and tuple(p.ds_shape) == shape]
        return tuple(name for name, p in found if not p.requires_grad) or tuple(name for name, _ in found)

    def _quiet(self) -> bool:
        """One pass without an allocation: whether each parameter is partitioned, or persistent, and unclaimed."""
        flying, available = self.in_flight, self.available
        for _, param in self.params:
            status = param.ds_status
            if status is flying or (status is available and not param.ds_persist) or param.ds_active_sub_modules:
                return False
        return True

    def release(self) -> list[Done]:
        """Wait for every gather in the registry and release its parameters; clear claims that no module holds."""
        registry = self.registry
        names = {id(p): n for n, p in self.params}
        waited: list[str] = []
        held: list[Any] = []
        for param in list(registry.keys()):
            handle = registry[param]
            if param.ds_status is not self.in_flight and not _complete(handle):
                continue  # a contradiction: not ours to guess at
            handle.wait()
            registry.pop(param, None)
            waited.append(names.get(id(param), "?"))
            held.append(param)
        claimed: list[str] = []
        for name, param in self.params:
            if param.ds_active_sub_modules:
                param.ds_active_sub_modules.clear()
                claimed.append(name)
                if param.ds_status is self.available:
                    held.append(param)
        # An engine without an optimizer has the offload itself in its place.
        coordinator = getattr(self.optimizer, "parameter_offload", self.optimizer).get_param_coordinator()
        release = getattr(coordinator, _RELEASE, None)
        for param in held:
            if param.ds_status is self.available and not param.ds_persist:
                if release is not None:
                    release(param)
                else:
                    param.partition()
        done: list[Done] = []
        if waited:
            done.append(
                Done("gather_released", tuple(waited), "Left in flight outside forward and backward; waited for.")
            )
        if claimed:
            done.append(Done("claim_cleared", tuple(claimed), "A submodule that no longer runs still claimed it."))
        return done


def _complete(handle: Any) -> bool:
    """Whether a gather is done. One handle serves several parameters: waiting for one leaves the others' entries
    behind."""
    parts = getattr(handle, "handles", None)
    if parts is not None:
        return all(_complete(part) for part in parts)
    # The flag is public in one of DeepSpeed's three handle classes and private in the others.
    return any(bool(value) for name, value in vars(handle).items() if name.endswith("complete"))


_REST = ParamStatus()
