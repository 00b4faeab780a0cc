"""Stages 1 and 2: where gradients wait for the step, and how that is put right.

Read from DeepSpeed's runtime/zero/stage_1_and_2.py, releases 0.16.9 to 0.19.8:

* not offloaded: each boundary backward replaces ``averaged_gradients``; several of them before one step overwrite each
  other, so earlier ones are *carried* and added;
* offloaded: a non-boundary backward goes to ``accumulated_grads_in_cpu``, a boundary backward writes its parameters'
  slices of the fp32 partition's ``.grad``, and nothing ever clears the slices of the others. Slices that this window
  did not write keep an earlier window's gradient (*stale*); parameters that only a non-boundary backward reached never
  get there (*lost*);
* fp32 accumulation of lower-precision parameters (0.19.8): one flat buffer adds everything up and is copied by
  parameter.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroguard.backends.base import Done
from zeroguard.backends.deepspeed.older import adds_at_boundary, drops_micro_batches, replaces_micro_batches
from zeroguard.backends.deepspeed.plain import Accumulators

__all__ = ["Zero12Accumulators"]


#: On releases that look at averaged_gradients to decide between replacing and adding: add.
_ADD: tuple[()] = ()


class Zero12Accumulators(Accumulators):
    """Accumulators of DeepSpeedZeroOptimizer. ``wait`` returns once pending device-to-host copies have landed."""

    def __init__(self, engine: Any, names: dict[int, str], wait: Any, *, fresh: bool, version: str) -> None:
        super().__init__(engine, names)
        opt = self.optimizer
        self.wait = wait
        self.replaces = replaces_micro_batches(version)
        self.offload = bool(opt.cpu_offload)
        self.partitions = bool(opt.partition_gradients)
        # The list object may be replaced by one that waits; the parameters in it stay.
        self.masters = list(opt.single_partition_of_fp32_groups)
        self.owned = {id(p): (p, g) for g, group in enumerate(opt.params_in_partition) for p in group}
        known = self.owned  # its entries serve twice
        self.params = {id(p): known.get(id(p)) or (p, g) for g, group in enumerate(opt.bit16_groups) for p in group}
        self.cpu = getattr(opt, "accumulated_grads_in_cpu", {})
        #: attached in the middle of a window: what it reached before is not known, so nothing of it counts as idle
        self.unknown = opt.micro_step_id >= 0
        # Attached in the middle of training: a look at what earlier windows left.
        self.dirty: set[int] = set()
        if self.offload and not fresh:
            wait()
            self.dirty = {key for key in self.owned if bool(self._slice(key).any())}
        self.dirty_cpu = set() if fresh else set(self.owned)
        self.held: set[int] = set()
        self.missed: set[int] = set()
        self.last: set[int] = set()
        self.zeroed: set[int] = set()
        self.carried: dict[int, Any] = {}
        #: what a further backward adds to; what of it zero_grad threw away; what was added to that
        self.adds = adds_at_boundary(version) and not self.offload
        self.keeps = self.partitions and not (drops_micro_batches(version) and opt.gradient_accumulation_steps <= 1)
        self.added: set[int] = set()
        self.left: set[int] = set()
        self.mixed: set[int] = set()
        #: on the device: thrown away, and the step's until another boundary backward takes its place
        self.ready: set[int] = set()
        #: ZeRO-1: what only backwards before the boundary reached, and no reduction took
        self.unreduced: set[int] = set()
        self.cleared = False
        #: a boundary backward has produced something since the last carry
        self.produced = False

    # -- places ----------------------------------------------------------------------------------------------------

    def _compact(self, group: int) -> bool:
        probe = getattr(self.optimizer, "_use_compact_grad_partition_buffer", None)
        return bool(probe is not None and probe(group))

    def _place(self, key: int) -> tuple[int, int, int, int]:
        """group, offset in the parameter, offset in the partition, elements."""
        opt = self.optimizer
        param, group = self.owned[key]
        pid = opt.get_param_id(param)
        if self.offload:
            return tuple(opt.grad_position[pid])  # type: ignore[return-value]
        rank = torch.distributed.get_rank(group=opt.real_dp_process_group[group])
        source = int(opt.grad_start_offset[group][rank][pid])
        dest = int(opt.grad_partition_insertion_offset[group][rank][pid])
        return group, source, dest, int(min(param.numel() - source, opt.partition_size[group] - dest))

    def _slice(self, key: int) -> torch.Tensor:
        group, _, dest, numel = self._place(key)
        return self.masters[group].grad.view(-1).narrow(0, dest, numel)

    def _note_norm(self, key: int) -> None:
        opt = self.optimizer
        piece = self._slice(key).float()
        opt.norm_for_param_grads[opt.get_param_id(self.owned[key][0])] = piece.norm(2)
        if not torch.isfinite(piece).all():
            opt.local_overflow = True

    # -- bookkeeping -----------------------------------------------------------------------------------------------

    def trainable(self) -> set[int]:
        return set(self.params)

    def began(self, boundary: bool) -> None:
        self.first = self.optimizer.micro_step_id < 0

    def closed_backward(self, boundary: bool) -> None:
        mine = self.now & self.owned.keys()
        self.produced = self.produced or boundary
        self._note_sums(mine, boundary)
        if self.offload:
            if boundary:
                self.missed |= self.held - mine
                self.missed -= mine
                self.held.clear()
                self.dirty |= mine
            else:
                self.held |= mine
        self.entered |= self.now
        self.last = mine
        self.now.clear()
        self.twice.clear()

    def _note_sums(self, mine: set[int], boundary: bool) -> None:
        """Which sums a backward has begun, or gone on with."""
        if self.first or (self.replaces and not self.offload and not boundary):
            self.added.clear()
            self.left.clear()
        self.mixed |= mine & self.left
        if self.adds or (self.keeps and not boundary):
            self.added |= mine
        if boundary and not self.offload:
            self.ready.clear()
        if boundary and not self.partitions and self.optimizer.overlap_comm:
            pending = self.optimizer.get_gradient_for_reduction
            self.unreduced = {key for key in self.owned.keys() - self.now if pending(self.owned[key][0]) is not None}

    def discard(self) -> None:
        if not self.offload and self.produced:
            self.ready |= self.entered & self.owned.keys()
        self.left |= self.added & self.entered
        super().discard()
        if not self.unmanaged:
            self.held.clear()
        self.missed.clear()
        self.unreduced.clear()

    def consumed(self) -> None:
        super().consumed()
        opt = self.optimizer
        if self.cleared and not self.offload:
            # A step after zero_grad without a backward steps with zero gradients, not with None.
            for group, size in enumerate(opt.partition_size):
                if opt.averaged_gradients.get(group) is None:
                    place = self.masters[group].device
                    zeros = torch.zeros(int(size), dtype=opt.gradient_accumulation_dtype, device=place)
                    opt.averaged_gradients[group] = [zeros]
        self.cleared = False
        # Unmanaged accumulation: engine.step() has just copied everything that was held.
        self.dirty |= self.held
        self.held.clear()

    def finalizes(self) -> None:
        """Unmanaged accumulation: engine.step() is about to hand over a window that zero_grad has emptied, and looks
        for buckets and gradients that only a backward makes."""
        opt = self.optimizer
        if not self.cleared or (self.offload and self.partitions):
            return
        if not self.partitions:
            opt.setup_buckets()
            return
        for group, params in enumerate(opt.params_in_partition):
            if opt.all_grad_tensors.get(group) is None:
                opt.all_grad_tensors[group] = opt.get_all_grad_tensors(params, opt.gradient_accumulation_dtype)

    def reset_window(self) -> None:
        super().reset_window()
        self.held.clear()
        self.missed.clear()
        self.carried.clear()
        self.produced = False
        self.zeroed.clear()
        self.unknown = False
        for keys in (self.added, self.left, self.mixed, self.ready, self.unreduced):
            keys.clear()

    def idle(self) -> set[int]:
        return set() if self.unknown else super().idle()

    def stale(self) -> set[int]:
        if self.unknown or not self.offload:
            return set()
        return self.dirty - self.entered - self.now

    def uncleared(self) -> set[int]:
        if self.unknown:
            return set()
        left = self.left if self.unmanaged else set()
        return (self.mixed | self.ready | left | self.stale()) & self.thrown

    def lost(self) -> set[int]:
        return self.missed | self.unreduced

    # -- repairs -----------------------------------------------------------------------------------------------------

    def carry(self) -> list[Done]:
        opt = self.optimizer
        if not self.produced:
            return []
        self.produced = False
        for group, master in enumerate(self.masters):
            if self._compact(group):
                continue
            if not self.offload:
                if opt.averaged_gradients.get(group) is not None:
                    self.carried[group] = opt.averaged_gradients[group]
                    opt.averaged_gradients[group] = None
                continue
            self.wait()
            held = self.carried.get(group)
            self.carried[group] = master.grad.clone() if held is None else held.add_(master.grad)
            master.grad.zero_()
        if self.offload:
            # The next backward then overwrites, as the first one of a window does; what it does not reach is zero.
            opt.micro_step_id = -1
            self.held.clear()
        return []

    def put_back(self) -> None:
        for group in list(self.carried):
            earlier = self.carried.pop(group)
            if self.offload:
                self.masters[group].grad.add_(earlier)
            else:
                self.optimizer.averaged_gradients[group] = earlier

    def flush_pending(self, boundary: bool) -> list[Done]:
        opt = self.optimizer
        if self.replaces and not self.offload:
            for group, kept in opt.all_grad_tensors.items():
                if kept is not None and opt.averaged_gradients.get(group) is None:
                    opt.averaged_gradients[group] = _ADD
        if not boundary or self.partitions or not opt.overlap_comm:
            return []
        found: set[int] = set()
        for key, (param, group) in self.params.items():
            if key in self.now or opt.params_already_reduced[opt.get_param_id(param)]:
                continue
            if opt.get_gradient_for_reduction(param) is None:
                continue
            if not opt.ready_for_gradients:
                getattr(opt, "setup_buckets", opt.backward_prologue)()
            found.add(key)
            opt.reduce_ready_partitions_and_remove_grads(param, group)
        if not found:
            return []
        return [
            Done(
                "gradient_recovered",
                self.named(found),
                "Reached by a non-boundary backward only; reduced with this boundary.",
            )
        ]

    def settle(self, boundary: bool) -> list[Done]:
        done: list[Done] = []
        for group, grads in self.optimizer.averaged_gradients.items():
            if grads is _ADD:
                self.optimizer.averaged_gradients[group] = None
        if self.offload:
            self._zero_old_accumulators()
            if boundary:
                done += self._recover()
                self._zero_stale()
        if boundary and self.carried:
            done += self._add_carried()
        return done

    def _zero_old_accumulators(self) -> None:
        """After the first backward of a window: later ones add to what they find."""
        if self.first and self.partitions:
            for key in self.dirty_cpu - self.last:
                buffer = self.cpu.get(self.optimizer.get_param_id(self.owned[key][0]))
                if buffer is not None:
                    buffer.zero_()
            self.dirty_cpu = set(self.last)
        else:
            self.dirty_cpu |= self.last

    def _recover(self) -> list[Done]:
        opt = self.optimizer
        if not self.missed:
            return []
        self.wait()
        for key in self.missed:
            group, source, dest, numel = self._place(key)
            target = self._slice(key)
            if self._compact(group):
                target.copy_(opt.averaged_gradients[group].flat_partition.narrow(0, dest, numel))
            elif not getattr(opt, "low_precision_master_weights_and_grads", False):
                kept = self.cpu[opt.get_param_id(self.owned[key][0])]
                target.copy_(kept.view(-1).narrow(0, source, numel))
            self._note_norm(key)
        names = self.named(self.missed)
        self.dirty |= self.missed
        self.missed.clear()
        return [Done("gradient_recovered", names, "Reached by a non-boundary backward only; now consumed by the step.")]

    def _zero_stale(self) -> None:
        old = self.stale()
        if old:
            self.wait()
        for key in old:
            self._slice(key).zero_()
        self.dirty -= old
        self.zeroed |= old

    def _add_carried(self) -> list[Done]:
        opt = self.optimizer
        added: set[int] = set()
        for group in list(self.carried):
            earlier = self.carried.pop(group)
            if self.offload:
                self.wait()
                self.masters[group].grad.add_(earlier)
                mine = {key for key in self.entered & self.owned.keys() if self.owned[key][1] == group}
                self.dirty |= mine
                for key in mine:
                    self._note_norm(key)
                added |= mine
                continue
            fresh = opt.averaged_gradients.get(group)
            if fresh is None:
                self.carried[group] = earlier
                continue
            for new, old in zip(fresh, earlier, strict=True):
                if not getattr(new, "_zero_padding", False):
                    new.add_(old)
            added |= {key for key in self.entered & self.owned.keys() if self.owned[key][1] == group}
        if not added:
            return []
        return [Done("gradients_added", self.named(added), "Several backwards before one step add up, as in PyTorch.")]

    def drop_idle(self) -> list[Done]:
        if not self.offload:
            return []
        self._zero_stale()
        dropped = self.zeroed & self.idle()
        self.zeroed.clear()
        if not dropped:
            return []
        return [Done("stale_gradient_dropped", self.named(dropped), "No backward of this window reached it.")]

    def clear(self) -> list[Done]:
        opt = self.optimizer
        had = self.named(self.entered | self.now)
        opt.micro_step_id = -1
        self.drop_unfinished()
        if self.offload:
            self.wait()
            for master in self.masters:
                master.grad.zero_()
            self.dirty.clear()
            opt.norm_for_param_grads = {}
            opt.local_overflow = False
            if hasattr(opt, "_offload_accumulated_param_ids"):
                opt._offload_accumulated_param_ids = set()
        self.cleared = bool(opt.averaged_gradients)
        for table in (opt.averaged_gradients, getattr(opt, "all_grad_tensors", {})):
            for group in table:
                table[group] = None
        for param, _ in self.params.values():
            param.grad_accum = None
        self.reset_window()
        return [Done("accumulators_cleared", had, "zero_grad cleared what ZeRO had accumulated outside .grad.")]

    def drop_unfinished(self) -> None:
        opt = self.optimizer
        buckets = list(getattr(opt, "ipg_buckets", {}).values())
        if not any(b.elements for b in buckets) and not any(opt.params_already_reduced) and not opt.ready_for_gradients:
            return
        for bucket in buckets:
            bucket.clear()
        if not buckets:  # up to 0.16 there is one bucket, kept in three attributes
            opt.grads_in_ipg_bucket, opt.params_in_ipg_bucket, opt.elements_in_ipg_bucket = [], [], 0
        extra = getattr(opt, "extra_large_param_to_reduce", None)
        if isinstance(extra, dict):
            extra.clear()
        else:
            opt.extra_large_param_to_reduce = None
        opt.params_already_reduced[:] = [False] * len(opt.params_already_reduced)
        opt._release_ipg_buffers()
        self.now.clear()

    # -- idle: untouched -----------------------------------------------------------------------------------------------

    def shelve_idle(self) -> list[Done]:
        idle = self.idle()
        for key in idle:
            self.shelf.append((self.params[key][0].data, self.params[key][0].data.clone()))
        for key in idle & self.owned.keys():
            group, _, dest, numel = self._place(key)
            self._shelve_slice(self.masters[group], dest, numel)
        return []

    def unshelve_idle(self) -> list[Done]:
        self._unshelve()
        return []
