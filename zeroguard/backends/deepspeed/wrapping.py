"""Wrap methods and replace attributes on instances, and give everything back.

Everything is set on the instance, never on a class or a module of DeepSpeed, so two engines do not see each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


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
        inner = make(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.live:
                return original(*args, **kwargs)
            return inner(*args, **kwargs)

        self.attribute(obj, name, wrapper)

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
