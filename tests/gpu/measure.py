"""All measurements that need a GPU, as one JSON file that is written again after every cell.

    python -m tests.gpu.measure all --out measured.json                      the installed DeepSpeed, ten minutes
    python -m tests.gpu.measure race --releases '' .releases/0.18.5 --shard 1/2 --out race1.json
    python -m tests.gpu.measure all --dry-run --out /tmp/dry.json            on a CPU: whether everything runs

Sections: ``wait`` (what a wait costs beside unrelated work), ``inflight`` (ZeRO-3 parameters in flight and what a read
of one gives), ``detect`` (reads that are found), ``guarded`` (reads with the guard, each mode and wait), ``back`` (the
copy back to the device), ``losses`` (two losses over one forward), ``scenarios`` (the contract's programs), ``race``
(unguarded reads), ``all``.

A cell is one report as ``zeroguard stress --json`` writes it, with ``detail`` for what is not a count. ``--budget``
stops before the machine's time is over; the same command with ``--resume`` goes on where the file ends.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.group import Lab

SECTIONS = ("wait", "inflight", "detect", "guarded", "back", "losses", "scenarios", "race")
CONFIGURATIONS = [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
PATTERNS = ("clear_engine", "clear_manual", "boundary_engine", "boundary_manual", "misuse_engine", "misuse_manual")
CASES = ("eval", "early_exit", "early_exit_eval", "exception", "forward_only", "conditional")


@dataclass
class Cell:
    """One measurement: a function of the lab, and what tells it from the others."""

    section: str
    call: str
    case: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    release: str = ""

    @property
    def key(self) -> str:
        return json.dumps([self.section, self.settings, Path(self.release).name], sort_keys=True)


# -- what there is to measure ----------------------------------------------------------------------------------------


def race(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(a) Unguarded reads. The orders newest and oldest first take turns in one cell."""
    for stage in o.stages:
        for overlap in (False, True):
            for size in o.sizes:
                what = {"stage": stage, "overlap_comm": overlap, "hidden": size}
                case = {**what, "iterations": o.iterations, "seconds": o.seconds}
                yield Cell("race", "measured.race", case, what)


