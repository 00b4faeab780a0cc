"""A DeepSpeed engine as zeroguard's guards see it: events out, reads and repairs in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.base import BackwardState, Done, EngineFacts, ParamStatus
from zeroguard.backends.deepspeed.backward import BackwardTracker, Forward
from zeroguard.backends.deepspeed.bf16 import Bf16Accumulators
from zeroguard.backends.deepspeed.copies import HostCopies, WaitingDict, WaitingList
from zeroguard.backends.deepspeed.older import drops_micro_batches, keep_micro_batches
from zeroguard.backends.deepspeed.params import ParamWatch
from zeroguard.backends.deepspeed.plain import Accumulators
from zeroguard.backends.deepspeed.wrapping import Patches
from zeroguard.backends.deepspeed.zero3 import Zero3Accumulators
from zeroguard.backends.deepspeed.zero12 import Zero12Accumulators

__all__ = ["DeepSpeedBackend"]

GRADIENT_EVENTS = frozenset(
    {ev.BackwardBegin, ev.GraphReached, ev.BackwardReduce, ev.BackwardEnd, ev.BackwardAborted, ev.ZeroGrad}
)
Emit = Callable[[ev.Event], None]


def _groups(engine: Any) -> list[Any]:
    """The process groups whose ranks train together: data-parallel, then model-parallel where there is one."""
    group = getattr(engine, "seq_data_parallel_group", None) or getattr(engine, "data_parallel_group", None)
    groups = [] if group is None else [group]
    mpu = getattr(engine, "mpu", None)
    if mpu is not None and hasattr(mpu, "get_model_parallel_group") and mpu.get_model_parallel_world_size() > 1:
        groups.append(mpu.get_model_parallel_group())
    return groups


class DeepSpeedBackend:
    """Implements :class:`zeroguard.backends.base.Engine` for a ``deepspeed.DeepSpeedEngine``, stages 0 to 3."""

    def __init__(self, engine: Any, facts: EngineFacts, accelerator: Callable[[], Any]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.facts = facts
        self.accelerator = accelerator
        self.names = {id(p): name for name, p in engine.module.named_parameters()}
        self.patches = Patches()
        self._current: Forward | None = None
        self.emit: Emit = lambda event: None
        self.steps = int(getattr(engine, "global_steps", 0))
        self.in_step = False
        self.step_depth = 0
        self.stepped = False
        self.repairing: frozenset[str] = frozenset()
        self.after_step: Callable[[], None] = lambda: None
        self.groups = _groups(engine)
        self.tracker = BackwardTracker(engine, facts.stage)
        self.copies = HostCopies(self.optimizer, accelerator, own_events=facts.own_copy_events)
        self.params = ParamWatch(engine) if facts.stage == 3 else None
        self.accumulators = Accumulators(engine, self.names)

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

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward is running."""
        return self.tracker.depth > 0 or self.tracker.running is not None

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
        wanted = frozenset(events)
        if "accumulator_reset" in guards:
            self.accumulators = self._accumulators()
        method = self.patches.method
        engine, optimizer = self.engine, self.optimizer
        method(engine, "forward", self._wrap_forward)
        method(engine, "backward", self._wrap_backward)
        method(engine, "step", self._wrap_engine_step)
        method(optimizer, "step", self._wrap_optimizer_step)
        if wanted & GRADIENT_EVENTS:
            self._attach_gradients()
        offloaded = self.facts.layout in (1, 2) and self.facts.offload
        if "accumulator_reset" in self.repairing and offloaded and drops_micro_batches(self.facts.deepspeed_version):
            keep_micro_batches(optimizer, method)
        if ev.ZeroGrad in wanted:
            method(engine, "zero_grad", self._wrap_zero_grad("engine"))
            method(engine.module, "zero_grad", self._wrap_zero_grad("module"))
            if hasattr(optimizer, "zero_grad"):
                method(optimizer, "zero_grad", self._wrap_zero_grad("optimizer"))
        if "host_read" in guards:
            self._attach_copies(transparent_reads)
        if ev.ModeChange in wanted:
            method(engine.module, "train", self._wrap_train)
        if ev.CheckpointBegin in wanted:
            method(engine, "save_checkpoint", self._wrap_save)

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

    def _attach_copies(self, transparent: bool) -> None:
        method, optimizer = self.patches.method, self.optimizer
        if self.facts.stage == 3:
            method(optimizer, "partition_grads", self._wrap_copying)
            if transparent and hasattr(optimizer, "_get_fp32_grad_state_partition"):
                method(optimizer, "_get_fp32_grad_state_partition", self._wrap_reading("offloaded gradient partition"))
            return
        method(optimizer, "async_accumulate_grad_in_cpu_via_gpu", self._wrap_hot)
        method(optimizer, "copy_grads_in_partition", self._wrap_copying)
        if not transparent:
            return
        attribute, copies = self.patches.attribute, self.copies
        waiting = WaitingDict(optimizer.accumulated_grads_in_cpu, copies, "accumulated_grads_in_cpu")
        attribute(optimizer, "accumulated_grads_in_cpu", waiting)
        masters = WaitingList(optimizer.single_partition_of_fp32_groups, copies, "offloaded fp32 gradient")
        attribute(optimizer, "single_partition_of_fp32_groups", masters)
        grads = WaitingDict(optimizer.offload_gradient_dict, copies, "offloaded fp32 gradient")
        attribute(optimizer, "offload_gradient_dict", grads)
        for param in self.engine.module.parameters():
            mapping = getattr(param, "_hp_mapping", None)
            if mapping is not None and mapping.offload_gradient_dict is grads.data:
                attribute(mapping, "offload_gradient_dict", grads)

    def detach(self) -> list[str]:
        """Give everything back. LOCAL. Returns what somebody else had replaced meanwhile."""
        if self.tracker.depth:
            self._restore_per_tensor()  # closed inside a forward
        return self.patches.undo()

    # -- wrappers: forward, backward, step -----------------------------------------------------------------------------

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tracker = self.tracker

        def forward(*args: Any, **kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            nested = tracker.depth > 0
            self.emit(ev.ForwardBegin(tracker.forwards + 1, self.engine.module.training, grad, nested))
            record = tracker.forward_begins()
            if hasattr(self, "_per_tensor"):
                vars(self.engine)["_backward_prologue_per_tensor"] = functools.partial(self._reached_output, record)
            tracker.depth += 1
            try:
                out = original(*args, **kwargs)
            except BaseException as error:
                self._raised(ev.Phase.FORWARD, error)
                raise
            finally:
                tracker.depth -= 1
                tracker.forward_ends(record)
                self._restore_per_tensor()
            self.emit(ev.ForwardEnd(record.number, grad))
            return out

        return forward

    def _restore_per_tensor(self) -> None:
        if self.patches.live and hasattr(self, "_per_tensor"):
            vars(self.engine)["_backward_prologue_per_tensor"] = self._per_tensor

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            tracker = self.tracker
            self._begin("engine.backward", None)
            inside = tracker.stack[-1] if tracker.stack else None
            if inside is not None or not hasattr(self, "_per_tensor"):
                # No hooks on the outputs: DeepSpeed sets them when its forward returns (and before 0.18 not at all).
                record = inside or tracker.latest
                if record is not None:
                    self._reached(record)
            if inside is not None and hasattr(self, "_per_tensor"):
                self._prologue_now()
            try:
                out = original(*args, **kwargs)
            except BaseException as error:
                self._abort(error)
                raise
            self._end()
            return out

        return backward

    def _wrap_engine_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.step_depth += 1
            try:
                out = original(*args, **kwargs)
            finally:
                self.step_depth -= 1
            if not self.step_depth and self.stepped:
                # Once an optimizer step, not once a micro-batch; and after DeepSpeed's own bookkeeping.
                self.stepped = False
                self.after_step()
            return out

        return step

    def _wrap_optimizer_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            tracker = self.tracker
            if tracker.running is not None and tracker.running.by == "loss.backward":
                self._abort(None)
            self.accumulators.consumed()
            self.emit(ev.StepBegin(self.steps, tracker.in_window))
            self.in_step = True
            # The step reads what it has waited for itself, or what the guard has just waited for.
            self.copies.hot += 1
            try:
                out = original(*args, **kwargs)
            except BaseException as error:
                self._raised(ev.Phase.STEP, error)
                raise
            finally:
                self.in_step = False
                self.copies.hot -= 1
            applied = not bool(getattr(self.optimizer, "overflow", False))
            self.accumulators.reset_window()
            tracker.reset_window()
            self.steps += 1
            self.emit(ev.StepEnd(self.steps, applied, tracker.pending_forward))
            self.stepped = bool(self.step_depth)
            if not self.step_depth:
                self.after_step()
            return out

        return step

    def _raised(self, phase: ev.Phase, error: BaseException) -> None:
        self.emit(ev.Raised(phase, f"{type(error).__name__}: {error}"))

    # -- the course of a backward ------------------------------------------------------------------------------------

    def _boundary(self) -> bool:
        if getattr(self.engine, "inside_no_sync_ctxt", False):
            return False
        return bool(self.engine.is_gradient_accumulation_boundary())

    def _begin(self, by: str, task: int | None) -> None:
        tracker = self.tracker
        if tracker.running is not None:
            self._abort(None)
        again, after_boundary = tracker.since_reset, tracker.boundary_in_window
        running = tracker.begin(by, task, self._boundary())
        self.emit(ev.BackwardBegin(running.number, by, again, after_boundary, running.boundary))  # type: ignore[arg-type]
        self.accumulators.began(running.boundary)

    def _reached(self, record: Forward) -> None:
        again = self.tracker.reach(record)
        if again >= 0 and self.tracker.running is not None:
            self._current = record
            self.emit(ev.GraphReached(self.tracker.running.number, record.number, again))

    def _from_hook(self) -> None:
        """A hook of DeepSpeed's fired inside a graph task: is that a backward that has not been seen to begin?"""
        task = torch._C._current_graph_task_id()
        running = self.tracker.running
        if running is None:
            self._begin("loss.backward", task)
        elif running.task is None:
            running.task = task
        elif running.task != task and running.by == "loss.backward":
            self._begin("loss.backward", task)  # the one before never ended

    def _prologue_now(self) -> None:
        running = self.tracker.running
        if running is not None and not running.prologue_done and "retained_graph" in self.repairing:
            running.prologue_done = True
            self._prologue()

    def _wrap_prologue(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._prologue = self._with_epilogue(original) if self.facts.stage == 0 else original

        def prologue(*args: Any, **kwargs: Any) -> Any:
            self._from_hook()
            running = self.tracker.running
            if running is None or "retained_graph" not in self.repairing:
                return original(*args, **kwargs)
            # Two forwards under one loss would enter the backward twice and leave it once.
            if running.prologue_done:
                return None
            running.prologue_done = True
            return self._prologue(*args, **kwargs)

        return prologue

    def _with_epilogue(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stage 0: DeepSpeed refuses loss.backward() there, because nothing would run its epilogue; here something
        does."""
        engine = self.engine

        def prologue(*args: Any, **kwargs: Any) -> Any:
            supported = engine._support_torch_style_backward
            if supported or engine._running_engine_backward or engine.fp16_enabled():
                return original(*args, **kwargs)
            engine._support_torch_style_backward = True
            try:
                out = original(*args, **kwargs)
            finally:
                engine._support_torch_style_backward = supported
            torch.autograd.Variable._execution_engine.queue_callback(lambda: engine._backward_epilogue())
            return out

        return prologue

    def _reached_output(self, record: Forward, grad: Any) -> Any:
        """Runs on each output of a forward in each backward, in place of DeepSpeed's scaling, which it calls."""
        if not self.patches.live:
            return self._per_tensor(grad)
        self._from_hook()
        self._reached(record)
        self._prologue_now()
        return self._per_tensor(grad)

    def _wrap_epilogue(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def epilogue(*args: Any, **kwargs: Any) -> Any:
            running = self.tracker.running
            if running is None:
                return original(*args, **kwargs)
            if self._nothing_to_reduce():
                # torch.autograd.grad with respect to an input: no parameter received a gradient, and DeepSpeed's
                # reduction would read a bucket that was never set up.
                running.boundary = False
                out = self._without_reduction(original, *args, **kwargs)
            else:
                self.emit(ev.BackwardReduce(running.number, running.boundary))
                out = original(*args, **kwargs)
            if running.by == "loss.backward":
                self._end()
            return out

        return epilogue

    def _nothing_to_reduce(self) -> bool:
        if "retained_graph" not in self.repairing or self.facts.layout not in (1, 2):
            return False
        opt = self.optimizer
        if opt.ready_for_gradients:
            return False
        # Without hooks (ZeRO-1, neither contiguous_gradients nor overlap_comm) nothing sets that flag.
        return all(opt.get_gradient_for_reduction(p) is None for group in opt.bit16_groups for p in group)

    def _without_reduction(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        allreduce = engine.enable_backward_allreduce
        engine.enable_backward_allreduce = False
        try:
            return original(*args, **kwargs)
        finally:
            engine.enable_backward_allreduce = allreduce

    def _end(self) -> None:
        running = self.tracker.running
        if running is None:
            return
        self.accumulators.closed_backward(running.boundary)
        self.tracker.end()
        self.emit(ev.BackwardEnd(running.number, running.boundary))

    def _abort(self, error: BaseException | None) -> None:
        running = self.tracker.running
        if running is None:
            return
        self.tracker.abort()
        text = "it never reached its epilogue" if error is None else f"{type(error).__name__}: {error}"
        self.emit(ev.BackwardAborted(running.number, text))
        if error is not None:
            self._raised(ev.Phase.BACKWARD, error)

    def _wrap_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        enter = self.accumulators.enter

        def reduce(param: Any, *args: Any) -> Any:
            enter(param)
            return original(param, *args)

        return reduce

    # -- wrappers: zero_grad, reads, mode, checkpoint -----------------------------------------------------------------

    def _wrap_zero_grad(self, by: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                tracker = self.tracker
                if not self.in_step and tracker.running is None and (tracker.in_window or tracker.unfinished):
                    self.emit(ev.ZeroGrad(by, tracker.in_window))  # type: ignore[arg-type]
                return out

            return zero_grad

        return make

    def _wrap_hot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        copies = self.copies

        def hot(*args: Any, **kwargs: Any) -> Any:
            # The copy back to the device reads the buffer that an earlier copy may still be filling; from 0.19.8 on
            # DeepSpeed waits here by itself.
            if not copies.own_events and self.optimizer.micro_step_id > 0:
                copies.wait()
            copies.hot += 1
            try:
                return original(*args, **kwargs)
            finally:
                copies.hot -= 1

        return hot

    def _wrap_copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        copies = self.copies
        record = not copies.own_events

        def copying(*args: Any, **kwargs: Any) -> Any:
            copies.hot += 1
            try:
                return original(*args, **kwargs)
            finally:
                copies.hot -= 1
                if record:
                    copies.copied()

        return copying

    def _wrap_reading(self, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*args: Any, **kwargs: Any) -> Any:
                self.copies.read(what)
                return original(*args, **kwargs)

            return reading

        return make

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train(mode: bool = True) -> Any:
            before = self.engine.module.training
            out = original(mode)
            if before != mode and not self.tracker.depth and self.tracker.running is None:
                self.emit(ev.ModeChange(mode))
            return out

        return train

    def _wrap_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self.emit(ev.CheckpointBegin())
            return original(*args, **kwargs)

        return save_checkpoint

    # -- reads -------------------------------------------------------------------------------------------------------

    def backward_state(self) -> BackwardState:
        return self.tracker.state()

    def param_status(self, *, scan: bool = True) -> ParamStatus:
        return ParamStatus() if self.params is None else self.params.look(scan)

    def idle_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.idle())

    def stale_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.stale())

    def lost_parameters(self) -> tuple[str, ...]:
        return self.accumulators.named(self.accumulators.lost())

    # -- repairs -----------------------------------------------------------------------------------------------------

    def rearm_backward(self) -> Sequence[Done]:
        running = self.tracker.running
        in_task = torch._C._current_graph_task_id() != -1
        prologue = None
        if running is not None and in_task and hasattr(self, "_prologue"):
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
        return done

    def drop_idle(self) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.drop_idle()

    def shelve_idle(self) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.shelve_idle()

    def unshelve_idle(self) -> Sequence[Done]:
        with torch.no_grad():
            return self.accumulators.unshelve_idle()

    def release_in_flight(self) -> Sequence[Done]:
        with torch.no_grad():
            return [] if self.params is None else self.params.release()

    def wait_copies(self, tensors: Sequence[Any] = (), wait: str = "event") -> Sequence[Done]:
        self.copies.wait(wait)
        return []
