"""The probe of the attribute table on a real engine of whatever DeepSpeed release is on the path."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch

import zeroguard
from tests.lab import idle
from tests.lab import programs as lab
from zeroguard.config import GUARDS


def probe(stage: int, offload: bool) -> dict[str, Any]:
    from zeroguard.backends import deepspeed as door

    engine, _, _ = lab.build(idle.Branch(), lab.ds_config(stage, offload))
    facts = door.facts_of(engine)
    missing = {}
    for guard in (*GUARDS, "reading"):
        gone = door.missing(engine, guard, layout=facts.layout, version=facts.deepspeed_version, offload=facts.offload)
        if gone:
            missing[guard] = [f"{item.owner}.{item.name}" for item in gone]
    with zeroguard.guard(engine, {"sinks": []}) as session:
        selected = list(session.selection.selected)
    lab.release(engine)
    return {"version": deepspeed.__version__, "torch": torch.__version__, "missing": missing, "selected": selected}
