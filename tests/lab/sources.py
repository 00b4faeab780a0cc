"""Where the configuration of a guarded engine comes from."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import zeroguard
from tests.lab import idle
from tests.lab import programs as lab


def merged(as_file: bool) -> dict[str, Any]:
    """An engine with a key "zeroguard" in its DeepSpeed configuration, a variable, a file, a dict and a keyword; and
    with them a guard of a plugin that sees a step."""
    torch.manual_seed(0)
    config: Any = lab.ds_config(2, True, zeroguard={"max_findings": 7, "on_violation": "record", "agree": True})
    folder, before = Path(tempfile.mkdtemp()), Path.cwd()
    (folder / "zeroguard.yaml").write_text("on_violation: raise\nagree: true\nsinks: []\n", encoding="utf-8")
    if as_file:
        (folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")
        model = idle.Branch()
        optimizer = torch.optim.SGD(model.parameters(), lr=lab.LR)
        engine, *_ = lab.deepspeed.initialize(model=model, optimizer=optimizer, config=str(folder / "ds.json"))
    else:
        engine, _, _ = lab.build(idle.Branch(), config)
    os.environ["ZEROGUARD_AGREE"] = "false"
    os.chdir(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            session = zeroguard.guard(
                engine, {"guards": [{"name": "backward_budget", "limit": 1}, {"name": "retained_graph"}]}, agree=True
            )
        wrong = ""
        try:
            zeroguard.guard(engine, on_violaton="warn")
        except zeroguard.ConfigError as error:
            wrong = str(error)
    finally:
        os.chdir(before)
        del os.environ["ZEROGUARD_AGREE"]
    with session:
        out = engine(torch.ones(2, 8))
        for _ in range(2):
            engine.backward(out.pow(2).mean(), retain_graph=True)
        engine.step()
    answer = {
        "config": session.config.model_dump(mode="json"),
        "origins": session.origins,
        "wrong": wrong,
        "warnings": [str(item.message) for item in caught if "zeroguard" in str(item.message)],
        **lab.record(session),
    }
    lab.release(engine)
    return answer
