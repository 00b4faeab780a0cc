"""A CPU that behaves like an accelerator: copies to page-locked memory land when something waits, not before.

On a GPU an unguarded read of an offloaded gradient is wrong only now and then. Here it is wrong always, so a
test of the wait needs no GPU and no luck. Every tensor counts as device memory, except the storages that went
through the accelerator's ``pin_memory``: those are host memory. A copy from the one to the other with
``non_blocking=True`` is queued on the current stream, its source cloned, and lands in
:meth:`ScriptedEvent.synchronize`, :meth:`ScriptedStream.synchronize` or the accelerator's ``synchronize``. Less
lands than on real hardware, where a copy may land early and where a read of device memory by Python, such as
``.item()``, waits for the stream: here such reads wait for nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

__all__ = ["ScriptedAccelerator", "ScriptedEvent", "ScriptedStream", "scripted_accelerator"]


#: torch's own, whatever stands in torch.Tensor meanwhile
_copy, _to = torch._C.TensorBase.copy_, torch._C.TensorBase.to


class _Copy:
    """One queued copy to host memory."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source = target, source
        self.landed = False

    def land(self) -> None:
        if self.landed:
            return
        self.landed = True
        with torch.no_grad():
            _copy(self.target, self.source)


class _Order:
    """A stream's promise to go on only after another stream's first ``upto`` entries."""

    def __init__(self, stream: ScriptedStream, upto: int) -> None:
        self.stream, self.upto = stream, upto

    def land(self) -> None:
        self.stream.land(self.upto)


