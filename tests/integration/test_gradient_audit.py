"""The gradient audit on real engines: silent where the run is exact, and at the first wrong step where it is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_healthy import CASES as HEALTHY
from tests.integration.test_two_losses import CONFIGURATIONS, PATTERNS, SETTINGS
from tests.lab.group import Lab

AUDIT = {"name": "gradient_audit", "elements_per_parameter": "all", "every_n_steps": 1, "action": "raise"}
#: beside the guards that put things right
BESIDE = {"guards": [{"name": "automatic"}, AUDIT], "on_violation": "record"}
#: alone, so that what DeepSpeed does by itself is judged
ALONE = {"guards": [AUDIT], "on_violation": "record"}
ZERO = CONFIGURATIONS[1:]
EACH = pytest.mark.parametrize(("stage", "offload"), ZERO)


def passed(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        # The guard accumulation has its own word on zero_grad in every micro-batch.
        assert [f for f in answer["findings"] if f["guard"] == "gradient_audit"] == [], answer["texts"]
        clips = "at stage 0 DeepSpeed clips" in answer["summary"]
        assert answer["verdicts"]["gradient_audit"] == ("never exercised" if clips else "passed"), answer["summary"]


@pytest.mark.parametrize(("stage", "offload"), CONFIGURATIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_silent_where_the_guards_make_the_run_exact(lab: Lab, pattern: str, stage: int, offload: bool) -> None:
    for dtype, gas in (("bf16", 4),):
        case = {"pattern": pattern, "stage": stage, "offload": offload, "dtype": dtype, "gas": gas}
        answers = lab.run(2, {"call": "programs.two_losses", "guarded": BESIDE, **case})
        assert {answer["status"] for answer in answers} == {"exact"}, answers
        passed(answers)


@pytest.mark.parametrize("pattern", PATTERNS)
@EACH
def test_alone_it_speaks_at_the_first_wrong_step(lab: Lab, stage: int, offload: bool, pattern: str) -> None:
    for dtype, gas in (("fp32", 1), ("bf16", 4)):
        case = {"pattern": pattern, "stage": stage, "offload": offload, "dtype": dtype, "gas": gas}
        answers = lab.run(2, {"call": "programs.two_losses", "guarded": ALONE, **case})
        found = [finding for answer in answers for finding in answer["findings"]]
        status = answers[0]["status"]
        if status == "exact":
            assert found == [], (case, answers[0]["texts"])
        elif status == "wrong":
            limit = 0.02 * answers[0]["update"]
            first = next(i for i, d in enumerate(answers[0]["differences"]) if d > limit)
            assert [f["guard"] for f in found] == ["gradient_audit"] * len(found)
            assert found, (case, answers[0]["differences"])
            assert min(f["step"] for f in found) == first, (case, answers[0]["differences"], found)


def test_what_is_wrong_has_the_right_name(lab: Lab) -> None:
    def kinds(ranks: int = 2, **case: Any) -> set[str]:
        answers = lab.run(ranks, {"guarded": ALONE, **case})
        return {finding["kind"] for answer in answers for finding in answer["findings"]}

    two = {"call": "programs.two_losses", "stage": 2, "offload": False, "steps": 1}
    assert kinds(**two, pattern="misuse_engine") == {"gradient_overwritten", "gradient_lost"}
    idle = {"call": "idle.idle", "stage": 2, "offload": True}
    assert kinds(**idle) == {"gradient_stale"}


@pytest.mark.parametrize(("program", "stage", "offload"), HEALTHY)
def test_healthy_programs(lab: Lab, program: str, stage: int, offload: bool) -> None:
    for dtype in ("bf16",):
        case = {"call": "healthy.run", "program": program, "stage": stage, "offload": offload, "dtype": dtype}
        answers = lab.run(2, {"guarded": BESIDE, **case})
        assert all(answer["same"] for answer in answers), "an audited run is the same bits"
        passed(answers)


@EACH
def test_settings_dtypes_and_accumulation(lab: Lab, stage: int, offload: bool) -> None:
    cases: list[dict[str, Any]] = [
        {"zero": z, "gas": 4} for z in SETTINGS if stage < 3 or "round_robin_gradients" not in z
    ]
    cases += [
        {"extra": {"data_types": {"grad_accum_dtype": "fp32"}}, "dtype": "bf16"},
        {"extra": {"managed_gradient_accumulation": False}},
        {"extra": {"communication_data_type": "fp32"}, "dtype": "bf16"},
        {"extra": {"communication_data_type": "bf16"}},
        # Not on ZeRO-3: with a factor of W DeepSpeed 0.19.8 divides by it and does not multiply again.
        *(
            {"extra": extra, "zero": {"reduce_scatter": False}}
            for extra in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0})
            if stage < 3
        ),
        {"extra": {"gradient_clipping": 0.001}},
        {"dtype": "fp16"},
    ]
    for case in cases:
        for pattern in ("misuse_engine", "boundary_manual"):
            if pattern == "boundary_manual" and "managed_gradient_accumulation" in case.get("extra", {}):
                continue  # the boundary is the caller's there
            answers = lab.run(
                2,
                {
                    "call": "programs.two_losses",
                    "pattern": pattern,
                    "stage": stage,
                    "offload": offload,
                    "guarded": BESIDE,
                }
                | case,
            )
            assert answers[0].get("status") in ("exact", "wrong"), (case, answers[0])  # clipped: not the reference's
            passed(answers)


@EACH
def test_zero_grad_exceptions_and_idle_parameters(lab: Lab, stage: int, offload: bool) -> None:
    calls: list[dict[str, Any]] = [
        *(
            {"call": "idle.zero_grad", "by": by, "gas": gas}
            for by in ("engine", "optimizer", "module")
            for gas in (1, 4)
        ),
        *({"call": "idle.idle", "how": how, "optimizer": "momentum"} for how in ("drop", "freeze")),
        *({"call": "idle.skip_batch", "where": where} for where in ("forward", "backward")),
        {"call": "idle.inside_forward"},
    ]
    for case in calls:
        passed(lab.run(2, {"stage": stage, "offload": offload, "guarded": BESIDE} | case))
