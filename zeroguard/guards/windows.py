"""What the guard ``accumulation`` watches of windows: backwards, boundaries, zero_grad and steps go together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zeroguard import events as ev
from zeroguard.backends.base import Engine
from zeroguard.findings import Severity
from zeroguard.guards.rhythm import Seen, Watcher

__all__ = ["Windows"]

#: Backwards without any step after which a loop that closes its session, or one that goes on, has forgotten it. High
#: enough for a look at a few gradients, and for any number of micro-batches that a loop adds up by itself.
FORGOTTEN_AT_CLOSE, FORGOTTEN = 10, 1000
#: Windows in a row, and clears in them, that no skipping of bad batches explains.
WINDOWS, CLEARS = 2, 3
#: Windows cut short by zero_grad, all of them after a multiple of the micro-batches before the first: ends of epochs.
SHORT = 3
_CARRIED = "they are added to the next epoch's first window"


class Windows(Watcher):
    """Backwards, boundaries, zero_grad and steps go together."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.steps = 0
        self.blind = False  # a loop whose backwards are not seen: its outputs are in containers that nobody looks into
        self.called = False  # any step, of the engine or of its optimizer
        self.untouched = 0  # backwards since the last step, zero_grad or read
        self.streak: list[int] = []
        self.micro_batches = 0  # that engine.step() has counted
        self.cut: list[int] = []  # how many it had where zero_grad cut a window short
        self._next_window()

    def _next_window(self) -> None:
        self.backwards = 0  # in this window, thrown away ones too
        self.waiting = 0  # of these, not cleared
        self.at_boundary = False  # one of these was at a boundary
        self.replaced = 0
        self.forwards = 0
        self.aborted = False
        self.clears = 0
        self.counted = 0  # micro-batches that engine.step() has counted
        self.cut_now = 0  # how many it had in all where zero_grad threw some away
        self.open = 0

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            ev.ForwardBegin: self._forward,
            ev.BackwardBegin: self._begin,
            ev.BackwardEnd: self._end,
            ev.BackwardAborted: self._aborted,
            ev.GradientRead: self._read,
            ev.ZeroGrad: self._zero_grad,
            ev.MicroBatchEnd: self._counts,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
            ev.EpochEnd: self._epoch_end,
            ev.Close: self._close,
        }

    def _forward(self, event: ev.ForwardBegin) -> Iterable[Seen]:
        self.forwards += event.grad and event.training
        return ()

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Seen]:
        self.replaced += self.at_boundary
        return ()

    def _end(self, event: ev.BackwardEnd) -> Iterable[Seen]:
        self.backwards += 1
        self.waiting += 1
        self.at_boundary = self.at_boundary or event.boundary
        self.untouched += 1
        if self.untouched == FORGOTTEN:
            yield from self._forgotten()

    def _aborted(self, event: ev.BackwardAborted) -> Iterable[Seen]:
        self.aborted = True
        if event.reducing:  # a release that does not replace what stands there, but trips over it
            yield from self._overwritten()

    def _read(self, event: ev.GradientRead) -> Iterable[Seen]:
        self.untouched = 0
        return ()

    def _zero_grad(self, event: ev.ZeroGrad) -> Iterable[Seen]:
        # engine, optimizer and module may each be told to clear; they clear the same backwards.
        self.clears += self.waiting > 0
        if self.waiting and self.open:
            self.cut_now = self.micro_batches
        self.waiting = self.untouched = self.replaced = 0
        self.at_boundary = False
        return ()

    def _counts(self, event: ev.MicroBatchEnd) -> Iterable[Seen]:
        self.called = True
        self.counted += 1
        self.micro_batches += 1
        self.open = event.open
        return ()

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Seen]:
        self.called = True
        if not self.steps and not event.backwards:
            self.blind = True
        yield from self._overwritten()
        if self.steps and not (self.blind or event.backwards or self.backwards or self.aborted):
            yield from self._empty(event)
        yield from self._cleared()
        yield from self._short(event)

    def _overwritten(self) -> Iterable[Seen]:
        """Where accumulator_reset is at work, it adds up, or says this itself."""
        alone = not self.engine.actions.get("accumulator_reset")
        if self.replaced and alone and self.engine.facts.replaces_at_boundary:
            yield Seen("overwritten_gradient", "error", {"n": self.replaced + 1})

    def _empty(self, event: ev.StepBegin) -> Iterable[Seen]:
        """A step, and no backward since the last one."""
        facts = self.engine.facts
        severity: Severity = "error"
        moves = "momentum, weight decay, learning rate schedule and step counters move once more"
        if facts.layout != 0 and not facts.offload:
            effect = "DeepSpeed finds no gradients and crashes: 'NoneType' object is not iterable, or the like"
        elif facts.stage == 0 or self.repaired:
            if event.cleared:
                return  # legal, and nothing happens, as in PyTorch
            severity, effect = "warning", f"no gradient is applied again, but {moves}"
        else:
            effect = f"the last window's gradient is applied again, and {moves}"
        kind = "step_without_backward" if self.forwards else "second_step"
        yield Seen(kind, severity, {"by": event.by, "effect": effect})

    def _cleared(self) -> Iterable[Seen]:
        if not self.clears >= self.counted > 0:
            self.streak = []
            return
        self.streak.append(self.clears)
        if len(self.streak) >= WINDOWS and sum(self.streak) >= CLEARS:
            only = "one micro-batch of each window is trained, and the others are lost"
            effect = f"zero_grad clears, as in PyTorch: {only}"
            if not self.repaired and self.engine.facts.stage > 1:
                effect = f"none so far, as ZeRO's accumulators ignore it; in PyTorch, on ZeRO-0 and 1, {only}"
            yield Seen("cleared_every_micro_batch", "warning", {"windows": len(self.streak), "effect": effect})

    def _short(self, event: ev.StepBegin) -> Iterable[Seen]:
        """zero_grad has thrown micro-batches away, and DeepSpeed still counts them. A bad batch that is left out looks
        the same, but not at every so many micro-batches."""
        facts = self.engine.facts
        clears = self.repaired or facts.stage == 0 or (facts.layout == 1 and not facts.offload)
        if not (self.cut_now and self.waiting and clears and event.by == "engine.step"):
            return
        self.cut.append(self.cut_now)
        first, steps = self.cut[0], facts.accumulation_steps
        if len(self.cut) >= SHORT and first > steps and not any(number % first for number in self.cut):
            yield Seen("short_window", "warning", {"n": self.waiting, "steps": steps, "every": first})

    def _step_end(self, event: ev.StepEnd) -> Iterable[Seen]:
        self.steps += 1
        self.micro_batches += 1
        self.untouched = 0
        self._next_window()
        return ()

    def _epoch_end(self, event: ev.EpochEnd) -> Iterable[Seen]:
        yield from self._left_open(
            "at the end of an epoch",
            f"{_CARRIED}, and each window is shifted against its batches from then on",
        )

    def _close(self, event: ev.Close) -> Iterable[Seen]:
        if event.failed:
            return
        # At stage 0 a look at gradients is one at param.grad, which nobody sees.
        if self.untouched >= FORGOTTEN_AT_CLOSE and self.engine.facts.stage:
            yield from self._forgotten()
        if self.steps:
            yield from self._left_open(
                "where the session closes",
                f"they are never applied if training ends here; if it goes on, {_CARRIED}",
            )

    def _left_open(self, where: str, effect: str) -> Iterable[Seen]:
        if self.open and self.waiting:
            steps = self.engine.facts.accumulation_steps
            yield Seen("open_window", "warning", {"open": self.open, "steps": steps, "where": where, "effect": effect})

    def _forgotten(self) -> Iterable[Seen]:
        if not self.called:
            yield Seen("engine_step_never_called", "warning", {"n": self.untouched})
