"""Which guard does what on which releases of DeepSpeed and PyTorch: run, printed, and with ``--write`` kept in
docs/compatibility.md.

::

    python -m tests.contract.compat --write             every pair of releases that is there (make compat)
    python -m tests.contract.compat --deepspeed newest --torch newest      one pair, for the weekly run (make drift)

Releases other than the installed ones lie in folders under ``.releases``: ``0.19.2`` or ``newest`` for DeepSpeed,
``torch-2.4.0`` or ``torch-newest`` for PyTorch. Exit status 1 when a guard does wrong, or a release does not start.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract.scenarios import CONFIGURATIONS, SCENARIOS, Verdict, judge
from tests.contract.test_releases import FOLDER
from tests.lab.group import ROOT, Lab
from zeroguard.backends.deepspeed.attributes import VERIFIED, version_tuple

PAGE = ROOT / "docs" / "compatibility.md"
#: columns that are guards, and what is no guard but needs DeepSpeed's internals all the same
#: an ordinary loop, without zeroguard
HEALTHY = {"call": "rhythm.divided_twice", "stage": 2, "offload": False, "gas": 1, "guarded": False}
SUBJECTS = tuple(dict.fromkeys(scenario.guard for scenario in SCENARIOS))


@dataclass
class Pair:
    """A release of DeepSpeed with one of PyTorch, and what was seen of it."""

    deepspeed: str
    torch: str
    problem: str = ""
    #: what DeepSpeed says on its own, where it does not train with this PyTorch
    unfit: str = ""
    missing: dict[str, list[str]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def bad(self) -> list[str]:
        """What must not be."""
        wrong = [f"{name}: {v.why}" for name, v in self.verdicts.items() if v.status == "wrong"]
        lost = [f"{guard}: missing {', '.join(names)}" for guard, names in self.missing.items()]
        return [text for text in (self.problem, *wrong, *lost) if text]

    def of(self, guard: str) -> tuple[str, list[str]]:
        """One word for a guard, and the reasons of what does not work."""
        if self.problem:
            return "does not start", [self.problem]
        if self.unfit:
            return "DeepSpeed fails", [self.unfit]
        if guard in self.missing:
            return "unavailable", [f"missing {', '.join(self.missing[guard])}"]
        mine = [self.verdicts[s.name] for s in SCENARIOS if s.guard == guard]
        reasons = list(dict.fromkeys(v.why for v in mine if v.status in ("unavailable", "wrong")))
        for status in ("wrong", "works", "unavailable"):
            if any(v.status == status for v in mine):
                return status, reasons
        return "not needed", []


def paths(deepspeed: str, torch: str) -> str:
    """The folders to put first on the path of a worker."""
    here = [] if deepspeed == VERIFIED[-1] else [deepspeed]
    here += [] if torch == "installed" else [f"torch-{torch}"]
    gone = [name for name in here if not (FOLDER / name).is_dir()]
    if gone:
        raise SystemExit(f"not in {FOLDER}: {', '.join(gone)}; run: make compat, or make drift")
    return os.pathsep.join(str((FOLDER / name).resolve()) for name in here)


def look(deepspeed: str, torch: str) -> Pair:
    """Probe the attribute table on each configuration, then run the twelve programs."""
    path, pair, lab = paths(deepspeed, torch), Pair(deepspeed, torch), Lab()
    pair.unfit = imported(path)
    if pair.unfit:
        pair.torch = torch_of(path) or torch
        return pair
    try:
        for stage, offload in CONFIGURATIONS:
            case = {"call": "contract.probe", "stage": stage, "offload": offload}
            answer = lab.run(1, case, python_path=path, timeout=300)[0]
            if "version" not in answer:
                pair.problem = answer.get("error", "no answer") + last_line(answer.get("log", ""))
                return pair
            pair.deepspeed, pair.torch = answer["version"].split("+")[0], answer["torch"].split("+")[0]
            for guard, names in answer["missing"].items():
                pair.missing.setdefault(guard, []).extend(n for n in names if n not in pair.missing.get(guard, ()))
        answer = lab.run(1, HEALTHY, python_path=path, timeout=300)[0]
        if "error" in answer:
            pair.unfit = f"without zeroguard, an ordinary loop on ZeRO-2 ends in {answer['error']}"
            return pair
        for scenario in SCENARIOS:
            pair.verdicts[scenario.name] = judge(scenario, lab, path, version_tuple(pair.deepspeed))
    except RuntimeError as error:
        pair.problem = str(error).splitlines()[0][:200]
    finally:
        lab.close()
    return pair


def last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return f": {lines[-1].strip()}" if lines else ""


def imported(path: str) -> str:
    """What ``import deepspeed`` ends in; empty where it does not."""
    done = python("import deepspeed", path)
    return f"`import deepspeed` ends in {done.stderr.strip().splitlines()[-1][:120]}" if done.returncode else ""


def torch_of(path: str) -> str:
    return python("import torch; print(torch.__version__.split('+')[0])", path).stdout.strip()


def python(code: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


# -- the page --------------------------------------------------------------------------------------------------------

HEAD = """# Compatibility

