"""Guard ``param_status``: no ZeRO-3 parameter is in flight where nobody waits for it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from zeroguard import events as ev
from zeroguard.backends.base import Action, EngineFacts, ParamStatus, Request
from zeroguard.guards.base import Choice, Guard, GuardModel, Outcome

__all__ = ["CheckPoint", "ParamStatusConfig", "ParamStatusGuard"]

CheckPoint = Literal[
    "after_step", "before_forward", "mode_change", "exception", "close", "host_read", "before_checkpoint"
]
EVERYWHERE: tuple[CheckPoint, ...] = (
    "after_step",
    "before_forward",
    "mode_change",
    "exception",
    "close",
    "host_read",
    "before_checkpoint",
)
MIB = 2**20
#: What PyTorch says where a graph, or a checkpoint's second run, meets a parameter that is partitioned: of size 0.
_EMPTY_GRADIENT = re.compile(
    r"returned an invalid gradient at index \d+ - got \[0\] but expected shape .*\[([\d, ]+)\]"
)
_EMPTY_AGAIN = re.compile(
    r"saved metadata: \{'shape': torch\.Size\(\[([\d, ]+)\]\)[^\n]*\n"
    r"recomputed metadata: \{'shape': torch\.Size\(\[0\]\)"
)


class ParamStatusConfig(GuardModel):
    """Options of the guard ``param_status``."""

    name: Literal["param_status"] = "param_status"
    """The guard's name."""
    action: Literal["raise", "warn", "repair"] = "repair"
    """``repair`` waits for the gathers and releases them, and reports only what cannot be put right; ``raise`` and
    ``warn`` change nothing and report with that severity."""
    check_at: tuple[CheckPoint, ...] = EVERYWHERE
    """The points of the loop where the status is checked. At ``exception`` nothing is waited for, because a rank
    that failed may never have launched its part of a gather; the next point does that."""
    gathered_boundaries: int = Field(default=3, ge=1)
    """Steps in a row after which a parameter that is not persistent may still be gathered when the next training
    forward begins, before a warning."""


