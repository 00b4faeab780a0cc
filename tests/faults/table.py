"""docs/faults.md: ``python -m tests.faults.table`` runs the gallery and prints the page, ``--write`` writes it."""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tests.faults.gallery import FAULTS, HEALTHY, NOT_HERE, Case, Fault, by_audit
from tests.faults.runs import Checked, Runner, check, check_healthy, places
from tests.lab.group import ROOT, Lab

__all__ = ["PAGE", "Row", "main", "page", "read_rows", "rows"]

PAGE = ROOT / "docs" / "faults.md"
MISSED = "**missed**"
COLUMNS = ("fault", "reports", "DeepSpeed", "where", "how", "measured", "from step", "found", "at step", "repaired")
MEASURED = COLUMNS.index("measured")


@dataclass(frozen=True)
class Row:
    """One row of the table; ``expected`` is all of it that the registry knows, ``measured`` the rest."""

    cells: tuple[str, ...]

    @property
    def expected(self) -> tuple[str, ...]:
        return self.cells[:MEASURED] + self.cells[MEASURED + 1 :]

    @property
    def measured(self) -> str:
        return self.cells[MEASURED]


def rows(sizes: dict[int, str] | None = None) -> list[Row]:
    """A row a case; ``sizes`` is what was measured, by the case's id."""
    return [_row(fault, case, (sizes or {}).get(id(case), "")) for fault in FAULTS for case in fault.cases]


def _row(fault: Fault, case: Case, size: str) -> Row:
    return Row(
        (
            f"[{fault.title}](#{fault.name.replace('_', '-')})" + (f" ({case.variant})" if case.variant else ""),
            (links(fault.reports) or "none located") if case is fault.cases[0] else "as above",
            ", ".join(case.releases),
            _where(case),
            "silent" if case.silent else case.shows,
            size or "-",
            str(case.first),
            _found(case),
            str(case.found_at) if case.found else "-",
            _repaired(case),
        )
    )


def _where(case: Case) -> str:
    extra = [f"{case.ranks} ranks"] if case.ranks > 1 else []
    extra += [case.dtype] if case.dtype != "fp32" else []
    return ", ".join([" ".join(case.places), *extra])


def _found(case: Case) -> str:
    if case.found:
        return ", ".join(f"`{name.split('.')[1]}`{' (audit)' if by_audit(name) else ''}" for name in case.found)
    return "-" if case.repaired else "not run" if case.not_run and case.shows != "hang" else MISSED


def _repaired(case: Case) -> str:
    return "exact" if case.repaired else "on request" if case.on_request else "no"


def links(reports: Iterable[str]) -> str:
    """Short links; DeepSpeed's by number alone."""
    out = []
    for report in reports:
        _, repo, kind, number = report.split("/")
        name = "" if repo == "DeepSpeed" else f"{repo} "
        out.append(f"[{name}{'PR ' if kind == 'pull' else ''}{number}](https://github.com/{report})")
    return ", ".join(out)


def sizes_of(checked: Sequence[Checked]) -> dict[int, str]:
    """The symptom of each case without zeroguard, over all its places."""
    out: dict[int, str] = {}
    for case_id in {id(c.place.case) for c in checked}:
        mine = [c for c in checked if id(c.place.case) == case_id]
        fault, case = mine[0].place.fault, mine[0].place.case
        if case.shows == "wrong":
            texts = {fault.measure.format(bound) for bound in _bounds([c.plain.off for c in mine])}
            low, *high = sorted(texts, key=lambda text: float(text.split()[-1]) if text[-1].isdigit() else 0.0)
            out[case_id] = " to ".join([low, *(text.split()[-1] for text in high)])
        elif case.shows == "crash":
            out[case_id] = ", ".join(sorted({c.plain.error.split(":")[0] for c in mine}))
    return out


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def read_rows(text: str) -> list[Row]:
    """The table as it stands in the page."""
    head = f"| {' | '.join(COLUMNS)} |"
    lines = text.split(head, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [Row(tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))) for line in lines]


@cache
def about(program: str) -> str:
    """The docstring of a program, without importing it: that would import DeepSpeed."""
    module, name = program.split(".")
    tree = ast.parse((ROOT / "tests" / "lab" / "gallery" / f"{module}.py").read_text(encoding="utf-8"))
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return " ".join((ast.get_docstring(node) or "").split())


# -- the page ----------------------------------------------------------------------------------------------------------