What was seen by running, on a CPU with one rank: `make compat` runs this and writes the page. A run of a program is
one configuration (ZeRO-1, 2 and 3, each without and with an offloaded optimizer), without zeroguard and with it, beside
plain PyTorch. *works*: a program is wrong, or crashes, without zeroguard, and exact with it (or, for what only reports,
it is reported there and nowhere else). *not needed*: exact without it. *unavailable*: the reason stands below.

No CPU can show a race of copies on a GPU: `host_read` runs on an accelerator that is scripted so that an unguarded read
is always too early. What was run on GPUs is in [gpu.md](gpu.md).
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


class Notes:
    """Reasons, numbered as they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, reasons: Sequence[str]) -> str:
        for reason in reasons:
            if reason not in self.texts:
                self.texts.append(reason)
        numbers = ", ".join(str(self.texts.index(reason) + 1) for reason in reasons)
        return f" ({numbers})" if numbers else ""

    def text(self) -> str:
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self.texts, 1)) + "\n"


def page(pairs: Sequence[Pair]) -> str:
    """The document."""
    notes, mine = Notes(), [pair for pair in pairs if pair.torch == pairs[0].torch]
    guards = []
    for guard in SUBJECTS:
        cells = [pair.of(guard) for pair in mine]
        guards.append([f"`{guard}`", *(word + notes.mark(reasons) for word, reasons in cells)])
    programs = []
    for scenario in SCENARIOS:
        row = [scenario.name, f"`{scenario.guard}`"]
        for pair in mine:
            verdict = pair.verdicts.get(scenario.name, Verdict(pair.of(scenario.guard)[0]))
            row.append(f"{verdict.why} put right" if verdict.status == "works" else verdict.status)
        programs.append(row)
    releases = [pair.deepspeed for pair in mine]
    torches = list(dict.fromkeys(pair.torch for pair in pairs))
    every = {(pair.deepspeed, pair.torch): pair for pair in pairs}
    cross = []
    for torch in torches:
        row = [torch]
        for release in releases:
            pair, base = every.get((release, torch)), every[release, torches[0]]
            row.append("not run" if pair is None else _cross(pair, base, notes))
        cross.append(row)
    return "\n".join(
        [
            HEAD,
            f"## Guards, by DeepSpeed release\n\nPyTorch {pairs[0].torch}, Python {platform.python_version()}. "
            "`reading` is no guard: `session.grad_norms()` and `session.gradients()`.\n",
            table(["guard", *releases], guards),
            "## DeepSpeed by PyTorch\n\nAll guards and all programs. *the same*: each as in the table above.\n",
            table(["PyTorch", *releases], cross),
            "## The programs\n\nHow many of the configurations are wrong without zeroguard and right with it. (The "
            "last three are not put right but reported, or read.)\n",
            table(["program", "guard", *releases], programs),
            *(["## Notes\n", notes.text()] if notes.texts else []),
        ]
    )


def _cross(pair: Pair, base: Pair, notes: Notes) -> str:
    if pair.problem or pair.unfit:
        word, reasons = pair.of(SUBJECTS[0])
        return word + notes.mark(reasons)
    if pair is base or [pair.of(g) for g in SUBJECTS] == [base.of(g) for g in SUBJECTS]:
        return "the same" if pair is not base else "above"
    reasons = [f"`{g}`: {', '.join(pair.of(g)[1]) or pair.of(g)[0]}" for g in SUBJECTS if pair.of(g) != base.of(g)]
    return "differs" + notes.mark(reasons)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", nargs="+", default=list(VERIFIED), help="releases, or newest")
    parser.add_argument("--torch", nargs="+", help="installed, or the end of a folder's name: torch-NAME")
    parser.add_argument("--write", action="store_true", help="write docs/compatibility.md")
    options = parser.parse_args()
    torches = options.torch or ["installed", *sorted(p.name.removeprefix("torch-") for p in FOLDER.glob("torch-*"))]
    pairs = []
    for torch in torches:
        for release in options.deepspeed:
            pair = look(release, torch)
            pairs.append(pair)
            words = ", ".join(f"{guard} {pair.of(guard)[0]}" for guard in SUBJECTS)
            print(f"DeepSpeed {pair.deepspeed}, PyTorch {pair.torch}: {words}", *pair.bad, sep="\n    ", flush=True)
    text = page(pairs)
    if options.write:
        Path(PAGE).write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return 1 if any(pair.bad for pair in pairs) else 0


if __name__ == "__main__":
    sys.exit(main())
