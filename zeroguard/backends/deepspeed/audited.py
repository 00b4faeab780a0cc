"""The gradient audit of an engine: where its samples come from and what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroguard.backends.base import Done, GradientAudit, UpdateAudit
from zeroguard.backends.deepspeed.audit import GradientSamples, Sections
from zeroguard.backends.deepspeed.state import BackendState

__all__ = ["Audited"]


class Audited(BackendState):
    """Reads and requests of the guard ``gradient_audit``."""

    _samples: GradientSamples | None = None

    def _gradient_samples(self) -> GradientSamples:
        if self._samples is None:
            stepped = [(name, param) for param, name in self.reading.stepped()]
            accumulator = getattr(self.optimizer, "gradient_accumulation_dtype", None)
            dtypes = [param.dtype for _, param in stepped]
            dtypes += [d for d in (accumulator, self.engine.communication_data_type) if isinstance(d, torch.dtype)]
            ranks = self.facts.world_size
            self._samples = GradientSamples(stepped, self.engine.device, ranks, self.groups[:1], dtypes)
        return self._samples

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
            pieces = ((id(p.param), p.offset_in_param, p.values) for p in self.reading.pieces())
            if self.facts.layout in (0, "bf16"):
                return samples.compare(pieces)
            return samples.compare(pieces, self._masters(), self._copies())

    def _not_here(self) -> str:
        if int(getattr(self.engine, "sequence_parallel_size", 1) or 1) > 1:
            return "with sequence parallelism gradients are averaged over other ranks than they are computed on"
        if self.facts.layout == 0 and self.engine.gradient_clipping() > 0:
            return "at stage 0 DeepSpeed clips before the optimizer's step begins"
        if self.wraps_nothing and not self.facts.managed_accumulation:
            return "DeepSpeed finishes the gradients of unmanaged accumulation inside engine.step()"
        return ""

    def audit_update(self) -> UpdateAudit:
        if self._samples is None or self.facts.layout in (0, "bf16"):
            return UpdateAudit()
        with torch.no_grad():
            factor = self._clip() / self.reading.scale()
            return self._samples.moved(self._masters(), self._copies(), self._rates(), factor)

    def _clip(self) -> float:
        """What clipping multiplied the gradients by."""
        limit = float(self.engine.gradient_clipping() or 0.0)
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        return min(1.0, limit / norm) if limit > 0 and norm > 0 else 1.0

    def _rates(self) -> dict[int, float]:
        """Learning rates by parameter."""
        groups = self.optimizer.optimizer.param_groups
        owner = self.optimizer.sub_group_to_group_id if self.facts.layout == 3 else {}
        rates: dict[int, float] = {}
        for number, parts in enumerate(self.reading.partition()):
            rate = float(groups[owner.get(number, number)].get("lr", 0.0))
            rates.update((id(part.param), rate) for part in parts)
        return rates

    def _masters(self) -> Sections:
        """The fp32 master weights of this rank: a flat partition a group."""
        opt = self.optimizer
        self.copies.hot += 1
        try:
            flats = list(
                opt.fp32_partitioned_groups_flat if self.facts.layout == 3 else opt.single_partition_of_fp32_groups
            )
        finally:
            self.copies.hot -= 1
        partition = self.reading.partition()
        for flat, parts in zip(flats, partition, strict=False):
            yield flat.data.view(-1), ((id(p.param), p.start, p.numel, p.dest) for p in parts)

    def _copies(self) -> Sections:
        """The same elements of the weights that the forward uses, by the memory that they share."""
        stage3 = self.facts.layout == 3
        shared: dict[tuple[int, torch.dtype], tuple[torch.Tensor, list[tuple[int, int, int, int]]]] = {}
        for parts in self.reading.partition():
            for part in parts:
                values = part.param.ds_tensor.data if stage3 else part.param.data
                storage = values.untyped_storage()
                key = (storage.data_ptr(), values.dtype)
                if key not in shared:
                    flat = torch.empty(0, dtype=values.dtype, device=values.device).set_(storage)
                    shared[key] = (flat, [])
                base = values.storage_offset() + (0 if stage3 else part.start)
                shared[key][1].append((id(part.param), part.start, part.numel, base))
        return list(shared.values())
