"""The course of a step as the loop itself announces it: nothing of DeepSpeed's is replaced.

The loop's calls say where it is. What a call cannot say (over which forward's graph a backward runs, which parameters
it reaches) is seen by PyTorch's own hooks on the module, on its outputs and on the parameters. They are removed at
detach.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.base import Evidence
from zeroguard.backends.deepspeed.backward import Forward
from zeroguard.backends.deepspeed.course import Course
from zeroguard.backends.deepspeed.older import drops_micro_batches
from zeroguard.backends.deepspeed.state import Emit

__all__ = ["Announced"]


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors with a graph in what a forward returned, in the containers that DeepSpeed looks into."""
    if isinstance(outputs, torch.Tensor):
        if outputs.grad_fn is not None:
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)


class Announced(Course):
    """What :class:`zeroguard.integrations.loop.LoopCallback` with ``wrap=False`` calls. LOCAL throughout."""

    #: gradients that arrived while no backward was announced, since the last look
    _strays = 0
    _steps_seen = 0
    #: ZeRO-1: gradients that wait in .grad for the boundary, where they enter DeepSpeed's reduction
    _waiting: frozenset[int] = frozenset()
    _at_boundary = False

    # -- attach ------------------------------------------------------------------------------------------------------

    def attach_announced(
        self,
        emit: Emit,
        *,
        repairing: Collection[str],
    ) -> None:
        """Hook PyTorch, not DeepSpeed."""
        self.emit = emit
        self.repairing = frozenset(repairing)
        self.wraps_nothing = True
        self.copies.unseen = not self.facts.own_copy_events
        self.sees_backwards = True
        self._steps_seen = self.engine.global_steps
        hook = self.patches.hook
        module = self.engine.module
        hook(module.register_forward_pre_hook(self._forward_begins))
        hook(module.register_forward_hook(self._forward_ends, always_call=True))
        for param in module.parameters():
            if param.requires_grad:
                hook(param.register_hook(self._gradient_hook(param)))

    @staticmethod
    def cannot_announce(version: str, offload: bool) -> str:
        """Why this release cannot be guarded without wrapping; empty where it can."""
        if offload and drops_micro_batches(version):
            return (
                f"DeepSpeed {version} with an offloaded optimizer drops micro-batches inside methods of its own, which "
                "can only be put right by wrapping them"
            )
        return ""

    def _gradient_hook(self, param: Any) -> Any:
        enter, tracker = self.accumulators.enter, self.tracker

        def arrived(grad: torch.Tensor) -> None:
            if tracker.running is None:
                self._strays += 1
            enter(param)

        return arrived

    # -- forwards, from hooks on the module --------------------------------------------------------------------------

    def _forward_begins(self, module: Any, args: Any) -> None:
        tracker = self.tracker
        grad = torch.is_grad_enabled()
        self.emit(ev.ForwardBegin(tracker.forwards + 1, module.training, grad, tracker.depth > 0))
        tracker.forward_begins()
        tracker.depth += 1

    def _forward_ends(self, module: Any, args: Any, outputs: Any) -> None:
        tracker = self.tracker
        if not tracker.stack:
            return
        record = tracker.stack[-1]
        tracker.depth -= 1
        tracker.forward_ends(record)
        if torch.is_grad_enabled():
            # Before DeepSpeed, which sets its own when engine.forward gets these outputs.
            for tensor in _tensors(outputs):
                tensor.register_hook(lambda grad, record=record: self._output_reached(record))
        self.emit(ev.ForwardEnd(record.number, torch.is_grad_enabled()))

    def _output_reached(self, record: Forward) -> None:
        running = self.tracker.running
        if not self.patches.live or running is None:
            return  # not announced: torch.autograd.grad with respect to an input, or a stray that is reported later
        if running.task is None:
            running.task = torch._C._current_graph_task_id()
            running.by = "engine.backward" if self._engine_runs_it() else "loss.backward"
            # DeepSpeed's epilogue of a loss.backward() is queued after this, and runs after it.
            torch.autograd.Variable._execution_engine.queue_callback(self._before_epilogue)
        first = record.backwards == 0
        self._reached(record)
        if first:
            running.prologue_done = True  # by DeepSpeed's hook on this very output, right after this one
        elif not running.prologue_done and "retained_graph" in self.repairing and self._per_tensor_hooks():
            running.prologue_done = True
            self.engine._backward_prologue()

    def _per_tensor_hooks(self) -> bool:
        return hasattr(self.engine, "_backward_prologue_per_tensor")

    def _engine_runs_it(self) -> bool:
        return bool(getattr(self.engine, "_running_engine_backward", True))

    def _before_epilogue(self) -> None:
        running = self.tracker.running
        if running is not None and self.patches.live:
            self.emit(ev.BackwardReduce(running.number, running.boundary))

    # -- what the loop announces -------------------------------------------------------------------------------------

    def evidence(self) -> Evidence:
        """What happened since the last look without having been announced."""
        strays, self._strays = self._strays, 0
        steps = self.engine.global_steps
        taken, self._steps_seen = steps - self._steps_seen, steps
        return Evidence(gradients=strays, steps=taken)

    def before_backward(self) -> None:
        """A backward, by engine.backward or loss.backward, comes next."""
        # Stage 0: DeepSpeed refuses loss.backward(), because nothing would run its epilogue; after_backward does.
        if self._lifts_refusal():
            self.engine._support_torch_style_backward = True
        self._begin("engine.backward", None, 1)

    def after_backward(self) -> None:
        """That backward returned."""
        running = self.tracker.running
        if running is None:
            return
        if self._lifts_refusal():
            self.engine._support_torch_style_backward = False
            if running.by == "loss.backward":
                self.emit(ev.BackwardReduce(running.number, running.boundary))
                self.engine._backward_epilogue()
        if len(running.forwards) > 1 and "retained_graph" in self.repairing:
            self.tracker.leave()  # DeepSpeed entered once a forward, and left once
        if self.facts.layout == 1:
            now = self.accumulators.now
            if running.boundary:
                now |= self._waiting
                self._waiting = frozenset()
            else:
                self._waiting |= now
                now.clear()
        self._end()

    def _lifts_refusal(self) -> bool:
        return (
            self.facts.stage == 0
            and "retained_graph" in self.repairing
            and self._per_tensor_hooks()
            and not self.engine.fp16_enabled()
        )

    def zero_grad_called(self) -> None:
        """The user has called zero_grad, on the engine, its optimizer or its module."""
        tracker = self.tracker
        self.cleared = True
        if tracker.running is None and (tracker.in_window or tracker.unfinished):
            self._waiting = frozenset()
            self.emit(ev.ZeroGrad("engine", tracker.in_window))
            self._discard()

    def before_step_call(self) -> None:
        """engine.step() comes next. It steps the optimizer at a boundary only."""
        managed = getattr(self.engine, "managed_gradient_accumulation", lambda: True)
        self._at_boundary = not managed() or self._boundary()
        if self._at_boundary:
            self.accumulators.consumed()
            self.emit(ev.StepBegin(self.steps, self.tracker.in_window, cleared=self.cleared))
            self.before_step()  # DeepSpeed has not begun, so nothing but the boundary backward makes gradients ready
        else:
            self.emit(ev.MicroBatchEnd(self._open_window(1)))

    def after_step_call(self) -> None:
        """engine.step() returned."""
        if not self._at_boundary:
            return
        self._at_boundary = False
        tracker = self.tracker
        applied = not bool(getattr(self.optimizer, "overflow", False))
        self.accumulators.reset_window()
        tracker.reset_window()
        self.cleared = False
        self.steps += 1
        tracker.steps += 1
        self.emit(ev.StepEnd(self.steps, applied, tracker.pending_forward))

    def make_up(self, call: str, evidence: Evidence) -> None:
        """Do late what calls that never came would have done, before ``call`` is done."""
        running = self.tracker.running is not None
        if call == "on_after_backward":
            if not running:
                self._note_backward()
            return
        if running and call in ("on_step_begin", "on_before_backward", "on_before_optimizer_step", "on_step_end"):
            self.after_backward()
        elif evidence.gradients and not running:
            self._note_backward()
        if evidence.steps:
            self._at_boundary = True
        if call != "on_step_end" and (evidence.steps or call == "on_step_begin"):
            self.after_step_call()

    def _note_backward(self) -> None:
        """A backward that nobody announced is over: it is counted, and nothing is repaired that was due before it."""
        running = self.tracker.begin("engine.backward", None, self._boundary())
        self.accumulators.closed_backward(running.boundary)
        self.tracker.end()

    def mode_changed(self, training: bool) -> None:
        """An evaluation begins or ends."""
        self.emit(ev.ModeChange(training))

    def raised(self, error: BaseException) -> None:
        """The loop caught this exception and will go on, or is about to end."""
        tracker = self.tracker
        if tracker.running is not None:
            if self._lifts_refusal():
                self.engine._support_torch_style_backward = False
            self._abort(error)
        else:
            self._raised(ev.Phase.FORWARD if tracker.depth else ev.Phase.BETWEEN, error)
        tracker.depth = 0
        tracker.stack.clear()
        self._at_boundary = False
        self._waiting = frozenset()
        self.evidence()  # what happened up to here is forgiven