def guarded(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(b) Guarded reads, newest first, and beside them unguarded ones with and without a delay kernel."""
    what: dict[str, Any] = {"stage": 2, "overlap_comm": False, "hidden": o.size}
    case = {**what, "orders": ["newest"], "iterations": o.reads, "seconds": 60.0}
    for mode in ("transparent", "explicit"):
        for wait in ("event", "stream", "device"):
            guard = {"guards": [{"name": "host_read", "mode": mode, "wait": wait}]}
            one = {**case, "guarded": guard, "explicit": mode == "explicit"}
            yield Cell("guarded", "measured.race", one, {**what, "mode": mode, "wait": wait})
    for delayed in (False, True):
        one = {**case, "iterations": o.iterations, "delayed": delayed}
        yield Cell("guarded", "measured.race", one, {**what, "mode": "none", "delayed": delayed})
    guard = {"guards": [{"name": "host_read"}]}
    one = {**case, "iterations": o.iterations, "delayed": True, "guarded": guard}
    yield Cell("guarded", "measured.race", one, {**what, "mode": "transparent", "wait": "event", "delayed": True})


def back(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(c) The reverse hazard: host memory goes back to the device before the copy that fills it has landed."""
    for overlap in (False, True):
        for pinned in (True, False):
            for delayed in (False, True):
                what = {"hidden": o.size, "overlap_comm": overlap, "pinned": pinned, "delayed": delayed}
                yield Cell("back", "measured.copy_back_engine", {**what, "windows": o.windows}, what)
    if release:
        return
    for order in ("same stream", "other stream", "other stream, event"):
        for pinned in (True, False):
            for delayed in (False, True):
                for mib in o.mib:
                    what = {"order": order, "pinned": pinned, "delayed": delayed, "mib": mib}
                    yield Cell("back", "measured.copy_back_raw", {**what, "seconds": o.seconds / 4}, what)


def losses(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(d) Two losses over one forward, beside plain PyTorch."""
    for pattern in PATTERNS:
        for stage, offload in CONFIGURATIONS:
            for guard in (False, True):
                what = {"pattern": pattern, "stage": stage, "offload": offload, "guarded": guard}
                yield Cell("losses", "programs.two_losses", what, what)


def scenarios(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(d) The contract's programs, except the host read, which has a section of its own here."""
    from tests.contract.scenarios import SCENARIOS

    for scenario in SCENARIOS:
        if scenario.guard != "host_read":
            yield Cell("scenarios", scenario.name, {}, {"program": scenario.name, "guard": scenario.guard})


def inflight(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(e) Parameters in flight."""
    for case in CASES:
        for guard in (False, True):
            yield Cell(
                "inflight", "measured.in_flight", {"case": case, "guarded": guard}, {"case": case, "guarded": guard}
            )


def detect(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(b) Reads that are found by ``detect``: copies of the user's own, behind a delay kernel."""
    for form in ("copy_",) if o.dry_run else ("copy_", "to"):
        for use in ("norm", "item", "tolist", "numpy", "pickle", "onto the device", "view"):
            for waited in (False, True):
                what = {"form": form, "use": use, "waited": waited}
                yield Cell("detect", "measured.detect", what, what)


def wait(o: argparse.Namespace, release: str) -> Iterator[Cell]:
    """(f) What a wait costs."""
    for busy in (True, False):
        for how in ("event", "stream", "device"):
            what = {"how": how, "mib": max(o.mib), "busy": busy}
            yield Cell("wait", "measured.wait_cost", {**what, "repeats": o.repeats}, what)


# -- running it ------------------------------------------------------------------------------------------------------


def arms_of(cell: Cell, answer: dict[str, Any]) -> dict[str, Any]:
    """Counts, as a report has them; none where nothing was counted."""
    if "arms" in answer:  # a race: one arm an order
        name = "with" if cell.case.get("guarded") else "without"
        return {f"{name}, {order} first": arm for order, arm in answer["arms"].items()}
    name = "with" if cell.case.get("guarded") else "without"
    if cell.section == "back":
        failed = {"not what was copied": answer["failures"]} if answer.get("failures") else {}
        return {name: {"iterations": answer["iterations"], "failures": answer["failures"], "messages": failed}}
    if cell.section == "losses":
        bad = answer["status"] != "exact"
        message = answer["error"] or "the weights are not those of plain PyTorch"
        return {name: {"iterations": 1, "failures": int(bad), "messages": {message[:300]: 1} if bad else {}}}
    if cell.section == "inflight":
        left = answer["after_train"]
        return {
            name: {"iterations": 1, "failures": int(left > 0), "messages": {f"{left} in flight": 1} if left else {}}
        }
    return {}


def detail_of(cell: Cell, answer: dict[str, Any]) -> dict[str, Any]:
    """What is no count: all of the answer but texts for people and what the arms have."""
    dropped = {"arms", "texts", "summary", "verdicts", "selected", "repairs", "trace"}
    kept = {k: v for k, v in answer.items() if k not in dropped}
    kinds = [f["kind"] if isinstance(f, dict) else f for f in answer.get("findings", [])]
    return kept | ({"findings": kinds} if "findings" in kept else {})


def run(cell: Cell, lab: Lab, timeout: float) -> dict[str, Any]:
    """The cell's answer: of the lab, or of one of the contract's programs."""
    if cell.section != "scenarios":
        return lab.run(1, {"call": cell.call, **cell.case}, python_path=cell.release, timeout=timeout)[0]
    from tests.contract.scenarios import CONFIGURATIONS as PLACES
    from tests.contract.scenarios import SCENARIOS

    (scenario,) = (s for s in SCENARIOS if s.name == cell.call)

    def ask(case: dict[str, Any]) -> dict[str, Any]:
        return lab.run(1, case, python_path=cell.release, timeout=timeout)[0]

    runs = list(scenario.run(ask, PLACES))
    return {
        "runs": len(runs),
        "right_without": sum(r.without for r in runs),
        "right_with": sum(r.with_it for r in runs),
        "seen": sorted({r.seen for r in runs if not r.with_it}),
    }


def main() -> int:
    o = options()
    began, cells = time.monotonic(), []
    for release in o.releases:
        for section in SECTIONS if o.section == "all" else (o.section,):
            for cell in globals()[section](o, release):
                cell.release = release
                cells.append(cell)
    first, of = (int(part) for part in o.shard.split("/"))
    cells = cells[len(cells) * (first - 1) // of : len(cells) * first // of]
    reports: list[dict[str, Any]] = json.loads(o.out.read_text()) if o.resume and o.out.exists() else []
    done = {report["cell"] for report in reports}
    cells = [cell for cell in cells if cell.key not in done]
    lab = Lab({} if o.dry_run else {"DS_ACCELERATOR": "cuda", "LAB_DEVICE": "cuda"})
    where: dict[str, Any] = {}
    late = failed = 0
    for cell in cells:
        left = o.budget - (time.monotonic() - began)
        if left < 5:
            late += 1
            continue
        if cell.release not in where:
            lab.close()
            where[cell.release] = lab.run(1, {"call": "measured.environment"}, python_path=cell.release, timeout=left)[
                0
            ]
        start = time.monotonic()
        report = {
            "scenario": cell.section,
            "command": shlex.join(["python", "-m", "tests.gpu.measure", *sys.argv[1:]]),
            "settings": cell.settings,
            "environment": where[cell.release],
            "arms": {},
            "seeds": {"first": 0},
            "cell": cell.key,
        }
        try:
            answer = run(cell, lab, min(280.0, left))
            if answer.get("status") in ("error", "dead"):
                raise RuntimeError(answer.get("error"), answer.get("trace") or answer.get("log", "")[-800:])
            report |= {"arms": arms_of(cell, answer), "detail": detail_of(cell, answer)}
        except Exception as error:
            failed += 1
            report["error"] = f"{type(error).__name__}: {error}"
        reports.append(report)
        o.out.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
        told = report.get("error") or report["arms"] or report["detail"]
        seconds = time.monotonic() - start
        print(f"{where[cell.release].get('deepspeed')} {cell.key} {seconds:.1f} s: {str(told)[:240]}", file=sys.stderr)
    lab.close()
    print(
        f"{len(cells) - late} cells in {time.monotonic() - began:.0f} s, {failed} with an error, {late} not run for "
        f"want of time{': go on with --resume' if late else ''}; {len(reports)} in {o.out}",
        file=sys.stderr,
    )
    return 1 if failed else 0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=(*SECTIONS, "all"))
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--resume", action="store_true", help="leave out the cells that the file has")
    parser.add_argument("--releases", nargs="*", default=[""], help="folders to put first on the path, '' for none")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds in all (default: %(default)g)")
    parser.add_argument("--shard", default="1/1", help="part k of n of the cells, as k/n (default: %(default)s)")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 1, 3])
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 2048, 512, 64, 10], help="widths, for race")
    parser.add_argument("--size", type=int, default=2048, help="width, for guarded and back")
    parser.add_argument("--iterations", type=int, default=500, help="reads of each order, for race")
    parser.add_argument("--reads", type=int, default=2000, help="reads a cell, for guarded")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="no cell of race goes on after (default: %(default)g)"
    )
    parser.add_argument("--windows", type=int, default=25, help="windows a cell, for back")
    parser.add_argument("--mib", type=int, nargs="*", default=[8, 64], help="MiB of a copy, for back and wait")
    parser.add_argument("--repeats", type=int, default=21, help="for wait")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, everything tiny: only whether it runs")
    o = parser.parse_args()
    if o.dry_run:
        o.sizes, o.size, o.iterations, o.reads, o.windows, o.mib, o.repeats = [64, 10], 64, 6, 6, 2, [1], 2
        return o
    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device: a CPU copies before Python goes on, so it cannot show these races; see --dry-run")
    return o


if __name__ == "__main__":
    sys.exit(main())
