"""A guarded module is copied and saved, and a guarded engine is freed, as one without a guard."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab

STAGES = [(0, False), (1, False), (2, True), (3, False)]


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_copies_of_a_module(lab: Lab, stage: int, offload: bool) -> None:
    answer = lab.run(1, {"call": "copied.copies", "stage": stage, "offload": offload})[0]
    assert "outcomes" in answer, answer
    for how, (without, under, after) in answer["outcomes"].items():
        assert without == under == after, how
    if stage == 0:  # with ZeRO a parameter leads to the optimizer, which cannot be pickled
        assert all("error" not in rows[0] for rows in answer["outcomes"].values())
    assert answer["reachable"] == []


@pytest.mark.parametrize(("stage", "destroy"), [(0, False), (1, False), (1, True), (2, True), (3, True)])
def test_a_dropped_engine(lab: Lab, stage: int, destroy: bool) -> None:
    """DeepSpeed itself keeps engines of stage 1 to 3 alive through its hooks; stages 1 and 2 until ``destroy()``."""
    case = {"call": "copied.dropped", "stage": stage, "offload": False, "destroy": destroy}
    answer = lab.run(1, case)[0]
    assert "unguarded" in answer, answer
    assert set(answer.values()) == {answer["unguarded"]}, answer
    if stage == 0 or (destroy and stage < 3):
        assert answer["unguarded"]
