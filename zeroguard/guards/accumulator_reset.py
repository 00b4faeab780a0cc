"""Guard ``accumulator_reset``: the accumulators hold this window's gradients and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, Request
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["AccumulatorResetConfig", "AccumulatorResetGuard"]

REMEDY = 'leave "guards" out of the configuration, or write {"name": "accumulator_reset", "action": "repair"}'


class AccumulatorResetConfig(GuardModel):
    """Options of the guard ``accumulator_reset``."""

    name: Literal["accumulator_reset"] = "accumulator_reset"
    """The guard's name."""
    action: Literal["repair", "detect"] = "repair"
    """``repair`` clears, recovers and adds up; ``detect`` changes nothing and reports."""
    idle: Literal["zero_gradient", "untouched"] = "zero_gradient"
    """What a step does to a parameter that no backward of the window reached. ``zero_gradient`` steps it with a zero
    gradient: momentum and weight decay still act on it. ``untouched`` puts its master weights and optimizer state
    back, as plain PyTorch leaves a parameter whose grad is None; it copies the idle parameters once a step. A step
    counter that the optimizer keeps per flat partition (Adam's) still counts that step."""


class AccumulatorResetGuard(Guard):
    """Keeps stale gradients away from the optimizer, and lost ones on their way to it.

    Source of the claim: docs/faults/stale_gradient.md, with the measured table; DeepSpeed issues 5241, 7439 and pull
    request 7981. Stages 1 to 3. LOCAL, but for one reduction of ZeRO-1 with overlap_comm that DeepSpeed itself leaves
    out.
    """

    name = "accumulator_reset"
    Config = AccumulatorResetConfig

    def __init__(self, config: AccumulatorResetConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.repair = config.action == "repair"
        self.untouched = config.idle == "untouched" and self.repair
        self.overwritten = 0
        self.reported: set[str] = set()

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        if facts.stage == 0:
            return Choice("not_applicable", "stage 0 accumulates in .grad, which zero_grad clears")
        if facts.offload_optimizer == "nvme":
            return Choice(
                "not_applicable", "gradients on NVMe are swapped by DeepSpeed and cannot be reset from outside"
            )
        why = "keeps gradients outside .grad that zero_grad does not clear"
        if facts.stage == 3 or facts.offload:
            why += ", and steps parameters that no backward reached with an earlier gradient"
        return Choice("selected", f"{facts.describe()} {why}")

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            ev.BackwardBegin: self._begin,
            ev.BackwardReduce: self._reduce,
            ev.BackwardEnd: self._end,
            ev.ZeroGrad: self._zero_grad,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
        }

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Outcome]:
        if event.after_boundary:
            if self.repair:
                yield Request(Action.CARRY)
            else:
                self.overwritten += 1

    def _reduce(self, event: ev.BackwardReduce) -> Iterable[Outcome]:
        if self.repair:
            yield Request(Action.FLUSH_PENDING, (event.boundary,))

    def _end(self, event: ev.BackwardEnd) -> Iterable[Outcome]:
        self.checks += 1
        if self.repair:
            yield Request(Action.SETTLE, (event.boundary,))

    def _zero_grad(self, event: ev.ZeroGrad) -> Iterable[Outcome]:
        self.checks += 1
        if self.repair:
            yield Request(Action.CLEAR)
        elif event.backwards:
            yield from self._report(
                "zero_grad_incomplete",
                (),
                expected=f"{event.by}.zero_grad() clears the gradients of the window",
                seen=f"{event.backwards} backward(s) of this window stay in ZeRO's accumulators",
                effect="gradients that you cleared are still added, or consumed by the step",
                cause="zero_grad clears .grad only; ZeRO has moved the gradients elsewhere by then",
                remedy=REMEDY,
            )

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        self.checks += 1
        if self.repair:
            yield Request(Action.DROP_IDLE)
            if self.untouched:
                yield Request(Action.SHELVE_IDLE)
            return
        overwritten, self.overwritten = self.overwritten, 0
        stale, lost = self.engine.stale_parameters(), self.engine.lost_parameters()
        if stale:
            yield from self._report(
                "stale_gradient",
                stale,
                expected="a parameter that no backward of this window reached is not stepped with a gradient",
                seen="the optimizer consumes what an earlier window left in its slice",
                effect="these parameters move again with an old gradient, on every step",
                cause="ZeRO writes only the slices of parameters that received a gradient and never clears the others",
                remedy=REMEDY,
            )
        if lost:
            yield from self._report(
                "lost_gradient",
                lost,
                expected="every gradient of the window reaches the optimizer",
                seen="reached by a non-boundary backward only, and not copied to what the optimizer consumes",
                effect="these parameters are stepped without their gradient",
                cause="ZeRO copies only the parameters that the boundary backward reached",
                remedy=f"{REMEDY}; or let the last backward of the window reach them all",
            )
        if overwritten:
            yield from self._report(
                "overwritten_gradient",
                (),
                expected="several backwards before one step add up",
                seen=f"{overwritten + 1} backwards at an accumulation boundary before one step",
                effect="only the last backward's gradient is applied",
                cause="at gradient_accumulation_steps = 1 every backward is a boundary and replaces the one before",
                remedy=f"{REMEDY}; or set gradient_accumulation_steps to that number",
            )

    def _report(self, kind: str, subject: tuple[str, ...], **text: Any) -> Iterable[Outcome]:
        """Once a kind: the first contaminated step says it all."""
        if kind not in self.reported:
            self.reported.add(kind)
            yield self.finding(kind, "error", subject=subject, **text)

    def _step_end(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        if self.untouched:
            yield Request(Action.UNSHELVE_IDLE)
