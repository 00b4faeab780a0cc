"""Everything that a guard could have touched, by path and identity: an engine, what hangs on it, and packages."""

from __future__ import annotations

import enum
import gc
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

#: Modules of PyTorch in which somebody who wraps something would do it.
PATCHED = (
    "torch",
    "torch._tensor",
    "torch.autograd",
    "torch.autograd.graph",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.modules.module",
    "torch.nn.utils.clip_grad",
    "torch.optim.optimizer",
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), enum.Enum, torch.dtype, torch.device, torch.Size)
_LEAVES = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

Snapshot = dict[str, Any]


def engine(root: Any, *, beyond: tuple[Any, ...] = ()) -> Snapshot:
    """Path -> object (kept, so that no identity is used twice), for all that can be reached through attributes and
    containers, but not through what lies in ``beyond``."""
    out: Snapshot = {}
    seen: set[int] = set(map(id, beyond))
    # Breadth first, so that what is reached in several ways always has its shortest path.
    queue: deque[tuple[str, Any]] = deque([("engine", root)])
    while queue:
        path, value = queue.popleft()
        for name, child in _children(value):
            if isinstance(child, _PLAIN):
                continue
            where = f"{path}{name}"
            out[where] = child
            if id(child) not in seen and not isinstance(child, _LEAVES):
                seen.add(id(child))
                queue.append((where, child))
    return out


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        # An empty dict of hooks is what is left of a hook that was removed; it is as good as none.
        yield from ((f".{name}", hooks) for name in _HOOKS if (hooks := getattr(value, name, None)))
    if isinstance(value, Mapping):
        for number, (key, item) in enumerate(list(value.items())):
            # Numbers are counted up over engines: DeepSpeed's of parameters, PyTorch's of hooks.
            yield f"[{key!r}]" if isinstance(key, str) else f"[#{number}]", item
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    yield from ((f".{name}", item) for name, item in list(getattr(value, "__dict__", {}).items()))


def packages() -> Snapshot:
    """Path -> object for each name in DeepSpeed's modules and classes, and in PyTorch's that are wrapped if any are."""
    out: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if module is None or (name.split(".")[0] != "deepspeed" and name not in PATCHED):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, (*_PLAIN, types.ModuleType)):
                continue
            out[f"{name}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                own = vars(value).items()
                out.update((f"{name}:{attribute}.{k}", v) for k, v in own if not isinstance(v, _PLAIN))
    return out


def changed(before: Snapshot, after: Snapshot) -> set[str]:
    """The paths at which something else stands, or nothing any more, or something new."""
    missing = object()
    return {path for path in before.keys() | after.keys() if before.get(path, missing) is not after.get(path, missing)}


def ours(root: Any, *, beyond: tuple[Any, ...] = ()) -> list[str]:
    """What of zeroguard can be reached from ``root`` by any reference that the garbage collector knows, but not through
    what lies in ``beyond``."""
    globals_ = {id(vars(module)) for module in list(sys.modules.values()) if module is not None}
    found: list[str] = []
    seen = {id(root), *map(id, beyond)}
    stack = [root]
    while stack:
        for child in gc.get_referents(stack.pop()):
            if id(child) in seen or id(child) in globals_ or isinstance(child, types.ModuleType | types.FrameType):
                continue
            seen.add(id(child))
            kind = child if isinstance(child, type | types.FunctionType) else type(child)
            if str(getattr(kind, "__module__", "")).split(".")[0] == "zeroguard":
                found.append(f"{kind.__module__}.{kind.__qualname__}")
            elif not isinstance(child, type):
                stack.append(child)
    return sorted(set(found))
