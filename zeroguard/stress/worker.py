"""The process that one arm of a scenario runs in: ``python -m zeroguard.stress.worker JOB``, JOB a JSON object.

It writes JSON lines to the file descriptor that the job names: first ``environment`` and what it runs on, then one line
an iteration, last what the guards saw. What DeepSpeed prints goes to its own output and gets in nobody's way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["main"]

CONFIG = {"sinks": [], "on_violation": "record"}


class Watched:
    """Sessions of one arm, and what their guards saw in all."""

    def __init__(self, guarded: bool) -> None:
        self.guarded = guarded
        self.findings: dict[str, int] = {}
        self.guards: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, engine: Any) -> Iterator[None]:
        if not self.guarded:
            yield
            return
        import zeroguard

        with zeroguard.guard(engine, CONFIG) as session:
            self.guards.update(session.selection.selected)
            yield
        for finding in session.findings:
            name = f"{finding.guard}: {finding.kind}"
            self.findings[name] = self.findings.get(name, 0) + 1


def main(argv: list[str]) -> int:
    """Run one job. 1 where the program itself could not run, which is told too."""
    warnings.filterwarnings("ignore")
    data = json.loads(argv[1])
    out = os.fdopen(data.pop("pipe"), "w", buffering=1)

    def tell(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    import torch

    from zeroguard._scripted import scripted_accelerator
    from zeroguard.backends.deepspeed.arena import Arena
    from zeroguard.stress.environment import environment
    from zeroguard.stress.jobs import SCENARIOS, Job
    from zeroguard.stress.scenarios import PROGRAMS

    job = Job(**data)
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    arena = Arena()
    usual = SCENARIOS[job.scenario]
    job = dataclasses.replace(job, size=job.size or (usual.size if arena.races else usual.small))
    watched = Watched(job.guarded)
    with arena.raced(scripted_accelerator) if job.scenario == "host-read" else contextlib.nullcontext():
        accelerator = "scripted" if arena.scripted else str(arena.device).split(":")[0]
        tell(environment=environment() | {"accelerator": accelerator}, size=job.size)
        try:
            for i, message in enumerate(PROGRAMS[job.scenario](job, arena, watched), job.skip):
                tell(iteration=i, message=message)
        except Exception as error:
            traceback.print_exc()
            tell(broken=f"{type(error).__name__}: {error}")
            return 1
    tell(done=True, findings=watched.findings, guards=sorted(watched.guards))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
