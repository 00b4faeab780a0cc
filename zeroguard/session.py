"""The one runner: binds an engine, the guards that were selected and the sinks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any

from zeroguard import events as ev
from zeroguard.backends.base import Engine, Request
from zeroguard.breakage import Breakage
from zeroguard.collective import vote
from zeroguard.config import GuardConfig, choose, registry, start
from zeroguard.errors import GuardUnavailableError, GuardViolation, SessionClosedError
from zeroguard.findings import Finding, Repair
from zeroguard.guards.base import Choice, Guard
from zeroguard.ranks import RankWatch
from zeroguard.report.gradients import GradientReads
from zeroguard.report.summary import GuardStats, Summary
from zeroguard.sinks import JsonLinesSink, JsonLinesSinkConfig, LoggingSink, Sink, as_sink

if TYPE_CHECKING:
    from zeroguard.report.summary import Row

__all__ = ["Selection", "Session"]


#: Parameter names, eight bytes each, in all findings and repairs that are kept. A model may have a hundred thousand.
NAMES = 2**20


class Selection(dict[str, str]):
    """Guard name -> why it was chosen or left out. ``selected`` are the names of those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.selected: list[str] = []

    def __str__(self) -> str:
        return "\n".join(f"{'+' if n in self.selected else '-'} {n}: {why}" for n, why in self.items())


