"""The course of a step: forward, backward and step, turned into events by wrapping the engine's own methods.

A backward is seen to begin in ``engine.backward`` or, for ``loss.backward()``, in the hooks that DeepSpeed sets on the
outputs of a forward; it is seen to end in DeepSpeed's epilogue.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.deepspeed.backward import Forward
from zeroguard.backends.deepspeed.rhythm import Rhythm

__all__ = ["Course"]


def _from_autograd(error: BaseException) -> bool:
    """Whether this exception came out of a backward of PyTorch's."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__", "")).startswith("torch.autograd") for frame in frames)


class Course(Rhythm):
    """Wrappers of forward, backward and step."""

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tracker = self.tracker

        def forward(*args: Any, **kwargs: Any) -> Any:
            running = tracker.running
            if running is not None and running.by == "loss.backward" and torch._C._current_graph_task_id() < 0:
                self._abort(None)  # it is over: it raised, or DeepSpeed has left its epilogue out
            grad = torch.is_grad_enabled()
            nested = tracker.depth > 0
            self.emit(ev.ForwardBegin(tracker.forwards + 1, self.engine.module.training, grad, nested))
            record = tracker.forward_begins()
            if self._per_tensor is not None:
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
        if self.patches.live and self._per_tensor is not None:
            vars(self.engine)["_backward_prologue_per_tensor"] = self._per_tensor

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            tracker = self.tracker
            # The third argument, by position, in every verified release (its signature is hidden by a decorator).
            divides = args[2] if len(args) > 2 else kwargs.get("scale_wrt_gas", True)
            self._divide_once = False
            self._begin("engine.backward", None, self.facts.accumulation_steps if divides else 1)
            if self._divide_once and divides:
                args, kwargs = args[:2], {**kwargs, "scale_wrt_gas": False}
            inside = tracker.stack[-1] if tracker.stack else None
            if inside is not None or self._per_tensor is None:
                # No hooks on the outputs: DeepSpeed sets them when its forward returns (and before 0.18 not at all).
                record = inside or tracker.latest
                if record is not None:
                    self._reached(record)
            if inside is not None and self._per_tensor is not None:
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
            # Stage 0: engine.step() clips .grad before it calls the optimizer.
            if self.facts.layout == 0 and not self.step_depth and self.tracker.at_boundary:
                self._before_step()
            if not self.facts.managed_accumulation and not self.tracker.in_window:
                self.accumulators.finalizes()
            self.step_depth += 1
            try:
                out = original(*args, **kwargs)
            finally:
                self.step_depth -= 1
            if not self.step_depth and self.stepped:
                # Once an optimizer step, not once a micro-batch; and after DeepSpeed's own bookkeeping.
                self.stepped = False
                self.after_step()
            elif not self.step_depth:
                self.emit(ev.MicroBatchEnd(self._open_window()))
            return out

        return step

    def _wrap_optimizer_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            tracker = self.tracker
            if tracker.running is not None and tracker.running.by == "loss.backward":
                self._abort(None)
            self.accumulators.consumed()
            by = "engine.step" if self.step_depth else "optimizer.step"
            self.emit(ev.StepBegin(self.steps, tracker.in_window, by, self.cleared))  # type: ignore[arg-type]
            if self.facts.layout != 0 or not self.facts.managed_accumulation:
                self._before_step()
            self.in_step = True
            # The step reads what it has waited for itself, or what the guard has just waited for.
            self.copies.enter()
            try:
                out = original(*args, **kwargs)
            except BaseException as error:
                self._raised(ev.Phase.STEP, error)
                raise
            finally:
                self.in_step = False
                self.copies.leave()
            applied = not bool(getattr(self.optimizer, "overflow", False))
            self.accumulators.reset_window()
            tracker.reset_window()
            self.cleared, self.order = False, 0
            self.steps += 1
            tracker.steps += 1
            self.emit(ev.StepEnd(self.steps, applied, tracker.pending_forward))
            self.stepped = bool(self.step_depth)
            if not self.step_depth:
                self.after_step()
            return out

        return step

    def _before_step(self) -> None:
        self.step_begins = True
        try:
            self.before_step()
        finally:
            self.step_begins = False

    def _raised(self, phase: ev.Phase, error: BaseException) -> None:
        self.emit(ev.Raised(phase, f"{type(error).__name__}: {error}"))

    # -- the course of a backward ------------------------------------------------------------------------------------

    def _boundary(self) -> bool:
        if getattr(self.engine, "inside_no_sync_ctxt", False):
            return False
        return bool(self.engine.is_gradient_accumulation_boundary())

    def _open_window(self, more: int = 0) -> int:
        """Micro-batches that engine.step() has counted in a window that is not complete, and ``more``; 0 where the loop
        itself sets the boundary."""
        set_by_loop = getattr(self.engine, "_is_gradient_accumulation_boundary", None) is not None
        if set_by_loop or not self.facts.managed_accumulation:
            return 0
        return (int(self.engine.micro_steps) + more) % self.facts.accumulation_steps

    def _begin(self, by: str, task: int | None, divisor: int) -> None:
        tracker = self.tracker
        if tracker.running is not None:
            self._abort(None)
        again, after_boundary = tracker.since_reset, tracker.boundary_in_window
        running = tracker.begin(by, task, self._boundary())
        began = ev.BackwardBegin(running.number, by, again, after_boundary, running.boundary, divisor)  # type: ignore[arg-type]
        self.emit(began)
        self.accumulators.began(running.boundary)

    def _reached(self, record: Forward) -> None:
        again = self.tracker.reach(record)
        if again >= 0 and self.tracker.running is not None:
            self._current = record
            stepped = record.steps < self.tracker.steps
            self.emit(ev.GraphReached(self.tracker.running.number, record.number, again, stepped))

    def _from_hook(self) -> None:
        """A hook of DeepSpeed's fired inside a graph task: is that a backward that has not been seen to begin?"""
        task = torch._C._current_graph_task_id()
        running = self.tracker.running
        if running is None:
            self._begin("loss.backward", task, self.facts.accumulation_steps)
        elif running.task is None:
            running.task = task
        elif running.task != task and running.by == "loss.backward":
            self._begin("loss.backward", task, self.facts.accumulation_steps)  # the one before never ended

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
                running.boundary = running.reduces = False
                out = self._without_reduction(original, *args, **kwargs)
                with torch.no_grad():
                    self.accumulators.put_back()
            else:
                self.emit(ev.BackwardReduce(running.number, running.boundary))
                running.reducing = True
                out = original(*args, **kwargs)
                running.reducing = False
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
        if len(running.forwards) > 1 and "retained_graph" not in self.repairing:
            self.tracker.excuse()  # DeepSpeed entered this backward once a forward, and left it once
        self.tracker.end()
        self.emit(ev.BackwardEnd(running.number, running.boundary))

    def _abort(self, error: BaseException | None) -> None:
        running = self.tracker.running
        if running is None:
            return
        self.tracker.abort()
        text = "it never reached its epilogue" if error is None else f"{type(error).__name__}: {error}"
        reducing = running.reducing and error is not None
        twice = self.accumulators.named(self.accumulators.twice) if reducing else ()
        self.emit(ev.BackwardAborted(running.number, text, error is not None, reducing, twice))
        if error is not None:
            self._raised(ev.Phase.BACKWARD, error)

    def _wrap_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        enter = self._ordering(self.accumulators.enter)

        def reduce(param: Any, *args: Any) -> Any:
            enter(param)
            try:
                return original(param, *args)
            except BaseException:
                if self.tracker.running is not None:
                    self.tracker.running.reducing = True
                raise

        return reduce

    def loop_raised(self, error: BaseException) -> None:
        """The exception of a loss.backward() passes through PyTorch and the loop, and nothing of DeepSpeed's."""
        running = self.tracker.running
        if running is not None and running.by == "loss.backward" and torch._C._current_graph_task_id() < 0:
            self._abort(error if _from_autograd(error) else None)
