"""The tables of docs/gpu.md, from the JSON files under docs/results.

    python -m tests.gpu.page           print the page
    python -m tests.gpu.page --write   write it

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/gpu.md"
RESULTS = ROOT / "docs/results"


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def host_reads() -> str:
    """Wrong reads by release and arm."""
    arms = ("without", "with, event", "with, stream", "with, device")

    def row(report: Any) -> list[str]:
        counts = [report["arms"][arm] for arm in arms]
        what = [report["environment"]["deepspeed"], str(report["settings"]["overlap_comm"]).lower()]
        return [*what, *(f"{one['failures']} of {one['iterations']}" for one in counts)]

    rows = sorted(row(report) for report in _read("host_read_h200.json"))
    return _table(
        ["DeepSpeed", "overlap_comm", "without", *(f"`wait: {arm.split(', ')[1]}`" for arm in arms[1:])], rows
    )


def waits() -> str:
    """What a wait costs beside unrelated work."""
    cells = [c for c in _read("measured_h200.json") if c["scenario"] == "wait" and c["settings"]["busy"]]
    rows = [
        [f"`{c['settings']['how']}`", f"{c['detail']['copy_ms']:.3g} ms", f"{c['detail']['wait_ms']:.3g} ms"]
        for c in cells
    ]
    return _table(["`wait`", "the copy alone", "the wait"], rows)


def steps() -> str:
    """Step time by stage and arm."""
    rows = []
    for stage in (2, 3):
        arms = _read(f"steps_h200_zero{stage}.json")["arms"]
        for name, arm in arms.items():
            rounds = [1e3 * seconds for seconds in arm["rounds"]]
            ratios = [100 * (a / b - 1) for a, b in zip(arm["rounds"], arms["nothing"]["rounds"], strict=True)]
            over = [f"{statistics.median(ratios):+.1f} %", f"{min(ratios):+.1f} to {max(ratios):+.1f} %"]
            over = ["", ""] if name == "nothing" else over
            rows.append(
                [
                    f"ZeRO-{stage}, {name}",
                    f"{statistics.median(rounds):.0f}",
                    f"{min(rounds):.0f} to {max(rounds):.0f}",
                    *over,
                ]
            )
    return _table(["", "ms a step", "of the rounds", "longer by", "of the rounds"], rows)


def reads() -> str:
    """Reads of gradients beside loops of safe_get_full_grad."""

    def row(result: Any) -> list[str]:
        ms = {name: f"{values[0]:.1f} ms" for name, values in result["milliseconds"].items()}
        norms = [ms["norms_loop"], ms["norms"], f"{result['norms_speedup']} times"]
        return [
            f"ZeRO-{result['stage']}",
            *norms,
            ms["gradients_loop"],
            ms["gradients"],
            f"{result['gradients_speedup']} times",
        ]

    head = ["", "loop of safe_get_full_grad", '`grad_norms(per="parameter")`', "", "loop", "`gradients()`", ""]
    return _table(head, [row(result) for result in _read("reading_h200.json")["results"]])


TABLES: dict[str, Callable[[], str]] = {"host reads": host_reads, "waits": waits, "steps": steps, "reads": reads}


def filled(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: a table has no place in it; the message names the table.
    """
    for name, make in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        table = make()
        page, found = between.subn(lambda match, table=table: match[1] + table + match[2], page)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"{PAGE.name}: no place '<!-- {name} -->' to '<!-- /{name} -->', or more than one")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} instead of printing it")
    options = parser.parse_args(arguments)
    text = filled(PAGE.read_text(encoding="utf-8"))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
