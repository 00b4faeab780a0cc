"""Weights that a step moves or spoils, weights that a loop writes in vain, and the healthy programs beside them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.group import Lab

#: writes of one whole parameter that DeepSpeed drops
LOST = {"written", "written in place", "NaN"}


def run(lab: Lab, ranks: int, name: str, **case: Any) -> list[dict[str, Any]]:
    return lab.run(ranks, {"call": f"weights.{name}", **case})


def kinds(answer: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(f["kind"], f["severity"], f["step"]) for f in answer["findings"]]


@pytest.mark.parametrize(
    ("stage", "offload", "how", "optimizers"),
    [
        (1, False, "drop", ["sgd", "adam"]),
        (1, False, "freeze", ["sgd", "momentum"]),
        (2, True, "drop", []),
        (2, True, "freeze", ["decay", "adam"]),
        (3, False, "drop", ["rmsprop", "adam"]),
        (3, False, "freeze", []),
        (3, True, "drop", ["momentum", "adagrad"]),
    ],
)
def test_what_moves_without_a_gradient_is_reported_and_nothing_else(
    lab: Lab, stage: int, offload: bool, how: str, optimizers: list[str]
) -> None:
    """At the first step that does it; what PyTorch would leave alone is what it is compared with."""
    kind, severity = {
        "drop": ("idle_parameter_moves", "info"),
        "freeze": ("frozen_parameter_moves", "warning"),
    }[how]
    answer = run(lab, 1, "without_gradient", stage=stage, offload=offload, how=how, optimizers=optimizers)[0]
    moves = ["momentum, used 2", "decay, used 0", "decay, used 2", "adam, used 2"]
    assert [name for name, case in answer.items() if case["moved"]] == [name for name in moves if name in answer]
    for name, case in answer.items():
        expected = [(kind, severity, int(name[-1]))] if case["moved"] else []
        assert kinds(case) == expected, (name, case["texts"])
        assert all(f["subject"] == ["v.weight", "v.bias"] for f in case["findings"])


def test_what_is_kept_as_it_is_is_not_reported(lab: Lab) -> None:
    guards = {"guards": [{"name": "automatic"}, {"name": "accumulator_reset", "idle": "untouched"}], "sinks": []}
    for how in ("drop", "freeze"):
        case = {"stage": 2, "offload": False, "how": how, "optimizers": ["decay"], "guarded": guards}
        for name, answer in run(lab, 1, "without_gradient", **case)[0].items():
            assert (answer["moved"], kinds(answer)) == (False, []), name


def test_weights_that_a_step_has_spoiled(lab: Lab) -> None:
    answer = run(lab, 2, "spoiled", stage=0)
    for rank in answer:
        assert not rank["finite"]
        assert kinds(rank) == [("weights_not_finite", "error", 2)], rank["texts"]
    for rank in run(lab, 2, "spoiled", stage=0, guarded={"sinks": []}):
        assert rank.get("error", "").startswith("GuardViolation"), "the run stops, on every rank"
    assert kinds(run(lab, 1, "spoiled", stage=2, dtype="bf16", bf16={"enabled": True, "check_grad_overflow": False})[0])
    for healthy in ({"stage": 0, "bad": -1}, {"stage": 3, "dtype": "bf16", "bad": -1}):
        answer = run(lab, 1, "spoiled", **healthy)[0]
        assert (answer["finite"], kinds(answer)) == (True, [])


@pytest.mark.parametrize(("dtype", "offload"), [("fp32", True), ("bf16", False)])
def test_writes_to_gathered_weights(lab: Lab, dtype: str, offload: bool) -> None:
    answers = run(lab, 2, "gathered", dtype=dtype, offload=offload)
    found = [{name for name, case in answer.items() if case["findings"]} for answer in answers]
    # The last element is one rank's; every rank holds a part of the others.
    assert found[0] & found[1] == LOST
    assert found[0] ^ found[1] == {"the last element"}
    for answer in answers:
        assert {name for name, case in answer.items() if case["changed"]} == {"written by rank 0"}
        assert all(case["given back"] for case in answer.values())
        for name in LOST:
            assert kinds(answer[name]) == [("lost_edit", "warning", 0)], answer[name]["texts"]
            assert answer[name]["findings"][0]["subject"] == ["l.0.bias"]


def test_writes_to_gathered_weights_of_one_rank(lab: Lab) -> None:
    """They are reported where they are lost, and nowhere else."""
    answer = run(lab, 1, "gathered")[0]
    for name, case in answer.items():
        lost = name in (*LOST, "the last element") and not case["changed"]
        assert bool(case["findings"]) is lost, (name, case["texts"])
