"""A long run with everything on: nothing may grow, nothing may be found, and the bits must be those of the loop that
needs no guard.

    python -m tests.benchmarks.soak [--steps 2000] [--json FILE]

Two ranks, ZeRO-2 with an offloaded optimizer and ZeRO-3; two losses over one forward, an evaluation every ten steps, a
checkpoint every fifty; all guards, the audit at every fifth step, both sinks and a function. Exit status 1 if something
is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.lab.group import Lab

CONFIGURATIONS = ((2, True), (3, False))
#: how far each may be from where it was after the warm-up, as a part of that
LIMITS = {"rss": 0.01, "objects": 0.01, "handles": 0.0, "hooks": 0.0}


def spread(samples: list[dict[str, int]], key: str) -> float:
    """The largest distance from the first sample, as a part of it."""
    first = samples[0][key]
    return max(abs(item[key] - first) for item in samples) / first


def run(lab: Lab, stage: int, offload: bool, steps: int) -> dict[str, Any]:
    """Both arms on two ranks; what they answered."""
    # By then as many repairs are kept as ever will be.
    case = {"call": "soak.soak", "stage": stage, "offload": offload, "steps": steps, "warmup": steps // 4}
    case["every"] = max(1, steps // 10)
    limit = 240 + steps * 1.0
    return {name: lab.run(2, {**case, "guarded": name == "with"}, timeout=limit) for name in ("with", "without")}


def wrong(arms: dict[str, Any], steps: int) -> Iterator[str]:
    """Everything that is not as it must be."""
    for name, answers in arms.items():
        for rank, answer in enumerate(answers):
            if "digest" not in answer:
                yield f"{name} zeroguard, rank {rank}: {answer.get('error')}"
    if any("digest" not in answer for answers in arms.values() for answer in answers):
        return
    digests = {answer["digest"] for answers in arms.values() for answer in answers}
    if len(digests) != 1:
        yield f"the parameters differ: {sorted(digests)}"
    for rank, answer in enumerate(arms["with"]):
        if answer["findings"]:
            yield f"rank {rank}: findings\n" + "\n".join(answer["texts"])
        if answer["repairs"].get("backward_rearmed") != steps:
            yield f"rank {rank}: not every step was repaired: {answer['repairs']}"
        if answer["verdicts"]["gradient_audit"] != "passed":
            yield f"rank {rank}: the audit says {answer['verdicts']['gradient_audit']}"
        for key, limit in LIMITS.items():
            if (far := spread(answer["samples"], key)) > limit:
                yield f"rank {rank}: {key} moved by {far:.3%}, which may be {limit:.0%}"


def line(answer: dict[str, Any]) -> str:
    """The first and the last sample."""
    first, last = answer["samples"][0], answer["samples"][-1]
    parts = [f"{key} {first[key]} -> {last[key]} ({spread(answer['samples'], key):.3%})" for key in LIMITS]
    return f"steps {first['step']} to {last['step']}: " + ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    lab, problems, data = Lab(), [], []
    try:
        for stage, offload in CONFIGURATIONS:
            arms = run(lab, stage, offload, options.steps)
            bad = list(wrong(arms, options.steps))
            problems += bad
            data.append({"stage": stage, "offload": offload, "steps": options.steps, "wrong": bad, **arms})
            print(f"ZeRO-{stage}{' offload' if offload else ''}, {options.steps} steps, 2 ranks")
            for name, answers in arms.items():
                for rank, answer in enumerate(answers):
                    if "digest" in answer:
                        print(f"  {name} zeroguard, rank {rank}: {line(answer)}; parameters {answer['digest'][:16]}")
            repairs = arms["with"][0].get("repairs")
            print(f"  findings {len(arms['with'][0].get('findings', []))}, repairs {repairs}", flush=True)
            print("".join(f"  WRONG {text}\n" for text in bad), end="", flush=True)
    finally:
        lab.close()
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print("as it must be" if not problems else f"{len(problems)} thing(s) wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
