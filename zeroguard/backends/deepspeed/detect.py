"""Any read by the host of page-locked memory that the device is still filling: DeepSpeed's, the user's, anybody's.

For a test run: every operation of PyTorch passes through Python. Two modes of PyTorch's see the operations. The
dispatch mode sees copies start, and whatever computes with a host tensor; the function mode sees the few methods that
read memory without an operation (``numpy``, ``tolist``, pickling, printing).

A read is reported when the event recorded behind the copy has not been reached at that moment, so a report is never a
guess: the read would have been wrong. A copy that happened to land in time is not reported. The read then waits for the
event, and is right.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = ["ReadDetector"]

#: Operations that overwrite their first argument and do not read it.
_FILLS = frozenset({"copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "_foreach_zero_"})
#: Operations that ask a tensor for its shape or kind, or whether it may be freed, and leave its memory alone. Views are
#: known by their schema.
_ASKS = frozenset({"is_pinned", "is_same_size", "record_stream", "resize_", "set_", "_unsafe_view"})
#: What the names of operations begin with that make new memory after a tensor's shape, or ask for it.
_MAKES = ("empty", "zeros", "ones", "full", "rand", "randn", "new_", "sym_")
#: They read a tensor's memory, or hand it out to be read, without an operation that a dispatch mode sees.
_UNSEEN = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "__repr__")
)
#: Pickling asks a plain tensor for its storage, as others do who read nothing.
_STORAGE = torch.Tensor.untyped_storage
_INSIDE = ("torch", "zeroguard", "contextlib", "functools", "copy", "copyreg", "pickle")


@dataclass(slots=True)
class _Copy:
    """A copy to the host: the bytes that it fills, the event behind it, and where it was started."""

    begin: int
    end: int
    event: Any
    line: str
    size: int


class ReadDetector:
    """LOCAL, of the thread that starts it and the backwards that it runs.

    Args:
        accelerator: gives DeepSpeed's accelerator: which tensors are on the device or page-locked, streams and events.
        report: called with ``reader``, ``copier`` (lines of code) and ``size`` (bytes of the copy), once for each pair
            of lines.
    """

    def __init__(self, accelerator: Callable[[], Any], report: Callable[[str, str, int], None]) -> None:
        self.accelerator, self.report = accelerator, report
        self.pending: dict[int, list[_Copy]] = {}
        self.live = True
        self._told: set[tuple[str, str]] = set()
        self._modes: list[Any] = [_Functions(self), _Operations(self)]
        for mode in self._modes:
            mode.__enter__()

    def stop(self) -> list[str]:
        """Take the modes off PyTorch's stacks. One below somebody else's stays, and only calls through; it is named."""
        self.live = False
        self.pending.clear()
        left = []
        functions, operations = self._modes
        tops: list[Any] = [_get_current_dispatch_mode(), _get_current_function_mode()]
        for mine, top in zip((operations, functions), tops, strict=True):
            if top is mine:
                mine.__exit__(None, None, None)
            else:
                left.append(f"PyTorch's stack of modes ({type(mine).__name__})")
        return left

    # -- copies ------------------------------------------------------------------------------------------------------

    def started(self, target: Any, source: Any) -> None:
        """A copy from ``source`` to ``target`` was queued, non_blocking."""
        accelerator = self.accelerator()
        if not _plain(target) or accelerator.on_accelerator(target) or not accelerator.on_accelerator(source):
            return
        # Memory that is not page-locked is filled before the call returns. A target with gaps is filled by the host.
        if not accelerator.is_pinned(target) or not target.is_contiguous():
            return
        event = accelerator.Event()
        event.record(accelerator.current_stream())
        begin = target.data_ptr()
        size = target.numel() * target.element_size()
        copies = self.pending.setdefault(target.untyped_storage().data_ptr(), [])
        copies[:] = [old for old in copies if not (begin <= old.begin and old.end <= begin + size)]
        copies.append(_Copy(begin, begin + size, event, _line(), size))

    # -- reads -------------------------------------------------------------------------------------------------------

    def read(self, tensors: Iterable[Any]) -> None:
        """The host is about to read these tensors."""
        for tensor in tensors:
            if not _plain(tensor) or tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage().data_ptr()
            copies = self.pending.get(storage)
            if copies is None:
                continue
            copies[:] = [item for item in copies if not item.event.query()]
            if not copies:
                del self.pending[storage]
                continue
            for item in [item for item in copies if _meets(tensor, item)]:
                self._found(item)
                item.event.synchronize()

    def _found(self, item: _Copy) -> None:
        reader = _line()
        if (reader, item.line) not in self._told:
            self._told.add((reader, item.line))
            self.report(reader, item.line, item.size)

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """PyTorch is about to run this; what of it the host reads is read now."""
        name = func.overloadpacket.__name__
        if name in _ASKS or name.startswith(_MAKES) or _only_looks(func):
            return
        if name == "_to_copy":
            device, kind = kwargs.get("device"), kwargs.get("dtype") or args[0].dtype
            if device is None or device.type == "cpu" or kind != args[0].dtype:
                self.read(args[:1])
        elif name == "copy_":
            self.read([] if self._queued(args[0], args[1]) else [args[1]])
        elif name == "_foreach_copy_":
            self.read(
                [source for target, source in zip(args[0], args[1], strict=True) if not self._queued(target, source)]
            )
        else:
            self.read(_tensors(args[1:] if name in _FILLS else args))
            self.read(_tensors([value for key, value in kwargs.items() if key != "out"]))

    def _queued(self, target: Any, source: Any) -> bool:
        """Whether the device reads the source, in the order of its stream: a copy to it that converts nothing, which
        the host would do first."""
        return bool(self.accelerator().on_accelerator(target) and target.dtype == source.dtype)

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """PyTorch has run this; a copy that it has queued is pending now."""
        name = func.overloadpacket.__name__
        if name == "_to_copy" and kwargs.get("non_blocking"):
            self.started(out, args[0])
        elif name in ("copy_", "_foreach_copy_") and (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
            pairs = [args[:2]] if name == "copy_" else zip(args[0], args[1], strict=True)
            for target, source in pairs:
                self.started(target, source)


class _Operations(TorchDispatchMode):
    def __init__(self, detector: ReadDetector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, detector = kwargs or {}, self.detector
        if not detector.live:
            return func(*args, **kwargs)
        if detector.pending:
            with torch._C.DisableTorchFunction():
                detector.operation(func, args, kwargs)
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            detector.ran(func, args, kwargs, out)
        return out


class _Functions(TorchFunctionMode):
    def __init__(self, detector: ReadDetector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        detector = self.detector
        if detector.pending and detector.live and (func in _UNSEEN or (func is _STORAGE and _pickles())):
            detector.read(args[:1])
        return func(*args, **(kwargs or {}))


def _pickles() -> bool:
    """Whether it is pickling that asks."""
    frame: Any = sys._getframe(2)
    for _ in range(3):
        if frame is not None and frame.f_code.co_name == "_reduce_ex_internal":
            return True
        frame = None if frame is None else frame.f_back
    return False


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _only_looks(func: Any) -> bool:
    """Whether an operation gives another view of the same memory and reads none of it."""
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(info.is_write for info in aliases)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _meets(tensor: Any, item: _Copy) -> bool:
    """Whether the tensor has an element in those bytes, for certain: of one with gaps, its first or its last."""
    size = tensor.element_size()
    first = tensor.data_ptr()
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) * size
    if tensor.is_contiguous():
        return bool(first < item.end and item.begin < last + size)
    return any(item.begin <= place < item.end for place in (first, last))


def _line() -> str:
    """Where the program is: the innermost line that is not PyTorch's or zeroguard's, and if that is DeepSpeed's, who
    called it."""
    frame: Any = sys._getframe(1)
    lines: list[str] = []
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if root not in _INSIDE and not (lines and root == "deepspeed"):
            lines.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}")
            if root != "deepspeed":
                break
        frame = frame.f_back
    return ", called from ".join(lines) or "a line that is not known"


def _short(name: str) -> str:
    """A file's name from the package or the working folder on."""
    roots = [root.rstrip(os.sep) + os.sep for root in (*sys.path, os.getcwd()) if root]
    return name[max((len(root) for root in roots if name.startswith(root)), default=0) :]
