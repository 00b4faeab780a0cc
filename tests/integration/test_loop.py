"""LoopCallback: the same programs as with the context manager, wrapped and announced, with the same results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_healthy import CASES as HEALTHY
from tests.integration.test_healthy import QUIET
from tests.integration.test_two_losses import BEYOND, CONFIGURATIONS, PATTERNS, silent
from tests.lab.group import Lab

MODES = pytest.mark.parametrize("mode", ["wrapped", "announced"])
EACH = pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS[1:])
#: largest difference of an exact run: one rounding of a weight
EXACT = 3e-8


def run(lab: Lab, ranks: int, mode: str, target: str, **case: Any) -> list[dict[str, Any]]:
    return lab.run(ranks, {"call": "loop.over", "mode": mode, "target": target, **case})


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
@MODES
def test_two_losses(lab: Lab, mode: str, pattern: str, stage: int, offload: bool) -> None:
    # Wrapped is what the context manager does; one cell of each shows that the calls change nothing.
    for dtype, gas in (("fp32", 1), ("bf16", 4)) if mode == "announced" else (("fp32", 4),):
        case = {"pattern": pattern, "stage": stage, "offload": offload, "dtype": dtype, "gas": gas}
        for answer in run(lab, 2, mode, "programs.two_losses", **case):
            assert answer["status"] == "exact", (dtype, gas, answer["status"], answer["error"], answer["differences"])
            assert silent(answer, pattern, gas), answer["texts"]
            assert answer["depth"] == 0


@EACH
def test_two_losses_with_other_settings(lab: Lab, stage: int, offload: bool) -> None:
    settings = [{"overlap_comm": True, "reduce_bucket_size": 64}, {"contiguous_gradients": False}]
    for zero in settings:
        for pattern in ("clear_engine", "boundary_manual", "misuse_engine"):
            case = {"pattern": pattern, "stage": stage, "offload": offload, "gas": 4, "zero": zero}
            for answer in run(lab, 2, "announced", "programs.two_losses", **case):
                assert answer["status"] == "exact", (zero, pattern, answer["error"], answer["differences"])
                assert silent(answer, pattern, 4), answer["texts"]


@EACH
def test_two_losses_with_unmanaged_accumulation_and_fp32_sums(lab: Lab, stage: int, offload: bool) -> None:
    extras = [
        ({"managed_gradient_accumulation": False}, "fp32"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "bf16"),
    ]
    for extra, dtype in extras:
        for pattern in ("clear_manual", "misuse_engine"):
            case = {"pattern": pattern, "stage": stage, "offload": offload, "dtype": dtype, "extra": extra}
            for answer in run(lab, 2, "announced", "programs.two_losses", **case):
                assert answer["status"] == "exact", (extra, pattern, answer["error"], answer["differences"])
                assert answer["findings"] == [], answer["texts"]


@pytest.mark.parametrize(
    ("stage", "offload", "scenario"),
    [case for case in BEYOND if case[2] in ("three_backwards", "two_forwards", "interleaved")],
)
def test_other_kinds(lab: Lab, stage: int, offload: bool, scenario: str) -> None:
    for answer in run(lab, 2, "announced", "retained.beyond", scenario=scenario, stage=stage, offload=offload):
        assert max(answer["differences"], default=1.0) <= EXACT, answer
        assert answer["findings"] == [], answer["texts"]


@EACH
def test_a_retained_backward_does_not_contaminate_the_next_step(lab: Lab, stage: int, offload: bool) -> None:
    for by in ("engine", "manual"):
        for answer in run(lab, 2, "announced", "retained.next_step", stage=stage, by=by, offload=offload):
            assert max(answer["differences"], default=1.0) <= EXACT, answer
            assert answer["findings"] == [], answer["texts"]


@EACH
@MODES
def test_idle_parameters_and_zero_grad(lab: Lab, mode: str, stage: int, offload: bool) -> None:
    cases = [("idle.idle", {"how": how}) for how in ("drop", "freeze")]
    cases += [("idle.zero_grad", {"by": by, "gas": gas}) for by in ("engine", "module") for gas in (1, 4)]
    cases += [("idle.skip_batch", {"where": where}) for where in ("forward", "backward")]
    for target, case in cases:
        for answer in run(lab, 2, mode, target, stage=stage, offload=offload, **case):
            assert max(answer.get("differences", [1.0])) <= EXACT, (target, case, answer)
            assert answer["findings"] == [], answer["texts"]


@pytest.mark.parametrize(("program", "stage", "offload"), HEALTHY)
def test_healthy_is_silent_and_bit_identical(lab: Lab, program: str, stage: int, offload: bool) -> None:
    for answer in run(lab, 2, "announced", "healthy.run", program=program, stage=stage, offload=offload):
        assert answer.get("same"), answer
        assert answer["findings"] == [], answer["texts"]
        assert {r["kind"] for r in answer["repairs"]} <= QUIET, answer["repairs"]


@pytest.mark.parametrize("case", ["eval", "exception", "early_exit_eval", "forward_only"])
@MODES
def test_parameters_in_flight(lab: Lab, mode: str, case: str) -> None:
    answer = run(lab, 2, mode, "status.left_behind", case=case)[0]
    assert answer["seen"]["after"]["INFLIGHT"] or answer["seen"]["after"]["registry"], "the case leaves something"
    assert answer["seen"]["at_boundary"]["INFLIGHT"] == 0, answer["seen"]
    assert answer["findings"] == [], answer["texts"]


# -- with wrap=False the calls have to be there ----------------------------------------------------------------------

CALLS = ["on_step_begin", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_step_end"]


@pytest.mark.parametrize("case", CALLS)
def test_a_missing_call_is_a_finding(lab: Lab, case: str) -> None:
    for answer in run_order(lab, case=case):
        assert answer["findings"], answer
        assert {f["guard"] for f in answer["findings"]} == {"call_order"}, answer["texts"]
        assert {f["kind"] for f in answer["findings"]} == {"missing_call"}
        assert all(case in f["expected"] for f in answer["findings"]), answer["texts"]
        assert min(f["step"] for f in answer["findings"]) <= 1
        assert "call_order" in answer["summary"]


def test_a_call_out_of_order_is_a_finding(lab: Lab) -> None:
    answer = run_order(lab, case="step_end_first")[0]
    assert answer["findings"], answer
    assert {f["guard"] for f in answer["findings"]} == {"call_order"}


def test_the_complete_loop_is_silent_and_exact(lab: Lab) -> None:
    for answer in run_order(lab, case="nothing"):
        assert answer["findings"] == [], answer["texts"]
        assert max(answer["differences"]) <= EXACT
        assert answer["closed"].startswith("SessionClosedError: LoopCallback.on_step_begin()")


@pytest.mark.parametrize("case", CALLS)
def test_wrapped_needs_none_of_them(lab: Lab, case: str) -> None:
    for answer in run_order(lab, case=case, wrap=True):
        assert answer["findings"] == [], answer["texts"]
        assert max(answer["differences"]) <= EXACT


def run_order(lab: Lab, **case: Any) -> list[dict[str, Any]]:
    return lab.run(2, {"call": "loop.order", **case})


def test_a_missing_call_stops_the_run_on_all_ranks(lab: Lab) -> None:
    for answer in lab.run(2, {"call": "loop.raised", "stage": 2, "offload": False}):
        assert answer["raised"].startswith("GuardViolation"), answer
        assert "LoopCallback.on_before_backward has been called" in answer["raised"]


@EACH
def test_nothing_of_deepspeed_is_touched(lab: Lab, stage: int, offload: bool) -> None:
    answer = lab.run(1, {"call": "loop.untouched", "stage": stage, "offload": offload})[0]
    # Hooks of PyTorch's on the module and the parameters, and where zeroguard's session is found.
    assert set(answer["during"]) <= {"module._forward_hooks", "module._forward_pre_hooks"}, answer
    assert answer["hooks"] == 8, "forward, its end, and six parameters"
    assert answer["left"] == 0
    assert not answer["marked"]
