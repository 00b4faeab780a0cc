"""Wrap methods and replace attributes on instances, and give everything back.

Everything is set on the instance, never on a class or a module of DeepSpeed, so two engines do not see each other.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class _Wrapper:
    """A method of one instance, wrapped. A deep copy of that instance gets its class's own method, not this one."""

    def __init__(
        self, patches: Patches, obj: Any, name: str, original: Callable[..., Any], inner: Callable[..., Any]
    ) -> None:
        functools.update_wrapper(self, original)
        self._parts = (patches, obj, name, original, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patches, _, _, original, inner = self._parts
        return (inner if patches.live else original)(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A pickled module gets its class's own method too; this is how Python pickles a bound method.
        _, obj, name, _, _ = self._parts
        return (getattr, (obj, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # copy.deepcopy(engine.module), as an EMA does it, copies the instance's attributes: with this wrapper in them
        # the copy's zero_grad() would clear the original's gradients.
        _, obj, _, original, _ = self._parts
        copied = memo.get(id(obj))
        if copied is None:
            return self
        function = getattr(original, "__func__", None)
        return copy.deepcopy(original, memo) if function is None else function.__get__(copied)


class _Shared(_Wrapper):
    """The same for a method that thousands of objects have: one function serves all of them, and what the wrapper says
    of itself is looked up when somebody asks."""

    def __init__(
        self, patches: Patches, obj: Any, name: str, original: Callable[..., Any], inner: Callable[..., Any]
    ) -> None:
        self._parts = (patches, obj, name, original, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patches, _, _, original, inner = self._parts
        return inner(original, *args, **kwargs) if patches.live else original(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._parts[3]

    def __getattr__(self, name: str) -> Any:
        if name == "_parts":  # while it is copied
            raise AttributeError(name)
        return getattr(self._parts[3], name)


class Patches:
    """A stack of changes to foreign objects; :meth:`undo` takes them back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._hooks: list[Any] = []
        self.live = True

    def method(self, obj: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``obj.name`` by ``make(original)``, as an attribute of the instance.

        ``functools.wraps`` keeps the signature: Hugging Face inspects save_checkpoint's. After :meth:`undo` a wrapper
        that somebody kept, or wrapped in turn, only calls through.
        """
        original = getattr(obj, name)
        self.attribute(obj, name, _Wrapper(self, obj, name, original, make(original)))

    def shared(self, obj: Any, name: str, inner: Callable[..., Any]) -> None:
        """The same for one of thousands of objects: ``inner(original, ...)``, one function for all of them."""
        self.attribute(obj, name, _Shared(self, obj, name, getattr(obj, name), inner))

    def attribute(self, obj: Any, name: str, value: Any) -> None:
        """Set ``obj.name``; the earlier value, or its absence from the instance, comes back with :meth:`undo`."""
        space = vars(obj)
        self._undo.append((obj, name, space.get(name, _ABSENT), value))
        space[name] = value

    def hook(self, handle: Any) -> None:
        """Keep a torch hook handle to remove."""
        self._hooks.append(handle)

    def undo(self) -> list[str]:
        """Take everything back. Returns the names that somebody else replaced meanwhile and that were left alone."""
        self.live = False
        left: list[str] = []
        while self._hooks:
            self._hooks.pop().remove()
        while self._undo:
            obj, name, earlier, ours = self._undo.pop()
            space = vars(obj)
            if space.get(name, _ABSENT) is not ours:
                left.append(f"{type(obj).__name__}.{name}")
                continue
            if earlier is _ABSENT:
                del space[name]
            else:
                space[name] = earlier
        return left
