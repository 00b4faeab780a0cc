"""What a session knows of the other ranks: whether they are guarded as well, and who is behind an exception that came
out of a collective."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroguard.backends.base import Engine
from zeroguard.collective import from_collective, job_store, members, unite
from zeroguard.errors import NotGuardedError
from zeroguard.events import Phase
from zeroguard.findings import Finding
from zeroguard.heartbeat import Beat, Heartbeat, Place
from zeroguard.report.summary import GuardStats

if TYPE_CHECKING:
    from zeroguard.config import GuardConfig

__all__ = ["RankWatch", "explain"]

#: The name under which findings about other ranks stand in the summary.
RANKS = "ranks"
#: How many ranks a text names.
SHOWN = 8

_DOING = {Phase.BETWEEN: "between the engine's calls", Phase.CLOSED: "at the end", Phase.CHECKPOINT: "save_checkpoint"}


class RankWatch:
    """The part of :class:`zeroguard.Session` that knows of other ranks. LOCAL, but for :meth:`all_findings`."""

    config: GuardConfig
    findings: list[Finding]
    phase: Phase
    _backend: Engine
    _stats: dict[str, GuardStats]
    _heartbeat: Heartbeat | None = None
    _agreeing = False
    _guarded = True  # as far as is known

    def _found(self, stats: GuardStats, finding: Finding) -> None:
        raise NotImplementedError

    # -- the heartbeat -----------------------------------------------------------------------------------------------

    def start_heartbeat(self) -> None:
        """LOCAL. Begin to tell the other ranks where this loop is, if the configuration wants it and the job has a
        store for it. Nothing is waited for."""
        groups = [members(group) for group in self._backend.groups]
        if not (self.config.agree and self.config.heartbeat) or max(map(len, groups), default=1) == 1:
            return
        store = job_store()
        if store is None:
            return
        here = weakref.ref(self)  # who drops the engine and its session must not find them kept by a thread

        def place() -> Place | None:
            session = here()
            return None if session is None else session._place()

        agrees = self.config.on_violation == "raise"
        agreement = f"every-{self.config.agree_every_n_steps}" if agrees else ""
        self._heartbeat = Heartbeat(store.connect, self._backend.facts.rank, groups, place, agreement)
        self._guarded = not agrees
        self._heartbeat.start()

    def _place(self) -> Place:
        doing = "agreement" if self._agreeing else _DOING.get(self.phase, self.phase.value)
        return Place(getattr(self._backend, "steps", 0), doing)

    def _all_guarded(self) -> None:
        """LOCAL, before the first step, in which a guard may be the first to wait for other ranks.

        Raises:
            NotGuardedError: a rank is not guarded, and would be waited for.
        """
        absent = [] if self._heartbeat is None else self._heartbeat.absent()
        self._guarded = True
        if absent:
            raise NotGuardedError(absent, self._backend.facts.rank, self.config.agree_every_n_steps)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()

    # -- when the loop ends with an exception ------------------------------------------------------------------------

    def on_exception(self, error: BaseException) -> None:
        """LOCAL, before :meth:`close`; leaving the ``with`` block calls it. The loop of this rank ends with ``error``.

        Says so to the other ranks. If ``error`` came out of a collective, what they said last is added to it, as a
        note, and is a finding of ``ranks``: who is silent since when, or left, and where. No collective is called; what
        is waited for is the job's store, for four seconds at most; and, on the rank that hosts it, that the others have
        looked, too. Without a heartbeat this does nothing.
        """
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None:
            return
        try:
            follows = from_collective(error)
            heartbeat.leave(_line(error), follows=follows)
            if follows:
                self._explain(error, heartbeat)
        finally:
            heartbeat.close()

    def _explain(self, error: BaseException, heartbeat: Heartbeat) -> None:
        silent: set[int] = set()
        try:
            beats, silent = heartbeat.look()
            kind, said = explain(beats, silent, heartbeat.others)
            cause = "these ranks did not take part in the collective that this one waited in"
            remedy = "look at their logs and their machines first; the exceptions of other ranks follow from it"
        except ConnectionError as gone:
            store = job_store()
            host = "the process that hosts it" if store is None else store.host
            kind, said = "store_gone", [f"the job's store does not answer ({gone}): {host} is gone, stopped or cut off"]
            cause = f"{host} ended, or this rank was cut off from it; without it no rank can be told about another"
            remedy = f"look at the log and the machine of {host} first, then at this rank's network"
        for line in said:
            error.add_note(f"zeroguard: {line}")
        place = self._place()
        finding = Finding(
            RANKS,
            kind,
            "error",
            self._backend.facts.rank,
            place.step,
            (),
            expected="every rank takes part in each collective",
            seen="; ".join(said),
            effect=f"this rank's loop ended in {place}",
            cause=cause,
            remedy=remedy,
        )
        self._found(self._stats.setdefault(RANKS, GuardStats(RANKS, "on")), finding)
        if kind != "store_gone" and (store := job_store()) is not None and store.here:
            heartbeat.see_off(set(heartbeat.others) - silent)

    # -- one report --------------------------------------------------------------------------------------------------

    def all_findings(self) -> list[Finding]:
        """COLLECTIVE, on every rank of the engine, before or after :meth:`close`. The findings of all ranks, by rank
        and then in their order; the same list on each. Not after an exception that only some ranks got: the others
        would be waited for."""
        mine = {RANKS: json.dumps([finding.to_dict() for finding in self.findings])}
        said = unite(mine, groups=self._backend.groups)
        rows = [row for rank in sorted(said) for row in json.loads(said[rank][RANKS])]
        return [Finding(**{**row, "subject": tuple(row["subject"])}) for row in rows]


def explain(beats: dict[int, Beat], silent: set[int], others: Sequence[int]) -> tuple[str, list[str]]:
    """Who is behind it, out of what the ``others`` said last: a kind of finding, and a line a rank, at most
    :data:`SHOWN`."""
    now = time.time()
    ended = {rank: beat for rank, beat in beats.items() if beat.end}
    culprits = {
        "rank_left": {
            rank: f"rank {rank} left with {beat.error} in {beat.place}"
            for rank, beat in ended.items()
            if beat.end == "left" and not beat.follows
        },
        "rank_silent": {
            rank: f"rank {rank} was last heard of {max(0.0, now - beat.at):.0f} s ago in {beat.place} "
            "(killed, crashed, stopped, or cut off)"
            for rank, beat in beats.items()
            if rank in silent
        },
        "rank_closed": {
            rank: f"rank {rank} closed its session {max(0.0, now - beat.at):.0f} s ago, after step {beat.step}"
            for rank, beat in ended.items()
            if beat.end == "closed"
        },
        "rank_unknown": {
            rank: f"rank {rank} has never been heard of: it is not guarded, or has no heartbeat"
            for rank in others
            if rank not in beats
        },
    }
    lines = [line for texts in culprits.values() for _, line in sorted(texts.items())]
    if lines:
        kind = next(kind for kind, texts in culprits.items() if texts)
    else:
        # Nobody is missing: one of them is somewhere else, and where they are says which.
        kind = "rank_elsewhere"
        lines = [
            f"rank {rank} left with {beat.error} in {beat.place}, out of a collective as well"
            if beat.end
            else f"rank {rank} is alive, in {beat.place} for {max(0.0, now - beat.since):.0f} s"
            for rank, beat in sorted(beats.items())
        ]
    more = len(lines) - SHOWN
    return kind, lines[:SHOWN] + ([f"and {more} more ranks"] if more > 0 else [])


def _line(error: BaseException) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:300]}" if first else type(error).__name__
