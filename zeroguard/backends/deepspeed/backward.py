"""Which backward is running, over which forward's graph, and the state that it leaves behind.

DeepSpeed (0.18 and later) runs its preprocess once per forward, from hooks on the forward's outputs, not once per
backward (runtime/utils.py, OutputBackwardHookManager); its hook state is reset by the next forward only
(runtime/base_optimizer.py, BackwardHookStateManager); and ZeRO-3 modules count the backward visits that a forward
announced and use them up (runtime/zero/parameter_offload.py). A second backward over the same forward therefore runs
without its preprocess, its epilogue and its parameters. This file sees each backward begin, and puts those three back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroguard.backends.base import BackwardState, Done

__all__ = ["Backward", "BackwardTracker", "Forward"]

_VISITS = "applied_pre_backward_ref_cnt"
_GRADS = "ds_grads_remaining"


@dataclass(slots=True)
class Forward:
    """One run of engine.forward: how many backward visits its graph announced to each ZeRO-3 module."""

    number: int
    backwards: int = 0
    steps: int = 0  # optimizer steps before the first backward over it
    before: list[int] | None = None
    visits: list[int] = field(default_factory=list)
    grads: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Backward:
    """One root graph task."""

    number: int
    by: str
    task: int | None
    boundary: bool
    prologue_done: bool = False
    reduces: bool = True  # False: no parameter received a gradient
    reducing: bool = False  # DeepSpeed's own reduction raised, or runs
    forwards: set[int] = field(default_factory=set)


class BackwardTracker:
    """The backwards of one engine. LOCAL throughout.

    Attributes:
        running: the backward that is running, or None.
        since_reset: backwards that DeepSpeed's hook state has seen since its last reset.
        steps: optimizer steps in this session.
        in_window: backwards since the last optimizer step or zero_grad.
        boundary_in_window: whether one of them ran at an accumulation boundary.
        at_boundary: whether the latest of them did, and ended: the gradients wait for the step.
        unfinished: a backward began and never reached its epilogue.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.stage = stage
        self.modules = list(engine.module.modules()) if stage == 3 else []
        self.running: Backward | None = None
        self.count = 0
        self.forwards = 0
        self.depth = 0
        self.latest: Forward | None = None
        self.stack: list[Forward] = []
        self.since_reset = 0
        self.in_window = 0
        self.steps = 0
        self.boundary_in_window = False
        self.at_boundary = False
        self.unfinished = False
        self.pending_forward = False
        self.harmless = 0  # DeepSpeed's count of running backwards where nothing runs, and that says nothing
        self.unmet = 0  # parameter gradients that a backward that broke off has left it waiting for

    # -- forwards ------------------------------------------------------------------------------------------------------

    def forward_begins(self) -> Forward:
        """A forward is about to run; DeepSpeed resets its hook state in it."""
        self.forwards += 1
        record = Forward(self.forwards)
        if self.modules and torch.is_grad_enabled():
            record.before = self._visits()
        self.stack.append(record)
        if self.running is None:
            self.since_reset = 0
        return record

    def forward_ends(self, record: Forward) -> None:
        """The forward returned or raised."""
        self.stack.remove(record)
        if record.before is not None and not record.visits:
            self._announce(record)
        if torch.is_grad_enabled():
            self.latest = record
            self.pending_forward = record.backwards == 0

    def _visits(self) -> list[int]:
        return [m.__dict__.get(_VISITS, 0) for m in self.modules]

    def _announce(self, record: Forward) -> None:
        before = record.before or [0] * len(self.modules)
        record.visits = [now - then for now, then in zip(self._visits(), before, strict=True)]
        record.grads = [m.__dict__.get(_GRADS, 0) for m in self.modules]

    # -- backwards -----------------------------------------------------------------------------------------------------

    def begin(self, by: str, task: int | None, boundary: bool) -> Backward:
        """A root graph task begins."""
        self.count += 1
        self.running = Backward(self.count, by, task, boundary)
        self.unmet = 0
        self.pending_forward = False
        return self.running

    def reach(self, record: Forward) -> int:
        """The running backward reached a forward's outputs. Returns how many earlier backwards did; -1 if known."""
        running = self.running
        if running is None or record.number in running.forwards:
            return -1
        running.forwards.add(record.number)
        if self.modules and not record.visits:
            # Lightning's manual optimization: the backward runs inside the forward that it belongs to.
            self._announce(record)
        if not record.backwards:
            record.steps = self.steps
        record.backwards += 1
        return record.backwards - 1

    def end(self) -> None:
        """The running backward and its epilogue are done."""
        running = self.running
        if running is None:
            return
        self.running = None
        self.since_reset += 1
        self.in_window += 1
        self.boundary_in_window = self.boundary_in_window or running.boundary
        if running.reduces:
            self.at_boundary = running.boundary

    def abort(self) -> None:
        """The running backward ended without its epilogue."""
        if self.running is not None:
            self.running = None
            self.unfinished = True
            self.at_boundary = False
            self.since_reset += 1
            self.excuse()

    def excuse(self) -> None:
        """A backward was entered more often than it was left, for a reason that is known: its loss was made of several
        forwards, or it raised."""
        state = self.hook_state
        self.harmless = 0 if state is None else state.backward_active_depth
        self.unmet = 0 if state is None else state.remaining_grad_acc_hooks

    def reset_window(self) -> None:
        """An optimizer step or zero_grad."""
        self.in_window = 0
        self.boundary_in_window = False
        self.at_boundary = False

    # -- state and repairs -------------------------------------------------------------------------------------------

    @property
    def hook_state(self) -> Any:
        """DeepSpeed's BackwardHookStateManager, from 0.18 on; None before."""
        return getattr(self.optimizer, "_backward_hook_state", None)

    def state(self) -> BackwardState:
        """See :meth:`zeroguard.backends.base.Engine.backward_state`."""
        state = self.hook_state
        counters = 0
        if self.modules and not self.pending_forward:
            counters = sum(1 for m in self.modules if m.__dict__.get(_VISITS, 0) or m.__dict__.get(_GRADS, 0) > 0)
        return BackwardState(
            depth=0 if state is None else max(0, state.backward_active_depth - self.harmless),
            hooks=0 if state is None else max(0, state.remaining_grad_acc_hooks - self.unmet),
            counters=counters,
            unfinished=self.unfinished,
            half_reduced=self._half_reduced(),
        )

    def _half_reduced(self) -> bool:
        """Whether DeepSpeed's buckets hold gradients, or its marks say that some are reduced already: so they do in the
        middle of a backward, and after one that raised."""
        opt = self.optimizer
        if any(bucket.params for bucket in getattr(opt, "ipg_buckets", {}).values()):
            return True
        if getattr(opt, "params_in_ipg_bucket", ()):  # up to 0.16 there is one bucket
            return True
        marks = getattr(opt, "params_already_reduced", ())
        return any(marks.values() if isinstance(marks, dict) else marks)

    def rearm(self, prologue: Callable[[], None] | None) -> list[Done]:
        """Let DeepSpeed see the running backward as a micro-step of its own."""
        state = self.hook_state
        if state is not None:
            # Counts the backward before as a micro-step (ZeRO-3), drops its reduced fp32 accumulators (ZeRO-1/2), and
            # forgets its queued callback: what DeepSpeed otherwise does at the next forward.
            self.optimizer.clear_backward_seen_flag()
            state.backward_active_depth = self.harmless = 0
            state.remaining_grad_acc_hooks = 0
        self.since_reset = 0
        if prologue is not None:
            prologue()
        if state is None and prologue is None:
            return []  # before 0.18 there is no such state
        return [Done("backward_rearmed", (), "A further backward got its own preprocess, epilogue and micro-step.")]

    def restore(self, record: Forward) -> list[Done]:
        """Give the modules back the visits that this forward announced."""
        changed = 0
        for module, visits, grads in zip(self.modules, record.visits, record.grads, strict=True):
            space = module.__dict__
            if visits and _VISITS in space:
                space[_VISITS] += visits
                changed += 1
            if grads and _GRADS in space:
                space[_GRADS] = grads
        if not changed:
            return []
        return [Done("module_counters_restored", (), f"{changed} modules fetch their parameters again.")]

    def leave(self) -> None:
        """Leave a backward that never reached its epilogue; a forward that ran since keeps its announced visits."""
        state = self.hook_state
        if state is not None:
            state.backward_active_depth = self.harmless = 0
            state.remaining_grad_acc_hooks = 0
        self.unfinished = False

    def rest(self) -> list[Done]:
        """Put everything back to rest at a step boundary."""
        state = self.hook_state
        leaked = False
        if state is not None:
            leaked = bool(state.backward_active_depth or state.remaining_grad_acc_hooks)
            state.reset_for_new_step()
            state.backward_active_depth = self.harmless = 0
            state.remaining_grad_acc_hooks = 0
        if self.modules and not self.pending_forward:
            for module in self.modules:
                space = module.__dict__
                if space.get(_VISITS, 0):
                    space[_VISITS] = 0
                if space.get(_GRADS, 0):
                    space[_GRADS] = 0
        leaked = leaked or self.unfinished
        self.unfinished = False
        self.since_reset = 0
        return [Done("backward_state_reset", (), "Nothing of this step's backwards reaches the next step.", not leaked)]