class ParamStatusGuard(Guard):
    """Validates ZeRO-3 parameter status.

    NOT_AVAILABLE and AVAILABLE are both legal at a boundary; INFLIGHT, a registry that is not empty and a submodule
    that is still active are not. Source of the claim: docs/faults/in_flight.md; DeepSpeed issues 3068, 3156, 5381.
    Stage 3. LOCAL.
    """

    name = "param_status"
    evaluates = True
    Config = ParamStatusConfig

    def __init__(self, config: ParamStatusConfig, engine: Any) -> None:
        super().__init__(config, engine)
        self.points = frozenset(config.check_at)
        self.repair = config.action == "repair"
        self.seen_gathered: dict[str, int] = {}
        self.warned: set[str] = set()
        self.fresh = False

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        if facts.stage != 3:
            return Choice(
                "not_applicable", f"ZeRO-{facts.stage} does not partition parameters; only stage 3 gathers them"
            )
        return Choice("selected", "ZeRO-3 gathers parameters asynchronously and may leave them in flight")

    def handlers(self) -> dict[type[ev.Event], Any]:
        table: dict[str, tuple[type[ev.Event], Any]] = {
            "after_step": (ev.StepEnd, self._after_step),
            "before_forward": (ev.ForwardBegin, self._before_forward),
            "mode_change": (ev.ModeChange, lambda e: self._check("at a change of train/eval mode")),
            "exception": (ev.Raised, self._raised),
            "close": (ev.Close, self._close),
            "host_read": (ev.HostRead, lambda e: self._check("before a host read")),
            "before_checkpoint": (ev.CheckpointBegin, lambda e: self._check("before a checkpoint")),
        }
        return {event: handler for point, (event, handler) in table.items() if point in self.points}

    def _before_forward(self, event: ev.ForwardBegin) -> Iterable[Outcome]:
        if event.nested:
            return ()
        # Between a step, which partitions everything, and the next forward, only the user can have gathered; an
        # evaluation in between leaves parameters gathered in every healthy run.
        count, self.fresh = self.fresh and event.training and event.grad, False
        return self._check("before a forward", count=count)

    def _after_step(self, event: ev.StepEnd) -> Iterable[Outcome]:
        self.step = event.step
        self.fresh = True
        yield from self._check("after a step")

    def _close(self, event: ev.Close) -> Iterable[Outcome]:
        return () if event.failed else self._check("at the end of the session")

    def _raised(self, event: ev.Raised) -> Iterable[Outcome]:
        """Look only: a gather that another rank never launched must not be waited for."""
        self.checks += 1
        if event.phase is ev.Phase.BACKWARD:
            yield from self._empty(event.error)
        if not self.repair:
            yield from self._judge(self.engine.param_status(), f"after an exception in {event.phase.value}")

    def _empty(self, error: str) -> Iterable[Outcome]:
        """An exception that only a parameter of size 0 explains."""
        again = _EMPTY_AGAIN.search(error)
        found = again or _EMPTY_GRADIENT.search(error)
        if found is None:
            return
        subject = self.engine.partitioned_parameters([int(n) for n in found[1].split(",") if n.strip()])
        if subject and again:
            yield self.finding(
                "recomputed_without_parameter",
                "error",
                subject=subject,
                expected="a checkpoint's second run, in the backward, finds the parameters gathered as the first did",
                seen=f"{error.partition(':')[0]}: of shape [{found[1]}] in the first run, and of size 0, which is "
                "partitioned, in the second",
                effect="no backward of this model gets through",
                cause="DeepSpeed up to 0.19.2 gathers in a backward for modules that a gradient passes; a module whose "
                "parameters are frozen is not among them",
                remedy="use DeepSpeed 0.19.8; or checkpoint with use_reentrant=True; or leave these trainable, in a "
                'group of their own:\n      {"params": frozen, "lr": 0.0, "weight_decay": 0.0}',
            )
        elif subject:
            yield self.finding(
                "partitioned_parameter_used",
                "error",
                subject=subject,
                expected="a loss is made of what the model returned",
                seen=f"it is also made of a parameter of shape [{found[1]}] that was partitioned, of size 0, by then: "
                f"{error}",
                effect="the backward breaks off; what was computed from the parameter was computed from nothing",
                cause="ZeRO-3 keeps a parameter whole only while its module's forward runs; a penalty over "
                "model.parameters() in the loop comes later",
                remedy="leave an L2 penalty to the optimizer's weight_decay; or compute it inside the forward of the "
                "module that owns the parameter, and return it",
            )

    def _check(self, where: str, count: bool = False) -> Iterable[Outcome]:
        self.checks += 1
        status = self.engine.param_status()
        if count:
            yield from self._gathered(status)
        if not (status.in_flight or status.registry or status.active):
            return
        if self.repair:
            yield Request(Action.RELEASE_IN_FLIGHT)
            status = self.engine.param_status()
        yield from self._judge(status, where)

    def _judge(self, status: ParamStatus, where: str) -> Iterable[Outcome]:
        subject = status.orphans + status.contradictions
        if subject:
            yield self.finding(
                "status_contradiction",
                "warning" if self.config.action == "warn" else "error",
                subject=subject,
                expected="a parameter is INFLIGHT exactly while the registry holds its gather",
                seen=f"{where}: {len(status.orphans)} INFLIGHT without a gather, {len(status.contradictions)} "
                "gathers of parameters that are not INFLIGHT",
                effect="the parameter can neither be waited for nor fetched; reads of it are undefined",
                cause="a gather was started or released outside DeepSpeed's own forward and backward",
                remedy="use deepspeed.zero.GatheredParameters instead of param.all_gather() and param.partition()",
            )
        elif not self.repair and (status.in_flight or status.registry):
            # A claim alone is what the first module keeps between two micro-batches, up to DeepSpeed 0.19.2.
            yield self.finding(
                "in_flight",
                "warning" if self.config.action == "warn" else "error",
                subject=status.in_flight or status.active,
                expected="no parameter INFLIGHT, no running gather, no active submodule",
                seen=f"{where}: {len(status.in_flight)} INFLIGHT, {status.registry} in the registry, "
                f"{len(status.active)} claimed by a submodule",
                effect="a read of such a parameter returns memory that is still being written",
                cause="a forward that stopped early, an exception or an evaluation prefetched what nothing then used",
                remedy='leave "guards" out of the configuration, or write {"name": "param_status", "action": "repair"}',
            )

    def _gathered(self, status: ParamStatus) -> Iterable[Outcome]:
        sizes = dict(status.gathered)
        self.seen_gathered = {name: self.seen_gathered.get(name, 0) + 1 for name in sizes}
        limit = self.config.gathered_boundaries
        late = tuple(n for n, times in self.seen_gathered.items() if times >= limit and n not in self.warned)
        if late:
            self.warned.update(late)
            yield self.finding(
                "stays_gathered",
                "warning",
                subject=late,
                expected="a parameter that is not persistent is partitioned again after a step",
                seen=f"still gathered {limit} steps in a row: {sum(sizes[n] for n in late) / MIB:.2f} MiB",
                effect="ZeRO-3 does not save this memory",
                cause="param.all_gather() without param.partition(), or a GatheredParameters that is never left",
                remedy="gather in 'with deepspeed.zero.GatheredParameters(params):' and leave it before the forward",
            )
