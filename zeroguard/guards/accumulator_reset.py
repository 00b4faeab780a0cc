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
        self.at_boundary = False  # a backward of this window was, and was not cleared since
        self.cleared = ""  # who called zero_grad in this window
        self.empty = False  # and no backward has come since
        self.in_the_way = False  # zero_grad came after a backward at a boundary, and none has ended since
        self.reported: set[str] = set()
        facts = engine.facts
        self.collective = self.repair and (facts.overlap_comm or (self.untouched and facts.stage == 3))

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
            ev.BackwardAborted: self._aborted,
            ev.ZeroGrad: self._zero_grad,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
        }

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Outcome]:
        if self.repair:
            if event.after_boundary:
                yield Request(Action.CARRY)
        elif self.engine.facts.replaces_at_boundary:
            self.overwritten += self.at_boundary

    def _reduce(self, event: ev.BackwardReduce) -> Iterable[Outcome]:
        if self.repair:
            yield Request(Action.FLUSH_PENDING, (event.boundary,))

    def owes(self, event: ev.Event) -> Iterable[Request]:
        # ZeRO-1's left-out reduction; and where a shelved ZeRO-3 parameter stands decides whether it is gathered again.
        if self.repair and isinstance(event, ev.BackwardReduce):
            yield Request(Action.FLUSH_PENDING, (event.boundary,))
        if self.untouched and isinstance(event, ev.StepBegin):
            yield Request(Action.SHELVE_IDLE)
        if self.untouched and isinstance(event, ev.StepEnd):
            yield Request(Action.UNSHELVE_IDLE)

    def _end(self, event: ev.BackwardEnd) -> Iterable[Outcome]:
        self.checks += 1
        self.at_boundary = self.at_boundary or event.boundary
        self.in_the_way = self.empty = False
        if self.repair:
            yield Request(Action.SETTLE, (event.boundary,))

    def _aborted(self, event: ev.BackwardAborted) -> Iterable[Outcome]:
        """Some releases do not overwrite what an earlier backward at a boundary left, but trip over it."""
        if self.overwritten and event.reducing and not self.repair:
            yield from self._overwritten(f"DeepSpeed's reduction raised {event.error}")
        elif self.in_the_way and event.reducing and not event.twice:
            yield from self._uncleared((), f"DeepSpeed's reduction of the next backward raised {event.error}")

    def _zero_grad(self, event: ev.ZeroGrad) -> Iterable[Outcome]:
        self.checks += 1
        if self.repair:
            yield Request(Action.CLEAR)
        elif event.backwards:
            self.cleared = self.cleared or event.by
            self.empty = True
            facts = self.engine.facts
            self.in_the_way = self.in_the_way or (self.at_boundary and facts.replaces_at_boundary and not facts.offload)
        self.overwritten, self.at_boundary = 0, False

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        self.checks += 1
        if self.repair:
            yield Request(Action.DROP_IDLE)
            if self.untouched:
                yield Request(Action.SHELVE_IDLE)
            return
        uncleared = self.engine.uncleared_parameters() if self.cleared else ()
        stale, lost = self.engine.stale_parameters(), self.engine.lost_parameters()
        if uncleared:
            stale = tuple(name for name in stale if name not in uncleared)
            yield from self._uncleared(
                uncleared, "these parameters move with a gradient that you cleared, or with one that was added to it"
            )
        elif self.empty and self.engine.facts.layout in (1, 2) and not self.engine.facts.offload:
            yield from self._uncleared((), "DeepSpeed steps it, or finds nothing to step and crashes")
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
        if self.overwritten:
            yield from self._overwritten("only the last backward's gradient is applied")

    def _uncleared(self, subject: tuple[str, ...], effect: str) -> Iterable[Outcome]:
        yield from self._report(
            "zero_grad_incomplete",
            subject,
            expected=f"{self.cleared}.zero_grad() clears the gradients of the window",
            seen="what it threw away is still in ZeRO's accumulators",
            effect=effect,
            cause="zero_grad clears .grad only; ZeRO has moved the gradients elsewhere by then",
            remedy=REMEDY,
        )

    def _overwritten(self, effect: str) -> Iterable[Outcome]:
        number = self.overwritten + 1
        self.overwritten = 0
        yield from self._report(
            "overwritten_gradient",
            (),
            expected="several backwards before one step add up",
            seen=f"{number} backwards at an accumulation boundary before one step",
            effect=effect,
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
        self.overwritten, self.at_boundary, self.cleared = 0, False, ""
        self.empty = self.in_the_way = False
        if self.untouched:
            yield Request(Action.UNSHELVE_IDLE)
