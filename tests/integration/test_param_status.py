"""ZeRO-3 parameters in flight: left there without the guard, waited for and released with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.group import Lab


@pytest.mark.parametrize("case", ["eval", "exception", "early_exit_eval", "forward_only"])
def test_nothing_stays_in_flight(lab: Lab, case: str) -> None:
    for answer in lab.run(2, {"call": "status.left_behind", "case": case}):
        seen = answer["seen"]
        assert seen["after"]["registry"] > 0, "the fault must show, else this proves nothing"
        assert seen["at_boundary"]["registry"] == 0
        assert seen["at_boundary"]["INFLIGHT"] == 0
        assert seen["end"] == {"INFLIGHT": 0, "registry": 0, "NOT_AVAILABLE": 18}
        assert answer["findings"] == [], answer["texts"]
        assert "gather_released" in {r["kind"] for r in answer["repairs"]}


@pytest.mark.parametrize("case", ["eval", "exception"])
def test_unguarded_is_the_reason(lab: Lab, case: str) -> None:
    for answer in lab.run(2, {"call": "status.left_behind", "case": case, "guarded": False}):
        assert answer["seen"]["at_boundary"]["INFLIGHT"] > 0, answer


def test_warn_reports_and_changes_nothing(lab: Lab) -> None:
    guarded = {"guards": [{"name": "param_status", "action": "warn", "check_at": ["mode_change"]}]}
    for answer in lab.run(2, {"call": "status.left_behind", "case": "eval", "guarded": guarded}):
        assert {f["kind"] for f in answer["findings"]} == {"in_flight"}
        assert {f["severity"] for f in answer["findings"]} == {"warning"}
        assert answer["repairs"] == []
        assert answer["seen"]["at_boundary"]["INFLIGHT"] > 0


def test_a_contradiction_is_raised_under_repair(lab: Lab) -> None:
    for answer in lab.run(2, {"call": "status.contradiction", "guarded": True}):
        assert answer["raised"].startswith("GuardViolation"), answer
        assert "l.2.weight" in answer["raised"]
        assert [f["kind"] for f in answer["findings"]][:1] == ["status_contradiction"]


def test_parameters_that_stay_gathered_are_a_warning_with_their_size(lab: Lab) -> None:
    answer = lab.run(1, {"call": "status.stays_gathered"})[0]
    kinds = [(f["kind"], f["severity"]) for f in answer["findings"]]
    assert kinds == [("stays_gathered", "warning")], answer
    assert answer["findings"][0]["subject"] == ["head.weight"]
    assert "MiB" in answer["findings"][0]["seen"]


def test_nothing_in_flight_before_a_checkpoint(lab: Lab, tmp_path: Path) -> None:
    for answer in lab.run(2, {"call": "status.checkpoint", "folder": str(tmp_path)}):
        assert answer["before"]["registry"] > 0
        assert answer["after"]["registry"] == 0
        assert answer["findings"] == []


def test_a_finding_on_one_rank_stops_all_ranks_at_the_same_step(lab: Lab) -> None:
    """None is left waiting in a collective, and DeepSpeed's own bookkeeping of the step is complete."""
    first, second = lab.run(2, {"call": "status.one_rank"})
    for answer in (first, second):
        assert answer["raised"].startswith("GuardViolation"), answer
        assert answer["steps"] == 2
        assert answer["global_steps"] == 3
    assert "l.2.weight" in first["raised"]
    assert "rank(s) 0 found a violation" in second["raised"]
    assert second["findings"] == []