HEAD = """# The fault gallery

Public faults of ZeRO training loops, each as a small program beside plain PyTorch, without zeroguard and with it. This
page is made by `python -m tests.faults.table --write` from [tests/faults/gallery.py](../tests/faults/gallery.py).
`pytest tests/faults` runs all of it, and the nearest healthy program of each fault, which is exact and of which nothing
is reported.
"""

LEGEND = """- *where*: ZeRO stages, with an `o` where the optimizer is offloaded to the CPU; one rank and fp32 where
  nothing else is said.
- *how*: a fault is silent, or it is a crash or a hang. *measured*: the largest difference from plain PyTorch, smallest
  to largest over the places of the row, or the exception.
- *from step*: the first step, from 1, at which it shows without zeroguard.
- *found*: what is reported, and at which step; where zeroguard repairs, by guards that only detect. *audit*: by
  `gradient_audit`, which here compares every element at every step.
- *repaired*: `exact` is equal to plain PyTorch after every step, with zeroguard as it comes; `on request` with an
  option.
"""


def page(checked: Sequence[Checked]) -> str:
    """The page, with what was measured."""
    table = rows(sizes_of(checked))
    lines = [HEAD, _counts(), "", f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row.cells)} |" for row in table]
    lines += ["", LEGEND, "## What is missed, and why", ""]
    lines += _reasons()
    lines += [
        "## Reported, and healthy",
        "",
        "Tried because of a report, exact without zeroguard, and exact with it:",
        "",
    ]
    lines += [f"- {about(c.program)} {links(c.reports)}" for c in HEALTHY if c.reports]
    lines += ["", "Programs that look like faults, and are none:", ""]
    lines += [f"- {text}" for text in dict.fromkeys(about(c.program) for c in HEALTHY if not c.reports)]
    lines += ["", "## Not in the gallery", ""]
    lines += [f"- {links(report.reports)}: {report.why}" for report in NOT_HERE]
    lines += ["", "## The programs", ""]
    for fault in FAULTS:
        lines += [f"### {fault.name.replace('_', ' ')}", ""]
        for program in dict.fromkeys(case.program for case in fault.cases):
            module, name = program.split(".")
            lines += [f"[{name}](../tests/lab/gallery/{module}.py): {about(program)}"]
        if fault.page:
            lines += [f"Cause, repair, and what to write instead: [{fault.page}.md](faults/{fault.page}.md)."]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _kind(case: Case) -> str:
    """What zeroguard makes of a case, in one word or two."""
    if case.repaired:
        return "repaired"
    if case.on_request:
        return "repaired on request"
    if case.found:
        return "found only by gradient_audit" if all(map(by_audit, case.found)) else "found"
    return "not run" if case.not_run and case.shows != "hang" else "missed"


def _counts() -> str:
    kinds = Counter(_kind(case) for fault in FAULTS for case in fault.cases)
    return (
        f"{len(FAULTS)} faults in {sum(kinds.values())} rows, one for places that have a fault alike. Rows: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        + "."
    )


def _reasons() -> list[str]:
    groups: tuple[tuple[str, Callable[[Case], bool]], ...] = (
        ("Missed", lambda c: not c.found and not c.repaired),
        ("Found late", lambda c: bool(c.found) and c.found_at > c.first),
        ("Found, and not repaired", lambda c: bool(c.found) and not c.repaired and c.found_at <= c.first),
        ("Repaired, and not reported by guards that only detect", lambda c: c.repaired and not c.found),
    )
    lines: list[str] = []
    for title, belongs in groups:
        members = [(fault, case) for fault in FAULTS for case in fault.cases if belongs(case)]
        lines += [f"{title}:", ""]
        said: set[tuple[str, str]] = set()
        for fault, case in members:
            if (fault.name, case.why) not in said and (case.why or case.not_run):
                said.add((fault.name, case.why))
                what = fault.title + (f" ({case.variant})" if case.variant else "")
                lines += [f"- {what}. {case.why or case.not_run}"]
        lines += [""]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} instead of printing it")
    options = parser.parse_args(arguments)
    lab = Lab()
    runner = Runner(lab)
    try:
        complaints = [line for control in HEALTHY for line in check_healthy(runner, control)]
        checked = [check(runner, place) for place in places()]
    finally:
        runner.close()
        lab.close()
    complaints += [line for item in checked for line in item.complaints]
    for line in complaints:
        print(line, file=sys.stderr)
    if complaints:
        return 1
    text = page(checked)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
