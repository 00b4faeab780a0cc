"""The exceptions that zeroguard raises.

::

    ZeroGuardError
    ├── ConfigError              a wrong key, type, value or file (also a ValueError)
    ├── EngineNotFoundError      what was given leads to no DeepSpeed engine (also a TypeError)
    ├── AlreadyGuardedError      a second attach to one engine
    ├── NotGuardedError          other ranks of the engine do not take part in the agreement
    ├── GuardUnavailableError    a guard cannot act on this engine or this DeepSpeed release
    ├── GradientsUnavailableError  no gradient to read now, or not on this engine
    ├── SessionClosedError       a call that needs an open session
    └── GuardViolation           findings of severity "error", with ``on_violation: raise``
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroguard.findings import Finding

__all__ = [
    "AlreadyGuardedError",
    "ConfigError",
    "EngineNotFoundError",
    "GradientsUnavailableError",
    "GuardUnavailableError",
    "GuardViolation",
    "NotGuardedError",
    "SessionClosedError",
    "ZeroGuardError",
]


class ZeroGuardError(Exception):
    """Base of every exception that zeroguard raises on purpose."""


class ConfigError(ZeroGuardError, ValueError):
    """A configuration that cannot be used. The message names the key, the value and what is allowed."""


class EngineNotFoundError(ZeroGuardError, TypeError):
    """The object given to :func:`zeroguard.guard` is not, and does not lead to, a DeepSpeed engine."""


class AlreadyGuardedError(ZeroGuardError):
    """The engine already has an open session."""


class NotGuardedError(ZeroGuardError):
    """Some ranks of this engine have no open session that agrees with this one: raised before the first step, as they
    would be waited for.

    Attributes:
        ranks: those ranks.
    """

    def __init__(self, ranks: Sequence[int], rank: int, every: int = 1) -> None:
        self.ranks = tuple(ranks)
        self._given = (self.ranks, rank, every)
        who = ", ".join(map(str, self.ranks))
        super().__init__(
            f"rank(s) {who} are not guarded, and rank {rank} is: at the end of a step it would wait for them for ever. "
            "Call zeroguard.guard(engine) on every rank, before the same step, with on_violation: raise, agree: true "
            f"and agree_every_n_steps: {every} on all of them; or set agree: false, and each rank stops alone."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self._given)


class GradientsUnavailableError(ZeroGuardError):
    """There is no gradient to read: the loop is not between a boundary backward and its step, or the engine has no such
    moment. The message says which, and is the same on every rank."""


class SessionClosedError(ZeroGuardError):
    """The session was closed; it cannot wait, check or be entered any more."""


class GuardUnavailableError(ZeroGuardError):
    """A guard that was asked for cannot act here.

    Attributes:
        guard: the guard's name.
        missing: the foreign attributes that were not found; empty when the reason is the
            engine's configuration rather than the DeepSpeed release.
    """

    def __init__(self, message: str, *, guard: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.guard = guard
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own calls __init__ with the message alone; launchers and pools pickle a worker's exception.
        return (partial(type(self), guard=self.guard, missing=self.missing), self.args)


class SinkTimeoutError(ZeroGuardError):
    """A sink of the user's did not return in time, and goes on in its own thread. A finding, unless ``on_guard_error``
    is ``raise``."""


class GuardViolation(ZeroGuardError):
    """One or more findings that make it wrong to go on.

    Raised at a fixed point of the step that every rank reaches (see
    :mod:`zeroguard.collective`), so no rank is left waiting.

    Attributes:
        findings: what was found on this rank; empty on a rank that stops because another one found
            something.
        ranks: the ranks with findings of severity "error".
    """

    def __init__(self, findings: Sequence[Finding], *, ranks: Sequence[int] = (), step: int | None = None) -> None:
        self.findings = tuple(findings)
        self.ranks = tuple(ranks)
        self.step = step
        super().__init__(self._text())

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(type(self), ranks=self.ranks, step=self.step), (self.findings,))

    def _text(self) -> str:
        if self.findings:
            count = len(self.findings)
            head = f"zeroguard stopped training: {count} error{'s' if count > 1 else ''}"
            return "\n\n".join([head, *(f.text() for f in self.findings)])
        where = "" if self.step is None else f" by the end of step {self.step}"
        who = ", ".join(map(str, self.ranks)) or "another rank"
        return (
            f"rank(s) {who} found a violation{where}; this rank stops with them so that none waits in a collective. "
            f"The text is in the exception and the log of rank(s) {who}."
        )
