"""What a user does beside forward, backward and step: zero_grad, reads of host memory, train and eval, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroguard import events as ev
from zeroguard.backends.deepspeed.state import BackendState, Make

__all__ = ["Asides"]


class Asides(BackendState):
    """Wrappers of zero_grad, of the copies to the host and their readers, of train and of save_checkpoint."""

    def _wrap_zero_grad(self, by: str) -> Make:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def zero_grad(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                tracker = self.tracker
                running = tracker.running
                if running is not None and running.by == "loss.backward" and torch._C._current_graph_task_id() < 0:
                    self._abort(None)  # it is over, and DeepSpeed has left its epilogue out
                self.cleared = self.cleared or not self.step_depth  # DeepSpeed clears after its own steps
                if not self.in_step and tracker.running is None and (tracker.in_window or tracker.unfinished):
                    self.emit(ev.ZeroGrad(by, tracker.in_window))  # type: ignore[arg-type]
                    self._discard()
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
            with copies.inside():
                return original(*args, **kwargs)

        return hot

    def _wrap_copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        copies = self.copies
        record = not copies.own_events

        def copying(*args: Any, **kwargs: Any) -> Any:
            try:
                with copies.inside():
                    return original(*args, **kwargs)
            finally:
                if record:
                    copies.copied()

        return copying

    def _wrap_reading(self, what: str) -> Make:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*args: Any, **kwargs: Any) -> Any:
                self.copies.read(what)
                return original(*args, **kwargs)

            return reading

        return make

    def _gradient_read(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tracker = self.tracker
        if not self.in_step:
            running = tracker.running is not None
            early = tracker.in_window > 0 and not (running or tracker.at_boundary or tracker.unfinished)
            self.emit(ev.GradientRead("safe_get_full_grad", tracker.in_window + running, early))
        return original(*args, **kwargs)

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
