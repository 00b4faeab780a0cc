"""Sinks that a user brought, each called from a thread of its own: one that blocks stops no step."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from zeroguard.errors import SinkTimeoutError

if TYPE_CHECKING:
    from zeroguard.findings import Finding, Repair

__all__ = ["Lane"]

#: Seconds that a step waits for a sink, once a session; and that close waits for what is still queued.
PATIENCE = 5.0
#: Records that may wait for a sink that is late; later ones are counted.
ROOM = 1000


class _Job:
    """One call, in the context variables of the thread that asked for it."""

    __slots__ = ("call", "context", "done", "error")

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call
        self.context: Context = copy_context()
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self.call is not None:
                self.context.run(self.call)
        except BaseException as error:  # handed to the thread that asked
            self.error = error
        finally:
            self.call = None
            self.done.set()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()


class Lane:
    """Hands records to a sink one after the other, and waits for each: what is written is written. Once the sink has
    taken longer than ``PATIENCE``, nobody waits for it any more before close.

    The thread starts with the first record, and is a daemon: a sink that never returns keeps no process from ending.
    """

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.late = False
        self.dropped = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._open: deque[_Job] = deque()
        self._thread: threading.Thread | None = None

    def write(self, record: Finding | Repair) -> None:
        """Have the sink take one record.

        Raises:
            SinkTimeoutError: once; from then on records are queued.
            Exception: what the sink raised, for this record or for one that was queued.
        """
        self._settle()
        if len(self._open) >= ROOM:
            self.dropped += 1
            return
        self._do(partial(self.sink.write, record), wait=not self.late)

    def close(self) -> None:
        """Have the sink write what is queued, and close.

        Raises:
            SinkTimeoutError: with the number of records that it has not taken.
            Exception: what the sink raised.
        """
        try:
            self._settle()
            self._do(self.sink.close, wait=True)
        except SinkTimeoutError:
            self._prune()
            left = max(0, len(self._open) - 1) + self.dropped  # the last one is the close
            raise SinkTimeoutError(f"at close, after {PATIENCE:g} s, {left} record(s) were not taken") from None
        finally:
            self._jobs.put(None)
        if self.dropped:
            raise SinkTimeoutError(f"{self.dropped} record(s) were dropped, because {ROOM} were waiting already")

    def _do(self, call: Callable[[], object], *, wait: bool) -> None:
        job = _Job(call)
        if not self._started():
            job.run()
        else:
            self._open.append(job)
            self._jobs.put(job)
            if not wait or threading.current_thread() is self._thread:
                return
            if not job.done.wait(PATIENCE):
                self.late = True
                raise SinkTimeoutError(f"it has not returned for {PATIENCE:g} s")
        self._settle()
        if job.error is not None:
            raise job.error

    def _started(self) -> bool:
        if self._thread is None:
            # Not a method of this object, so that a lane that nobody closes can go, and its thread with it.
            thread = threading.Thread(target=_work, args=(self._jobs,), name="zeroguard-sink", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                thread.start()
                self._thread = thread
                weakref.finalize(self, self._jobs.put, None)
        return self._thread is not None

    def _prune(self) -> BaseException | None:
        error: BaseException | None = None
        while self._open and self._open[0].done.is_set():
            job = self._open.popleft()
            error = error or job.error
        return error

    def _settle(self) -> None:
        """Forget what is done, and raise what went wrong with it."""
        error = self._prune()
        if error is not None:
            raise error
