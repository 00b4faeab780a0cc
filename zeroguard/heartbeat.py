"""Each rank says in the job's store where its loop is, about once a second, so that the others can tell who went
missing, and where.

Everything here is LOCAL: the store is a server that one process of the job holds, and no rank waits for another. A
call of the store may still hang, where that process was stopped or cut off. So all of them are made by one daemon
thread a session, over a connection of its own; the loop itself only ever waits for this thread, and not for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["Beat", "Heartbeat", "Place"]

#: Seconds from one sign of life to the next.
BEAT = 1.0
#: The longest, in seconds, that the loop waits for the store when it ends.
ANSWER = 2.0
#: How long, in seconds, the first agreement waits for the other ranks to have been guarded.
GUARDED = 30.0


class Place(NamedTuple):
    """Where a loop is: optimizer steps completed, and what it does."""

    step: int
    doing: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.doing}"


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said of itself.

    Attributes:
        number: counts the signs of life; one that stands still means that the process does.
        at: when it was written, seconds of wall time on that rank's machine.
        since: from when on the loop has been at this place, by the same clock, to about a second.
        step, doing: the place.
        end: empty while the session is open, ``closed``, or ``left`` after an exception.
        error: the exception it left with.
        follows: whether that exception came out of a collective, so that another rank may be behind it.
        done: whether that rank needs the store no more.
    """

    number: int
    at: float
    since: float
    step: int
    doing: str
    end: str = ""
    error: str = ""
    follows: bool = False
    done: bool = False

    @property
    def place(self) -> Place:
        """The place."""
        return Place(self.step, self.doing)


