"""What the guard ``accumulation`` watches of weights: a step, and the loop, do to them what they seem to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zeroguard import events as ev
from zeroguard.backends.base import Engine, Switched
from zeroguard.guards.rhythm import Seen, Watcher

__all__ = ["Spoiled", "Trained", "Written"]

#: Steps from one look at requires_grad of all parameters to the next.
LOOK = 10


class Trained(Watcher):
    """A step moves what is to be trained, and nothing else."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.steps = 0

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {ev.StepBegin: self._step_begin}

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Seen]:
        every, self.steps = self.steps % LOOK == 0, self.steps + 1
        yield from self._judge(self.engine.switched_parameters(every=every))

    def _judge(self, switched: Switched) -> Iterable[Seen]:
        if switched.frozen:
            old = self.engine.facts.offload and not self.repaired
            what = "the gradient of an earlier step" if old else "momentum and weight decay"
            yield Seen("frozen_parameter_moves", "warning", {"what": what}, switched.frozen)
        if switched.unfrozen:
            yield Seen("unfrozen_parameter_stays", "warning", {}, switched.unfrozen)
        if switched.left_out:
            # Many models leave something out and are none the worse; it is not what PyTorch does.
            yield Seen("idle_parameter_moves", "info", {}, switched.left_out)


class Spoiled(Watcher):
    """Weights stay finite. Only where DeepSpeed does not look by itself."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.begun = False

    def handlers(self) -> dict[type[ev.Event], Any]:
        facts = self.engine.facts
        if facts.checks_gradients or not facts.trains or facts.offload_optimizer == "nvme":
            return {}
        return {ev.StepBegin: self._step_begin, ev.StepEnd: self._step_end, ev.Close: self._close}

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Seen]:
        if not self.begun:
            self.begun = True
            self.engine.spoiled_step()
        return ()

    def _step_end(self, event: ev.StepEnd) -> Iterable[Seen]:
        return self._judge(self.engine.spoiled_step() if event.applied else 0)

    def _close(self, event: ev.Close) -> Iterable[Seen]:
        return () if event.failed else self._judge(self.engine.spoiled_step(last=True))

    def _judge(self, step: int) -> Iterable[Seen]:
        if step:
            yield Seen("weights_not_finite", "error", {"step": step})


class Written(Watcher):
    """What the loop writes into weights stays there."""

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {ev.EditLost: self._lost}

    def _lost(self, event: ev.EditLost) -> Iterable[Seen]:
        yield Seen("lost_edit", "warning", {}, event.parameters)
