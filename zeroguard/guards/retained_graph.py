"""Guard ``retained_graph``: every backward over a forward's graph gets its own preprocess, epilogue and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, Request
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["RetainedGraphConfig", "RetainedGraphGuard"]

REMEDY = (
    'write {"name": "retained_graph", "action": "repair"}, or add the losses and call engine.backward once:\n'
    "      loss = loss_a + loss_b\n"
    "      engine.backward(loss)\n"
    "      engine.step()"
)


class RetainedGraphConfig(GuardModel):
    """Options of the guard ``retained_graph``."""

    name: Literal["retained_graph"] = "retained_graph"
    """The guard's name."""
    action: Literal["repair", "detect"] = "repair"
    """``repair`` gives every further backward its own preprocess and epilogue; ``detect`` changes nothing and reports
    the first contaminated step with the pattern that caused it."""


class RetainedGraphGuard(Guard):
    """Resets the backward preprocess state.

    Source of the claim: docs/faults/retained_graph.md, with the measured table; DeepSpeed issues 7352 and pull
    requests 8045 and 8135. Stages 0 to 3. LOCAL.
    """

    name = "retained_graph"
    Config = RetainedGraphConfig

    def __init__(self, config: RetainedGraphConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.repair = config.action == "repair"
        self.window = 0
        self.by: set[str] = set()
        self.pattern = ""
        self.vague = False  # the pattern does not name the graph yet
        self.wrong = False  # a second visit of the running backward contaminates the step
        self.certain = False  # whatever comes until then
        self.reported = False
        self.aborted = ""
        self.raised = ""  # the same, and zero_grad does not make it go
        self.half_reduced = False  # at the beginning of the running backward
        self.boundary = False  # of the running backward
        self.at_boundary = False  # a backward of this window was, and was not cleared since

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        if facts.stage == 0:
            if facts.dtype == "float16" or not facts.output_hooks:
                return Choice("not_applicable", f"{facts.describe()} has no backward state outside PyTorch's own")
            return Choice("selected", "at stage 0 DeepSpeed refuses loss.backward(), as nothing would run its epilogue")
        return Choice(
            "selected", f"ZeRO-{facts.stage} runs its backward preprocess once a forward, not once a backward"
        )

    def handlers(self) -> dict[type[ev.Event], Any]:
        return {
            ev.BackwardBegin: self._begin,
            ev.GraphReached: self._reached,
            ev.BackwardEnd: self._end,
            ev.BackwardAborted: self._aborted,
            ev.ZeroGrad: self._zero_grad,
            ev.StepBegin: self._step_begin,
            ev.StepEnd: self._step,
        }

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Outcome]:
        self.checks += 1
        self.window += 1
        self.by.add(event.by)
        self.boundary = event.boundary
        if self.raised:
            self.half_reduced = self.engine.backward_state().half_reduced
        if self.aborted and self.repair:
            yield self._unfinished()
            yield Request(Action.DROP_UNFINISHED)
        elif self.half_reduced and not self.repair:
            yield from self._goes_on()
        # engine.backward on ZeRO-1 and 2 prepares itself; there only a replaced gradient is wrong.
        certain = self.engine.facts.stage == 3 or event.by == "loss.backward"
        self.wrong = certain or (self.at_boundary and self.engine.facts.replaces_at_boundary)
        self.certain = self.certain or certain
        if event.again and self.repair:
            yield Request(Action.REARM_BACKWARD)
        elif event.again and not self.pattern and certain:
            # Also over another forward's graph: DeepSpeed counts micro-steps and queues its epilogue once a forward.
            self.pattern = f"backward {event.again + 1} since the last forward, by {event.by}"
            self.vague = True

    def _reached(self, event: ev.GraphReached) -> Iterable[Outcome]:
        if not event.again:
            return
        if self.repair:
            yield Request(Action.RESTORE_COUNTERS, (event.forward,))
        elif self.wrong and (not self.pattern or self.vague):
            self.vague = False
            how = " and ".join(sorted(self.by))
            self.pattern = f"backward {event.again + 1} over the graph of forward {event.forward}, by {how}"

    def _end(self, event: ev.BackwardEnd) -> Iterable[Outcome]:
        self.at_boundary = self.at_boundary or event.boundary
        if event.boundary and not self.raised and self.engine.facts.layout == 1:
            self.aborted = ""  # its gradients waited in .grad, and were taken along
        # Where a gradient is only replaced, zero_grad may still come and throw it away.
        return self._contaminated() if self.certain else ()

    def _aborted(self, event: ev.BackwardAborted) -> Iterable[Outcome]:
        if self.pattern:  # only seen when nothing is repaired: the second backward has no epilogue to reach
            yield from self._contaminated()
        elif not event.raised and not self.repair and self._harmless():
            return
        elif not self.reported:  # what follows a contaminated step is its consequence
            self.aborted = event.error
            if event.raised:
                self.raised = event.error
            if event.reducing and event.twice and not self.half_reduced:
                self.reported = True
                yield self._in_parts(event)

    def _harmless(self) -> bool:
        """ZeRO-1 has nothing to do at the end of a backward that is no boundary."""
        facts = self.engine.facts
        return facts.layout == 1 and not (self.boundary and facts.managed_accumulation)

    def _contaminated(self) -> Iterable[Outcome]:
        if not self.repair and self.pattern and not self.reported:
            self.reported = True
            yield self.finding(
                "second_backward",
                "error",
                expected="one backward over each forward's graph, or a preprocess and an epilogue for each backward",
                seen=self.pattern,
                effect="the update is silently wrong, or DeepSpeed crashes here or one step later",
                cause="DeepSpeed prepares a backward once per forward; a second one over the graph runs without",
                remedy=REMEDY,
            )

    def _zero_grad(self, event: ev.ZeroGrad) -> Iterable[Outcome]:
        """zero_grad after an exception is the right thing to do: what is left goes, and nobody is told off."""
        self.at_boundary = False
        if not self.certain:
            self.pattern, self.vague = "", False
        if self.aborted:
            self.aborted = ""
            if self.repair:
                self.raised = ""
                yield Request(Action.DROP_UNFINISHED)

    def _goes_on(self) -> Iterable[Outcome]:
        """A backward begins, and what one that raised has left is still there, whether or not zero_grad was called."""
        error, self.raised, self.aborted = self.raised, "", ""
        if not self.reported:
            self.reported = True
            yield self.finding(
                "unfinished_backward",
                "error",
                expected="a loop that goes on after a backward that raised finds none of its gradients",
                seen=f"{error}, and gradients that stand half reduced in DeepSpeed's buckets",
                effect='this backward crashes ("has already been reduced", or a mute AssertionError), or adds to them',
                cause="zero_grad does not empty DeepSpeed's buckets, and nothing else of DeepSpeed's does",
                remedy='write {"name": "retained_graph", "action": "repair"}; or look for what may raise before the '
                "backward:\n"
                "      if torch.isfinite(loss):\n"
                "          engine.backward(loss)",
            )

    def _in_parts(self, event: ev.BackwardAborted) -> Outcome:
        return self.finding(
            "gradient_in_parts",
            "error",
            subject=event.twice,
            expected="a parameter's gradient arrives once a backward, whole",
            seen=f"it came in parts, and DeepSpeed's reduction raised {event.error}",
            effect="this backward breaks off, as will every one of this model",
            cause="a reentrant checkpoint runs a backward of its own; a module, or a weight, that is used in two of "
            "them gets a gradient from each, and ZeRO reduces the first as if it were all",
            remedy="checkpoint without reentrance:\n"
            "      torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)\n"
            '    in transformers: gradient_checkpointing_kwargs={"use_reentrant": False}',
        )

    def _unfinished(self) -> Outcome:
        error, raised, self.aborted, self.raised = self.aborted, self.raised, "", ""
        if not raised:
            return self.finding(
                "unfinished_backward",
                "warning" if self.repair else "error",
                expected="every backward that began reaches its epilogue",
                seen=error,
                effect="its last gradients are not reduced: DeepSpeed crashes in the step, or leaves them out",
                cause="DeepSpeed has entered a backward more often than it has left it (a loss.backward() of several "
                "forwards' sum, or one that raised before), and skips the epilogue",
                remedy='write {"name": "retained_graph", "action": "repair"}, or call engine.backward(loss)',
                repaired=self.repair,
            )
        return self.finding(
            "unfinished_backward",
            "warning",
            expected="every backward that began reaches its epilogue",
            seen=error,
            effect="DeepSpeed keeps half-reduced gradients and the next backward crashes or adds to them",
            cause="an exception left a backward and the loop went on",
            remedy="call engine.zero_grad() where you catch the exception, before the next forward",
            repaired=self.repair,
        )

    def _step_begin(self, event: ev.StepBegin) -> Iterable[Outcome]:
        if self.aborted and not self.repair:  # the step may crash
            yield self._unfinished()
        yield from self._contaminated()

    def _step(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        self.checks += 1
        state = self.engine.backward_state()
        if self.aborted:
            yield self._unfinished()
        elif (state.depth or state.hooks) and not self.reported:
            yield self.finding(
                "backward_state_left_over",
                "warning" if self.repair else "error",
                expected="after a step no backward counts as running and no parameter gradient is expected",
                seen=f"after {self.window} backward(s) DeepSpeed still counts {state.depth} as running and expects "
                f"{state.hooks} more parameter gradients",
                effect="the next step's backward runs with this step's state",
                cause=self.pattern or "a backward was entered more often than it was left",
                remedy=REMEDY,
                repaired=self.repair,
            )
        if self.repair:
            yield Request(Action.REST_BACKWARD)
        self.window = 0
        self.by.clear()
        self.pattern, self.vague = "", False
        self.raised, self.half_reduced, self.at_boundary, self.certain = "", False, False, False
