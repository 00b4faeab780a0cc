"""The gradient audit of an engine: where its samples come from and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from zeroguard.backends.base import Done, GradientAudit, UpdateAudit
from zeroguard.backends.deepspeed.audit import GradientSamples
from zeroguard.backends.deepspeed.sections import Members, Section, SharedMemory
from zeroguard.backends.deepspeed.state import BackendState

__all__ = ["Audited"]


class Audited(BackendState):
    """Reads and requests of the guard ``gradient_audit``."""

    _samples: GradientSamples | None = None
    _in_masters: list[Members] | None = None

    @cached_property
    def _low(self) -> SharedMemory:
        """Where the low-precision weights lie."""
        return SharedMemory()

    def _gradient_samples(self) -> GradientSamples:
        if self._samples is None:
            accumulator = getattr(self.optimizer, "gradient_accumulation_dtype", None)
            dtypes = [param.dtype for param, _ in self._audited_parameters()]
            dtypes += [d for d in (accumulator, self.engine.communication_data_type) if isinstance(d, torch.dtype)]
            ranks = self.facts.world_size
            self._samples = GradientSamples(
                self._audited_parameters, self.engine.device, ranks, self.groups[:1], dtypes
            )
        return self._samples

    def _audited_parameters(self) -> Sequence[tuple[Any, str]]:
        """(parameter, name), whether trained at this moment or not: a GAN freezes half of them for a backward."""
        if self.facts.layout == 0:
            return [(param, name) for name, param in self.engine.module.named_parameters()]
        return self.reading.stepped()

    # -- sampling ----------------------------------------------------------------------------------------------------

    def sample_gradients(self, elements: int, seed: int) -> Sequence[Done]:
        samples = self._armed(elements, seed)
        samples.began()
        return []

    def _armed(self, elements: int, seed: int) -> GradientSamples:
        samples = self._gradient_samples()
        if not samples.armed:
            samples.arm(elements, seed)
            if self.joined_in_window and not self.tracker.steps:
                samples.spoil("zeroguard was attached in the middle of this window")
        return samples

    def spoil_samples(self, why: str) -> Sequence[Done]:
        self._gradient_samples().spoil(why)
        return []

    def forget_samples(self) -> Sequence[Done]:
        self._gradient_samples().clear()
        return []

    def end_samples(self) -> Sequence[Done]:
        if self._samples is not None:
            self._samples.disarm()
        return []

    # -- comparing -----------------------------------------------------------------------------------------------------

    def audit_gradients(self, elements: int, seed: int) -> GradientAudit:
        reason = self.reading.limits() or self._not_here()
        if reason:
            return GradientAudit(skipped=reason)
        with torch.no_grad():
            samples = self._armed(elements, seed)
            if self.wraps_nothing and not samples.rows:
                samples.spoil("no backward of this window was announced")
            gradients = self.reading.sections()
            if self.facts.layout in (0, "bf16"):
                return samples.compare(gradients)
            return samples.compare(gradients, self._masters(), self._copies())

    def _not_here(self) -> str:
        if int(getattr(self.engine, "sequence_parallel_size", 1) or 1) > 1:
            return "with sequence parallelism gradients are averaged over other ranks than they are computed on"
        if self.facts.layout == 0 and self.engine.gradient_clipping() > 0:
            return "at stage 0 DeepSpeed clips before the optimizer's step begins"
        if self.wraps_nothing and not self.facts.managed_accumulation:
            return "DeepSpeed finishes the gradients of unmanaged accumulation inside engine.step()"
        return ""

    def audit_update(self) -> Callable[[], UpdateAudit]:
        if self._samples is None or self.facts.layout in (0, "bf16"):
            return UpdateAudit
        with torch.no_grad():
            factor = self._clip() / self.reading.scale()
            result = self._samples.moved(self._masters(), self._copies(), self._rates(), factor)
        if self.engine.device.type == "cpu":
            return result
        copied = self.accelerator().Event()
        copied.record()

        def wait() -> UpdateAudit:
            copied.synchronize()
            return result()

        return wait

    def _clip(self) -> torch.Tensor | float:
        """What clipping multiplied the gradients by; not read where it is on the device, which would wait for it."""
        limit, norm = float(self.engine.gradient_clipping() or 0.0), self.engine.get_global_grad_norm()
        if limit <= 0 or norm is None:
            return 1.0
        return (limit / torch.as_tensor(norm, device=self.engine.device).float()).clamp(max=1.0).nan_to_num(1.0)

    def _rates(self) -> dict[int, float]:
        """Learning rates by parameter."""
        groups = self.optimizer.optimizer.param_groups
        owner = self.optimizer.sub_group_to_group_id if self.facts.layout == 3 else {}
        rates: dict[int, float] = {}
        for number, parts in enumerate(self.reading.partition()):
            rate = float(groups[owner.get(number, number)].get("lr", 0.0))
            rates.update((id(part.param), rate) for part in parts)
        return rates

    def _masters(self) -> Iterable[Section]:
        """The fp32 master weights of this rank: a flat partition a group."""
        flats = self.master_weights()
        if self._in_masters is None:
            partition = self.reading.partition()
            self._in_masters = [
                Members([(id(p.param), p.start, p.numel, p.dest) for p in parts]) for parts in partition
            ]
        return [(flat.data.view(-1), members) for flat, members in zip(flats, self._in_masters, strict=False)]

    def _copies(self) -> Iterable[Section]:
        """The same elements of the weights that the forward uses, by the memory that they share."""
        stage3 = self.facts.layout == 3
        parts = [part for parts in self.reading.partition() for part in parts]
        held = [part.param.ds_tensor if stage3 else part.param for part in parts]
        pieces = [(id(part.param), part.start, part.numel) for part in parts]
        return self._low.sections(pieces, held, skip=not stage3)
