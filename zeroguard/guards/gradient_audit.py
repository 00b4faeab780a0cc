"""Guard ``gradient_audit``: the gradient that the optimizer consumes is the one that autograd produced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, GradientAudit, Mismatch, Request, UpdateAudit
from zeroguard.findings import Severity
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["GradientAuditConfig", "GradientAuditGuard"]

_SEVERITY: dict[str, Severity] = {"raise": "error", "warn": "warning", "record": "info"}
_GUARDED = 'leave "guards" out of the configuration, so that the accumulators are put right'
_EDIT = "if you changed gradients yourself, call session.expect_gradient_edit() in that step"

#: kind -> (what was seen, what it does, the likely cause, what to change)
_TEXTS: dict[str, tuple[str, str, str, str]] = {
    "lost": (
        "the optimizer is about to consume zeros",
        "these parameters are not trained in this step",
        "a backward of the window never reached what the step consumes",
        _GUARDED,
    ),
    "stale": (
        "no backward of this window reached them, and the optimizer is about to consume a gradient",
        "these parameters move again with an old gradient",
        "an earlier window's gradient was never cleared",
        _GUARDED,
    ),
    "overwritten": (
        "the optimizer is about to consume the last backward's gradient alone",
        "what the earlier backwards of this step contributed is gone",
        "several backwards at an accumulation boundary before one step replace each other",
        f"{_GUARDED}; or set gradient_accumulation_steps to the number of backwards",
    ),
    "duplicated": (
        "the optimizer is about to consume twice the gradient",
        "these parameters move twice as far",
        "a gradient was added to an accumulator that already held it",
        _GUARDED,
    ),
    "scaled": (
        "the optimizer is about to consume {factor} times the gradient",
        "these parameters move by a wrong amount; with Adam it hardly shows, with clipping and SGD it does",
        "the loss or the gradient is divided, or multiplied, once too often on its way",
        "look at who divides by the number of micro-batches or of ranks: your loop, the trainer, DeepSpeed",
    ),
    "not_reduced": (
        "this rank is about to consume its own gradient, not the mean over the ranks",
        "ranks train on their own data only, and drift apart",
        "the reduction over the data-parallel ranks did not take place for these parameters",
        "check that all ranks reach the same accumulation boundary and the same parameters",
    ),
    "missing_on_rank": (
        "the mean that the optimizer is about to consume leaves this rank's gradient out",
        "this rank's data does not train these parameters",
        "this rank's gradient arrived after the reduction, or in a different order than on the others",
        "check that all ranks reach the same parameters in the same order",
    ),
    "not_finite": (
        "autograd delivered finite gradients, and the optimizer is about to consume inf or NaN",
        "the weights become NaN, or the step is skipped",
        "an overflow in the reduction, or memory that was read before it was written",
        "reduce in fp32 (communication_data_type), or lower the loss scale",
    ),
    "differs": (
        "the optimizer is about to consume another gradient",
        "the update is wrong",
        "part of an accumulator was overwritten, or holds an earlier window's gradient",
        f"{_GUARDED}; {_EDIT}",
    ),
}


class GradientAuditConfig(GuardModel):
    """Options of the guard ``gradient_audit``."""

    name: Literal["gradient_audit"] = "gradient_audit"
    """The guard's name."""
    action: Literal["raise", "warn", "record"] = "warn"
    """What a mismatch is: an error, a warning, or a note that is only kept in ``session.findings``."""
    elements_per_parameter: Annotated[int, Field(ge=1)] | Literal["all"] = 64
    """How many elements of each parameter are compared, at places that change from step to step; fewer where that would
    be more than 262 144 in all. ``all`` is for tests."""
    every_n_steps: int = Field(default=10, ge=1)
    """One step out of so many is audited."""
    warmup_steps: int = Field(default=5, ge=0)
    """So many first steps are all audited."""


