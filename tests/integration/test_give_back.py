"""After close every wrapped method, hook and dict is the original object again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.lab.group import ROOT, Lab

STAGES = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
BF16 = {"stage": 1, "offload": False, "dtype": "bf16", "extra": {"data_types": {"grad_accum_dtype": "fp32"}}}
CASES = [
    *({"stage": stage, "offload": offload} for stage, offload in STAGES),
    *({"stage": stage, "offload": False, "wrap": False} for stage in (0, 1, 2, 3)),  # hooks of PyTorch's instead
    BF16,
    *({"stage": stage, "offload": True, "accelerator": "scripted"} for stage in (2, 3)),  # host_read's containers
]


def environment() -> dict[str, str]:
    """For a process of its own."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LAB_DEVICE": "cpu"}


def all_is_back(answer: dict[str, Any]) -> None:
    """A course of :mod:`tests.lab.returned`."""
    assert "left" in answer, answer
    assert answer["left"] == {}
    assert answer["reachable"] == {}
    assert answer["packages"] == []
    assert answer["own_methods"] == []  # DeepSpeed itself replaces no method, so none is left out of the comparison
    assert answer["touched"] > 100  # the snapshot sees what is wrapped, and what hangs on it
    raised = {"": "", "forward": "ValueError: boom in forward", "step": "Boom: boom in step"}
    assert answer["raised"] == {**raised, "backward": "ValueError: boom in backward"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_everything_is_the_original_after_close(lab: Lab, case: dict[str, Any]) -> None:
    """However the loop ended, and whoever closed."""
    answer = lab.run(1, {"call": "returned.course", **case})[0]
    all_is_back(answer)
    assert ("host_read" in answer["selected"]) == ("accelerator" in case)


@pytest.mark.parametrize(("stage", "offload"), [(2, True), (3, False)])
def test_a_destroyed_engine(lab: Lab, stage: int, offload: bool) -> None:
    answer = lab.run(1, {"call": "returned.destroyed", "stage": stage, "offload": offload})[0]
    assert answer == {"reachable": [], "findings": []}


def test_without_a_process_group_and_at_the_end_of_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.lab.ends"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = dict(line.split(": ", 1) for line in run.stdout.splitlines() if line.startswith(("group", "exit")))
    assert said == {"group gone": "[] []", "exit": "[] []"}, run.stdout + run.stderr
    assert run.returncode == 0
    assert "Traceback" not in run.stderr


def test_attaching_twice_is_an_error(lab: Lab) -> None:
    answer = lab.run(1, {"call": "giveback.attach_twice"})[0]
    assert "already has an open zeroguard session" in answer["error"]
    assert answer["after_close"] == "attached"


def test_errors_name_the_thing_and_the_way_out(lab: Lab) -> None:
    answer = lab.run(1, {"call": "giveback.errors"})[0]
    assert answer["no_engine"].startswith("EngineNotFoundError: no DeepSpeed engine in this Linear.")
    assert "deepspeed.initialize" in answer["no_engine"]
    assert answer["not_applicable"].startswith("GuardUnavailableError: guard 'param_status'")
    assert "ZeRO-1 does not partition parameters" in answer["not_applicable"]
    missing = answer["missing"]
    assert "optimizer.params_in_partition" in missing
    assert "0.16.9, 0.17.6, 0.18.5, 0.19.2, 0.19.6, 0.19.8" in missing
    assert "on_unavailable: warn" in missing
    assert missing.endswith("| accumulator_reset | ('optimizer.params_in_partition',)")
    assert "accumulator_reset" in answer["warned"][0]
    assert "on_unavailable" not in answer["warned"][0]
    assert answer["selected"] == ["retained_graph", "accumulation"]
    assert answer["verdicts"]["accumulator_reset"] == "unavailable"
    assert "+ retained_graph: ZeRO-1" in answer["selection"]
    assert "- host_read: " in answer["selection"]
