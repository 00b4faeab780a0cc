"""When zeroguard itself breaks: it is said, what broke is switched off on all ranks together, and training goes on."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zeroguard import events as ev
from zeroguard.backends.base import Engine, Request
from zeroguard.collective import unite
from zeroguard.errors import SinkTimeoutError
from zeroguard.findings import Finding, Repair
from zeroguard.guards.base import Guard
from zeroguard.report.summary import GuardStats
from zeroguard.sinks import LoggingSink, Sink, logger

if TYPE_CHECKING:
    from zeroguard.config import GuardConfig

__all__ = ["Breakage"]

#: The name under which findings about sinks stand in the summary.
SINKS = "sinks"
_TRACE = 6000  # characters of a traceback that are kept, from its end


class Breakage:
    """The part of :class:`zeroguard.Session` for what must not happen. LOCAL, but for :meth:`_switch_off_together`.

    A guard that raised on one rank goes on getting events until the step's fixed point, since its repairs may be part
    of collectives in which other ranks wait. What an event's handler owes them although it raised, it says in
    :meth:`zeroguard.guards.base.Guard.owes`.
    """

    config: GuardConfig
    _backend: Engine
    _stats: dict[str, GuardStats]
    _guards: list[Guard]
    _table: dict[type[ev.Event], list[tuple[Guard, GuardStats, Any]]]
    _sinks: list[Sink]
    #: guard -> what it raised, until it is switched off
    _broken: dict[str, str]
    #: sink -> records that it did not get
    _lost: dict[str, int]

    def _found(self, stats: GuardStats, finding: Finding) -> None:
        raise NotImplementedError

    def _repair(self, guard_: Guard, stats: GuardStats, request: Request) -> None:
        raise NotImplementedError

    # -- guards ------------------------------------------------------------------------------------------------------

    def _guard_broke(self, guard_: Guard, where: str, error: Exception) -> None:
        """Say so, the first time; with ``on_guard_error: raise`` the error goes on its way."""
        if self.config.on_guard_error == "raise":
            raise error
        if guard_.name in self._broken or guard_ not in self._guards:
            return
        self._broken[guard_.name] = f"{type(error).__name__}: {error}, in {where}"
        self._tell(
            self._stats[guard_.name],
            "guard_error",
            expected="a guard handles every event",
            seen=self._broken[guard_.name],
            effect="training goes on without what this guard repairs and reports: it is switched off, where ranks "
            "agree on all of them, at the end of the step",
            cause="a mistake in the guard, or a state of the engine that it does not know",
            remedy="report the text below; with on_guard_error: raise the exception comes through",
            detail=_trace(error),
        )

    def _fingerprint(self, guard_: Guard) -> int:
        if guard_.name in self._broken:
            return 0
        try:
            return guard_.fingerprint()
        except Exception as error:
            self._guard_broke(guard_, "fingerprint", error)
            return 0

    def _pay(self, guard_: Guard, stats: GuardStats, event: ev.Event, done: list[Request]) -> None:
        """Take part in what other ranks do in this event, though the handler has raised."""
        try:
            for request in guard_.owes(event):
                if request not in done:
                    self._repair(guard_, stats, request)
        except Exception as error:
            self._guard_broke(guard_, f"what {type(event).__name__} owes to other ranks", error)

    def _switch_off_together(self) -> None:
        """COLLECTIVE, once a rank has said in the vote that a guard broke."""
        self._switch_off(unite(self._broken, groups=self._backend.groups))

    def _switch_off_alone(self) -> None:
        """Where ranks do not agree on anything. A guard whose work is COLLECTIVE stays: the others would wait."""
        facts = self._backend.facts
        alone = {g.name for g in self._guards if g.name in self._broken and (facts.world_size == 1 or not g.collective)}
        self._switch_off({facts.rank: {name: self._broken[name] for name in alone}})

    def _switch_off(self, said: Mapping[int, Mapping[str, str]]) -> None:
        for guard_ in list(self._guards):
            name = guard_.name
            who = {rank: errors[name] for rank, errors in said.items() if name in errors}
            if not who:
                continue
            text = "; ".join(f"rank {rank}: {error}" for rank, error in who.items())
            if name not in self._broken:
                self._tell(
                    self._stats[name],
                    "guard_switched_off",
                    expected="a guard works on every rank",
                    seen=text,
                    effect="training goes on without what this guard repairs and reports",
                    cause="the guard raised on another rank, and ranks have to do the same",
                    remedy=f"look at the findings of rank(s) {', '.join(map(str, who))}",
                )
            self._retire(guard_)
            self._broken.pop(name, None)
            stats = self._stats[name]
            stats.state, stats.note = "broken", f"switched off after step {self._backend.steps}: {text}"

    def _retire(self, guard_: Guard) -> None:
        # It may have hooks of its own to take away. It is known to be broken, so a further error says nothing new.
        with contextlib.suppress(Exception):
            ends = guard_.handlers().get(ev.Close)
            for outcome in ends(ev.Close(failed=True)) if ends else ():
                if isinstance(outcome, Request):
                    getattr(self._backend, outcome.action.value)(*outcome.args)
        self._guards = [other for other in self._guards if other is not guard_]
        self._table = {event: [row for row in rows if row[0] is not guard_] for event, rows in self._table.items()}
        self._backend.switch_off(guard_.name)

    # -- sinks -------------------------------------------------------------------------------------------------------

    def _hand(self, sinks: Iterable[Sink], record: Finding | Repair) -> None:
        """Have each sink take the record."""
        for name in self._lost:
            self._lose(name)
        for sink in tuple(sinks):
            try:
                sink.write(record)
            except SinkTimeoutError as error:
                self._sink_broke(sink, error, "further records wait for it, and nobody waits for them before close")
            except Exception as error:
                self._sinks = [other for other in self._sinks if other is not sink]
                self._lost[_label(sink)] = 0
                self._lose(_label(sink))
                self._sink_broke(sink, error, "this record and later ones are not written there")

    def _lose(self, name: str) -> None:
        self._lost[name] += 1
        notes = (f"{name}: {count} record(s) not written" for name, count in self._lost.items())
        self._sink_stats().note = "; ".join(notes)

    def _sink_stats(self) -> GuardStats:
        return self._stats.setdefault(SINKS, GuardStats(SINKS, "on"))

    def _sink_broke(self, sink: Sink, error: Exception, effect: str) -> None:
        if self.config.on_guard_error == "raise":
            raise error
        late = isinstance(error, SinkTimeoutError)
        self._tell(
            self._sink_stats(),
            "sink_late" if late else "sink_error",
            expected="a sink takes every record, soon",
            seen=f"{_label(sink)}: {error if late else f'{type(error).__name__}: {error}'}",
            effect=f"training goes on; {effect}",
            cause="a server that does not answer" if late else "a full disk, a closed file, or a mistake in the sink",
            remedy="put the sink right; until then look into session.findings and the other sinks",
            detail="" if late else _trace(error),
        )

    def _close_sink(self, sink: Sink) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        try:
            sink.close()
        except Exception as error:
            self._sink_broke(sink, error, "what it still held may not be written")

    # -- saying so ---------------------------------------------------------------------------------------------------

    def _tell(self, stats: GuardStats, kind: str, **text: Any) -> None:
        """A finding of severity warning. Where no sink logs it, the log gets it all the same."""
        facts, steps = self._backend.facts, self._backend.steps
        finding = Finding(stats.name, kind, "warning", facts.rank, steps, (), **text)
        logs = self.config.on_violation != "record" and any(isinstance(sink, LoggingSink) for sink in self._sinks)
        self._found(stats, finding)
        if not logs:
            with contextlib.suppress(Exception):  # the log may be what is broken
                logger.warning("%s", finding.text())


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-_TRACE:]


def _label(sink: Sink) -> str:
    inner = getattr(sink, "sink", sink)
    return repr(getattr(inner, "function", inner))
