"""The summary of a session: one row a guard, "never exercised" told apart from "passed"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroguard.backends.base import EngineFacts

__all__ = ["GuardStats", "Row", "Summary"]

HEADS = ("guard", "verdict", "events", "checks", "repairs", "findings", "time")


@dataclass(slots=True)
class GuardStats:
    """Counters of one guard, kept by the session."""

    name: str
    state: str = "off"
    note: str = ""
    events: int = 0
    checks: int = 0
    repairs: int = 0
    findings: int = 0
    seconds: float = 0.0

    def counts(self) -> dict[str, float]:
        """The counters alone."""
        return {
            "events": self.events,
            "checks": self.checks,
            "repairs": self.repairs,
            "findings": self.findings,
            "seconds": self.seconds,
        }

    def row(self) -> Row:
        """The row as it stands."""
        return Row(
            self.name, self.verdict(), self.events, self.checks, self.repairs, self.findings, self.seconds, self.note
        )

    def verdict(self) -> str:
        """``passed`` only where something was checked."""
        if self.state != "on":
            return self.state
        if self.findings:
            return "findings"
        if not self.checks:
            return "never exercised"
        return "repaired" if self.repairs else "passed"


@dataclass(frozen=True, slots=True)
class Row:
    """One guard's line. ``seconds`` is the time spent in the guard and its repairs on this rank."""

    guard: str
    verdict: str
    events: int
    checks: int
    repairs: int
    findings: int
    seconds: float
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        if self.verdict in ("off", "not needed", "not applicable", "unavailable"):
            return (self.guard, self.verdict, "-", "-", "-", "-", "-")
        counts = (self.events, self.checks, self.repairs, self.findings)
        return (self.guard, self.verdict, *map(str, counts), f"{self.seconds * 1e3:.1f} ms")


class Summary:
    """A table for a terminal or a log. ``str`` of it needs nothing but text; ``rows`` is the data."""

    def __init__(self, facts: EngineFacts, rows: Sequence[Row]) -> None:
        self.facts = facts
        self.rows = list(rows)

    def __str__(self) -> str:
        table = [HEADS, *(row.cells() for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADS))]
        lines = [
            f"zeroguard, rank {self.facts.rank}: {self.facts.describe()}, DeepSpeed {self.facts.deepspeed_version}"
        ]
        for number, line in enumerate(table):
            left = [line[i].ljust(widths[i]) for i in range(2)]
            right = [line[i].rjust(widths[i]) for i in range(2, len(HEADS))]
            lines.append("  ".join(left + right).rstrip())
            if number == 0:
                lines.append("  ".join("-" * width for width in widths))
        notes = [f"{row.guard}: {row.note}" for row in self.rows if row.note]
        return "\n".join(lines + ([""] if notes else []) + notes)

    __repr__ = __str__
