"""What guards find and what was put right: data first, text second."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Finding", "Repair", "Severity", "name_list", "said", "shown"]

Severity = Literal["error", "warning", "info"]

#: How many parameter names a text shows; the data always holds them all.
NAMES_SHOWN = 5


def name_list(names: tuple[str, ...]) -> str:
    """At most five names and a count, for texts."""
    if not names:
        return "(no parameter)"
    shown = ", ".join(names[:NAMES_SHOWN])
    rest = len(names) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def shown(value: object, limit: int = 300) -> str:
    """A value in a message: its repr, cut off where it is long. It came from a user, and may be anything."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def said(error: BaseException, limit: int = 300) -> str:
    """The kind of an exception and its message, which may raise in turn: it comes from somebody's plugin."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception as second:
        text = f"{type(error).__name__}, whose message cannot be had: {type(second).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, on one rank, at one step.

    Attributes:
        guard: the guard that saw it.
        kind: a short, stable word for the kind of fault, such as ``second_backward``.
        severity: ``error`` stops the run under ``on_violation: raise``; ``warning`` never does; ``info`` is only kept.
        rank: the global rank that saw it.
        step: optimizer steps completed when it was seen (0 before the first).
        subject: names of the parameters concerned, all of them; empty where none is.
        expected: what a healthy loop shows here.
        seen: what was there.
        cause: the likely cause.
        remedy: what to change in the user's code.
        repaired: whether zeroguard put it right.
        effect: what it does to the training, in plain words.
        detail: further lines, such as a traceback.
    """

    guard: str
    kind: str
    severity: Severity
    rank: int
    step: int
    subject: tuple[str, ...]
    expected: str
    seen: str
    cause: str
    remedy: str
    repaired: bool = False
    effect: str = ""
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict with every field."""
        data = asdict(self)
        data["subject"] = list(self.subject)
        return data

    def text(self) -> str:
        """Several lines for a person; the first says what, where and when."""
        state = "repaired" if self.repaired else self.severity
        lines = [f"[{self.guard}] {self.kind.replace('_', ' ')} ({state}), rank {self.rank}, step {self.step}"]
        if self.subject:
            lines.append(f"  parameters: {name_list(self.subject)}")
        lines += [f"  expected:   {self.expected}", f"  seen:       {self.seen}"]
        if self.effect:
            lines.append(f"  effect:     {self.effect}")
        lines += [f"  cause:      {self.cause}", f"  what to do: {self.remedy}"]
        lines += [f"  {line}" for line in self.detail.splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True, slots=True)
class Repair:
    """Something that was put right and needs no attention. Not a finding.

    Attributes:
        guard: the guard that asked for it.
        kind: a short, stable word, such as ``stale_gradient_dropped``.
        rank: the global rank.
        step: optimizer steps completed when it happened.
        parameters: names of the parameters concerned; empty where the repair concerns no single one.
        detail: one sentence.
    """

    guard: str
    kind: str
    rank: int
    step: int
    parameters: tuple[str, ...] = field(default=())
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dict with every field."""
        data = asdict(self)
        data["parameters"] = list(self.parameters)
        return data

    def text(self) -> str:
        """One line."""
        names = f": {name_list(self.parameters)}" if self.parameters else ""
        return f"[{self.guard}] {self.kind.replace('_', ' ')}, rank {self.rank}, step {self.step}{names}. {self.detail}"

    def __str__(self) -> str:
        return self.text()
