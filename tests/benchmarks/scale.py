"""What zeroguard costs as models and jobs grow: measured on a CPU with gloo, and carried on to ten thousand ranks.

    python -m tests.benchmarks.scale --write      measure, print, and write docs/results/scale.json and docs/scale.md
    python -m tests.benchmarks.scale --page       docs/scale.md again, from docs/results/scale.json

Worker processes of tests/lab/scale.py do the measuring. A busy machine makes the times longer, and nothing else.
"""

# ruff: noqa: E501  (the page has tables)
from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.lab.group import ROOT, Lab
from zeroguard.backends.deepspeed.audit import MOST
from zeroguard.guards.gradient_audit import GradientAuditConfig

AUDIT = GradientAuditConfig()
RESULT, PAGE = ROOT / "docs" / "results" / "scale.json", ROOT / "docs" / "scale.md"
AUDITED = [{"name": "automatic"}, {"name": "gradient_audit", "every_n_steps": 1}]
UNAUDITED = [{"name": "automatic"}, {"name": "gradient_audit", "warmup_steps": 0}]
#: numbers of parameters for the scripted engine, which has no tensors, and for real ones
SCRIPTED, REAL = (100, 1_000, 10_000, 100_000), (200, 1_000)
RANKS, JOBS = (1, 2, 4), (8, 64, 512, 4_096, 10_000)
MEMORY = ((1, True), (2, False), (2, True), (3, True))


def ask(lab: Lab, workers: int, call: str, /, **case: Any) -> Any:
    answer = lab.run(workers, {"call": f"scale.{call}", **case}, timeout=900)[0]
    if isinstance(answer, dict) and "error" in answer:
        raise RuntimeError(f"{call} {case}: {answer['error']}")
    print(f"{call} on {workers} rank(s) {case}: {answer}", file=sys.stderr, flush=True)
    return answer


def _memory(lab: Lab) -> list[dict[str, Any]]:
    rows = []
    for stage, offload in MEMORY:
        few, many = (20, 60) if stage == 3 else (100, 400)
        case = {"stage": stage, "offload": offload}
        small, large = (ask(lab, 1, "memory", parameters=n, **case) for n in (few, many))
        bare = [ask(lab, 1, "memory", parameters=n, audit=False, **case)["python"] for n in (few, many)]
        slope = {"without": round((bare[1] - bare[0]) / (many - few))}
        slope |= {key: round((large[key] - small[key]) / (many - few)) for key in ("python", "audited", "tensors")}
        rows.append({**case, **slope})
    return rows


def _collectives(lab: Lab) -> dict[str, Any]:
    each = {"not audited": UNAUDITED, "audited": AUDITED}
    case = {"parameters": 100, "stage": 2}
    return {name: ask(lab, 2, "collectives", **case, guards=g)["steps"][-1] for name, g in each.items()}


PARTS: dict[str, Callable[[Lab], Any]] = {
    "memory": _memory,
    "collectives": _collectives,
    "kept": lambda lab: ask(lab, 1, "kept", parameters=100_000, steps=200),
    "scripted": lambda lab: [
        {"ranks": ranks, "parameters": n, **ask(lab, ranks, "scripted", parameters=n)}
        for ranks in RANKS
        for n in SCRIPTED
    ],
    "host_of_agreement": lambda lab: [
        {"ranks": ranks, "microseconds": ask(lab, 1, "voted", ranks=ranks)} for ranks in JOBS
    ],
    "steps": lambda lab: [{"parameters": n, **ask(lab, 1, "per_parameter", parameters=n)} for n in REAL],
}


def measure(parts: Sequence[str]) -> dict[str, Any]:
    """These parts; the others stay as they were measured before."""
    import deepspeed
    import torch

    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "python": platform.python_version()}
    data = json.loads(RESULT.read_text(encoding="utf-8")) if set(parts) < set(PARTS) else {}
    data["command"] = "python -m tests.benchmarks.scale --write"
    data["environment"] = {**versions, "cores": os.cpu_count(), "machine": platform.machine()}
    lab = Lab()
    try:
        data.update((name, PARTS[name](lab)) for name in parts)
    finally:
        lab.close()
    return data


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _calls(calls: Sequence[tuple[str, int]]) -> str:
    return " and ".join(f"`{name}` of {number(size)} bytes" for name, size in calls)


