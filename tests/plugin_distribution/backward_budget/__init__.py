"""A guard that zeroguard does not bring: too many backwards before one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from zeroguard import events as ev
from zeroguard.backends.base import EngineFacts
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["BackwardBudgetConfig", "BackwardBudgetGuard"]


class BackwardBudgetConfig(GuardModel):
    """Options of the guard ``backward_budget``."""

    name: Literal["backward_budget"] = "backward_budget"
    """The guard's name."""
    limit: int = Field(default=8, ge=1)
    """Backwards that one optimizer step may consume."""


class BackwardBudgetGuard(Guard):
    """Counts the backwards of each step. LOCAL, all stages."""

    name = "backward_budget"
    Config = BackwardBudgetConfig

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        """Needed where the engine accumulates by itself."""
        if facts.stage == 0:
            return Choice("not_applicable", "stage 0 has no budget")
        return Choice("selected", f"at most {config.limit} backwards a step")

    def handlers(self) -> dict[type[ev.Event], Any]:
        """Only the begin of a step."""
        return {ev.StepBegin: self._step}

    def _step(self, event: ev.StepBegin) -> Iterable[Outcome]:
        self.step = event.step
        self.checks += 1
        if event.backwards > self.config.limit:
            yield self.finding(
                "budget_exceeded",
                "warning",
                expected=f"at most {self.config.limit} backwards before one step",
                seen=f"{event.backwards} backwards",
                cause="the loop adds up more losses than this job allows",
                remedy="add the losses before one backward, or raise limit",
            )