class ScriptedStream:
    """A queue of copies, in order. ``begin`` and ``end`` number its entries since it was made."""

    def __init__(self, device: _Device, *args: Any, **kwargs: Any) -> None:
        self._device = device
        self.queue: list[_Copy | _Order] = []
        self.begin = 0
        device.streams.append(self)

    @property
    def end(self) -> int:
        """Entries queued so far, landed or not."""
        return self.begin + len(self.queue)

    def land(self, upto: int) -> None:
        """Let the entries before ``upto`` land, oldest first."""
        while self.queue and self.begin < upto:
            entry = self.queue.pop(0)
            self.begin += 1
            entry.land()

    def copies(self, upto: int | None = None) -> Iterator[_Copy]:
        """Copies that the device has finished before anything queued here now begins, other streams' included."""
        count = len(self.queue) if upto is None else max(0, upto - self.begin)
        for entry in self.queue[:count]:
            if isinstance(entry, _Order):
                yield from entry.stream.copies(entry.upto)
            elif not entry.landed:
                yield entry

    def synchronize(self) -> None:
        """The host waits for everything on this stream."""
        self._device.waits.append("stream")
        self.land(self.end)

    def wait_event(self, event: ScriptedEvent) -> None:
        """The stream waits, the host does not."""
        if event.mark is not None and event.mark[0] is not self:
            self.queue.append(_Order(*event.mark))

    def wait_stream(self, stream: ScriptedStream) -> None:
        """The stream waits for what the other one has been given so far."""
        if stream is not self:
            self.queue.append(_Order(stream, stream.end))

    def record_event(self, event: ScriptedEvent | None = None) -> ScriptedEvent:
        """Mark this point of the stream."""
        event = event or ScriptedEvent(self._device)
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything has landed."""
        return next(self.copies(), None) is None


class ScriptedEvent:
    """A point of a stream. ``mark`` is the stream and the number of entries before the point."""

    def __init__(self, device: _Device, *args: Any, **kwargs: Any) -> None:
        self._device = device
        self.mark: tuple[ScriptedStream, int] | None = None

    def record(self, stream: ScriptedStream | None = None) -> None:
        """Take the present end of a stream, the current one if none is given."""
        stream = stream or self._device.current
        self.mark = (stream, stream.end)

    def synchronize(self) -> None:
        """The host waits for what was queued before :meth:`record`."""
        self._device.waits.append("event")
        if self.mark is not None:
            self.mark[0].land(self.mark[1])

    def wait(self, stream: ScriptedStream | None = None) -> None:
        """A stream waits for the point."""
        (stream or self._device.current).wait_event(self)

    def query(self) -> bool:
        """Whether the point was reached."""
        return self.mark is None or next(self.mark[0].copies(self.mark[1]), None) is None

    def elapsed_time(self, other: ScriptedEvent) -> float:
        """Milliseconds; nothing takes time here."""
        return 0.0


class _Device:
    """Streams, host memory and the log of waits."""

    def __init__(self) -> None:
        self.streams: list[ScriptedStream] = []
        self.waits: list[str] = []
        # The storages themselves: an address alone might be given to another tensor after they are freed.
        self.host: dict[int, torch.UntypedStorage] = {}
        self.default = self.current = ScriptedStream(self)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.host[storage.data_ptr()] = storage
        return tensor

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self.host

    def pending(self) -> int:
        return len({id(copy) for stream in self.streams for copy in stream.copies()})

    def land_for(self, tensor: torch.Tensor) -> None:
        """The device reaches, on the current stream, an access to this host storage."""
        where = tensor.untyped_storage().data_ptr()
        for copy in list(self.current.copies()):
            if copy.target.untyped_storage().data_ptr() == where:
                copy.land()

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """``Tensor.copy_`` as an accelerator does it. Host to host is an ordinary copy of what is there."""
        to_host, from_host = self.is_host(target), self.is_host(source)
        if to_host and not from_host:
            if non_blocking:
                self.current.queue.append(_Copy(target.data, source.detach().clone()))
                return target
            self.land_for(target)
        elif from_host and not to_host:
            self.land_for(source)
        return _copy(target, source, non_blocking)


class _Start:
    """The operation copy_ as a dispatch mode gets it: to call it is to start the copy."""

    overloadpacket = torch.ops.aten.copy_
    _schema = torch.ops.aten.copy_.default._schema

    def __init__(self, device: _Device) -> None:
        self._device = device

    def __call__(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return self._device.copy(target, source, non_blocking)


@contextlib.contextmanager
def _intercepted(device: _Device) -> Iterator[None]:
    """``Tensor.copy_``, ``Tensor.to`` and ``Tensor.record_stream`` of this process go to the device.

    Replaced on the class, because nothing milder sees both inside an autograd hook: a TorchFunctionMode is off while
    ``Tensor.backward`` runs, which is itself a function that it handles, and no mode sees ``record_stream``, whose
    arguments are refused before one is asked.
    """

    def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if _get_current_dispatch_mode() is None:
            return device.copy(self, src, non_blocking)
        # A copy that lands later starts no operation now, and a dispatch mode is there to see it.
        with _pop_mode_temporarily() as mode:
            return mode.__torch_dispatch__(_Start(device), (), (self, src, non_blocking), {})

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Everything is on the CPU, so only non_blocking tells that a host tensor is to be brought to the device.
        if not kwargs.get("non_blocking") or not device.is_host(self):
            return _to(self, *args, **kwargs)
        device.land_for(self)
        # It is the device that reads here, in the order of its stream: nothing for a mode that watches the host.
        hidden = _get_current_dispatch_mode() is not None
        with _pop_mode_temporarily() if hidden else contextlib.nullcontext():
            out = _to(self, *args, **kwargs)
            return out.clone() if out is self else out

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        return None  # nothing is freed early here

    space: dict[str, Any] = {"copy_": copy_, "to": to, "record_stream": record_stream}
    before: dict[str, Any] = {name: vars(torch.Tensor).get(name) for name in space}
    for name, function in space.items():
        setattr(torch.Tensor, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            if function is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, function)


class ScriptedAccelerator:
    """What :func:`scripted_accelerator` puts in front of DeepSpeed's accelerator class.

    Attributes:
        pending: copies that have not landed.
        waits: what the host waited for so far, oldest first: ``event``, ``stream`` or ``device``, whether or not a copy
            was pending.
    """

    _device: _Device
    _exits: list[contextlib.ExitStack]

    @property
    def pending(self) -> int:
        return self._device.pending()

    @property
    def waits(self) -> list[str]:
        return self._device.waits

    def __enter__(self) -> ScriptedAccelerator:
        """Copies are intercepted from here on."""
        stack = contextlib.ExitStack()
        stack.enter_context(_intercepted(self._device))
        self._exits.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.pop().close()

    # -- DeepSpeedAccelerator ------------------------------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def handles_memory_backpressure(self) -> bool:
        return True  # else DeepSpeed limits ZeRO-3's prefetch by events that say nothing here

    def use_host_timers(self) -> bool:
        return True

    @property
    def Stream(self) -> Callable[..., ScriptedStream]:
        return functools.partial(ScriptedStream, self._device)

    @property
    def Event(self) -> Callable[..., ScriptedEvent]:
        return functools.partial(ScriptedEvent, self._device)

    def current_stream(self, device_index: Any = None) -> ScriptedStream:
        return self._device.current

    def default_stream(self, device_index: Any = None) -> ScriptedStream:
        return self._device.default

    @contextlib.contextmanager
    def stream(self, stream: ScriptedStream | None) -> Iterator[None]:
        before = self._device.current
        self._device.current = stream or before
        try:
            yield
        finally:
            self._device.current = before

    def synchronize(self, device_index: Any = None) -> None:
        self._device.waits.append("device")
        for stream in self._device.streams:
            stream.land(stream.end)

    def pin_memory(
        self, tensor: torch.Tensor, *args: Any, make_copy: bool = True, match_shape: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        # The second argument is align_bytes up to 0.19.2; newer releases pass the other two by name.
        if make_copy:
            return self._device.pin(tensor.detach().clone())
        return self._device.pin(tensor.new_empty(tensor.shape if match_shape else (tensor.numel(),)))

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        return self._device.pin(torch.empty(*size, dtype=dtype, device=device))

    def pin_empty_like(
        self, tensor: torch.Tensor, device: Any = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._device.pin(torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device))

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        self._device.host.pop(tensor.untyped_storage().data_ptr(), None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._device.is_host(tensor)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return not self._device.is_host(tensor)


def scripted_accelerator(inner: Any) -> Any:
    """An accelerator on which host reads race, always and on a CPU. LOCAL.

    Give it to DeepSpeed before the engine is made, and put ``inner`` back afterwards::

        from deepspeed.accelerator import get_accelerator, set_accelerator

        inner = get_accelerator()
        with scripted_accelerator(inner) as accelerator:
            set_accelerator(accelerator)
            try:
                ...
            finally:
                set_accelerator(inner)

    Args:
        inner: DeepSpeed's accelerator of the CPU. It is not changed.

    Returns:
        An instance of a new subclass of ``type(inner)``, so that DeepSpeed's own checks pass, with the attributes of
        :class:`ScriptedAccelerator`. Copies are intercepted inside ``with`` only, in the whole process.
    """
    kind: Any = type(f"Scripted{type(inner).__name__}", (ScriptedAccelerator, type(inner)), {})
    made = kind.__new__(kind)  # a copy: inner's __init__ may probe the machine
    vars(made).update(vars(inner))
    made._device = _Device()
    made._exits = []
    return made
