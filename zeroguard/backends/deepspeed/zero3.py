"""Stage 3: where gradients wait for the step, and how that is put right.

Read from DeepSpeed's runtime/zero/stage3.py, releases 0.16.9 to 0.19.8: each parameter has a slice of one flat
buffer of gradient partitions. The first backward of a window copies into it, later ones add; a parameter that the
first one did not reach keeps an earlier window's gradient, and a later one adds to that. With an offloaded optimizer,
a boundary backward copies the slices of the parameters that it reached to the fp32 partition's ``.grad``, and only
those.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroguard.backends.base import Done
from zeroguard.backends.deepspeed.plain import Accumulators

__all__ = ["Zero3Accumulators"]


class Zero3Accumulators(Accumulators):
    """Accumulators of DeepSpeedZeroOptimizer_Stage3. ``wait`` returns once pending device-to-host copies have
    landed."""

    def __init__(self, engine: Any, names: dict[int, str], wait: Any, *, fresh: bool) -> None:
        super().__init__(engine, names)
        opt = self.optimizer
        self.wait = wait
        self.offload = bool(opt.offload_optimizer)
        self.params = {id(p): p for group in opt.fp16_groups for p in group}
        #: buffer slices, and slices of the fp32 partition's .grad, that may hold something
        self.dirty: set[int] = set()
        self.dirty_fp32: set[int] = set()
        #: attached in the middle of a window: what it reached before is not known, so nothing of it counts as idle
        self.unknown = opt.micro_step_id > 0 or bool(getattr(opt, "_epilogue_ran_this_backward", False))
        if not fresh:  # attached in the middle of training: a look at what earlier windows left
            wait()
            self.dirty = {key for key in self.params if bool(self._buffer(key).any())}
            if self.offload:
                slices = {key: self._fp32(key) for key in self.params}
                self.dirty_fp32 = {key for key, piece in slices.items() if piece is not None and bool(piece.any())}
        self.held: set[int] = set()
        self.missed: set[int] = set()
        self.last: set[int] = set()
        self.zeroed: set[int] = set()
        #: entered in this window, in a backward that added to an earlier window's gradient
        self.mixed: set[int] = set()

    def _buffer(self, key: int) -> torch.Tensor:
        return self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[self.params[key].ds_id]

    def _place(self, key: int) -> tuple[int, int, int]:
        """sub-group, offset in its flat fp32 partition, elements."""
        return tuple(self.optimizer.grad_position[self.optimizer.get_param_id(self.params[key])])  # type: ignore

    def _fp32(self, key: int) -> torch.Tensor | None:
        group, dest, numel = self._place(key)
        grad = self.optimizer.fp32_partitioned_groups_flat[group].grad
        return None if grad is None else grad.narrow(0, dest, numel)

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def trainable(self) -> set[int]:
        return set(self.params)

    def began(self, boundary: bool) -> None:
        self.first = self.optimizer.micro_step_id == 0

    def closed_backward(self, boundary: bool) -> None:
        now = self.now & self.params.keys()
        if not self.first and not self.unknown:
            self.mixed |= now & (self.dirty - self.entered)
        if self.offload:
            if boundary:
                self.missed |= self.held - now
                self.missed -= now
                self.held.clear()
                self.dirty_fp32 |= now
            else:
                self.held |= now
        self.dirty |= now
        self.entered |= now
        self.last = now
        self.now.clear()
        self.twice.clear()

    def consumed(self) -> None:
        super().consumed()
        # Unmanaged accumulation: engine.step() has just copied everything that was held.
        self.dirty_fp32 |= self.held
        self.held.clear()

    def reset_window(self) -> None:
        super().reset_window()
        self.held.clear()
        self.missed.clear()
        self.mixed.clear()
        self.zeroed.clear()
        self.unknown = False

    def discard(self) -> None:
        super().discard()
        if not self.unmanaged:
            self.held.clear()
        self.missed.clear()

    def idle(self) -> set[int]:
        return set() if self.unknown else super().idle()

    def stale(self) -> set[int]:
        if self.unknown:
            return set()
        left = self.dirty_fp32 if self.offload else self.dirty & self._consumed()
        return left - self.entered - self.now | self.mixed

    def uncleared(self) -> set[int]:
        return self.stale() & self.thrown

    def _consumed(self) -> set[int]:
        """Without offload, DeepSpeed itself steps a parameter that was frozen in mid-run with zeros."""
        return {key for key, param in self.params.items() if param.requires_grad}

    def lost(self) -> set[int]:
        return set(self.missed)

    # -- repairs -----------------------------------------------------------------------------------------------------

    def settle(self, boundary: bool) -> list[Done]:
        if self.first:
            self._zero(self.dirty - self.last)
            self.dirty = set(self.last)
        if not (self.offload and boundary):
            return []
        done = self._recover()
        if not self.unknown:
            self._zero_fp32(self.dirty_fp32 - self.entered)
        return done

    def _zero(self, keys: set[int]) -> None:
        if keys and self.offload:
            self.wait()
        for key in keys:
            self._buffer(key).zero_()
        self.zeroed |= keys

    def _zero_fp32(self, keys: set[int]) -> None:
        if keys:
            self.wait()
        for key in keys:
            piece = self._fp32(key)
            if piece is not None:
                piece.zero_()
        self.dirty_fp32 -= keys
        self.zeroed |= keys

    def _recover(self) -> list[Done]:
        if not self.missed:
            return []
        opt = self.optimizer
        self.wait()
        for key in self.missed:
            piece = self._fp32(key)
            if piece is None:
                continue
            piece.copy_(self._buffer(key))
            opt.norm_for_param_grads[opt.get_param_id(self.params[key])] = opt._constant_buffered_norm2(
                self._buffer(key)
            )
        names = self.named(self.missed)
        self.dirty_fp32 |= self.missed
        self.missed.clear()
        return [Done("gradient_recovered", names, "Reached by a non-boundary backward only; now consumed by the step.")]

    def drop_idle(self) -> list[Done]:
        idle = self.idle()
        self._zero(self.dirty & idle)
        self.dirty -= idle
        if self.offload:
            self._zero_fp32(self.dirty_fp32 & idle)
        dropped = self.zeroed & idle & (set(self.params) if self.offload else self._consumed())
        self.zeroed.clear()
        if not dropped:
            return []
        return [Done("stale_gradient_dropped", self.named(dropped), "No backward of this window reached it.")]

    def clear(self) -> list[Done]:
        opt = self.optimizer
        had = self.named(self.entered | self.now)
        opt.micro_step_id = 0
        if hasattr(opt, "_epilogue_ran_this_backward"):
            opt._epilogue_ran_this_backward = False
        self.drop_unfinished()
        if self.offload:
            self.wait()
        if self.dirty or self.entered:
            opt.grad_partitions_flat_buffer.zero_()
        if self.offload:
            for flat in opt.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()
            opt.norm_for_param_grads = {}
            if hasattr(opt, "_offload_boundary_param_ids"):
                opt._offload_boundary_param_ids = set()
        self.dirty.clear()
        self.dirty_fp32.clear()
        self.reset_window()
        return [Done("accumulators_cleared", had, "zero_grad cleared what ZeRO had accumulated outside .grad.")]

    def drop_unfinished(self) -> None:
        opt = self.optimizer
        buckets = list(getattr(opt, "ipg_buckets", {}).values())
        for bucket in buckets:
            bucket.params.clear()
            bucket.elements = 0
            if hasattr(bucket, "process_group"):
                bucket.process_group = None
        if not buckets:  # up to 0.16 there is one bucket, a list of parameters
            opt.params_in_ipg_bucket = []
        for key in opt.params_already_reduced:
            opt.params_already_reduced[key] = False
        self.dirty |= self.now & self.params.keys()  # full buckets were reduced before it raised
        self.now.clear()

    # -- idle: untouched -----------------------------------------------------------------------------------------------

    def shelve_idle(self) -> list[Done]:
        for key in self.idle():
            group, dest, numel = self._place(key)
            self._shelve_slice(self.optimizer.fp32_partitioned_groups_flat[group], dest, numel)
            self.shelf.append((self.params[key], self.params[key].ds_tensor.detach().clone()))
        return []

    def unshelve_idle(self) -> list[Done]:
        whole = [(p, value) for p, value in self.shelf if hasattr(p, "ds_tensor")]
        self.shelf = [(p, value) for p, value in self.shelf if not hasattr(p, "ds_tensor")]
        self._unshelve()
        for param, value in whole:
            # The step re-points ds_tensor.data, so the partition is looked up now; a persistent parameter was gathered
            # again with the stepped value and is let go, to be gathered from the restored partitions.
            param.ds_tensor.data.copy_(value)
            if param.ds_status.name == "AVAILABLE":
                param.partition()
        return []
