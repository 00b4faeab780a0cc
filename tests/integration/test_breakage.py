"""A guard that breaks does not break training, and says so: each handler of each guard raises, on one of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

#: Events of the lab's healthy loop, of each of which some guard has a handler.
USUAL = {"ForwardBegin", "BackwardBegin", "BackwardEnd", "StepBegin", "StepEnd", "MicroBatchEnd", "Close"}


def seen(answer: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    assert "rows" in answer, answer
    return {(row["guard"], row["event"]): row for row in answer["rows"]}


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, True), (3, False)])
def test_each_handler_raises_on_one_rank(lab: Lab, stage: int, offload: bool) -> None:
    healthy, broken = map(seen, lab.run(2, {"call": "breakage.every_handler", "stage": stage, "offload": offload}))
    assert {event for (_, event), row in broken.items() if row["found"]} >= USUAL
    for case, row in broken.items():
        guard, event = case
        other = healthy[case]
        assert row["same"], case
        assert other["same"], case
        if row["found"] == []:  # the loop has no such event
            assert row["verdict"] != "broken"
            continue
        assert [f[:3] for f in row["found"]] == [[guard, "guard_error", "warning"]], case
        if event == "Close":
            assert other["found"] == [], case  # nothing is agreed on at the end
            continue
        assert [f[:3] for f in other["found"]] == [[guard, "guard_switched_off", "warning"]], case
        assert (row["verdict"], other["verdict"]) == ("broken", "broken"), case


def test_without_an_agreement_what_others_wait_for_goes_on(lab: Lab) -> None:
    case = {"call": "breakage.every_handler", "stage": 2, "offload": True, "config": {"agree": False}}
    healthy, broken = map(seen, lab.run(2, case))
    for (guard, event), row in broken.items():
        assert row["same"], (guard, event)
        assert healthy[guard, event]["found"] == []
        assert {f[0] for f in row["found"]} <= {guard}
        if row["found"] and event != "Close":
            assert (row["verdict"] == "broken") == (guard != "gradient_audit"), (guard, event)