class GradientAuditGuard(Guard):
    """Compares samples of what autograd delivered with what the optimizer consumes.

    Tolerance, elementwise: with B backwards in the window, W data-parallel ranks, u the largest unit roundoff of the
    dtypes on the way (parameter, accumulator, communication) and S the mean over the ranks of the sum over the
    backwards of the absolute sampled gradient, |consumed - expected| may be at most
    ((B + 1) + (W + 3)) u S + (B + W) 2^-24 S, plus the smallest number of those dtypes once for each rounding.

    Stages 0 to 3. COLLECTIVE at an audited step: one all-reduce of three floats a sample, at the step of every rank.
    """

    name = "gradient_audit"
    collective = True
    communicates = True
    Config = GradientAuditConfig

    def __init__(self, config: GradientAuditConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.severity = _SEVERITY[config.action]
        self.elements = 0 if config.elements_per_parameter == "all" else config.elements_per_parameter
        self.taken = 0
        self.sampling = False
        #: what the last audited step did to the weights, not looked at yet
        self.update: Callable[[], UpdateAudit] | None = None
        self.joined = -1  # the last step in whose all-reduce this rank took part
        self.reported: set[tuple[str, tuple[str, ...]]] = set()

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        if facts.offload_optimizer == "nvme":
            return Choice("not_applicable", "gradients on NVMe cannot be read before the step")
        return Choice("selected", "compares samples of autograd's gradients with what the optimizer consumes")

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            ev.BackwardBegin: self._begin,
            ev.BackwardAborted: self._aborted,
            ev.ZeroGrad: self._zero_grad,
            ev.GradientEdit: self._edit,
            ev.GradientClip: self._clipped,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
            ev.Close: self._close,
        }

    def _due(self) -> bool:
        return self.taken < self.config.warmup_steps or self.taken % self.config.every_n_steps == 0

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Outcome]:
        yield from self._settle()
        if self._due():
            self.sampling = True
            yield Request(Action.SAMPLE_GRADIENTS, (self.elements, self.taken))

    def _aborted(self, event: ev.BackwardAborted) -> Iterable[Outcome]:
        if self.sampling and event.raised:
            yield Request(Action.SPOIL_SAMPLES, ("a backward raised",))

    def _edit(self, event: ev.GradientEdit) -> Iterable[Outcome]:
        if self._due():
            self.sampling = True
            yield Request(Action.SPOIL_SAMPLES, ("an edit of the gradients was declared",))

    def _clipped(self, event: ev.GradientClip) -> Iterable[Outcome]:
        """The user's own clip, where it found something to clip."""
        if event.gradients and self.sampling:
            yield Request(Action.SPOIL_SAMPLES, ("the loop has clipped the gradients",))

    def _zero_grad(self, event: ev.ZeroGrad) -> Iterable[Outcome]:
        # Not the time to settle: zero_grad comes right after the step.
        if self.sampling:
            yield Request(Action.FORGET_SAMPLES)

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        yield from self._settle()
        if not self._due():
            return
        self.joined = self.taken
        result = self.engine.audit_gradients(self.elements, self.taken)
        if result.skipped:
            self.note = f"step {self.step} not audited: {result.skipped}"
            return
        self.checks += 1
        yield from self._judge(result)
        yield from self._judge_update(UpdateAudit(not_cast=result.edited))

    def owes(self, event: ev.Event) -> Iterable[Request]:
        if isinstance(event, ev.StepBegin):
            if self._due() and self.joined != self.taken:
                self.joined = self.taken
                self.engine.audit_gradients(self.elements, self.taken)
        elif isinstance(event, ev.StepEnd):
            if self.step != event.step:
                self.step, self.taken, self.sampling = event.step, self.taken + 1, False
            yield Request(Action.END_SAMPLES)
        elif not isinstance(event, ev.Close):
            # The other ranks compare with a mean that this rank's samples are part of.
            yield Request(Action.SPOIL_SAMPLES, ("the guard broke",))

    def _judge(self, result: GradientAudit) -> Iterable[Outcome]:
        groups: dict[tuple[str, str], list[Mismatch]] = {}
        for item in result.mismatches:
            factor = "" if item.factor is None or item.kind != "scaled" else self._constant(item.factor)
            groups.setdefault((item.kind, factor), []).append(item)
        for (kind, factor), items in groups.items():
            subject = tuple(item.name for item in items)
            if (kind, subject) in self.reported:
                continue
            self.reported.add((kind, subject))
            seen, effect, cause, remedy = _TEXTS[kind]
            worst = max(item.error for item in items)
            yield self.finding(
                f"gradient_{kind}",
                self.severity,
                subject=subject,
                expected="the gradient that the optimizer consumes is the mean over the ranks of what autograd "
                f"delivered, to {result.tolerance:.1e} of its size",
                seen=f"{seen.format(factor=factor)}; relative error {worst:.2g}, {len(items)} of {result.audited} "
                "parameters of this rank",
                effect=effect,
                cause=cause,
                remedy=remedy,
            )

    def _constant(self, factor: float) -> str:
        """A factor in the words of those who make such mistakes."""
        facts = self.engine.facts
        for base, what in ((facts.accumulation_steps, "micro-batches"), (facts.world_size, "ranks")):
            for power in (1, 2):
                for sign, form in ((1, "N"), (-1, "1/N")):
                    if base > 1 and abs(factor / base ** (sign * power) - 1) < 0.02:
                        tail = f"^{power}" if power > 1 else ""
                        return f"{factor:.3g} ({form}{tail}, N = {base} {what})"
        return f"{factor:.3g}"

    def _step_end(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        due, self.taken = self._due(), self.taken + 1
        if not (due or self.sampling):
            return
        self.sampling = False
        if event.applied:
            self.update = self.engine.audit_update()
        if self.severity == "error":
            yield from self._settle()  # the ranks decide now
        yield Request(Action.END_SAMPLES)

    def _settle(self) -> Iterable[Outcome]:
        """What the last audited step did to the weights. Looked at when the next forward is on its way: to wait for the
        optimizer's step right after it would leave the accelerator without work."""
        update, self.update = self.update, None
        if update is not None:
            yield from self._judge_update(update())

    def _judge_update(self, result: UpdateAudit) -> Iterable[Outcome]:
        kinds = {
            "parameter_unmoved": (
                result.unmoved,
                "a parameter with a gradient and a learning rate moves in a step",
                "not one sampled bit of its master weights changed",
                "these parameters are not trained",
                "the step wrote elsewhere, or something put the old weights back",
                "look for code that restores weights, and for a parameter that the optimizer holds twice",
            ),
            "copy_differs": (
                result.not_cast,
                "after a step a low-precision weight is its fp32 master weight, rounded",
                "the sampled weights differ",
                "the forward uses other weights than the optimizer trains; a resume uses yet others",
                "the weights were edited, under GatheredParameters without modifier_rank or in place, and the master "
                "weights were not; or this rank missed an update",
                "edit both: the master weights with deepspeed.utils.safe_set_full_fp32_param, and the copies under "
                "GatheredParameters(params, modifier_rank=0)",
            ),
        }
        for kind, (subject, expected, seen, effect, cause, remedy) in kinds.items():
            if not subject or (kind, subject) in self.reported:
                continue
            self.reported.add((kind, subject))
            yield self.finding(
                kind,
                self.severity,
                subject=subject,
                expected=expected,
                seen=seen,
                effect=effect,
                cause=cause,
                remedy=remedy,
            )

    def _close(self, event: ev.Close) -> Iterable[Outcome]:
        if not event.failed:
            yield from self._settle()
        if self.sampling:
            yield Request(Action.END_SAMPLES)
