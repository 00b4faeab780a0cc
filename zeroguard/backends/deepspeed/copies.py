"""Pending device-to-host copies of offloaded gradients: knowing them, and waiting for them.

From 0.19.8 DeepSpeed keeps the newest event of each stream that copies gradients to the host
(``_pending_offload_events``); those are used. On older releases the same is recorded here, right after each copy. The
wait is for these events, not for the device, where other work may be running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zeroguard.backends.deepspeed.detect import ReadDetector
from zeroguard.backends.deepspeed.views import WaitingDict, WaitingList

__all__ = ["HostCopies"]


class HostCopies:
    """The pending copies of one engine. LOCAL throughout.

    ``hot`` is above zero while DeepSpeed itself touches the buffers: its own reads are ordered by its streams and
    must not be slowed down.
    """

    def __init__(self, optimizer: Any, accelerator: Callable[[], Any], *, own_events: bool) -> None:
        self.optimizer = optimizer
        self.accelerator = accelerator
        self.own_events = own_events
        self.events: dict[Any, Any] = {}
        self.hot = 0
        #: copies are not seen (nothing is wrapped, and DeepSpeed keeps no events): only the device can be waited for
        self.unseen = False
        self.waits = 0
        #: what the user sees instead of DeepSpeed's containers: attributes of an object, name, original, view
        self._views: list[tuple[dict[str, Any], str, Any, WaitingDict | WaitingList]] = []
        self.detector: ReadDetector | None = None
        #: called before a read by the user; the session times and counts it
        self.on_read: Callable[[str], None] = lambda what: None

    def copied(self) -> None:
        """Remember that the current stream has just been given a copy to the host."""
        accelerator = self.accelerator()
        stream = accelerator.current_stream()
        event = self.events.get(stream)
        if event is None:
            event = self.events[stream] = accelerator.Event()
        event.record(stream)

    def pending(self) -> bool:
        """Whether a copy may still be running."""
        if self.events or self.unseen:
            return True
        return bool(self.own_events and self.optimizer._pending_offload_events)

    def wait(self, how: str = "event") -> None:
        """Return once every copy that was recorded has landed.

        Args:
            how: ``event`` waits for the copies; ``stream`` for everything queued on the streams that copied; ``device``
                for everything on the device.
        """
        if not self.pending():
            return
        self.waits += 1
        if how == "device" or self.unseen:
            self.accelerator().synchronize()
        elif how == "stream":
            streams = set(self.events)
            if self.own_events:
                streams |= set(self.optimizer._pending_offload_events)
            for stream in streams:
                stream.synchronize()
        else:
            for event in self.events.values():
                event.synchronize()
        self.events.clear()
        if self.own_events:
            # After a stronger wait this returns at once, and DeepSpeed forgets what has landed.
            self.optimizer._wait_for_offload_copies()

    def read(self, what: str) -> None:
        """The user is about to read ``what``."""
        if not self.hot:
            self.on_read(what)

    # -- what DeepSpeed sees of its containers, and what the user sees -----------------------------------------------

    def view(self, owner: Any, name: str, what: str) -> WaitingDict | WaitingList:
        """What to put in place of ``owner.name``: a view that waits. DeepSpeed's own code gets the plain object,
        between :meth:`enter` and :meth:`leave`."""
        original = getattr(owner, name)
        kind = WaitingDict if isinstance(original, dict) else WaitingList
        view = kind(original, lambda: self.read(what))
        self._views.append((vars(owner), name, original, view))
        return view

    def enter(self) -> None:
        """DeepSpeed itself touches the buffers from here on."""
        self.hot += 1
        if self.hot == 1:
            for space, name, original, view in self._views:
                if space.get(name) is view:
                    space[name] = original

    def leave(self) -> None:
        """It no longer does."""
        self.hot -= 1
        if self.hot == 0:
            for space, name, original, view in self._views:
                if space.get(name) is original:
                    space[name] = view
                    if len(view) != len(view.data):
                        view.refresh()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The buffers are touched as DeepSpeed does: by its own code, or by a look of ours that has waited already, or
        need not."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def close(self) -> list[str]:
        """Nobody waits here any more; whatever was put in place of DeepSpeed's containers is there to be taken back.
        Returns what could not be taken back."""
        for space, name, original, view in self._views:
            if space.get(name) is original:  # closed while DeepSpeed is at work
                space[name] = view
        self._views.clear()
        detector, self.detector = self.detector, None
        return [] if detector is None else detector.stop()

    def detect(self, report: Callable[[str, str, int], None]) -> None:
        """From here on every read by the host of memory that the device is still filling is reported: the line that
        read, the line that copied, and the bytes of the copy."""
        self.detector = ReadDetector(self.accelerator, report)