def number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def page(data: dict[str, Any]) -> str:
    """The document."""
    where = data["environment"]
    host = {row["ranks"]: row["microseconds"] for row in data["host_of_agreement"]}
    jobs = [
        (number(ranks), number(8 * (ranks + 1)), number(16 * (ranks - 1)), f"{micros / 1000:.2f}", number(ranks))
        for ranks, micros in host.items()
    ]
    memory = [
        (
            f"ZeRO-{r['stage']}{', offloaded' if r['offload'] else ''}",
            r["without"],
            r["python"],
            r["audited"],
            r["tensors"],
        )
        for r in data["memory"]
    ]
    python = max(row["audited"] for row in data["memory"])
    a_sample = max(row["tensors"] for row in data["memory"]) / int(AUDIT.elements_per_parameter)
    most = MOST * a_sample / 2**20
    fit = int((64 - most) * 2**20 / python)
    kept = data["kept"]
    by_size: dict[int, dict[int, float]] = {}
    for row in data["scripted"]:
        by_size.setdefault(row["parameters"], {})[row["ranks"]] = row["microseconds"]
    ranks = sorted({row["ranks"] for row in data["scripted"]})
    scripted = [(number(n), *(f"{row[r]:.0f}" for r in ranks)) for n, row in by_size.items()]
    steps = [
        (number(r["parameters"]), f"{r['without_ms']:.1f}", f"{r['with_ms']:.1f}", r["extra_us_per_parameter"])
        for r in data["steps"]
    ]
    return f"""# Cost and scale

`make scale` measures this and writes the page; the numbers are in [scale.json](results/scale.json). DeepSpeed
{where["deepspeed"]}, PyTorch {where["torch"]}, gloo on {where["cores"]} cores that had other work too: the times are
upper bounds. A *parameter* is a tensor here, not an element: GPT-2 shaped 1.3 B has 292. Times on a GPU are in
[gpu.md](gpu.md).

## What a step costs

With P parameters, B backwards a step, W ranks, s samples in an audited step ({AUDIT.elements_per_parameter} P, but not more than {number(MOST)}, or P):

| | A step | More in a step that `gradient_audit` looks at (the first {AUDIT.warmup_steps}, then each {AUDIT.every_n_steps}th) |
| --- | --- | --- |
| collectives of zeroguard | 1 all-reduce every `agree_every_n_steps` steps (with `on_violation: raise` and several ranks); else 0 | 1 more |
| bytes of a rank's buffer | 8 (W + 1) | 4 (3 s + 1) |
| bytes that a rank sends, and a node's link carries each way, in a ring | 16 (W - 1); hierarchically 16 (W - 1) a node, whatever its ranks | 24 s (W - 1) / W |
| host time | B events of constant cost, one call a gradient, every tenth step one look at each parameter; on ZeRO-3 two passes over modules a backward and one over parameters a check point | one hook a parameter and backward, a dozen vector operations over s |
| waits for the device | 0 without a finding, but for the agreement's result, and the norm before steps 1, 2, 4, 8, ... where DeepSpeed clips unasked | 2 |
| of the job's store | one small write a second and rank (`heartbeat`), by a thread | |

With P grow the host time of the lines above and the audit's buffer, with W the agreement; nothing else does. Counted on
two ranks with 100 parameters: {_calls(data["collectives"]["not audited"])} a step; {_calls(data["collectives"]["audited"])} in an audited one.

## Memory

Bytes a parameter on each rank, from two sizes of model: of Python by `tracemalloc` (allocated by zeroguard's code and
held after a backward or a step, in the first step, which is audited, and in a later one that is not), of tensors by
PyTorch's profiler (the most at a time inside the audit, and the rows that wait for it; {AUDIT.elements_per_parameter} samples a parameter).

{table(["Engine", "Python, without `gradient_audit`", "Python", "Python, audited step", "tensors, audited step"], memory)}
The tensors of the audit are {a_sample:.0f} bytes a sample, in audited steps only, and end at {most:.0f} MiB: a model with
more than {MOST // int(AUDIT.elements_per_parameter)} parameters is looked at in fewer places of each. So all guards together stay below 64 MiB
up to {number(fit)} parameters. No guard holds copies of tensors but where there is something to repair
(`carry`, `idle: untouched`: [architecture.md](architecture.md)).

Findings and repairs are kept up to `max_findings` of each, and up to 2^20 names of parameters in all; later ones go to
the sinks and are counted. {kept["counted"]} repairs that concern 100 000 parameters each: {kept["repairs"]} kept,
{kept["bytes"] / 2**20:.1f} MiB.

## Measured: guards alone

Microseconds of a healthy step of the default guards on the scripted engine, agreement included, median; gloo on one
machine, so that {ranks[-1]} ranks share {where["cores"]} cores.

{table(["Parameters", *(f"{r} rank(s)" for r in ranks)], scripted)}
## Measured: ZeRO-2 without and with the default guards

One rank, parameters of 64 elements, so that the step is nothing but overhead; milliseconds of processor
time a step, and the median of the differences a round, in microseconds a parameter. None of these steps is audited.

{table(["Parameters", "without", "with", "more, us a parameter"], steps)}
## Carried on to ten thousand ranks

The agreement is the only part that grows with the job. Its host part is measured, with a network that takes no time; its
bytes follow from the formulas above; for the network, take what your own needs for one all-reduce of that size. It is
next to the all-reduce, or all-gather, of the gradients: 2 bytes an element.

{table(["Ranks", "buffer, bytes", "sent in a ring, bytes", "host, ms a step", "store writes a second"], jobs)}
At 10 000 ranks a step of one second is {host[10_000] / 1e4:.2f} % longer by the host part. `agree_every_n_steps: 10` makes that a
tenth, for findings that stop the run up to nine steps later; `agree: false` does away with it, and with the heartbeat,
whose {number(10_000)} writes a second go to one process.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write both files")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the JSON")
    options = parser.parse_args()
    data = json.loads(RESULT.read_text(encoding="utf-8")) if options.page else measure(options.only)
    if options.write:
        RESULT.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.write or options.page:
        PAGE.write_text(page(data), encoding="utf-8")
    print(page(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
