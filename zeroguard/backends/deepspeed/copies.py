"""Pending device-to-host copies of offloaded gradients: knowing them, and waiting for them.

From 0.19.8 DeepSpeed keeps the newest event of each stream that copies gradients to the host
(``_pending_offload_events``); those are used. On older releases the same is recorded here, right after each copy. The
wait is for these events, not for the device, where other work may be running.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["HostCopies", "WaitingDict", "WaitingList"]


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


class WaitingDict(UserDict):
    """A view of one of DeepSpeed's dicts that waits before it hands out a value.

    The original dict stays the storage, so it can be put back as the same object.
    """

    def __init__(self, original: dict[Any, Any], copies: HostCopies, what: str) -> None:
        self.data = original
        self._copies = copies
        self._what = what

    def __getitem__(self, key: Any) -> Any:
        if not self._copies.hot:
            self._copies.read(self._what)
        return self.data[key]

    def get(self, key: Any, default: Any = None) -> Any:
        if not self._copies.hot:
            self._copies.read(self._what)
        return self.data.get(key, default)

    def values(self) -> Any:
        self._copies.read(self._what)
        return self.data.values()

    def items(self) -> Any:
        self._copies.read(self._what)
        return self.data.items()

    def keys(self) -> Any:
        return self.data.keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __contains__(self, key: Any) -> bool:
        return key in self.data

    def __or__(self, other: Any) -> Any:
        self._copies.read(self._what)
        return self.data | dict(other)

    def __ror__(self, other: Any) -> Any:
        self._copies.read(self._what)
        return dict(other) | self.data

    def __repr__(self) -> str:
        self._copies.read(self._what)
        return repr(self.data)

    def __reduce__(self) -> Any:
        self._copies.read(self._what)
        return (dict, (dict(self.data),))


class WaitingList(list):
    """A list of DeepSpeed's fp32 partitions that waits before it hands one out: their ``.grad`` is read next."""

    def __init__(self, original: list[Any], copies: HostCopies, what: str) -> None:
        super().__init__(original)
        self._copies = copies
        self._what = what

    def __getitem__(self, index: Any) -> Any:
        if not self._copies.hot:
            self._copies.read(self._what)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        if not self._copies.hot:
            self._copies.read(self._what)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        return list(self) + list(other)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def copy(self) -> list[Any]:
        return list(self)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        self._copies.read(self._what)
        return (list, (list(super().__iter__()),))
