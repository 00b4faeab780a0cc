"""A DeepSpeed engine as zeroguard's guards see it: events out, reads and repairs in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.base import BackwardState, Done, ParamStatus
from zeroguard.backends.deepspeed.announced import Announced
from zeroguard.backends.deepspeed.asides import Asides
from zeroguard.backends.deepspeed.audited import Audited
from zeroguard.backends.deepspeed.bf16 import Bf16Accumulators
from zeroguard.backends.deepspeed.edits import Edits
from zeroguard.backends.deepspeed.older import drops_micro_batches, keep_micro_batches
from zeroguard.backends.deepspeed.plain import Accumulators
from zeroguard.backends.deepspeed.state import Emit
from zeroguard.backends.deepspeed.zero3 import Zero3Accumulators
from zeroguard.backends.deepspeed.zero12 import Zero12Accumulators

__all__ = ["DeepSpeedBackend"]

GRADIENT_EVENTS = frozenset(
    {ev.BackwardBegin, ev.GraphReached, ev.BackwardReduce, ev.BackwardEnd, ev.BackwardAborted, ev.ZeroGrad}
)


class DeepSpeedBackend(Announced, Asides, Audited, Edits):
    """Implements :class:`zeroguard.backends.base.Engine` for a ``deepspeed.DeepSpeedEngine``, stages 0 to 3."""

    # -- attach and detach -------------------------------------------------------------------------------------------

    def attach(
        self,
        emit: Emit,
        events: Collection[type[ev.Event]],
        *,
        guards: Collection[str],
        repairing: Collection[str],
        transparent_reads: bool,
    ) -> None:
        """Wrap what gives these events. ``repairing`` are the guards that may change what DeepSpeed does."""
        self.emit = emit
        self.repairing = frozenset(repairing)
        self._note_frozen()
        wanted = frozenset(events)
        self.sees_backwards = bool(wanted & GRADIENT_EVENTS)
        self.sees_copies = "host_read" in guards
        if "accumulator_reset" in guards:
            self.accumulators = self._accumulators()
        method = self.patches.method
        engine, optimizer = self.engine, self.optimizer
        steps = optimizer if self.facts.trains else None
        for obj, name, make in (
            (engine, "forward", self._wrap_forward),
            (engine, "backward", self._wrap_backward),
            (engine, "step", self._wrap_engine_step),
            (steps, "step", self._wrap_optimizer_step),
        ):
            if hasattr(obj, name):  # else no guard is left that needs it, by the table
                method(obj, name, make)
        if wanted & GRADIENT_EVENTS:
            self._attach_gradients()
        offloaded = self.facts.layout in (1, 2) and self.facts.offload
        if "accumulator_reset" in self.repairing and offloaded and drops_micro_batches(self.facts.deepspeed_version):
            keep_micro_batches(optimizer, method, lambda: "accumulator_reset" in self.repairing)
        if ev.ZeroGrad in wanted:
            method(engine, "zero_grad", self._wrap_zero_grad("engine"))
            method(engine.module, "zero_grad", self._wrap_zero_grad("module"))
            if hasattr(optimizer, "zero_grad"):
                method(optimizer, "zero_grad", self._wrap_zero_grad("optimizer"))
        if "host_read" in guards and self.facts.offload:
            self._attach_copies(transparent_reads)
        if ev.GradientClip in wanted:
            method(engine, "parameters", self._wrap_parameters)
            method(engine.module, "parameters", self._wrap_parameters)
        if ev.ModeChange in wanted:
            method(engine.module, "train", self._wrap_train)
        if ev.GradientRead in wanted:
            self._attach_gradient_reads()
        if ev.EditLost in wanted:
            self._attach_edits()
        if ev.CheckpointBegin in wanted:
            method(engine, "save_checkpoint", self._wrap_save)

    def announce(self, emit: Emit, *, guards: Collection[str], repairing: Collection[str]) -> None:
        """Instead of :meth:`attach`: wrap nothing; the loop tells where it is."""
        if "accumulator_reset" in guards:
            self.accumulators = self._accumulators()
        self._note_frozen()
        self.attach_announced(emit, repairing=repairing)

    def detect_reads(self) -> None:
        """Report every read by the host of memory that a copy is still filling, DeepSpeed's or not. For a test run."""
        self.copies.detect(lambda reader, copier, size: self.emit(ev.ReadInFlight(reader, copier, size)))

    def _attach_gradients(self) -> None:
        method = self.patches.method
        if self.facts.layout in (1, 2, 3):
            method(self.optimizer, "reduce_independent_p_g_buckets_and_remove_grads", self._wrap_reduce)
        method(self.engine, "_backward_epilogue", self._wrap_epilogue)
        if hasattr(self.engine, "_backward_prologue_per_tensor"):
            method(self.engine, "_backward_prologue", self._wrap_prologue)
            # DeepSpeed takes this one at each forward, so each forward can be given its own.
            self._per_tensor = self.engine._backward_prologue_per_tensor
            self.patches.attribute(self.engine, "_backward_prologue_per_tensor", self._per_tensor)

    def _attach_gradient_reads(self) -> None:
        """What safe_get_full_grad ends in."""
        shared, read = self.patches.shared, self._gradient_read
        if self.facts.stage == 3:
            shared(self.optimizer, "get_fp32_grad_for_param", read)
            return
        for param in self.engine.module.parameters():
            if hasattr(param, "get_full_hp_grad"):  # not on parameters that the optimizer does not step
                shared(param, "get_full_hp_grad", read)

    def _attach_copies(self, transparent: bool) -> None:
        method, optimizer = self.patches.method, self.optimizer
        if self.facts.stage == 3:
            method(optimizer, "partition_grads", self._wrap_copying)
            for name in ("_get_fp32_grad_state_partition", "get_fp32_grad_partitions") if transparent else ():
                if hasattr(optimizer, name):
                    method(optimizer, name, self._wrap_reading("offloaded gradient partition"))
            return
        method(optimizer, "async_accumulate_grad_in_cpu_via_gpu", self._wrap_hot)
        method(optimizer, "copy_grads_in_partition", self._wrap_copying)
        if not transparent:
            return
        attribute, view = self.patches.attribute, self.copies.view
        grads = view(optimizer, "offload_gradient_dict", "offloaded fp32 gradient")
        attribute(optimizer, "offload_gradient_dict", grads)
        for name, what in (
            ("accumulated_grads_in_cpu", "accumulated_grads_in_cpu"),
            ("single_partition_of_fp32_groups", "offloaded fp32 gradient"),
        ):
            attribute(optimizer, name, view(optimizer, name, what))
        for param in self.engine.module.parameters():
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is not None and mapping.offload_gradient_dict is grads.data:
                attribute(mapping, "offload_gradient_dict", grads)

    def switch_off(self, guard: str) -> None:
        """LOCAL, between two steps. What only this guard needs is not done any more; its wrappers call through."""
        self.repairing -= {guard}
        self.actions = {name: action for name, action in self.actions.items() if name != guard}
        if guard == "accumulator_reset":
            self.shelves_idle = False
            self.accumulators = Accumulators(self.engine, self.names)

    def detach(self) -> list[str]:
        """Give everything back. LOCAL. Returns what somebody else had replaced meanwhile."""
        if self.tracker.depth:
            self._restore_per_tensor()  # closed inside a forward
        left = self.copies.close()
        return left + self.patches.undo()

    def _accumulators(self) -> Accumulators:
        fresh = self.steps == 0 and int(getattr(self.engine, "micro_steps", 0)) == 0
        if self.facts.layout == "bf16":
            return Bf16Accumulators(self.engine, self.names)
        if self.facts.stage == 3:
            return Zero3Accumulators(self.engine, self.names, self.copies.wait, fresh=fresh)
        if self.facts.stage in (1, 2):
            return Zero12Accumulators(
                self.engine, self.names, self.copies.wait, fresh=fresh, version=self.facts.deepspeed_version
            )
        return Accumulators(self.engine, self.names)

    # -- reads -------------------------------------------------------------------------------------------------------

    def backward_state(self) -> BackwardState:
        return self.tracker.state()

    def param_status(self, *, scan: bool = True) -> ParamStatus:
        return ParamStatus() if self.params is None else self.params.look(scan)

    def idle_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.idle())

    def stale_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.stale())

    def uncleared_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.uncleared())

    def partitioned_parameters(self, shape: Sequence[int]) -> tuple[str, ...]:
        return () if self.params is None else self.params.partitioned(tuple(shape))

    def lost_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.lost())

    def grad_norm(self) -> float | None:
        # At the end of the optimizer's own step the engine does not know of it yet.
        norm = getattr(self.optimizer, "_global_grad_norm", None) if self.facts.stage else None
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return None if norm is None else float(norm)

    def grad_norms(self) -> dict[str, float]:
        with torch.no_grad():
            return self.reading.norms()

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return self.reading.gradients(names)

    # -- repairs -----------------------------------------------------------------------------------------------------

    def rearm_backward(self) -> Sequence[Done]:
        running = self.tracker.running
        in_task = torch._C._current_graph_task_id() != -1
        prologue = None
        if running is not None and in_task and self._prologue is not None:
            # Inside the graph task the callback that runs the epilogue can be queued.
            running.prologue_done = True
            prologue = self._prologue
        return self.tracker.rearm(prologue)

    def restore_counters(self, forward: int) -> Sequence[Done]:
        if not self.tracker.modules or self._current is None or self._current.number != forward:
            return []
        return self.tracker.restore(self._current)

    def rest_backward(self) -> Sequence[Done]:
        return self.tracker.rest()

    def drop_unfinished(self) -> Sequence[Done]:
        self.accumulators.drop_unfinished()
        self.tracker.leave()
        return [Done("unfinished_backward_dropped", (), "Half-reduced gradients of a backward that raised are gone.")]

    def carry(self) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.carry()

    def flush_pending(self, boundary: bool) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.flush_pending(boundary)

    def settle(self, boundary: bool) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.settle(boundary)

    def clear(self) -> Sequence[Done]:
        with torch.no_grad():
            done = self.accumulators.clear()
        self.tracker.reset_window()
        self.tracker.unfinished = False
        self.order = 0
        return done

    def drop_idle(self) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.drop_idle()

    def shelve_idle(self) -> Sequence[Done]:
        self.shelves_idle = True
        with torch.no_grad():
            return self.accumulators.shelve_idle()

    def unshelve_idle(self) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.unshelve_idle()

    def release_in_flight(self) -> Sequence[Done]:
        with torch.no_grad():
            return [] if self.params is None else self.params.release()

    def divide_once(self) -> Sequence[Done]:
        self._divide_once = True
        return [Done("divided_once", (), "The trainer has divided this loss already.", routine=True)]

    def wait_copies(self, tensors: Sequence[Any] = (), wait: str = "event") -> Sequence[Done]:
        filled = {place.untyped_storage().data_ptr() for place in self._filled()} if tensors else set()
        own = [t for t in tensors if t.untyped_storage().data_ptr() in filled]
        if own or not tensors:
            self.copies.wait(wait)
        if len(own) < len(tensors):
            self.accelerator().current_stream().synchronize()
        return []

    def _filled(self) -> list[torch.Tensor]:
        """The host tensors that DeepSpeed's copies fill."""
        optimizer = self.optimizer
        if not self.facts.offload:
            return []
        if self.facts.stage == 3:
            grads = [flat.grad for flat in self.master_weights() if flat.grad is not None]
            return [optimizer.grad_partitions_flat_buffer, *grads]
        masters = [master.grad for master in self.master_weights()]
        with self.copies.inside():
            return [*optimizer.accumulated_grads_in_cpu.values(), *(grad for grad in masters if grad is not None)]
