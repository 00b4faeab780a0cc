"""DeepSpeed's containers of host memory, as a user sees them while guarded: a look at a value waits first.

They are the dict and the list that they stand for, in all that Python can ask of one, and copies of them are plain.
What is written into one is written into the original, which is put back at the end as the same object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["WaitingDict", "WaitingList"]


class WaitingDict(dict):
    """A dict that waits before it hands out a value, not for its keys or its length.

    It holds nothing itself: every method works on ``data``, the original. ``dict(view)``, ``{**view}`` and C code that
    honours ``__iter__`` and ``keys`` come through here too; C code that looks into a dict without asking it sees an
    empty one.
    """

    def __init__(self, original: dict[Any, Any], look: Callable[[], None]) -> None:
        super().__init__()
        self.data = original
        self._look = look

    def refresh(self) -> None:
        """Nothing to do: it holds nothing."""

    # -- values: after a wait --

    def __getitem__(self, key: Any) -> Any:
        self._look()
        return self.data[key]

    def get(self, key: Any, default: Any = None) -> Any:
        self._look()
        return self.data.get(key, default)

    def values(self) -> Any:
        self._look()
        return self.data.values()

    def items(self) -> Any:
        self._look()
        return self.data.items()

    def pop(self, *args: Any) -> Any:
        self._look()
        return self.data.pop(*args)

    def popitem(self) -> Any:
        self._look()
        return self.data.popitem()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._look()
        return self.data.setdefault(key, default)

    def copy(self) -> dict[Any, Any]:
        self._look()
        return self.data.copy()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        self._look()
        return copy.deepcopy(self.data, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    def __or__(self, other: Any) -> Any:
        self._look()
        return self.data | other

    def __ror__(self, other: Any) -> Any:
        self._look()
        return other | self.data

    def __eq__(self, other: object) -> bool:
        self._look()
        return bool(self.data == (other.data if isinstance(other, WaitingDict) else other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as a dict

    def __repr__(self) -> str:
        self._look()
        return repr(self.data)

    # -- keys, and what is written: no wait --

    def keys(self) -> Any:
        return self.data.keys()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __contains__(self, key: Any) -> bool:
        return key in self.data

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.data[key]

    def clear(self) -> None:
        self.data.clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.data.update(*args, **kwargs)

    def __ior__(self, other: Any) -> Any:
        self.data |= other
        return self

    @classmethod
    def fromkeys(cls, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class WaitingList(list):
    """A list of DeepSpeed's fp32 partitions that waits before it hands one out: their ``.grad`` is read next.

    C code may take a list's elements without asking it, so this one holds them as well; :meth:`refresh` takes them from
    the original again.
    """

    def __init__(self, original: list[Any], look: Callable[[], None]) -> None:
        super().__init__(original)
        self.data = original
        self._look = look

    def refresh(self) -> None:
        """Hold what the original holds."""
        super().__setitem__(slice(None), self.data)

    # -- elements: after a wait --

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return self.data[index]

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return iter(self.data)

    def __reversed__(self) -> Iterator[Any]:
        self._look()
        return reversed(self.data)

    def copy(self) -> list[Any]:
        self._look()
        return self.data.copy()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        self._look()
        return copy.deepcopy(self.data, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self.copy(),)

    def __add__(self, other: Any) -> Any:
        return self.copy() + list(other)

    def __radd__(self, other: Any) -> Any:
        return other + self.copy()

    def __mul__(self, count: Any) -> list[Any]:
        return self.copy() * count

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == (other.copy() if isinstance(other, WaitingList) else other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(self.copy())

    # -- what is written: into both, no wait --

    def pop(self, *args: Any) -> Any:
        self._look()
        out = self.data.pop(*args)
        self.refresh()
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        self.data[index] = value
        self.refresh()

    def __delitem__(self, index: Any) -> None:
        del self.data[index]
        self.refresh()

    def append(self, value: Any) -> None:
        self.data.append(value)
        self.refresh()

    def extend(self, values: Iterable[Any]) -> None:
        self.data.extend(values)
        self.refresh()

    def insert(self, index: Any, value: Any) -> None:
        self.data.insert(index, value)
        self.refresh()

    def remove(self, value: Any) -> None:
        self.data.remove(value)
        self.refresh()

    def clear(self) -> None:
        self.data.clear()
        self.refresh()

    def reverse(self) -> None:
        self.data.reverse()
        self.refresh()

    def sort(self, **kwargs: Any) -> None:
        self.data.sort(**kwargs)
        self.refresh()

    def __iadd__(self, other: Any) -> Any:
        self.extend(other)
        return self

    def __imul__(self, count: Any) -> Any:
        self.data *= count
        self.refresh()
        return self
