"""Guard ``accumulation``: the rhythm of backward, boundary and step is the one that the loop means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, Request
from zeroguard.findings import Severity
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["AccumulationConfig", "AccumulationGuard"]


class AccumulationConfig(GuardModel):
    """Options of the guard ``accumulation``."""

    name: Literal["accumulation"] = "accumulation"
    """The guard's name."""
    action: Literal["detect", "repair"] = "detect"
    """``detect`` changes nothing and reports; ``repair`` also lets DeepSpeed not divide a loss that the trainer has
    divided already. That makes the gradients of such a run larger, by its number of micro-batches: with an optimizer
    that is not invariant to that (SGD, or any with clipping), look at the learning rate."""


class AccumulationGuard(Guard):
    """Sees what a trainer and DeepSpeed do to the same loss and the same step.

    Source of the claim: docs/faults/rhythm.md, with the measured table; Lightning issue 6170, Accelerate issues 2951
    and 3303. Stages 0 to 3. LOCAL.
    """

    name = "accumulation"
    Config = AccumulationConfig

    def __init__(self, config: AccumulationConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.repair = config.action == "repair"
        self.divided: ev.LossDivided | None = None
        self.reported: set[str] = set()

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        return Choice(
            "selected", "a trainer and DeepSpeed may both divide a loss, or step, without the other's knowing"
        )

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            ev.LossDivided: self._divided,
            ev.BackwardBegin: self._begin,
            ev.GraphReached: self._reached,
            ev.GradientRead: self._read,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step_end,
        }

    def _divided(self, event: ev.LossDivided) -> Iterable[Outcome]:
        self.divided = event
        return ()

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Outcome]:
        self.checks += 1
        divided, self.divided = self.divided, None
        if divided is None or divided.divisor == 1 or event.divisor == 1:
            return
        if self.repair:
            yield Request(Action.DIVIDE_ONCE)
            return
        n, m = divided.divisor, event.divisor
        yield from self._report(
            "double_division",
            "warning",
            expected=f"a loss is divided once by its {m} micro-batches",
            seen=f"{divided.by} divided it by {n}, and engine.backward divides it by {m} again",
            effect=f"gradients are {n} times too small: scaled by 1/{n * m} instead of 1/{m}. Adam hides most of it; "
            "SGD, clipping and every logged gradient norm do not",
            cause=f"{divided.by} sets DeepSpeed's gradient_accumulation_steps and also divides by it itself",
            remedy=f"multiply the loss by {n} in training_step, or write\n"
            '      {"name": "accumulation", "action": "repair"}\n'
            "    and in both cases look at your learning rate",
        )

    def _reached(self, event: ev.GraphReached) -> Iterable[Outcome]:
        if event.stepped:
            yield from self._report(
                "step_between_backwards",
                "error",
                expected="all backwards over one forward's graph come before the step",
                seen=f"backward {event.again + 1} over the graph of forward {event.forward} comes after a step that "
                "consumed an earlier one",
                effect="two steps a batch, and the later one's gradients mix weights of before and after the first",
                cause="accelerator.backward, and with it Hugging Face's Trainer, calls engine.step inside the backward",
                remedy="add the losses and call backward once:\n"
                "      accelerator.backward(loss_a + loss_b)\n"
                "    or step yourself; what accelerator.prepare returned is the engine:\n"
                "      model.backward(loss_a, retain_graph=True); model.backward(loss_b); model.step()",
            )

    def _read(self, event: ev.GradientRead) -> Iterable[Outcome]:
        self.checks += 1
        if not event.backwards:
            yield from self._report(
                "late_gradient_read",
                "warning",
                expected="a gradient is read after its backward and before the step",
                seen=f"{event.what} with no backward since the last step",
                effect="DeepSpeed answers with what the last step left in its buffers (ZeRO-3, offload), or an error",
                cause="the step came earlier than the place of the read suggests; in Hugging Face's "
                "on_pre_optimizer_step and on_optimizer_step it is over, as Accelerate steps inside backward",
                remedy="read between backward and step, in your own loop:\n"
                "      engine.backward(loss); norm = safe_get_full_grad(param).norm(); engine.step()\n"
                "    for the norm over all gradients: session.grad_norm(), or grad_norm=True of zeroguard's callbacks",
            )

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        self.checks += 1
        if event.by == "engine.step":
            return
        facts = self.engine.facts
        steps = facts.accumulation_steps
        # Only at a boundary do these reduce, or hand over, what the step consumes; the others do it at each backward.
        loses = facts.layout in (1, 2, "bf16") or facts.offload or (facts.stage == 0 and facts.world_size > 1)
        where = "optimizer.step() was called without engine.step()"
        remedy = "call engine.step() instead of optimizer.step(); in Fabric that is\n      model._forward_module.step()"
        if steps > 1 and loses:
            yield from self._report(
                "bypassed_engine_step",
                "error",
                expected="engine.step() after each micro-batch: it alone counts them",
                seen=f"{where} at gradient_accumulation_steps = {steps}",
                effect="no backward ever counts as a boundary, so nothing is reduced for this step: KeyError: 0, or a "
                "silently wrong update",
                cause="Fabric's optimizer.step() never reaches the engine, whose micro_steps then stay at 0",
                remedy=f"{remedy}\n    or set gradient_accumulation_steps to 1 in the DeepSpeed configuration",
            )
        else:
            yield from self._report(
                "bypassed_engine_step",
                "warning",
                expected="engine.step(), which steps the optimizer and counts",
                seen=where,
                effect="this update is right, but engine.global_steps stays where it is: a scheduler in the DeepSpeed "
                "configuration never moves, and every checkpoint without a tag is called global_step0",
                cause="Fabric's optimizer.step() calls the ZeRO optimizer, never the engine",
                remedy=f"{remedy}\n    or leave it, if you have no such scheduler and name your checkpoints",
            )

    def _report(self, kind: str, severity: Severity, **text: Any) -> Iterable[Outcome]:
        """Once a kind: it is the loop's shape, the same at every step."""
        if kind not in self.reported:
            self.reported.add(kind)
            yield self.finding(kind, severity, **text)

    def _step_end(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        return ()
