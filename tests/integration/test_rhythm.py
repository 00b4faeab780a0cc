"""What a trainer and DeepSpeed do to the same loss and the same step: each fault, and the nearest healthy program."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
#: largest difference of an exact run: one rounding of a weight
EXACT = 3e-8
ALONE = {"guards": [{"name": "accumulation"}], "on_violation": "record"}


def run(lab: Lab, name: str, ranks: int = 2, **case: Any) -> list[dict[str, Any]]:
    return lab.run(ranks, {"call": f"rhythm.{name}", **case})


def kinds(answer: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(f["kind"], f["severity"], f["step"]) for f in answer["findings"]]


@EACH
def test_divided_twice(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, "divided_twice", stage=stage, offload=offload, guarded=ALONE):
        assert kinds(answer) == [("double_division", "warning", 0)], answer["texts"]
        assert max(answer["differences"]) > 1e-3, "nothing is changed unless asked for"
    repair = {"guards": [{"name": "accumulation", "action": "repair"}]}
    for answer in run(lab, "divided_twice", stage=stage, offload=offload, guarded=repair):
        assert max(answer["differences"]) <= EXACT, answer
        assert answer["findings"] == []


@EACH
def test_a_step_inside_the_backward(lab: Lab, stage: int, offload: bool) -> None:
    unguarded = run(lab, "step_inside_backward", stage=stage, offload=offload)[0]
    if stage in (1, 2):
        assert (unguarded["error"], unguarded["steps"]) == ("", 4), "two steps a batch, in silence"
    else:
        assert unguarded["error"].startswith("RuntimeError"), unguarded
    for answer in run(lab, "step_inside_backward", stage=stage, offload=offload, guarded=ALONE):
        if stage:  # at stage 0 PyTorch itself refuses, before the graph is reached
            assert kinds(answer) == [("step_between_backwards", "error", 1)], answer
    if stage:
        for answer in run(lab, "step_inside_backward", stage=stage, offload=offload, guarded=True):
            assert answer["error"].startswith("GuardViolation"), answer
            assert "accelerator.backward(loss_a + loss_b)" in answer["error"]
    for answer in run(lab, "step_inside_backward", stage=stage, offload=offload, guarded=True, summed=True):
        assert (answer["error"], answer["steps"], answer["findings"]) == ("", 2, []), answer


@EACH
def test_a_gradient_read_after_the_step(lab: Lab, stage: int, offload: bool) -> None:
    # One rank: on two, ZeRO-1 and 2 refuse on the rank that owns the parameter only, and the other one waits for it.
    for answer in run(lab, "read_gradient", ranks=1, stage=stage, offload=offload, late=True, guarded=ALONE):
        if stage == 0:
            assert answer["seen"] == [-1.0], "None: the user sees that there is nothing"
            continue
        assert kinds(answer) == [("late_gradient_read", "warning", 1)], answer
        refused = stage < 3 and not offload
        assert answer["error"].startswith("ValueError") if refused else answer["seen"], answer
    for answer in run(lab, "read_gradient", stage=stage, offload=offload, late=False, guarded=True):
        assert answer["findings"] == [], answer["texts"]
        assert answer["seen"] == pytest.approx([answer["true"]], rel=1e-5)


@EACH
def test_a_gradient_read_before_its_window_is_full(lab: Lab, stage: int, offload: bool) -> None:
    refused = stage == 2 and not offload  # by the rank that holds it, and the other one waits
    for answer in run(lab, "read_early", ranks=1 if refused else 2, stage=stage, offload=offload, guarded=ALONE):
        assert bool(answer["error"]) is refused
        assert answer["full"] == [True, True]
        assert answer["early"] == ([] if refused else [stage == 3 and not offload] * 2)
        if not refused and stage < 2:
            assert answer["own"] == [True, True], "param.grad, and nothing of DeepSpeed's is called"
        wrong = stage > 1 and (offload or refused)
        assert kinds(answer) == ([("early_gradient_read", "warning", 0)] if wrong else []), answer["texts"]


@EACH
def test_a_step_past_the_engine(lab: Lab, stage: int, offload: bool) -> None:
    for answer in run(lab, "bypass", stage=stage, offload=offload, guarded=ALONE):
        assert kinds(answer) == [("bypassed_engine_step", "warning", 0)], answer
        assert max(answer["differences"]) <= EXACT, answer
        assert answer["global_steps"] == 0
    right = stage == 3 and not offload
    for answer in run(lab, "bypass", stage=stage, offload=offload, gas=2, guarded=ALONE):
        severity = "warning" if right else "error"
        assert kinds(answer) == [("bypassed_engine_step", severity, 0)], answer
        wrong = bool(answer["error"]) or max(answer["differences"]) > 1e-3
        assert wrong is not right, answer
    for answer in run(lab, "bypass", stage=stage, offload=offload, gas=2, by="engine", guarded=True):
        assert answer["findings"] == [], answer["texts"]
        assert max(answer["differences"]) <= EXACT, answer
