"""What every guard is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from zeroguard.backends.base import Engine, EngineFacts, Request
from zeroguard.events import Event
from zeroguard.findings import Finding, Severity, shown

__all__ = ["Choice", "Guard", "GuardModel", "Outcome", "unknown_keys"]

#: What a guard hands back.
Outcome = Finding | Request
Handler = Callable[[Any], Iterable[Outcome]]


def unknown_keys(cls: type[BaseModel], data: Any) -> Any:
    """Refuse unknown keys with a message that names the key, its value and what is allowed."""
    if isinstance(data, dict):
        allowed = sorted(cls.model_fields)
        for key, value in data.items():
            if key not in cls.model_fields:
                from difflib import get_close_matches

                near = get_close_matches(str(key), allowed, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                what = f"unknown key {shown(key)} (value {shown(value)})"
                raise ValueError(f"{what}; allowed: {', '.join(allowed)}{hint}")
    return data


class GuardModel(BaseModel):
    """Base of all configuration: frozen, unknown keys refused, docstrings are the descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        return unknown_keys(cls, data)


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a guard acts on an engine, and why.

    ``status``: ``selected``; ``not_needed`` (the accelerator or the stage cannot have the fault, and asking for the
    guard by name is no mistake); ``not_applicable`` (the guard has nothing to act on: an error when asked for by
    name).
    """

    status: Literal["selected", "not_needed", "not_applicable"]
    reason: str


class Guard:
    """Base class. A guard never raises, logs, patches or talks to other ranks.

    Subclasses set ``name`` and ``Config``, say in ``choose`` whether they act on an engine, list in ``handlers``
    the events that they want, and return findings and requests from the handlers.
    """

    name: ClassVar[str]
    on_request: ClassVar[bool] = False
    """Whether it is left out of the automatic choice, and runs only where the configuration lists it."""
    evaluates: ClassVar[bool] = False
    """Whether it has something to do on an engine without an optimizer, which only evaluates."""
    collective: bool = False
    """Whether other ranks wait in what it reads or repairs. Such a guard is switched off on all ranks or on none."""
    communicates: ClassVar[bool] = False
    """Whether it needs collectives of its own on several ranks; then ``agree: false`` leaves it out."""
    Config: ClassVar[type[GuardModel]]

    def __init__(self, config: Any, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.rank = engine.facts.rank
        self.step = 0
        self.checks = 0
        #: something to say in the summary
        self.note = ""

    @classmethod
    def choose(cls, facts: EngineFacts, config: Any) -> Choice:
        """Whether this guard acts on an engine with these facts, and why."""
        raise NotImplementedError

    def handlers(self) -> dict[type[Event], Handler]:
        """Which events this guard wants, and what handles each."""
        raise NotImplementedError

    def owes(self, event: Event) -> Iterable[Request]:
        """Called when the handler of ``event`` raised: the COLLECTIVE part of its work, in which other ranks wait.
        Requests that it has made are not carried out again; a read it must not repeat itself."""
        return ()

    def fingerprint(self) -> int:
        """What this rank did in the window that was stepped last, as a number of at most 62 bits, once; 0 for nothing
        to compare. Asked at the end of a step, where ranks agree on stopping."""
        return 0

    def differs(self, words: Mapping[int, int]) -> Iterable[Finding]:
        """Judge the fingerprints of the data-parallel ranks, by global rank, the same on each of them."""
        return ()

    def finding(
        self,
        kind: str,
        severity: Severity,
        *,
        expected: str,
        seen: str,
        cause: str,
        remedy: str,
        subject: tuple[str, ...] = (),
        repaired: bool = False,
        effect: str = "",
    ) -> Finding:
        """A finding of this guard, on this rank, at the current step."""
        return Finding(
            guard=self.name,
            kind=kind,
            severity=severity,
            rank=self.rank,
            step=self.step,
            subject=subject,
            expected=expected,
            seen=seen,
            cause=cause,
            remedy=remedy,
            repaired=repaired,
            effect=effect,
        )
