"""Healthy programs give silence, and the guarded run is the same bits as the unguarded one."""

from __future__ import annotations

import pytest

from tests.lab.group import Lab

CONFIGURATIONS = [(0, False), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
PROGRAMS = [
    "single_loss",
    "accumulation_adamw_clipping",
    "frozen_tied_unused",
    "checkpoint_reentrant",
    "checkpoint_non_reentrant",
    "eval_between",
    "loss_backward",
    "two_forwards_summed",
    "zero_grad_after_step",
    "zero_grad_before_backward",
]
#: Repairs that a healthy program may show: evaluation leaves gathers in flight, every ZeRO-3 run does that.
QUIET = {"gather_released", "claim_cleared"}


#: DeepSpeed refuses loss.backward() at stage 0, so there is no unguarded run to compare with
CASES = [(p, s, o) for p in PROGRAMS for s, o in CONFIGURATIONS if s > 0 or p != "loss_backward"]


@pytest.mark.parametrize(("program", "stage", "offload"), CASES)
@pytest.mark.parametrize(("ranks", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16")])
def test_silent_and_bit_identical(lab: Lab, ranks: int, dtype: str, program: str, stage: int, offload: bool) -> None:
    case = {"call": "healthy.run", "program": program, "stage": stage, "offload": offload, "dtype": dtype}
    for answer in lab.run(ranks, case):
        assert answer.get("same"), answer
        assert answer["findings"] == [], answer["texts"]
        assert {r["kind"] for r in answer["repairs"]} <= QUIET, answer["repairs"]


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
def test_two_engines(lab: Lab, stage: int, offload: bool) -> None:
    for answer in lab.run(1, {"call": "healthy.two_engines", "stage": stage, "offload": offload}):
        assert answer.get("same"), answer
        assert all(r["findings"] == [] for r in answer["records"]), answer


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
def test_detecting_guards_are_silent_too(lab: Lab, stage: int, offload: bool) -> None:
    """With action: detect nothing is changed and a healthy loop is still silent."""
    guards = [{"name": "retained_graph", "action": "detect"}, {"name": "accumulator_reset", "action": "detect"}]
    for program in ("single_loss", "accumulation_adamw_clipping", "frozen_tied_unused", "eval_between"):
        case = {
            "call": "healthy.run",
            "program": program,
            "stage": stage,
            "offload": offload,
            "guarded": {"guards": guards},
        }
        for answer in lab.run(1, case):
            assert answer.get("same"), answer
            assert answer["findings"] == [], answer["texts"]
            assert answer["repairs"] == [], answer["repairs"]