class Heartbeat:
    """This rank's signs of life in the store, and a look at the others'. LOCAL.

    Args:
        connect: gives a connection to the job's store that nobody else uses. Called by the thread.
        rank: this one, of the whole job.
        groups: the ranks of each process group that trains this engine, the same on each of the group's ranks.
        place: tells where the loop is; None once nobody holds it any more, which ends the thread.
        agreement: what this rank and the others have to have in common to agree with each other; empty if it agrees
            with none.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        rank: int,
        groups: Sequence[Sequence[int]],
        place: Callable[[], Place | None],
        agreement: str = "",
    ) -> None:
        self.rank = rank
        self.groups = [tuple(group) for group in groups]
        self.others = sorted({one for group in groups for one in group} - {rank})
        self._connect = connect
        self._place = place
        self._agreement = agreement
        self._prefixes = [f"zeroguard/{zlib.crc32(repr(group).encode()):08x}" for group in self.groups]
        self._number, self._published = 0, 0.0
        self._since = time.time()
        self._last = Place(-1, "")
        self._end = ("", "", False)
        self._done = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._broken = ""
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="zeroguard-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin. Nothing is waited for."""
        self._thread.start()

    # -- what the loop's thread calls --------------------------------------------------------------------------------

    def absent(self) -> list[int]:
        """Ranks that have no open session with the same ``agreement``, after a wait of at most :data:`GUARDED`
        seconds; none where the store does not say."""
        try:
            return self._ask(self._absent, GUARDED + ANSWER)
        except ConnectionError:
            return []

    def leave(self, error: str, *, follows: bool) -> None:
        """Say that the loop ends with an exception."""
        self._end = ("left", error, follows)
        with contextlib.suppress(ConnectionError):  # whoever looks finds out
            self._ask(self._publish, ANSWER)

    def look(self) -> tuple[dict[int, Beat], set[int]]:
        """What the other ranks last said, and those of them that give no sign of life while this one watches.

        Returns after :data:`ANSWER` seconds at the latest, as soon as every rank has ended or has been heard, and at
        once where one has left with an exception of its own.

        Raises:
            ConnectionError: the store does not answer.
        """
        deadline = time.monotonic() + ANSWER
        # Watched, instead of reckoned from what stands there: the clocks of two machines may differ.
        first = now = self._ask(self._read, ANSWER)
        while True:
            silent = {rank for rank, beat in now.items() if not beat.end and beat == first.get(rank)}
            left = deadline - time.monotonic()
            if any(beat.end == "left" and not beat.follows for beat in now.values()):
                return now, set()  # that explains it, and a launcher may be about to end this rank as well
            if not silent or left < 0.3:
                return now, silent
            time.sleep(0.1)
            now = {**first, **self._ask(self._read, left)}

    def see_off(self, ranks: Iterable[int]) -> None:
        """Wait until these ranks need the store no more, twice :data:`ANSWER` seconds at most: what the process that
        hosts it does before it ends, because others are still looking for the same rank."""
        deadline = time.monotonic() + 2 * ANSWER
        with contextlib.suppress(ConnectionError):
            while (left := deadline - time.monotonic()) > 0:
                beats = self._ask(self._read, left)
                if all(beats[rank].done for rank in ranks if rank in beats):
                    return
                time.sleep(0.05)

    def close(self) -> None:
        """Idempotent. Stop and join the thread; it is given up on, after :data:`ANSWER` seconds, only where the store
        holds it."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return
        if not self._end[0]:
            self._end = ("closed", "", False)
        self._done = True
        self._jobs.put(None)
        self._thread.join(0.1 if self._broken else ANSWER)

    def _ask(self, job: Callable[[Any], Any], seconds: float) -> Any:
        if self._broken or os.getpid() != self._process:
            raise ConnectionError(self._broken or "this process was forked")
        answer: Future[Any] = Future()
        self._jobs.put((job, answer))
        if self._broken:
            self._give_up()  # the thread may not have seen this job any more
        try:
            return answer.result(seconds)
        except TimeoutError:
            self._broken = f"no answer within {seconds:.0f} s"
            raise ConnectionError(self._broken) from None

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store = self._connect()
            self._count(store, 1)
            while self._publish(store):
                if not self._work(store):
                    self._publish(store)
                    break
            if self._end[0] != "left":  # who left in the first step was guarded, for those that come to it later
                self._count(store, -1)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            self._broken = self._broken or "this rank has left it"
            self._give_up()

    def _work(self, store: Any) -> bool:
        """One job, or none until the next beat is due; false at the end."""
        try:
            job = self._jobs.get(timeout=BEAT)
        except queue.Empty:
            return True
        if job is None:
            return False
        try:
            job[1].set_result(job[0](store))
        except Exception as error:
            job[1].set_exception(ConnectionError(f"{type(error).__name__}: {error}"))
            raise
        return True

    def _give_up(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[1].set_exception(ConnectionError(self._broken))

    def _count(self, store: Any, change: int) -> None:
        """Keep count of this rank's open sessions that agree, and of the ranks that have any. Not of which session goes
        with which of another rank: a rank may have opened and closed more of them."""
        for prefix in self._prefixes if self._agreement else ():
            mine = store.add(f"{prefix}/{self._agreement}/{self.rank}", change)
            if mine == max(change, 0):
                store.add(f"{prefix}/{self._agreement}", change)

    def _publish(self, store: Any) -> bool:
        """Say where the loop is; false when there is no loop any more."""
        place = self._place()
        if place is None:
            return False
        now = time.time()
        self._number, self._published = self._number + 1, time.monotonic()
        if place != self._last:
            self._last, self._since = place, now
        end, error, follows = self._end
        beat = Beat(self._number, now, self._since, place.step, place.doing, end, error, follows, self._done)
        for prefix in self._prefixes:
            store.set(f"{prefix}/beat/{self.rank}", json.dumps(asdict(beat)))
        return True

    def _read(self, store: Any) -> dict[int, Beat]:
        out: dict[int, Beat] = {}
        for group, prefix in zip(self.groups, self._prefixes, strict=True):
            for rank in group:
                key = f"{prefix}/beat/{rank}"
                if rank != self.rank and rank not in out and store.check([key]):
                    out[rank] = Beat(**json.loads(store.get(key)))
        return out

    def _absent(self, store: Any) -> list[int]:
        deadline = time.monotonic() + GUARDED
        out: set[int] = set()
        for group, prefix in zip(self.groups, self._prefixes, strict=True):
            key = f"{prefix}/{self._agreement}"
            # One number for the whole group: what each of a thousand ranks asks has to be small.
            while store.add(key, 0) < len(group) and time.monotonic() < deadline:
                time.sleep(0.02)
                if time.monotonic() - self._published > BEAT:
                    self._publish(store)
            if store.add(key, 0) < len(group):
                out |= {rank for rank in group if store.add(f"{key}/{rank}", 0) < 1}
        return sorted(out)