class Session(Breakage, GradientReads, RankWatch):
    """Guards at work on one engine; made by :func:`zeroguard.guard`, or from a backend of :mod:`zeroguard.testing`.

    Attributes:
        findings: warnings and errors of this rank, oldest first.
        repairs: what was put right, by guard, step and parameter. A repair is not a finding.
        selection: why each guard was chosen or left out.
        origins: field of the configuration -> where its value came from; empty where nobody said.
    """

    def __init__(
        self,
        backend: Any,
        config: GuardConfig,
        *,
        sinks: Sequence[object] = (),
        unavailable: dict[str, str] | None = None,
        origins: dict[str, str] | None = None,
    ) -> None:
        self.config = config
        self.origins = dict(origins or {})
        self.findings: list[Finding] = []
        self.repairs: list[Repair] = []
        self.selection = Selection()
        self.closed = False
        #: opened by something that the user did not write (the launcher): an explicit zeroguard.guard takes over
        self.yields = False
        self.phase = ev.Phase.BETWEEN
        self._backend: Engine = backend
        self._unavailable = unavailable or {}
        self._stats: dict[str, GuardStats] = {}
        self._guards: list[Guard] = []
        self._table: dict[type[ev.Event], list[tuple[Guard, GuardStats, Any]]] = {}
        self._pending: list[Finding] = []
        self._room = NAMES
        self._broken: dict[str, str] = {}
        self._lost: dict[str, int] = {}
        self._failed = False
        self._on_close: list[Callable[[], None]] = []
        self._select()
        self._sinks = self._open_sinks(sinks)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _select(self) -> None:
        facts = self._backend.facts
        named: dict[str, Any] = {choice.name: choice for choice in self.config.guards or ()}
        for name, cls in registry().items():
            stats = self._stats[name] = GuardStats(name)
            if not self.config.automatic and name not in named:
                self.selection[name] = stats.note = "not in the configured list"
                continue
            if cls.on_request and name not in named:
                self.selection[name] = 'on request only: list it beside {"name": "automatic"}'
                continue
            options = named.get(name) or cls.Config()
            choice = choose(cls, facts, options)
            if cls.communicates and not self.config.agree and facts.world_size > 1 and choice.status == "selected":
                choice = Choice("not_applicable", "on several ranks it needs an all-reduce, and agree is false")
            made: Guard | None = None
            if choice.status == "selected" and name not in self._unavailable:
                choice, made = start(cls, options, self._backend, choice)
            reason = self._unavailable.get(name, choice.reason)
            if choice.status == "not_applicable" and name in named and not self.config.automatic:
                raise GuardUnavailableError(
                    f"guard {name!r} was asked for by name but cannot act on this engine: {choice.reason}. "
                    'Take it out of guards, or add {"name": "automatic"} to it: then the right ones are chosen, and '
                    "the other entries are options for those that are.",
                    guard=name,
                )
            self.selection[name] = stats.note = reason
            if made is None:
                stats.state = "unavailable" if name in self._unavailable else choice.status.replace("_", " ")
                continue
            self.selection.selected.append(name)
            stats.state = "on"
            stats.note = ""
            self._add(made, stats)
        self._backend.actions = {g.name: str(getattr(g.config, "action", "repair")) for g in self._guards}

    def _add(self, guard_: Guard, stats: GuardStats) -> None:
        guard_.step = self._backend.steps
        self._guards.append(guard_)
        for event, handler in guard_.handlers().items():
            self._table.setdefault(event, []).append((guard_, stats, handler))

    def _open_sinks(self, extra: Sequence[object]) -> list[Sink]:
        given = [as_sink(item) for item in extra]  # first: a wrong one must not leave files open
        made: list[Sink] = []
        for config in self.config.sinks:
            made.append(
                JsonLinesSink(config, self._backend.facts.rank)
                if isinstance(config, JsonLinesSinkConfig)
                else LoggingSink(config)
            )
        return made + given

    # -- running -----------------------------------------------------------------------------------------------------

    def emit(self, event: ev.Event) -> None:
        """LOCAL. Feed one event to the guards; called by the backend."""
        if self.closed and not isinstance(event, ev.Close):
            return  # closed inside a forward or a backward: what is still on its way is nobody's business any more
        self._move(event)
        if not self._guarded and type(event) is ev.StepBegin:
            self._all_guarded()
        for guard_, stats, handler in self._table.get(type(event), ()):
            began = perf_counter()
            stats.events += 1
            done: list[Request] = []
            try:
                for outcome in handler(event):
                    if isinstance(outcome, Request):
                        done.append(outcome)
                        self._repair(guard_, stats, outcome)
                    elif guard_.name not in self._broken:  # what it says after it broke is worth nothing
                        self._found(stats, outcome)
            except Exception as error:
                self._guard_broke(guard_, type(event).__name__, error)
                self._pay(guard_, stats, event, done)
            stats.checks, stats.note = guard_.checks, guard_.note
            stats.seconds += perf_counter() - began

    def _move(self, event: ev.Event) -> None:
        phase = event.phase if type(event) is ev.Raised else _PHASES.get(type(event))
        if phase is not None:
            self.phase = phase

    def _repair(self, guard_: Guard, stats: GuardStats, request: Request) -> None:
        done = getattr(self._backend, request.action.value)(*request.args)
        for item in done:
            if item.routine:
                continue
            stats.repairs += 1
            facts = self._backend.facts
            repair = Repair(guard_.name, item.kind, facts.rank, guard_.step, item.parameters, item.detail)
            self._keep(self.repairs, repair, repair.parameters)
            self._write(repair)

    def record(self, finding: Finding) -> None:
        """LOCAL. Take a finding that an integration made; its guard is one that :meth:`watch` added."""
        self._found(self._stats[finding.guard], finding)

    def _found(self, stats: GuardStats, finding: Finding) -> None:
        stats.findings += 1
        self._keep(self.findings, finding, finding.subject)
        if finding.severity == "error" and not finding.repaired and len(self._pending) < self.config.max_findings:
            self._pending.append(finding)
        self._write(finding)

    def _keep(self, kept: list[Any], record: Finding | Repair, names: Sequence[str]) -> None:
        if len(kept) < self.config.max_findings and len(names) <= self._room:
            self._room -= len(names)
            kept.append(record)

    def _write(self, record: Finding | Repair) -> None:
        quiet = self.config.on_violation == "record"
        self._hand([sink for sink in self._sinks if not (quiet and isinstance(sink, LoggingSink))], record)

    def decide(self) -> None:
        """COLLECTIVE with ``agree`` and ``on_violation: raise``, at each ``agree_every_n_steps``-th step: stop, on all
        ranks, if one has found an error.

        Called by the backend at the end of every optimizer step, which all ranks reach.

        Raises:
            GuardViolation: with this rank's findings; without any on ranks that only follow.
        """
        if self.closed or self.config.on_violation != "raise":
            self._pending.clear()
            self._switch_off_alone()
            return
        facts = self._backend.facts
        mine = bool(self._pending)
        ranks: Sequence[int] = [facts.rank] if mine else []
        if self.config.agree:
            if facts.world_size > 1 and self._backend.steps % self.config.agree_every_n_steps:
                return
            word = next((word for guard_ in self._guards if (word := self._fingerprint(guard_))), 0)
            groups, broken = self._backend.groups, bool(self._broken)
            self._agreeing = True  # and still, where it raises
            said = vote(mine, word, groups=groups, device=facts.accelerator, broken=broken)
            self._agreeing = False
            if said.broken:
                self._switch_off_together()
            ranks = said.flagged
            if len(set(said.words.values())) > 1:
                ranks = self._compare(said.words) or ranks
        else:
            self._switch_off_alone()
        if not ranks:
            return
        pending, self._pending = self._pending, []
        raise GuardViolation(pending, ranks=ranks, step=max((g.step for g in self._guards), default=0))

    def _compare(self, words: Mapping[int, int]) -> Sequence[int]:
        """Let the guards judge fingerprints that differ; the ranks that have to stop, which all of them see alike."""
        before = len(self._pending)
        for guard_ in self._guards:
            try:
                for finding in guard_.differs(words):
                    self._found(self._stats[guard_.name], finding)
            except Exception as error:
                self._guard_broke(guard_, "differs", error)
        return sorted(words) if len(self._pending) > before else []

    # -- what a user calls -------------------------------------------------------------------------------------------

    def host_read(self, *tensors: Any) -> contextlib.AbstractContextManager[None]:
        """LOCAL. Return once these host tensors (all offloaded gradients, if none is given) are safe to read.

        Works as a call, ``session.host_read(t)``, and as ``with session.host_read(t):``; the wait happens in the call.
        A tensor that DeepSpeed does not fill, such as the target of your own ``copy_(..., non_blocking=True)``, is safe
        once the current stream has done what was queued on it so far. Where the accelerator resolves dependencies it
        returns at once.

        Raises:
            SessionClosedError: after close.
        """
        if self.closed:
            raise SessionClosedError(
                "session.host_read() after close: read inside the 'with zeroguard.guard(...)' block"
            )
        self.emit(ev.HostRead("session.host_read", tensors))
        works = any(guard_.name == "host_read" and guard_.name not in self._broken for guard_ in self._guards)
        asked = tensors or "host_read" in self.selection.selected
        if asked and not works and not self._backend.facts.resolves_data_dependency:
            # Nothing of DeepSpeed's is in host memory here, or the guard broke; a copy may be on its way all the same.
            self._backend.wait_copies(tensors)
        return contextlib.nullcontext()

    def expect_gradient_edit(self) -> None:
        """LOCAL. Say that this step's gradients are changed on purpose (``safe_set_full_grad``, your own clip): the
        guard ``gradient_audit`` does not compare them. Call it before the step, on one rank or on all.

        Raises:
            SessionClosedError: after close.
        """
        if self.closed:
            raise SessionClosedError("session.expect_gradient_edit() after close")
        self.emit(ev.GradientEdit())

    def watch(self, guard_: Guard) -> None:
        """LOCAL. Add a guard that no configuration selects, such as the order of an integration's own calls."""
        stats = self._stats[guard_.name] = GuardStats(guard_.name, "on")
        self.selection[guard_.name] = "brought by the integration"
        self.selection.selected.append(guard_.name)
        self._add(guard_, stats)

    def counters(self) -> dict[str, dict[str, float]]:
        """LOCAL. Guard -> what it has counted so far: ``events``, ``checks``, ``repairs``, ``findings``, ``seconds``
        (spent in the guard and its repairs, waits included). Only guards that run."""
        return {name: stats.counts() for name, stats in self._stats.items() if stats.state == "on"}

    def grad_norm(self) -> float | None:
        """LOCAL. The norm over all gradients of the last step, before clipping, as DeepSpeed computed it; None where it
        did not (no step so far, or stage 0 in fp32 without clipping). Stages 0 to 3."""
        return self._backend.grad_norm()

    def summary(self) -> Summary:
        """LOCAL. A table with one row a guard; ``str`` of it is text, ``rows`` is data."""
        return Summary(self._backend.facts, [stats.row() for stats in self._stats.values()])

    @property
    def rows(self) -> list[Row]:
        """The summary's rows."""
        return self.summary().rows

    def close(self, *, failed: bool = False) -> None:
        """LOCAL, on every rank at the same place. Give everything back that was wrapped.

        Idempotent; the context manager calls it, also when the loop raised (``failed``).

        No collective is called and, after an exception, nothing is waited for.
        """
        if self.closed:
            return
        self.closed = True
        self._failed = self._failed or failed
        # The stack runs them all, last one first, also when one raises.
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(self._close_sink, sink)
            for action in self._on_close:
                stack.callback(action)
            stack.callback(self._stop_heartbeat)
            # In the middle of a forward or a backward nothing is at rest that could be checked.
            self.emit(ev.Close(self._failed or self._backend.busy))
        # Who keeps a closed session to read it must not keep the engine, and its memory, with it.
        self._on_close.clear()
        self._table.clear()
        self._guards.clear()
        self._backend = SimpleNamespace(facts=self._backend.facts, groups=self._backend.groups)  # type: ignore[assignment]

    def __enter__(self) -> Session:
        if self.closed:
            raise SessionClosedError("this session is closed; call zeroguard.guard(engine) again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self.closed:
                self._backend.loop_raised(error)
                self.on_exception(error)
        finally:
            self.close(failed=kind is not None)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<zeroguard.Session {state}, {len(self.findings)} findings, {len(self.repairs)} repairs>"


_PHASES: dict[type[ev.Event], ev.Phase] = {
    ev.ForwardBegin: ev.Phase.FORWARD,
    ev.ForwardEnd: ev.Phase.BETWEEN,
    ev.BackwardBegin: ev.Phase.BACKWARD,
    ev.BackwardEnd: ev.Phase.BETWEEN,
    ev.BackwardAborted: ev.Phase.BETWEEN,
    ev.StepBegin: ev.Phase.STEP,
    ev.StepEnd: ev.Phase.BETWEEN,
    ev.CheckpointBegin: ev.Phase.CHECKPOINT,
    ev.Close: ev.Phase.CLOSED,
}
