"""zeroguard stress on real engines: each scenario fails without the guards and passes with them. And the programs of
tests/gpu/measure.py on the scripted accelerator, so that they run at the first try on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.group import Lab
from zeroguard.cli import main

pytest.importorskip("deepspeed")


def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "host-read", "--iterations", "3", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "cannot show this race" in text
    assert "scripted accelerator" in text
    data = json.loads((tmp_path / "host-read.json").read_text())
    without, kept = data["arms"]["without"], data["arms"]["with"]
    assert (without["iterations"], without["failures"]) == (3, 3), without
    assert (kept["iterations"], kept["failures"]) == (3, 0), kept
    assert "host_read" in kept["guards"]
    assert "findings" not in kept, kept
    assert data["environment"]["accelerator"] == "scripted"


@pytest.mark.parametrize(("scenario", "stage"), [("retained-graph", 2), ("retained-graph", 3), ("inflight", 3)])
def test_the_other_scenarios(lab: Lab, scenario: str, stage: int) -> None:
    case = {"call": "measured.scenario", "name": scenario, "stage": stage}
    bare, kept = (lab.run(1, {**case, "guarded": guarded})[0] for guarded in (False, True))
    assert len(bare["messages"]) == len(kept["messages"]) == 3
    assert all(bare["messages"]), bare
    assert not any(kept["messages"]), kept
    assert kept["findings"] == {}


@pytest.mark.parametrize(("stage", "failures"), [(1, 4), (2, 4), (3, 0)])
def test_unguarded_reads(lab: Lab, stage: int, failures: int) -> None:
    case = {"call": "measured.race", "stage": stage, "hidden": 16, "iterations": 4}
    answer = lab.run(1, case)[0]
    for order in ("newest", "oldest"):
        arm = answer["arms"][order]
        assert arm["iterations"] == 4
        assert arm["failures"] == failures, arm


@pytest.mark.parametrize("mode", ["transparent", "explicit"])
def test_guarded_reads(lab: Lab, mode: str) -> None:
    guarded = {"guards": [{"name": "host_read", "mode": mode}]}
    case = {"call": "measured.race", "hidden": 16, "iterations": 4, "guarded": guarded, "explicit": mode == "explicit"}
    answer = lab.run(1, case)[0]
    assert [arm["failures"] for arm in answer["arms"].values()] == [0, 0], answer
    assert answer["findings"] == []


@pytest.mark.parametrize(("order", "failures"), [("same stream", 0), ("other stream", 3), ("other stream, event", 0)])
def test_copies_back(lab: Lab, order: str, failures: int) -> None:
    case = {"call": "measured.copy_back_raw", "mib": 1, "order": order, "pinned": True, "delayed": False}
    assert lab.run(1, {**case, "iterations": 3})[0] == {"iterations": 3, "failures": failures}


def test_copies_back_of_deepspeed(lab: Lab) -> None:
    case = {"call": "measured.copy_back_engine", "hidden": 16, "overlap_comm": False, "pinned": True, "delayed": False}
    answer = lab.run(1, {**case, "windows": 2})[0]
    assert answer["failures"] == 0, answer


@pytest.mark.parametrize(
    ("case", "left"),
    [("eval", 1), ("exception", 9), ("early_exit_eval", 9), ("forward_only", 1), ("early_exit", 0), ("conditional", 0)],
)
def test_in_flight(lab: Lab, case: str, left: int) -> None:
    bare, kept = (lab.run(1, {"call": "measured.in_flight", "case": case, "guarded": g})[0] for g in (False, True))
    assert bare["in_flight"] == bare["after_train"] == left, bare
    assert kept["after_train"] == 0, kept


@pytest.mark.parametrize("waited", [False, True])
def test_detect_without_an_offloaded_optimizer(lab: Lab, waited: bool) -> None:
    answer = lab.run(1, {"call": "measured.detect", "form": "copy_", "waited": waited})[0]
    assert answer["findings"] == ([] if waited else ["read_in_flight"]), answer
    assert answer["value"] == 1024.0, "the read has waited"


def test_what_a_wait_costs(lab: Lab) -> None:
    answer = lab.run(1, {"call": "measured.wait_cost", "how": "event", "mib": 1, "repeats": 2})[0]
    assert answer["wait_ms"] > 0, answer
