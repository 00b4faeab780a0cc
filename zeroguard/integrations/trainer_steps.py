"""A guard that a trainer's integration brings along: the trainer's steps beside the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from zeroguard import events as ev
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["BatchBegin", "BatchEnd", "TrainerSteps", "TrainerStepsConfig"]


class BatchBegin(ev.Event):
    """The Trainer begins a step."""


class BatchEnd(ev.Event):
    """The Trainer ends a step."""


class TrainerStepsConfig(GuardModel):
    """No options."""

    name: Literal["trainer_steps"] = "trainer_steps"
    """The guard's name."""


class TrainerSteps(Guard):
    """Counts the engine's steps in each step of the Trainer: one is right.

    Two backwards over one graph are the guard ``accumulation``'s to report, at the second of them; this one sees two
    forwards, each with an ``accelerator.backward`` of its own. Stages 0 to 3. LOCAL.
    """

    name: ClassVar[str] = "trainer_steps"
    Config = TrainerStepsConfig

    def __init__(self, config: TrainerStepsConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.taken = 0
        self.silent = False  # reported, here or by the other guard

    @classmethod
    def choose(cls, facts: Any, config: Any) -> Choice:
        return Choice("selected", "brought by ZeroGuardTrainerCallback")

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            BatchBegin: self._begin,
            BatchEnd: self._end,
            ev.GraphReached: self._reached,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
        }

    def _begin(self, event: BatchBegin) -> Iterable[Outcome]:
        self.taken = 0
        return ()

    def _reached(self, event: ev.GraphReached) -> Iterable[Outcome]:
        self.silent = self.silent or event.stepped
        return ()

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        self.taken += 1
        return ()

    def _step_end(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        return ()

    def _end(self, event: BatchEnd) -> Iterable[Outcome]:
        self.checks += 1
        if self.taken < 2 or self.silent:
            return
        self.silent = True
        yield self.finding(
            "several_steps_a_batch",
            "warning",
            expected="one engine.step() for each step that the Trainer counts",
            seen=f"{self.taken} engine steps in one step of the Trainer",
            effect="the weights move after each backward instead of once for their sum, and the learning rate, "
            "max_steps and the log count a batch's steps as one",
            cause="training_step calls accelerator.backward more than once, and each call steps",
            remedy="add the losses and call backward once:\n"
            "      self.accelerator.backward(loss_a + loss_b, scale_wrt_gas=False)\n"
            "    or step once yourself; the model that training_step gets is the engine:\n"
            "      model.backward(loss_a, scale_wrt_gas=False)\n"
            "      model.backward(loss_b, scale_wrt_gas=False)\n"
            "      model.step()",
        )
