"""Guard ``accumulation``: the rhythm of backward, boundary and step is the one that the loop means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, Request
from zeroguard.findings import Finding
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome
from zeroguard.guards.rhythm import Ranks, Seen, Settings, Trainer, Updates
from zeroguard.guards.rhythm_texts import TEXTS
from zeroguard.guards.weights import Spoiled, Trained, Written
from zeroguard.guards.windows import Windows

__all__ = ["AccumulationConfig", "AccumulationGuard"]


#: Events that tell a loop that was checked from one that never got there.
_JUDGED = (ev.BackwardBegin, ev.StepBegin, ev.GradientRead, ev.GradientClip)


class AccumulationConfig(GuardModel):
    """Options of the guard ``accumulation``."""

    name: Literal["accumulation"] = "accumulation"
    """The guard's name."""
    action: Literal["detect", "repair"] = "detect"
    """``detect`` changes nothing and reports; ``repair`` also lets DeepSpeed not divide a loss that the trainer has
    divided already. That makes the gradients of such a run larger, by its number of micro-batches: with an optimizer
    that is not invariant to that (SGD, or any with clipping), look at the learning rate."""


class AccumulationGuard(Guard):
    """Sees a loop, a trainer and DeepSpeed step to different rhythms; each kind of fault is reported once.

    Source of the claim: docs/faults/rhythm.md, with the measured tables; Lightning issues 6170 and 19987, Accelerate
    issues 2951, 3303 and 3807, DeepSpeed issues 2343, 6767, 7439 and 8415 and pull request 8068. Stages 0 to 3. LOCAL,
    but for the comparison of ranks, which rides on the session's agreement on stopping.
    """

    name = "accumulation"
    Config = AccumulationConfig

    def __init__(self, config: AccumulationConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.repair = config.action == "repair"
        self.divided: ev.LossDivided | None = None
        self.reported: set[str] = set()
        self.ranks = Ranks(engine)
        kinds = (Trainer, Windows, Updates, Settings, Trained, Spoiled, Written)
        self.watchers = [kind(engine).handlers() for kind in kinds]
        self.watchers.append(self.ranks.handlers())

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        return Choice("selected", "a loop, a trainer and DeepSpeed may each have their own idea of a step")

    def handlers(self) -> dict[type[ev.Event], Any]:
        wanted = {event for watcher in self.watchers for event in watcher}
        return {
            **dict.fromkeys(wanted, self._watch),
            ev.LossDivided: self._divided,
            ev.BackwardBegin: self._begin,
            ev.StepEnd: self._step_end,
        }

    def _watch(self, event: ev.Event) -> Iterable[Outcome]:
        self.checks += isinstance(event, _JUDGED)
        for watcher in self.watchers:
            handler = watcher.get(type(event))
            if handler is not None:
                yield from self._findings(handler(event))

    def _findings(self, seen: Iterable[Seen]) -> Iterable[Finding]:
        """Once a kind: it is the loop's shape, the same at every step."""
        for item in seen:
            if item.kind in self.reported:
                continue
            self.reported.add(item.kind)
            text = TEXTS[item.text or item.kind]
            filled = {name: value.format(**item.values) for name, value in text._asdict().items()}
            yield self.finding(item.kind, item.severity, subject=item.subject, **filled)

    def _divided(self, event: ev.LossDivided) -> Iterable[Outcome]:
        self.divided = event
        return ()

    def _begin(self, event: ev.BackwardBegin) -> Iterable[Outcome]:
        yield from self._watch(event)
        divided, self.divided = self.divided, None
        if divided is None or divided.divisor == 1 or event.divisor == 1:
            return
        if self.repair:
            yield Request(Action.DIVIDE_ONCE)
            return
        n, m = divided.divisor, event.divisor
        yield from self._findings([Seen("double_division", "warning", {"by": divided.by, "n": n, "m": m, "nm": n * m})])

    def _step_end(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        yield from self._watch(event)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> int:
        return self.ranks.fingerprint()

    def differs(self, words: Mapping[int, int]) -> Iterable[Finding]:
        yield from self._findings(self.ranks.differs(words))
