"""What was counted, to paste into an issue or a pull request: text, Markdown, and data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zeroguard.stress.runner import Arm
from zeroguard.stress.statistics import needed, wilson

__all__ = ["FORMATS", "Report"]

_LABELS = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "driver": "driver",
    "accelerator": "accelerator",
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "deepspeed": "DeepSpeed",
    "zeroguard": "zeroguard",
    "python": "Python",
    "os": "OS",
}


@dataclass(frozen=True)
class Report:
    """One scenario, or one command of the user's.

    Attributes:
        scenario: its name; ``command`` for the user's own.
        command: what was typed.
        settings: stage, size and the like; empty for a command.
        environment: of the process that ran it.
        arms: name -> what it gave.
        seeds: ``first`` and ``last``; every iteration has its own.
        notes: what the reader has to know.
    """

    scenario: str
    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    arms: dict[str, Arm]
    seeds: dict[str, int]
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no guarded arm had a failure."""
        return not any(arm.failures for name, arm in self.arms.items() if name.split(",")[0] == "with")

    def to_dict(self) -> dict[str, Any]:
        """``scenario``, ``command``, ``environment``, ``arms``, ``seeds``; ``settings`` and ``notes`` where there are
        any."""
        data = dataclasses.asdict(self) | {"arms": {name: arm.to_dict() for name, arm in self.arms.items()}}
        return {k: v for k, v in data.items() if v or k not in ("settings", "notes")}

    # -- for a person ------------------------------------------------------------------------------------------------

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("arm", "iterations", "passed", "failed", "fail rate", "95 % interval")]
        for name, arm in self.arms.items():
            low, high = wilson(arm.failures, arm.iterations)
            rate = arm.failures / arm.iterations if arm.iterations else 0.0
            counts = (str(arm.iterations), str(arm.iterations - arm.failures), str(arm.failures))
            rows.append((name, *counts, f"{rate:.2%}", f"{low:.2%} to {high:.2%}"))
        return rows

    def _judgement(self) -> Iterator[str]:
        """What the counts can show, and what they cannot."""
        for suffix in ("", ", widened"):
            bare, kept = self.arms.get(f"without{suffix}"), self.arms.get(f"with{suffix}")
            if bare is None or not bare.iterations:
                continue
            where = " with the window widened" if suffix else ""
            low, high = wilson(bare.failures, bare.iterations)
            at, careful = needed(bare.failures / bare.iterations), needed(low)
            if at is None or careful is None:
                yield (
                    f"No failure without the guards{where}: {bare.iterations} iterations cannot rule out a rate below "
                    f"{high:.2%}, and there is nothing that the guards could be shown to prevent."
                )
                continue
            yield (
                f"To tell fixed from luck{where} takes {_clean(at)} in a row at the rate that was seen, and {careful} "
                "at the lower end of its interval (luck alone gives that many in one of twenty tries)."
            )
            if kept is None:
                continue
            if kept.failures:
                yield f"With the guards{where} {kept.failures} of {kept.iterations} failed."
            elif kept.iterations >= careful:
                yield f"With the guards{where} {kept.iterations} of {kept.iterations} were clean: enough."
            else:
                yield f"With the guards{where} {kept.iterations} of {kept.iterations} were clean: not enough."

    def _facts(self) -> Iterator[tuple[str, str]]:
        yield "command", self.command
        if self.settings:
            yield "settings", ", ".join(f"{k} {v}" for k, v in self.settings.items())
        yield "seeds", f"{self.seeds['first']} to {self.seeds['last']}, one an iteration"
        for key, label in _LABELS.items():
            if key in self.environment:
                yield label, str(self.environment[key])

    def text(self) -> str:
        """For a terminal."""
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"zeroguard stress: {self.scenario}", ""]
        for row in rows:
            cells = [
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells))
        lines += ["", *self._judgement(), *self.notes, ""]
        for name, kind, message, count in self._events():
            lines.append(f"{name}: {kind}: {message} ({count})")
        facts = list(self._facts())
        width = max(len(label) for label, _ in facts)
        lines += ["", *(f"{label.ljust(width)}  {value}" for label, value in facts)]
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """For an issue or a pull request."""
        head, *rows = self._rows()
        lines = [
            f"### zeroguard stress: {self.scenario}",
            "",
            _row(head),
            _row(["---"] * len(head)),
            *map(_row, rows),
            "",
        ]
        lines += [f"- {line}" for line in (*self._judgement(), *self.notes)]
        events = list(self._events())
        if events:
            lines += ["", _row(["arm", "", "message", "times"]), _row(["---"] * 4)]
            lines += [_row([name, kind, f"`{_plain(message)}`", str(count)]) for name, kind, message, count in events]
        lines += ["", "<details><summary>How, and where</summary>", "", _row(["", ""]), _row(["---", "---"])]
        lines += [_row([label, f"`{_plain(value)}`"]) for label, value in self._facts()]
        return "\n".join([*lines, "", "</details>"]) + "\n"

    def _events(self) -> Iterator[tuple[str, str, str, int]]:
        for name, arm in self.arms.items():
            for kind, counts in (("failure", arm.messages), ("finding", arm.findings)):
                for message, count in sorted(counts.items(), key=lambda item: -item[1]):
                    yield name, kind, message, count


def _clean(count: int) -> str:
    return f"{count} clean iteration{'s' if count > 1 else ''}"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


FORMATS = {"text": Report.text, "markdown": Report.markdown}
