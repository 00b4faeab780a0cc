"""Guards that other distributions bring, through the entry-point group ``zeroguard.guards``.

An entry point has the guard's name and leads to its class::

    [project.entry-points."zeroguard.guards"]
    loss_spike = "loss_spike.guard:LossSpikeGuard"

Nothing is read, and no plugin imported, before a guard is looked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, get_args, get_origin

from zeroguard.findings import said
from zeroguard.guards.base import Guard, GuardModel

__all__ = ["GROUP", "Plugin", "plugins"]

GROUP = "zeroguard.guards"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of the group.

    Attributes:
        name: the entry point's name, which is the guard's.
        distribution: name and release of the distribution that brings it, such as ``loss-spike 1.0``.
        entry_point: what it leads to, ``module:Class``.
        guard: the class; None when it cannot be used.
        problem: why it cannot be used; empty when it can.
    """

    name: str
    distribution: str
    entry_point: str
    guard: type[Guard] | None = None
    problem: str = ""

    def describe(self) -> str:
        """What is wrong, and with whom."""
        return (
            f"guard {self.name!r} comes from {self.distribution} (entry point {self.name} = {self.entry_point}) and "
            f"cannot be used: {self.problem}"
        )


@cache
def plugins(taken: tuple[str, ...]) -> tuple[Plugin, ...]:
    """Every entry point of the group, by name, loaded once a process. One that is broken has a ``problem``.

    Args:
        taken: names that no plugin may have.
    """
    # Sorted, so that every rank and every run sees the same order.
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, _distribution(point)))
    names = Counter(point.name for point in points)
    out = []
    for point in points:
        guard: type[Guard] | None = None
        if point.name in taken:
            problem = "zeroguard itself has a guard of that name, which is used"
        elif names[point.name] > 1:
            # Which of them would run depends on the order of folders on the path.
            who = [_distribution(other) for other in points if other.name == point.name]
            problem = f"{' and '.join(who)} bring a guard of that name; uninstall all but one"
        else:
            guard, problem = _load(point)
        out.append(Plugin(point.name, _distribution(point), point.value, guard, problem))
    return tuple(out)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"


def _load(point: EntryPoint) -> tuple[type[Guard] | None, str]:
    """The class, or why it cannot be used."""
    try:
        guard = point.load()
        problem = _wrong(guard, point.name)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        return None, said(error)
    return (None, problem) if problem else (guard, "")


def _wrong(guard: object, name: str) -> str:
    """What keeps this from being a guard; may raise whatever the plugin raises."""
    if not (isinstance(guard, type) and issubclass(guard, Guard)):
        return f"it leads to {guard!r}, which is not a subclass of zeroguard.guards.base.Guard"
    if getattr(guard, "name", None) != name:
        return f"{guard.__qualname__}.name is {getattr(guard, 'name', None)!r}; it must be {name!r}, as the entry point"
    missing = [method for method in ("choose", "handlers") if _same(guard, method)]
    if missing:
        return f"{guard.__qualname__} does not define {' and '.join(missing)}"
    model = getattr(guard, "Config", None)
    if not (isinstance(model, type) and issubclass(model, GuardModel)):
        return f"{guard.__qualname__}.Config is {model!r}, not a subclass of zeroguard.guards.base.GuardModel"
    field = model.model_fields.get("name")
    kind = None if field is None else field.annotation
    if get_origin(kind) is not Literal or get_args(kind) != (name,):
        return f'{model.__qualname__} needs the field: name: Literal["{name}"] = "{name}"'
    model()  # without a list of guards every guard is chosen with its defaults
    model.model_json_schema()  # it becomes part of GuardConfig's
    return ""


def _same(guard: type[Guard], method: str) -> bool:
    own, base = getattr(guard, method), getattr(Guard, method)
    return getattr(own, "__func__", own) is getattr(base, "__func__", base)
